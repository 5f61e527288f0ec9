"""Where `mooncake-router` begins: the program itself needs packages that may not be installed."""

import os
import sys

from kvcore.extras import missing_package


def main() -> int:
    """Exit status as that of router.cli; 2 without the packages of the extra `router`."""
    try:
        from router.cli import main as run
    except ModuleNotFoundError as error:
        print(missing_package("mooncake-router", "router", error), file=sys.stderr)
        return 2
    try:
        return run()
    except BrokenPipeError:
        # Whoever read our output (`head`) has seen enough; the interpreter would complain about the rest.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
