"""Unfolds the compact recordings of tests/data/hosts into a tree like /sys."""

from pathlib import Path
from typing import NamedTuple

RECORDINGS = Path(__file__).resolve().parents[2] / "data" / "hosts"
NAMES = sorted(path.stem for path in RECORDINGS.glob("*.txt"))
_VENDORS = {"nvidia": "0x10de", "amd": "0x1002", "other": "0x1a03"}


class Recording(NamedTuple):
    """`root` stands for /sys. `relations`: GPU to what `nvidia-smi topo -m` printed, one word a card."""

    root: Path
    nic_names: tuple[str, ...]
    relations: dict[str, list[str]]


def unfold(name: str, root: Path) -> Recording:
    nic_names, relations = [], {}
    for line in (RECORDINGS / f"{name}.txt").read_text().splitlines():
        kind, *words = line.split()
        if kind == "numa":
            for node in words:
                (root / "devices/system/node" / f"node{node}").mkdir(parents=True)
        elif kind == "nic":
            nic_names.append(words[0])
            _add_nic(root, words[0], words[1], words[2:])
        elif kind == "gpu":
            device = _add_pci_device(root, words[1], words[2:])
            (device / "vendor").write_text(f"{_VENDORS[words[0]]}\n")
            (device / "class").write_text("0x030200\n")
        elif kind == "topo":
            relations[words[0]] = words[1:]
    return Recording(root, tuple(nic_names), relations)


def _add_nic(root: Path, name: str, node: str, path: list[str]) -> None:
    parent = _add_pci_device(root, node, path) if path else root / "devices/virtual"
    device = parent / "infiniband" / name
    device.mkdir(parents=True)
    if path:
        (device / "device").symlink_to(parent)
        (parent / "vendor").write_text("0x15b3\n")
        (parent / "class").write_text("0x020700\n")
    listing = root / "class/infiniband"
    listing.mkdir(parents=True, exist_ok=True)
    (listing / name).symlink_to(device)


def _add_pci_device(root: Path, node: str, path: list[str]) -> Path:
    device = root.joinpath("devices", *path)
    device.mkdir(parents=True, exist_ok=True)
    (device / "numa_node").write_text(f"{node}\n")
    listing = root / "bus/pci/devices"
    listing.mkdir(parents=True, exist_ok=True)
    (listing / path[-1]).symlink_to(device)
    return device
