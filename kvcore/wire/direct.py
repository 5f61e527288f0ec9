"""Messages of one-sided planes: how a client gets at the pool's memory by itself."""

import msgspec

from kvcore.wire.vocabulary import Message


class ShmOffer(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where to fetch the pool memfd: connect to `attach_path` (a Unix socket), send `nonce`, receive it.

    The attach connection must stay open as long as the pool is mapped: its end is the store's proof that the
    mapping is gone (kernel order at exit: memory first, then files). On `unix_path`, if it is given, the
    store speaks this protocol, too: messages cost less there than over TCP.
    """

    attach_path: str
    nonce: bytes
    pool_size_bytes: int
    unix_path: str = ""


class RdmaOffer(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Devices of the store that have the pool registered; a queue pair may be connected to each."""

    devices: list[str]
    pool_size_bytes: int


class QueuePairAddress(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a peer must know to connect to a queue pair. `lid` is 0 on Ethernet; `mtu` is the code of ibv_mtu
    (1: 256 bytes .. 5: 4096)."""

    number: int
    packet_number: int
    gid: bytes
    lid: int
    mtu: int


class ConnectQueuePair(Message, frozen=True, array_like=True, tag=60):
    """Connects a queue pair of the client with a new one on `device` of the store. It dies with this
    connection."""

    device: str
    address: QueuePairAddress


class ConnectQueuePairReply(Message, frozen=True, array_like=True, tag=61):
    """Byte 0 of the pool is at `pool_address` for whoever shows `remote_key`."""

    address: QueuePairAddress
    pool_address: int
    remote_key: int


class DisconnectQueuePair(Message, frozen=True, array_like=True, tag=62):
    """Ack when the store's end is destroyed: nothing that may still be on the wire arrives after it. A client
    whose queue pair has failed says so before it says anything about the objects it was writing."""

    device: str
    number: int
