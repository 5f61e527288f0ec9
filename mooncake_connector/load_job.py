"""How the blocks of one request come out of the store: three ways, all of which keep a leading run.

vLLM recomputes from the first block that did not come, so nothing behind it is worth waiting for. Each
function returns how many leading blocks are complete; the content of the others is undefined until the
caller zeroes it. No transfer is in flight any more when they return.
"""

import time
from collections.abc import Callable, Sequence

from kvcore.client.base import LayerwiseStore
from kvcore.transport.base import Transfer
from kvcore.wire.messages import Status
from mooncake_connector.kv_layout import KVLayout

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
        layout: KVLayout,
        keys: Sequence[bytes],
        block_ids: Sequence[int],
        deadline: float,
        batch_blocks: int,
        on_layers: Callable[[range, int], None],
    ) -> None:
        """`on_layers(layers, first)`: layers of the blocks from index `first` on have arrived."""
        self.store = store
        self.layout = layout
        self.keys = keys
        self.block_ids = block_ids
        self.deadline = deadline
        self.batch_blocks = batch_blocks
        self.on_layers = on_layers
        self.cancelled = False

    def remaining_ms(self) -> float:
        return max(0.0, (self.deadline - time.monotonic()) * 1e3)

    def batches(self, begin: int, end: int) -> list[range]:
        return [range(i, min(i + self.batch_blocks, end)) for i in range(begin, end, self.batch_blocks)]

    def submit(self, batch: range, layer_begin: int, layer_end: int, wait_ms: float = 0) -> Transfer:
        buffers = [self.layout.buffers(layer_begin, layer_end, self.block_ids[index]) for index in batch]
        keys = [self.keys[index] for index in batch]
        return self.store.read_layers(keys, layer_begin, layer_end, buffers, wait_ms=int(wait_ms))


def load_whole_blocks(load: LoadContext, begin: int, end: int) -> int:
    """Sealed blocks [begin, end), all layers of a batch in one read, two reads in flight."""
    num_layers = load.layout.num_layers
    batches = load.batches(begin, end)
    ahead: Transfer | None = None
    complete = begin
    for position, batch in enumerate(batches):
        transfer = ahead or load.submit(batch, 0, num_layers)
        ahead = load.submit(batches[position + 1], 0, num_layers) if position + 1 < len(batches) else None
        statuses = transfer.wait(load.remaining_ms())
        complete = batch.start + _leading_ok(statuses)
        if complete < batch.stop or load.cancelled:
            if ahead is not None:
                ahead.wait(load.remaining_ms())
            break
        load.on_layers(range(num_layers), batch.start)
    return complete


def load_layer_by_layer(load: LoadContext, layer_done: Callable[[int, int], None]) -> int:
    """Sealed blocks, layer by layer over all of them, for an engine that computes right behind.

    `layer_done(layer, complete)` is called once a layer of the first `complete` blocks has arrived and the
    others are given up.
    """
    complete = len(load.keys)
    for layer in range(load.layout.num_layers):
        transfers = [(batch, load.submit(batch, layer, layer + 1)) for batch in load.batches(0, complete)]
        arrived, unbroken = 0, True
        for batch, transfer in transfers:
            leading = _leading_ok(transfer.wait(load.remaining_ms()))
            if unbroken:
                arrived, unbroken = batch.start + leading, leading == len(batch)
        complete = min(complete, arrived)
        layer_done(layer, complete)
        if complete == 0:
            break
        load.on_layers(range(layer, layer + 1), 0)
    return complete


def follow_writer(load: LoadContext, begin: int, end: int) -> int:
    """Blocks [begin, end) of a prefill engine that is still computing them, or has not begun.

    Waits for layer 0 of some blocks, takes along those of the same prefill chunk, and asks for their other
    layers at once, in the order in which the writer commits them; then the next chunk. Ends early when the
    writer gives a block up.
    """
    complete, goes_on = begin, True
    while complete < end and goes_on:
        arrived, goes_on = _await_chunk(load, complete, end)
        if arrived == complete:
            break
        complete = _follow_layers(load, complete, arrived)
        goes_on = goes_on and complete == arrived
    return complete


def _follow_layers(load: LoadContext, begin: int, end: int) -> int:
    load.on_layers(range(1), begin)
    alive, chunk = end - begin, range(begin, end)
    wait_ms = load.remaining_ms()
    transfers = [load.submit(chunk, layer, layer + 1, wait_ms) for layer in range(1, load.layout.num_layers)]
    for layer, transfer in enumerate(transfers, start=1):
        statuses = transfer.wait(load.remaining_ms() + TRANSFER_GRACE_MS)
        alive = min(alive, _leading_ok(statuses))
        if alive:
            load.on_layers(range(layer, layer + 1), begin)
    return begin + alive


def _await_chunk(load: LoadContext, begin: int, end: int) -> tuple[int, bool]:
    """(end of the blocks from `begin` on whose layer 0 is here now, whether more may come)."""
    arrived = begin
    while arrived < end and not load.cancelled:
        # Later batches of one chunk follow the first at once; if they do not, the chunk has ended.
        limit_ms = FOLLOW_SLICE_MS if arrived == begin else SAME_CHUNK_MS
        wait_ms = min(limit_ms, load.remaining_ms())
        batch = range(arrived, min(arrived + load.batch_blocks, end))
        statuses = load.submit(batch, 0, 1, wait_ms).wait(wait_ms + TRANSFER_GRACE_MS)
        leading = _leading_ok(statuses)
        arrived += leading
        if leading < len(batch):
            if statuses[leading] is not Status.TIMED_OUT:
                return arrived, False
            if arrived > begin:
                return arrived, True
            if not load.remaining_ms():
                return arrived, False
    return arrived, not load.cancelled


def _leading_ok(statuses: Sequence[Status]) -> int:
    for index, status in enumerate(statuses):
        if status is not Status.OK:
            return index
    return len(statuses)
