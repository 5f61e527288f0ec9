"""Where `mooncake-sim` begins: the program itself needs packages that may not be installed."""

from kvcore.extras import start


def main() -> int:
    """Exit status as that of kvsim.cli; 2 without the packages of the extra `sim`."""
    return start("mooncake-sim", "sim", "kvsim.cli")
