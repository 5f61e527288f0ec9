"""The transfer engine (paper, section 3.2.3): moves bytes between registered memory here and at peers.

    engine = TransferEngine(EngineConfig(host="10.0.0.1"))
    memory = engine.register_local_memory(buffer)
    segment = engine.open_segment("10.0.0.2:17000")
    batch = engine.submit_transfer([TransferRequest(Direction.WRITE, memory.address, segment, remote, size)])
    engine.wait(batch)                          # or get_transfer_status(batch), now and then
    engine.unregister_local_memory(memory)

One room a file: engine (the interface), worker (one thread that owns all that moves), rdma_path and tcp_path
(one connection each), connector (makes and ends them), server (the passive side), memory, cards, batch,
messages, config. What to do is decided in kvcore.transport.slices, endpoints and topology, which are pure.
"""

from kvcore.transport.engine.batch import Direction, Segment, TransferRequest, TransferState, TransferStatus
from kvcore.transport.engine.config import EngineConfig, engine_config
from kvcore.transport.engine.engine import TransferEngine

__all__ = [
    "Direction",
    "EngineConfig",
    "Segment",
    "TransferEngine",
    "TransferRequest",
    "TransferState",
    "TransferStatus",
    "engine_config",
]
