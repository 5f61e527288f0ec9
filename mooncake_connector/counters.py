"""Counters that any thread may raise and the engine's stats hook takes away."""

import threading


class Counters:
    def __init__(self) -> None:
        self._values: dict[str, float] = {}
        self._lock = threading.Lock()

    def add(self, name: str, amount: float = 1) -> None:
        if amount:
            with self._lock:
                self._values[name] = self._values.get(name, 0) + amount

    def take(self) -> dict[str, float]:
        """Everything counted since the last call."""
        with self._lock:
            values, self._values = self._values, {}
        return values
