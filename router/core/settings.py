"""What the policies and the admission are built from, in one place (the `[scheduling]` part of router.toml)."""

import msgspec

from router.core.prng import SplitMix64


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`seed`: of everything drawn at random, so that a run can be repeated."""

    seed: int = 0

    def prng(self) -> SplitMix64:
        return SplitMix64(self.seed)
