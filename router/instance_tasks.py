"""One background task for each engine, started and ended as engines come and go."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from router.instance import Instance

Job = Callable[[Instance], Coroutine[Any, Any, None]]


class InstanceTasks:
    """On the event loop's thread. `job` runs until it is cancelled."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._tasks: dict[Instance, asyncio.Task[None]] = {}

    def follow(self, instances: Iterable[Instance]) -> None:
        """Exactly these have a task from now on."""
        present = set(instances)
        for instance in present - self._tasks.keys():
            self._tasks[instance] = asyncio.get_running_loop().create_task(self._job(instance))
        for instance in self._tasks.keys() - present:
            self._tasks.pop(instance).cancel()

    def __len__(self) -> int:
        return len(self._tasks)

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
