#!/usr/bin/env python3
"""No Python file here may be longer than MAX_LINES: a file that grows past it holds two things."""

import subprocess
import sys
from pathlib import Path

MAX_LINES = 400


def main() -> int:
    root = Path(__file__).resolve().parent.parent
    # Files git would commit, also those not added yet; never environments or build folders.
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "*.py"],
        cwd=root,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    too_long = []
    for name in filter(None, listing.split("\0")):
        path = root / name
        if path.is_file():
            num_lines = path.read_bytes().count(b"\n")
            if num_lines > MAX_LINES:
                too_long.append(
                    f"{name}: {num_lines} lines, allowed are {MAX_LINES}; split it by what it does"
                )
    print("\n".join(too_long), file=sys.stderr, end="\n" if too_long else "")
    return 1 if too_long else 0


if __name__ == "__main__":
    raise SystemExit(main())
