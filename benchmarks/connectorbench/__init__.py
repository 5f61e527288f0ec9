"""vLLM's KV connectors side by side, with real engines (../connectors.py)."""
