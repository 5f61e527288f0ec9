"""What stops a guest from being made."""

import sys


class SetupError(Exception):
    """Says what is missing and what to do about it."""


def say(text: str) -> None:
    print(f"[rdma-vm] {text}", file=sys.stderr, flush=True)
