"""Writes objects to an SSD tier as fast as it can and reports on stdout what is committed; made to be killed.

Lines: `+N` object N is on disk, `-N` its removal is durable.
"""

import random
import sys
from pathlib import Path

from kvcore.wire.messages import Status
from store_server.core.tiering import Acceptance
from store_server.ssd import Removed, Written
from store_server.ssd.types import Outcome
from tests.unit.store_server.ssd.harness import Driver, key_of, make_data


def size_of(number: int) -> int:
    return random.Random(number).randrange(1, 200_000)


def report(outcomes: list[Outcome]) -> None:
    lines = []
    for outcome in outcomes:
        if isinstance(outcome, Written) and outcome.status == Status.OK:
            lines.append(f"+{int.from_bytes(outcome.request.key[:4], 'big')}\n")
        elif isinstance(outcome, Removed):
            lines += [f"-{int.from_bytes(key[:4], 'big')}\n" for key in outcome.keys]
    # One write call for many lines: what was cut off in the middle by the kill is no report.
    sys.stdout.write("".join(lines))
    sys.stdout.flush()


def main(directory: Path, first: int) -> None:
    with Driver(directory, capacity_bytes=4 << 30, segment_bytes=4 << 20, batch_bytes=1 << 20) as driver:
        number = first
        while True:
            data = make_data(number, size_of(number))
            while driver.begin_put(key_of(number), data, num_layers=1 + number % 4) is not Acceptance.QUEUED:
                report(driver.step())
            if number % 5 == 0 and number - 20 >= first:
                driver.tier.remove([key_of(number - 20)])
            number += 1


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
