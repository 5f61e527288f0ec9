"""Where `mooncake-router` begins: the program itself needs packages that may not be installed."""

from kvcore.extras import start


def main() -> int:
    """Exit status as that of router.cli; 2 without the packages of the extra `router`."""
    return start("mooncake-router", "router", "router.cli")
