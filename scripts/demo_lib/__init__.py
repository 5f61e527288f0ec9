"""The demo: start the cluster, ask, ask a plain vLLM the same, compare, report, end everything."""
