"""Our store over shared memory: clients of the same host map the pool."""

from storebench.systems.ours import Ours


class OursShm(Ours):
    def __init__(self) -> None:
        super().__init__("ours-shm", "shm")
