"""Programs whose packages pip installs only when asked for them by an extra."""

_OURS = ("kvcore", "store_server", "router", "kvsim", "mooncake_connector", "sglang_hicache_backend")


def missing_package(program: str, extra: str, error: ModuleNotFoundError) -> str:
    """What to tell who starts `program` without the packages of `extra`. Raises `error` for a module of our
    own, which no pip will bring."""
    if (error.name or "").split(".")[0] in _OURS:
        raise error
    return f"{program}: {error}. Install what it needs: pip install 'mooncake-kv-suite[{extra}]'"
