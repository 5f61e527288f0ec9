"""Does a running engine get its KV back from the store, and is it the right KV? Asked over HTTP.

The engine's side is `mooncake_connector.verify` (vLLM) and `sglang_hicache_backend.verify` (SGLang); both are
commands, and scripts/verify-vllm and scripts/verify-sglang start them.
"""
