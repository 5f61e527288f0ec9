"""What sysfs tells about RDMA devices: names, port state, and which GID to speak from."""

from pathlib import Path
from typing import NamedTuple

INFINIBAND = Path("/sys/class/infiniband")
PORT = 1
# Tables have hundreds of places, a few in use, from the front: so many free ones in a row are their end.
_FREE_PLACES_AT_END = 16


class Gid(NamedTuple):
    position: int
    raw: bytes
    is_roce_v2: bool


class Port(NamedTuple):
    """`is_ethernet`: RoCE or iWARP, where peers are found by GID; else InfiniBand, by LID."""

    is_active: bool
    is_ethernet: bool
    lid: int
    gid: Gid


def device_names(root: Path = INFINIBAND) -> list[str]:
    try:
        return sorted(path.name for path in root.iterdir())
    except OSError:
        return []


def is_active(device_name: str, root: Path = INFINIBAND) -> bool:
    return "ACTIVE" in _read(_port_path(device_name, root) / "state")


def read_port(device_name: str, root: Path = INFINIBAND) -> Port | None:
    """None when the device has no usable GID (its interface is down or has no address)."""
    path = _port_path(device_name, root)
    gid = best_gid(read_gids(device_name, root))
    if gid is None:
        return None
    lid = _read(path / "lid")
    return Port(
        is_active=is_active(device_name, root),
        is_ethernet=_read(path / "link_layer") != "InfiniBand",
        lid=int(lid, 16) if lid else 0,
        gid=gid,
    )


def read_gids(device_name: str, root: Path = INFINIBAND) -> list[Gid]:
    path = _port_path(device_name, root)
    found: list[Gid] = []
    position = free_places = 0
    while free_places < _FREE_PLACES_AT_END and (text := _read(path / "gids" / str(position))):
        raw = bytes.fromhex(text.replace(":", ""))
        free_places = 0 if any(raw) else free_places + 1
        if any(raw):
            found.append(Gid(position, raw, "v2" in _read(path / "gid_attrs" / "types" / str(position))))
        position += 1
    return found


def best_gid(gids: list[Gid]) -> Gid | None:
    """RoCE v2 over IPv4 first, because it is routed most often; link-local addresses last."""
    return min(gids, key=_rank, default=None)


def _rank(gid: Gid) -> tuple[int, int]:
    is_ipv4 = gid.raw.startswith(bytes(10) + b"\xff\xff")
    is_link_local = gid.raw[:2] == b"\xfe\x80"
    kind = (0 if is_ipv4 else 2 if is_link_local else 1) + (0 if gid.is_roce_v2 else 3)
    return kind, gid.position


def _port_path(device_name: str, root: Path) -> Path:
    return root / device_name / "ports" / str(PORT)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, ValueError):
        return ""
