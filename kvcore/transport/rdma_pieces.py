"""From what is to be moved (spans of the pool, views of memory here) to pieces that a device can move."""

from collections.abc import Sequence

from kvcore.layout import split_views
from kvcore.transport.rdma_host import RdmaHost
from kvcore.transport.rdma_memory import Room, address_of
from kvcore.transport.rdma_mover import Piece

# One request moves at most so much: what is larger is shared by several paths, and one that fails is small.
SLICE_BYTES = 1 << 20


class Plan:
    """Pieces of one or more objects. Memory that is registered is moved from or to directly; what is not goes
    through a room of the bounce buffer, which is taken when everything has been added."""

    def __init__(self, host: RdmaHost) -> None:
        self._host = host
        self._pieces: list[Piece] = []
        self._staged: list[memoryview] = []
        self._staged_bytes = 0
        self._views: list[memoryview] = []
        self.room: Room | None = None

    def add(self, spans: Sequence[tuple[int, int]], views: Sequence[memoryview]) -> None:
        """`views`, one after the other, are the bytes of the pool's spans (offset, size)."""
        find = self._host.memory.find
        for (offset, _), run in zip(spans, split_views(views, [size for _, size in spans]), strict=True):
            for view in run:
                address = address_of(view)
                if find(address, len(view)) is None:
                    # Not known yet where: counted from the beginning of the room, as -1, -2, ...
                    address = -1 - self._staged_bytes
                    self._staged.append(view)
                    self._staged_bytes += len(view)
                else:
                    self._views.append(view)
                self._add_slices(address, len(view), offset)
                offset += len(view)

    def take_room(self) -> bool:
        """False: what has to be copied does not fit into the bounce buffer now."""
        if self._staged_bytes:
            bounce = self._host.bounce()
            self.room = bounce.take(self._staged_bytes) if bounce is not None else None
        return self.room is not None or not self._staged_bytes

    def pieces(self) -> list[Piece]:
        """After `take_room`."""
        if self.room is None:
            return self._pieces
        base = self.room.address
        return [
            piece
            if piece.local_address >= 0
            else piece._replace(local_address=base - 1 - piece.local_address)
            for piece in self._pieces
        ]

    def keep(self) -> object:
        """What must live as long as pieces are on their way."""
        return (self._views, self.room)

    def copy_in(self) -> None:
        """Before a write."""
        if self.room is not None:
            offset = 0
            for view in self._staged:
                self.room.view[offset : offset + len(view)] = view
                offset += len(view)

    def copy_out(self) -> None:
        """After a read."""
        if self.room is not None:
            offset = 0
            for view in self._staged:
                view[:] = self.room.view[offset : offset + len(view)]
                offset += len(view)

    def close(self) -> None:
        """When nothing is on its way any more."""
        if self.room is not None:
            self.room.close()
            self.room = None

    def _add_slices(self, address: int, size_bytes: int, offset: int) -> None:
        step = -1 if address < 0 else 1
        for begin in range(0, size_bytes, SLICE_BYTES):
            self._pieces.append(
                Piece(address + step * begin, min(SLICE_BYTES, size_bytes - begin), offset + begin)
            )
