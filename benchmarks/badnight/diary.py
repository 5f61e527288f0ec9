"""What happened in a bad night, and what of that should not have."""

import asyncio

from routersoak.client import Ending

from badnight.client import Asked
from badnight.faults import FAULTS, Trouble

# Breakers and health checks of the routers come back so long after what they saw.
_AFTERMATH_S = 6.0
_FAILURES = (Ending.FAILED, Ending.CUT, Ending.BROKEN_OFF, Ending.REFUSED)


class Diary:
    """Times are seconds since it was begun, but those of requests: the loop's."""

    def __init__(self) -> None:
        self._began_s = asyncio.get_running_loop().time()
        self.troubles: list[Trouble] = []
        self.complaints: list[str] = []

    def now(self) -> float:
        return asyncio.get_running_loop().time() - self._began_s

    def begin(self, fault: str, target: str) -> Trouble:
        self.troubles.append(Trouble(fault, target, self.now(), FAULTS[fault].excuses))
        return self.troubles[-1]

    def met_by(self, asked: Asked) -> list[Trouble]:
        began, ended = asked.began_s - self._began_s, asked.ended_s - self._began_s
        return [
            trouble
            for trouble in self.troubles
            if trouble.began_s <= ended and (not trouble.ended_s or began <= trouble.ended_s + _AFTERMATH_S)
        ]

    def judge(self, asked: Asked) -> None:
        met = self.met_by(asked)
        reason = ""
        if asked.is_wrong:
            reason = f"wrong tokens, {asked.ending.value}: {asked.tokens}"
        elif asked.ending is Ending.HUNG:
            reason = "hung"
        elif asked.ending in _FAILURES and not any(trouble.excuses for trouble in met):
            reason = f"{asked.ending.value} {asked.detail}"
        if reason:
            about = f"{asked.question} by {asked.whom}, at {asked.began_s - self._began_s:.1f} s"
            self.complaints.append(f"{about}: {reason}; beside it: {', '.join(map(str, met)) or 'nothing'}")
