"""Which network card is near which memory (pure): paper, section 3.2.3.

A server tells its peers its matrix: for each place where memory may be ("cpu:0" a NUMA node, "cuda:0" a GPU)
the cards to prefer, and the others, to be used when a preferred one fails. The JSON form is that of Mooncake
0.3, so matrices written for it can be used here.
"""

import enum
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from kvcore.errors import ConfigError

ANYWHERE = "*"
"""Memory of which nobody knows where it is."""


class Relation(enum.IntEnum):
    """How far two PCI devices are from each other, nearest first, in the words of `nvidia-smi topo -m`."""

    PIX = 0  # one switch between them
    PXB = 1  # several switches
    PHB = 2  # the host bridge of one CPU
    NODE = 3  # different host bridges of one NUMA node
    SYS = 4  # different NUMA nodes, or nobody knows


class PciDevice(NamedTuple):
    """`path`: the devices above it and itself, from the host bridge down ("pci0000:00", "0000:00:01.1", ...);
    empty for a device that is not on PCI, such as soft-RoCE. `numa_node`: -1 unknown."""

    name: str
    path: tuple[str, ...]
    numa_node: int


class Host(NamedTuple):
    """`gpus` are named after their order on the bus: "cuda:0" is the first of NVIDIA's."""

    numa_nodes: tuple[int, ...]
    nics: tuple[PciDevice, ...]
    gpus: tuple[PciDevice, ...]


class Cards(NamedTuple):
    """Names of network cards for one place of memory."""

    preferred: tuple[str, ...]
    others: tuple[str, ...]


Matrix = Mapping[str, Cards]


def relation(one: PciDevice, other: PciDevice) -> Relation:
    shared = _shared_depth(one.path, other.path)
    if shared >= 2:
        # Below the last device they share, a switch shows as its downstream port and then the device itself.
        below = max(len(one.path), len(other.path)) - shared
        return Relation.PIX if below <= 2 else Relation.PXB
    if shared == 1:
        return Relation.PHB
    same_node = one.numa_node == other.numa_node and one.numa_node >= 0
    return Relation.NODE if same_node else Relation.SYS


def discover(host: Host) -> dict[str, Cards]:
    """The matrix of a host: a GPU prefers the cards with the nearest relation, a NUMA node those attached to
    it. A place that has none prefers all."""
    names = [nic.name for nic in host.nics]
    matrix = {}
    for node in host.numa_nodes:
        near = [nic.name for nic in host.nics if nic.numa_node in (node, -1)]
        matrix[f"cpu:{node}"] = _cards(near or names, names)
    for gpu in host.gpus:
        relations = [relation(gpu, nic) for nic in host.nics]
        near = [name for name, kind in zip(names, relations, strict=True) if kind == min(relations)]
        matrix[gpu.name] = _cards(near, names)
    return matrix


def restrict(matrix: Matrix, allowed: Sequence[str]) -> dict[str, Cards]:
    """The matrix with none but the `allowed` cards. Where no preferred one is left, the others are it."""
    restricted = {}
    for place, cards in matrix.items():
        preferred = [name for name in cards.preferred if name in allowed]
        everything = [name for name in (*cards.preferred, *cards.others) if name in allowed]
        restricted[place] = _cards(preferred or everything, everything)
    return restricted


def cards_for(matrix: Matrix, place: str) -> Cards:
    """The cards of a place; of one that is not in the matrix, such as ANYWHERE, all, in a stable order."""
    if place in matrix:
        return matrix[place]
    everything: dict[str, None] = {}
    for cards in matrix.values():
        everything.update(dict.fromkeys((*cards.preferred, *cards.others)))
    return Cards(tuple(sorted(everything)), ())


def dump_matrix(matrix: Matrix) -> str:
    """Mooncake's JSON: {"cpu:0": [["mlx5_0"], ["mlx5_1"]], ...}."""
    return json.dumps({place: [list(cards.preferred), list(cards.others)] for place, cards in matrix.items()})


def parse_matrix(text: str, origin: str = "the NIC matrix") -> dict[str, Cards]:
    """What `dump_matrix` writes. ConfigError says where it is wrong."""
    try:
        parsed: Any = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{origin}: not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise ConfigError(f'{origin}: an object like {{"cpu:0": [["mlx5_0"], []]}} is expected')
    return {str(place): _parse_cards(place, value, origin) for place, value in parsed.items()}


def _parse_cards(place: str, value: Any, origin: str) -> Cards:
    try:
        preferred, others = msgspec.convert(value, tuple[tuple[str, ...], tuple[str, ...]])
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"{origin}: {place!r} needs two lists of names, preferred cards and others: {error}"
        ) from error
    return Cards(preferred, others)


def _cards(preferred: Sequence[str], everything: Sequence[str]) -> Cards:
    return Cards(tuple(preferred), tuple(name for name in everything if name not in preferred))


def _shared_depth(one: Sequence[str], other: Sequence[str]) -> int:
    depth = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        depth += 1
    return depth
