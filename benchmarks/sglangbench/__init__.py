"""How long SGLang's HiCache waits for its pages, by storage backend (../sglang_prefetch.py)."""
