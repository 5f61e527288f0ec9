"""What one measurement gives."""

import msgspec


class Figure(msgspec.Struct, frozen=True):
    """Of one system in one round: CPU time, memory, or how much is done in a second of CPU time."""

    name: str
    system: str
    round: int
    value: float
    unit: str

    @property
    def more_is_better(self) -> bool:
        return self.unit.endswith("/s")
