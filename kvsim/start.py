"""Where `mooncake-sim` begins: the program itself needs packages that may not be installed."""

import sys

from kvcore.extras import missing_package


def main() -> int:
    """Exit status as that of kvsim.cli; 2 without the packages of the extra `sim`."""
    try:
        from kvsim.cli import main as run
    except ModuleNotFoundError as error:
        print(missing_package("mooncake-sim", "sim", error), file=sys.stderr)
        return 2
    return run()
