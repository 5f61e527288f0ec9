"""The host's own PCI devices and NUMA nodes, as sysfs shows them."""

import re
from pathlib import Path

from kvcore.transport.topology import Host, PciDevice

SYSFS = Path("/sys")
_DISPLAY_CLASSES = ("0x0300", "0x0302", "0x0380")  # VGA, 3D controller, other display (AMD's accelerators)
_GPU_KINDS = {"0x10de": "cuda", "0x1002": "hip"}
_NODE = re.compile(r"^node(\d+)$")


def read_host(root: Path = SYSFS) -> Host:
    """Never raises: what cannot be read is not there."""
    nodes = sorted(
        int(match[1]) for path in _children(root / "devices/system/node") if (match := _NODE.match(path.name))
    )
    nics = [_nic(path) for path in sorted(_children(root / "class/infiniband"), key=_natural)]
    return Host(tuple(nodes) or (0,), tuple(nics), tuple(_gpus(root)))


def _nic(path: Path) -> PciDevice:
    device = path / "device"
    if not device.exists():
        return PciDevice(path.name, (), -1)
    return PciDevice(path.name, _pci_path(device), _numa_node(device))


def _gpus(root: Path) -> list[PciDevice]:
    found: list[PciDevice] = []
    counts = dict.fromkeys(_GPU_KINDS.values(), 0)
    for path in sorted(_children(root / "bus/pci/devices")):
        kind = _GPU_KINDS.get(_read(path / "vendor"))
        if kind is None or _read(path / "class")[:6] not in _DISPLAY_CLASSES:
            continue
        found.append(PciDevice(f"{kind}:{counts[kind]}", _pci_path(path), _numa_node(path)))
        counts[kind] += 1
    return found


def _pci_path(device: Path) -> tuple[str, ...]:
    parts = device.resolve().parts
    start = next((index for index, part in enumerate(parts) if part.startswith("pci")), len(parts))
    return parts[start:]


def _numa_node(device: Path) -> int:
    text = _read(device / "numa_node")
    return int(text) if text.lstrip("-").isdigit() else -1


def _natural(path: Path) -> list[int | str]:
    """mlx5_2 before mlx5_10."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", path.name)]


def _children(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, ValueError):
        return ""
