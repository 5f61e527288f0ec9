"""The systems; one file each. Peers are chosen by name."""

from collections.abc import Callable, Mapping, Sequence

from storebench.systems.base import System
from storebench.systems.lmcache import LMCache
from storebench.systems.memcpy import Memcpy
from storebench.systems.mooncake_shm import MooncakeShm
from storebench.systems.mooncake_tcp import MooncakeTcp
from storebench.systems.ours_shm import OursShm
from storebench.systems.ours_tcp import OursTcp, OursTcpWithoutChecksums
from storebench.systems.raw_tcp import RawTcp
from storebench.systems.redis import Redis

OURS: Sequence[Callable[[], System]] = (OursTcp, OursTcpWithoutChecksums, OursShm)
BASELINES: Sequence[Callable[[], System]] = (RawTcp, Memcpy)
PEERS: Mapping[str, Sequence[Callable[[], System]]] = {
    "mooncake": (MooncakeTcp, MooncakeShm),
    "redis": (Redis,),
    "lmcache": (LMCache,),
}
