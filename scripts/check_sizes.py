#!/usr/bin/env python3
"""No Python file here may be longer than MAX_LINES: a file that grows past it holds two things."""

import sys
from collections.abc import Iterator
from pathlib import Path

MAX_LINES = 400


def python_files(folder: Path) -> Iterator[Path]:
    """Without environments, caches and build folders."""
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.name in ("build", "dist"):
            continue
        if path.is_dir():
            yield from python_files(path)
        elif path.suffix == ".py":
            yield path


def main() -> int:
    root = Path(__file__).resolve().parent.parent
    too_long = []
    for path in python_files(root):
        num_lines = path.read_bytes().count(b"\n")
        if num_lines > MAX_LINES:
            name = path.relative_to(root)
            too_long.append(f"{name}: {num_lines} lines, allowed are {MAX_LINES}; split it by what it does")
    print("\n".join(too_long), file=sys.stderr, end="\n" if too_long else "")
    return 1 if too_long else 0


if __name__ == "__main__":
    raise SystemExit(main())
