"""What a system under test is to the runner."""

from pathlib import Path
from typing import Protocol

from storebench.clients import ClientSpec
from storebench.plan import Cell


class System(Protocol):
    """`name` stands in the report, `about` says what exactly it is, with versions. A system is started once
    and measured by any number of clients."""

    name: str
    about: str

    def start(self, work_dir: Path) -> None:
        """Install what is missing, start the servers on 127.0.0.1 and pre-touch their memory.

        SystemFailed, saying what to do, when that is impossible; `stop` is called in any case.
        """
        ...

    def stop(self) -> None: ...

    @property
    def server_pids(self) -> list[int]: ...

    def client(self) -> ClientSpec: ...

    def measures(self, cell: Cell) -> bool:
        """False for cells that would say nothing about this system."""
        ...
