"""SGLang plugin: HiCache pages of this engine are shared with every other engine through `mooncake-store`.

SGLang finds it by name, nothing is registered: `--hicache-storage-backend dynamic` with module_path
"sglang_hicache_backend.backend" and class_name "MooncakeSuiteHiCache" (docs/sglang.md).
"""
