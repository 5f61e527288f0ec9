"""Where the suite keeps what is made once for all clones; scripts/lib.sh has the same rule for the shell."""

import os
from pathlib import Path


def suite_cache() -> Path:
    """An empty variable counts as none, as it does in the shell."""
    user_cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("MOONCAKE_SUITE_CACHE") or Path(user_cache) / "mooncake-kv-suite")
