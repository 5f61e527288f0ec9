"""Our store over TCP, and the same without checksums (what they cost is the ratio of the two)."""

from storebench.plan import MIB, Cell
from storebench.systems.ours import Ours


class OursTcp(Ours):
    def __init__(self) -> None:
        super().__init__("ours-tcp", "tcp")


class OursTcpWithoutChecksums(Ours):
    def __init__(self) -> None:
        super().__init__("ours-tcp-nosum", "tcp", checksums=False)

    def measures(self, cell: Cell) -> bool:
        return cell.num_clients == 1 and cell.num_keys == 1 and cell.size_bytes >= MIB
