"""Ids of requests and transfers: unique across routers and restarts, cheap to make."""

import itertools
import secrets


class IdSource:
    """A random prefix a process, then a count: 0.1 us where uuid4 costs 2 us."""

    def __init__(self) -> None:
        self._prefix = secrets.token_hex(8)
        self._count = itertools.count()

    def next_id(self) -> str:
        return f"{self._prefix}-{next(self._count):x}"
