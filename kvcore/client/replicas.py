"""Adding a copy of objects to one level and dropping that of another, in this order: what clients of both
kinds have in common."""

from collections.abc import Sequence

from kvcore.wire.messages import Status


def with_status_ok(names: Sequence[bytes], statuses: Sequence[Status]) -> list[bytes]:
    """Those that could be added: only their other copy may be dropped."""
    return [name for name, status in zip(names, statuses, strict=True) if status is Status.OK]


def after_dropping(added: Sequence[Status], dropped: Sequence[Status]) -> list[Status]:
    """`dropped`: one for each OK in `added`."""
    left = iter(dropped)
    return [next(left) if status is Status.OK else status for status in added]
