"""What must be said to the store in the order it was submitted, each when its bytes have arrived.

Layers of an object are committed in order, but queue pairs finish in any: a Commit that overtook its
forerunner would be refused. And an Abort must not overtake bytes that are still on their way: the store may
use the room for something else at once.
"""

import threading
from collections import deque
from typing import Protocol


class Item(Protocol):
    def is_ready(self) -> bool: ...

    def send(self) -> None:
        """Called once, when it is ready and everything before it has been sent."""
        ...


class CommitOrder:
    """Thread-safe. Whoever makes the first item ready calls `pump`; it sends all that can go."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._items: deque[Item] = deque()
        self._is_pumping = False

    def add(self, item: Item) -> None:
        with self._lock:
            self._items.append(item)
        self.pump()

    def pump(self) -> None:
        while True:
            with self._lock:
                if self._is_pumping or not self._items or not self._items[0].is_ready():
                    return
                self._is_pumping = True
                item = self._items.popleft()
            try:
                item.send()
            finally:
                with self._lock:
                    self._is_pumping = False
