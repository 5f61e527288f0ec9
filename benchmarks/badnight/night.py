"""One bad night: traffic while everything fails by a schedule drawn from a seed."""

import asyncio
import random
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import aiohttp
import msgspec
from routersoak.client import Ending

from badnight.client import Asker, Clients
from badnight.cluster import Cluster
from badnight.diary import Diary
from badnight.faults import FAULTS, Remote, Target
from badnight.members import Programs
from badnight.morning import Totals, see_morning
from badnight.questions import prompts
from tests.engine.served import MODEL

_FLAT_BYTES = 64 << 20
_SAMPLE_EVERY_S = 2.0


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    seconds: float
    seed: int = 0
    num_clients: int = 6
    mean_pause_s: float = 1.0
    fault_every_s: float = 4.0  # in each of two lanes; engines and routers have a third
    engine_fault_every_s: float = 45.0
    deadline_s: float = 120.0  # of one request: beyond it, it hangs
    faults: tuple[str, ...] = tuple(FAULTS)  # of these the schedule is drawn

    @property
    def shares(self) -> bool:
        """Whether both engines use one store."""
        return self.seed % 2 == 1

    @property
    def has_shm(self) -> bool:
        """Whether the second engine uses shared memory."""
        return self.seed // 2 % 2 == 0


class Outcome(msgspec.Struct, kw_only=True):
    seed: int
    shares: bool
    seconds: float
    endings: dict[str, int]
    troubles: dict[str, int]
    complaints: list[str]
    counted: dict[str, float]  # of engines and stores, over all of their processes
    flipped_bits: int
    rss_bytes: dict[str, list[int]]  # medians of the first, middle and last third
    slowest_s: float  # of the answers


async def bad_night(
    folder: Path,
    programs: Programs,
    truth: Sequence[list[int]],
    plan: Plan,
    progress: Callable[[str], None],
    remote: tuple[str, Remote] | None = None,
) -> Outcome:
    """`folder`: with a short path, for sockets. `truth`: the tokens of each of `prompts()`, by an engine
    without us. `remote`: its URL and the server. AssertionError or SystemFailed when something does not even
    start."""
    url = remote[0] if remote is not None else ""
    cluster = Cluster(folder, programs, plan.seed, shares=plan.shares, has_shm=plan.has_shm, remote_url=url)
    try:
        progress("engines are started")
        await cluster.start()
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            asker = Asker(session, prompts(), truth, MODEL, plan.deadline_s)
            night = _Night(cluster, plan, asker, remote[1] if remote is not None else None)
            return await night.run(session, progress)
    finally:
        await cluster.close()


class _Night:
    def __init__(self, cluster: Cluster, plan: Plan, asker: Asker, remote: Remote | None) -> None:
        self._cluster = cluster
        self._plan = plan
        self._asker = asker
        self._remote = remote
        self._diary = Diary()
        self._busy: set[str] = set()
        self._num_judged = 0
        self._totals = Totals(cluster)
        self._sizes: list[dict[str, int]] = []
        self._clients = Clients(
            asker, list(cluster.routers), cluster.url_of, len(prompts()), plan.num_clients, plan.mean_pause_s
        )

    async def run(self, session: aiohttp.ClientSession, progress: Callable[[str], None]) -> Outcome:
        plan, diary = self._plan, self._diary
        traffic = asyncio.create_task(self._clients.run(plan.seed))
        lanes = [asyncio.create_task(self._lane(number)) for number in range(3)]
        looking = asyncio.create_task(self._totals.keep_looking(session))
        try:
            while diary.now() < plan.seconds:
                await asyncio.sleep(_SAMPLE_EVERY_S)
                self._sizes.append(self._cluster.rss_bytes())
                for task in (traffic, looking, *lanes):
                    if task.done():
                        task.result()
                self._look_for_dead()
                self._judge()
                progress(self._progress_text())
            # A fault under way heals by itself.
            await asyncio.gather(*lanes)
            self._clients.stop()
            await traffic
        finally:
            for task in (traffic, looking, *lanes):
                task.cancel()
            await asyncio.gather(traffic, looking, *lanes, return_exceptions=True)
        self._judge()
        self._look_for_dead()
        progress("the morning after")
        left = await see_morning(self._cluster, session, self._asker, len(prompts()), self._totals)
        return self._outcome([*diary.complaints, *left])

    async def _lane(self, number: int) -> None:
        """The last one is that of engines and routers."""
        plan = self._plan
        rng = random.Random(f"{plan.seed}/lane {number}")
        is_last = number == 2
        every_s = plan.engine_fault_every_s if is_last else plan.fault_every_s
        names = [
            name
            for name in plan.faults
            if (FAULTS[name].resource in ("engine", "router")) == is_last
            and (self._remote is not None or FAULTS[name].resource != "remote")
        ]
        while names:
            pause_s = rng.uniform(0.3, 1.7) * every_s
            if self._diary.now() + pause_s > plan.seconds:
                return
            await asyncio.sleep(pause_s)
            await self._do(rng.choice(names), rng)

    async def _do(self, name: str, rng: random.Random) -> None:
        fault = FAULTS[name]
        # One that nobody uses is no trouble.
        store = rng.choice(self._cluster.stores[: 1 if self._plan.shares else 2])
        engine = rng.choice(self._cluster.engines)
        of_a_store = dict.fromkeys(("store", "link", "disk"), store.name)
        target_name = {**of_a_store, "engine": engine.name}.get(fault.resource, "")
        resource = f"{fault.resource} {target_name}"
        if resource in self._busy:
            return
        self._busy.add(resource)
        trouble = self._diary.begin(name, target_name)
        try:
            await fault.run(Target(self._cluster, rng, resource, store, engine, self._remote))
        finally:
            trouble.ended_s = self._diary.now()
            self._busy.discard(resource)

    def _judge(self) -> None:
        """Those that have ended since the last time."""
        for asked in self._clients.asked[self._num_judged :]:
            self._num_judged += 1
            self._diary.judge(asked)

    def _look_for_dead(self) -> None:
        for name in self._cluster.dead():
            text = f"{name} has died, and nobody killed it"
            if text not in self._diary.complaints:
                self._diary.complaints.append(text)

    def _progress_text(self) -> str:
        endings = Counter(asked.ending.value for asked in self._clients.asked)
        now = ", ".join(
            f"{trouble.fault} {trouble.target}" for trouble in self._diary.troubles if not trouble.ended_s
        )
        return (
            f"{self._diary.now():6.0f} s  {endings.total()} requests, "
            f"{endings[Ending.ANSWERED.value]} answered, "
            f"{len(self._diary.complaints)} complaints; {now or 'quiet'}"
        )

    def _outcome(self, complaints: list[str]) -> Outcome:
        asked = self._clients.asked
        sizes = _thirds(self._sizes)
        for name, (_, middle, last) in sizes.items():
            if self._plan.seconds >= 600 and last > max(middle + _FLAT_BYTES, middle * 1.1):
                complaints.append(f"memory of {name} grows: {middle >> 20} to {last >> 20} MiB")
        answered = [one.ended_s - one.began_s for one in asked if one.ending is Ending.ANSWERED]
        if not answered:
            complaints.append("nothing was answered")
        return Outcome(
            seed=self._plan.seed,
            shares=self._plan.shares,
            seconds=self._diary.now(),
            endings=dict(Counter(one.ending.value for one in asked).most_common()),
            troubles=dict(Counter(trouble.fault for trouble in self._diary.troubles).most_common()),
            complaints=complaints,
            counted={name: value for name, value in sorted(self._totals.sums.items()) if value},
            flipped_bits=sum(store.link.num_flipped for store in self._cluster.stores),
            rss_bytes=sizes,
            slowest_s=max(answered, default=0.0),
        )


def _thirds(samples: Sequence[dict[str, int]]) -> dict[str, list[int]]:
    """By name: medians of the first, middle and last third, for which a restart does not count much."""
    of_name: defaultdict[str, list[int]] = defaultdict(list)
    for sample in samples:
        for name, size in sample.items():
            of_name[name].append(size)
    found = {}
    for name, values in of_name.items():
        size = max(len(values) // 3, 1)
        parts = (values[:size], values[size:-size] or values, values[-size:])
        found[name] = [int(statistics.median(part)) for part in parts]
    return found
