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

    Each batch waits for layer 0 of all its blocks; then the other layers are asked for at once, in the order
    in which the writer commits them. Ends at once when the writer gives a block up.
    """
    complete = begin
    for batch in load.batches(begin, end):
        complete = batch.start + _follow_batch(load, batch)
        if complete < batch.stop:
            break
    return complete


def _follow_batch(load: LoadContext, batch: range) -> int:
    num_layers = load.layout.num_layers
    alive = _await_first_layer(load, batch)
    if alive == 0:
        return 0
    load.on_layers(range(1), batch.start)
    rest = range(batch.start, batch.start + alive)
    wait_ms = load.remaining_ms()
    transfers = [load.submit(rest, layer, layer + 1, wait_ms) for layer in range(1, num_layers)]
    for layer, transfer in enumerate(transfers, start=1):
        statuses = transfer.wait(load.remaining_ms() + TRANSFER_GRACE_MS)
        alive = min(alive, _leading_ok(statuses))
        if alive:
            load.on_layers(range(layer, layer + 1), batch.start)
    return alive


def _await_first_layer(load: LoadContext, batch: range) -> int:
    """How many leading blocks have their first layer here; waits in slices so that a cancel is noticed."""
    arrived = 0
    while arrived < len(batch) and not load.cancelled:
        wait_ms = min(FOLLOW_SLICE_MS, load.remaining_ms())
        waiting = range(batch.start + arrived, batch.stop)
        statuses = load.submit(waiting, 0, 1, wait_ms).wait(wait_ms + TRANSFER_GRACE_MS)
        leading = _leading_ok(statuses)
        arrived += leading
        if leading < len(waiting) and (statuses[leading] is not Status.TIMED_OUT or not load.remaining_ms()):
            break
    return arrived


def _leading_ok(statuses: Sequence[Status]) -> int:
    for index, status in enumerate(statuses):
        if status is not Status.OK:
            return index
    return len(statuses)
