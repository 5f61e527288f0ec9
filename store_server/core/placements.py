"""What has come to which tier and left it, in order, for those who publish it."""

from collections.abc import Sequence

import msgspec

from kvcore.wire.messages import Tier


class Placed(msgspec.Struct, gc=False):
    """These keys have come to a tier (`is_stored`) or left it. In one run a prefix stands in its order."""

    is_stored: bool
    tier: Tier
    keys: list[bytes]


class PlacementLog:
    """Neighbouring changes of one kind become one run, so that a burst of evictions is one event."""

    def __init__(self) -> None:
        self._runs: list[Placed] = []

    def __len__(self) -> int:
        return len(self._runs)

    def stored(self, keys: Sequence[bytes], tier: Tier) -> None:
        self._add(True, tier, keys)

    def removed(self, keys: Sequence[bytes], tier: Tier) -> None:
        self._add(False, tier, keys)

    def take(self) -> list[Placed]:
        """Everything since the last call."""
        runs, self._runs = self._runs, []
        return runs

    def _add(self, is_stored: bool, tier: Tier, keys: Sequence[bytes]) -> None:
        if not keys:
            return
        if self._runs:
            last = self._runs[-1]
            if last.is_stored == is_stored and last.tier is tier:
                last.keys.extend(keys)
                return
        self._runs.append(Placed(is_stored, tier, list(keys)))
