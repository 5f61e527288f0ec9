"""Whether a decode engine may still wait for prefill engines on faith.

A prefill engine whose blocks have other names (another dtype, block size or number of ranks) never delivers,
and every request would pay its whole wait before the decode engine computes the prompt itself.
"""

from collections.abc import Callable

from mooncake_connector.log import get_logger

logger = get_logger(__name__)

FRUITLESS_LIMIT = 3
PAUSE_SECONDS = 60.0


class FollowTrust:
    """After FRUITLESS_LIMIT waits in a row that brought no block at all, none is begun for PAUSE_SECONDS."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._fruitless = 0
        self._paused_until = float("-inf")

    @property
    def given(self) -> bool:
        return self._clock() >= self._paused_until

    def lose(self) -> None:
        self._fruitless += 1
        if self._fruitless >= FRUITLESS_LIMIT:
            # One more after the pause is enough to pause again.
            self._fruitless = FRUITLESS_LIMIT - 1
            self._paused_until = self._clock() + PAUSE_SECONDS
            logger.warning(
                "prefill engines delivered nothing for %d requests in a row: prompts are computed here "
                "for %.0f s. Do both engines log the same namespace at start?",
                FRUITLESS_LIMIT,
                PAUSE_SECONDS,
            )

    def restore(self) -> None:
        self._fruitless = 0
