"""How the blocks of one request come out of the store: three ways, all of which keep a leading run.

vLLM recomputes from the first block that did not come, so nothing behind it is worth waiting for. Each
function returns how many leading blocks are complete; the content of the others is undefined until the
caller zeroes it. When they return, no transfer is in flight and no room to land is held any more; on a device
the last copies may still be under way (KVMemory.delivered).
"""

import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import closing

from kvcore.client.base import LayerwiseStore
from kvcore.transport.base import Transfer
from kvcore.wire.messages import Status
from mooncake_connector.kv_memory import KVMemory, Landing

# A follower looks at this interval whether its request was cancelled meanwhile.
FOLLOW_SLICE_MS = 500.0
# A writer sends one layer of a whole prefill chunk in one go; its parts may arrive so far apart.
SAME_CHUNK_MS = 10.0
# What a waiting read may take on top of its wait: the bytes themselves, and a busy host.
TRANSFER_GRACE_MS = 2_000.0


class LoadContext:
    """One load: keys[i] go to vLLM block block_ids[i]; `deadline` in seconds of time.monotonic()."""

    def __init__(
        self,
        store: LayerwiseStore,
        memory: KVMemory,
        keys: Sequence[bytes],
        block_ids: Sequence[int],
        deadline: float,
        batch_blocks: int,
        on_layers: Callable[[range, int], None],
    ) -> None:
        """`on_layers(layers, first)`: layers of the blocks from index `first` on have arrived."""
        self.store = store
        self.memory = memory
        self.num_layers = memory.layout.num_layers
        self.keys = keys
        self.block_ids = block_ids
        self.deadline = deadline
        self.on_layers = on_layers
        self.cancelled = False
        self._batch_blocks = batch_blocks

    def remaining_ms(self) -> float:
        return max(0.0, (self.deadline - time.monotonic()) * 1e3)

    def batches(self, begin: int, end: int, num_layers: int) -> list[range]:
        step = min(self._batch_blocks, self.memory.max_blocks(num_layers))
        return [range(i, min(i + step, end)) for i in range(begin, end, step)]

    def land(
        self, blocks: range, layer_begin: int, layer_end: int, timeout_ms: float, follows: bool = False
    ) -> Landing | None:
        block_ids = self.block_ids[blocks.start : blocks.stop]
        return self.memory.land(block_ids, layer_begin, layer_end, timeout_ms=timeout_ms, follows=follows)

    def submit(
        self,
        landing: Landing,
        first: int,
        batch: range,
        layer_begin: int,
        layer_end: int,
        wait_ms: float = 0,
    ) -> Transfer:
        """Reads blocks `batch` into a landing whose block 0 is block `first` of this load."""
        buffers = [landing.buffers(layer_begin, layer_end, index - first) for index in batch]
        keys = [self.keys[index] for index in batch]
        return self.store.read_layers(keys, layer_begin, layer_end, buffers, wait_ms=int(wait_ms))

    def await_writer(self, index: int) -> bool:
        """Waits for layer 0 of one block, without room to land; False when it does not come."""
        scratch = memoryview(bytearray(self.memory.layout.layer_size_bytes))
        while not self.cancelled:
            wait_ms = min(FOLLOW_SLICE_MS, self.remaining_ms())
            transfer = self.store.read_layers([self.keys[index]], 0, 1, [scratch], wait_ms=int(wait_ms))
            [status] = transfer.wait(wait_ms + TRANSFER_GRACE_MS)
            if status is not Status.TIMED_OUT or not self.remaining_ms():
                return status is Status.OK
        return False


class _Read:
    """Layers of a batch of blocks on their way."""

    def __init__(self, load: LoadContext, landing: Landing, batch: range, layers: range) -> None:
        self.batch = batch
        self._load = load
        self._landing = landing
        self._layers = layers
        try:
            self._transfer = load.submit(landing, batch.start, batch, layers.start, layers.stop)
        except BaseException:
            landing.release()
            raise

    def finish(self, *, deliver: bool = True) -> int:
        """Waits; how many leading blocks have arrived."""
        try:
            leading = _leading_ok(self._transfer.wait(self._load.remaining_ms()))
            if deliver and leading:
                for layer in self._layers:
                    self._landing.deliver(layer, 0, leading)
            return leading
        finally:
            self._landing.release()


def _read_batches(
    load: LoadContext, batches: list[range], layers: range, ahead: int
) -> Generator[_Read, None, None]:
    """Reads for the caller to finish, in order; up to `ahead` more are in flight. Ends early when there is no
    room to land before the deadline."""
    waiting, flying = deque(batches), deque[_Read]()
    try:
        while waiting or flying:
            while waiting and len(flying) <= ahead:
                timeout_ms = 0 if flying else load.remaining_ms()
                landing = load.land(waiting[0], layers.start, layers.stop, timeout_ms)
                if landing is None:
                    break
                flying.append(_Read(load, landing, waiting.popleft(), layers))
            if not flying:
                return
            yield flying.popleft()
    finally:
        for read in flying:
            read.finish(deliver=False)


def load_whole_blocks(load: LoadContext, begin: int, end: int) -> int:
    """Sealed blocks [begin, end), all layers of a batch in one read, two reads in flight."""
    layers = range(load.num_layers)
    complete = begin
    with closing(_read_batches(load, load.batches(begin, end, len(layers)), layers, ahead=1)) as reads:
        for read in reads:
            complete = read.batch.start + read.finish()
            if complete < read.batch.stop or load.cancelled:
                break
            load.on_layers(layers, read.batch.start)
    return complete


def load_layer_by_layer(load: LoadContext, layer_done: Callable[[int, int], None]) -> int:
    """Sealed blocks, layer by layer over all of them, for an engine that computes right behind.

    `layer_done(layer, complete)` is called once a layer of the first `complete` blocks has arrived and the
    others are given up.
    """
    complete = len(load.keys)
    for layer in range(load.num_layers):
        batches, arrived = load.batches(0, complete, 1), 0
        with closing(_read_batches(load, batches, range(layer, layer + 1), len(batches))) as reads:
            for read in reads:
                arrived = read.batch.start + read.finish()
                if arrived < read.batch.stop:
                    break
        complete = arrived
        layer_done(layer, complete)
        if complete == 0:
            break
        load.on_layers(range(layer, layer + 1), 0)
    return complete


def follow_writer(load: LoadContext, begin: int, end: int) -> int:
    """Blocks [begin, end) of a prefill engine that is still computing them, or has not begun.

    Waits for layer 0 of a block, takes along those of the same prefill chunk, and asks for their other layers
    at once, in the order in which the writer commits them; then the next chunk. Ends early when the writer
    gives a block up. Room to land is taken only once a chunk has begun.
    """
    complete, goes_on = begin, True
    while complete < end and goes_on and load.await_writer(complete):
        chunk = range(complete, min(end, complete + load.memory.max_blocks(load.num_layers, follows=True)))
        landing = load.land(chunk, 0, load.num_layers, load.remaining_ms(), follows=True)
        if landing is None:
            break
        try:
            arrived, goes_on = _await_chunk(load, landing, chunk)
            if arrived == complete:
                break
            complete = _follow_layers(load, landing, range(complete, arrived))
        finally:
            landing.release()
        goes_on = goes_on and complete == arrived
    return complete


def _follow_layers(load: LoadContext, landing: Landing, chunk: range) -> int:
    load.on_layers(range(1), chunk.start)
    alive, wait_ms = len(chunk), load.remaining_ms()
    transfers: list[Transfer] = []
    try:
        for layer in range(1, load.num_layers):
            transfers.append(load.submit(landing, chunk.start, chunk, layer, layer + 1, wait_ms))
        for layer, transfer in enumerate(transfers, start=1):
            alive = min(alive, _leading_ok(transfer.wait(load.remaining_ms() + TRANSFER_GRACE_MS)))
            if alive:
                landing.deliver(layer, 0, alive)
                load.on_layers(range(layer, layer + 1), chunk.start)
    finally:
        # After an error some may still be writing to the landing, which is about to go to somebody else.
        for transfer in transfers:
            transfer.wait(0)
    return chunk.start + alive


def _await_chunk(load: LoadContext, landing: Landing, chunk: range) -> tuple[int, bool]:
    """(end of the blocks of `chunk` whose layer 0 is here now, whether more may come)."""
    arrived = chunk.start
    for batch in load.batches(chunk.start, chunk.stop, 1):
        # Later blocks of one prefill chunk follow the first at once; if they do not, the chunk has ended.
        wait_ms = min(SAME_CHUNK_MS, load.remaining_ms())
        transfer = load.submit(landing, chunk.start, batch, 0, 1, wait_ms)
        statuses = transfer.wait(wait_ms + TRANSFER_GRACE_MS)
        leading = _leading_ok(statuses)
        if leading:
            landing.deliver(0, arrived - chunk.start, arrived - chunk.start + leading)
        arrived += leading
        if leading < len(batch):
            return arrived, statuses[leading] is Status.TIMED_OUT
        if load.cancelled:
            return arrived, False
    return arrived, True


def _leading_ok(statuses: Sequence[Status]) -> int:
    for index, status in enumerate(statuses):
        if status is not Status.OK:
            return index
    return len(statuses)
