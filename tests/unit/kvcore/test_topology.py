"""Which cards are near which memory, on servers as they are."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.errors import ConfigError
from kvcore.transport.topology import (
    ANYWHERE,
    Cards,
    PciDevice,
    Relation,
    cards_for,
    discover,
    dump_matrix,
    parse_matrix,
    relation,
    restrict,
)
from kvcore.transport.topology_sysfs import read_host
from tests.unit.kvcore.host_trees import NAMES, unfold


def matrix_of(name: str, tmp_path: Path) -> dict[str, Cards]:
    return discover(read_host(unfold(name, tmp_path).root))


@pytest.mark.parametrize("name", NAMES)
def test_relations_are_those_of_nvidia_smi(name: str, tmp_path: Path) -> None:
    recording = unfold(name, tmp_path)
    host = read_host(recording.root)
    assert tuple(nic.name for nic in host.nics) == recording.nic_names
    gpus = {gpu.name: gpu for gpu in host.gpus}
    assert set(recording.relations) <= set(gpus)
    for gpu, words in recording.relations.items():
        assert [relation(gpus[gpu], nic).name for nic in host.nics] == words


@pytest.mark.parametrize("name", NAMES)
def test_every_place_knows_every_card_once(name: str, tmp_path: Path) -> None:
    recording = unfold(name, tmp_path)
    for cards in discover(read_host(recording.root)).values():
        assert sorted((*cards.preferred, *cards.others)) == sorted(recording.nic_names)
        assert cards.preferred


def test_dgx_a100(tmp_path: Path) -> None:
    matrix = matrix_of("dgx_a100", tmp_path)
    assert matrix["cuda:0"].preferred == matrix["cuda:1"].preferred == ("mlx5_0", "mlx5_1")
    assert matrix["cuda:7"].preferred == ("mlx5_8", "mlx5_9")
    assert matrix["cpu:0"].preferred == ("mlx5_4", "mlx5_5")
    assert len(matrix["cpu:2"].preferred) == 12, "a node without cards prefers all"
    assert len(matrix) == 8 + 8


def test_a_card_for_each_gpu(tmp_path: Path) -> None:
    matrix = matrix_of("a100_9nic", tmp_path)
    assert [matrix[f"cuda:{gpu}"].preferred for gpu in range(8)] == [
        ("mlx5_2",), ("mlx5_4",), ("mlx5_6",), ("mlx5_8",), ("mlx5_1",), ("mlx5_3",), ("mlx5_5",), ("mlx5_7",)
    ]  # fmt: skip
    assert matrix["cpu:1"].preferred == ("mlx5_1", "mlx5_3", "mlx5_5", "mlx5_7")


def test_gpus_without_a_card_of_their_own_share_those_of_their_socket(tmp_path: Path) -> None:
    matrix = matrix_of("hgx_h100_4nic", tmp_path)
    assert matrix["cuda:1"] == Cards(("mlx5_0",), ("mlx5_1", "mlx5_2", "mlx5_3", "mlx5_4", "mlx5_5"))
    assert matrix["cuda:0"].preferred == ("mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3")
    assert matrix["cuda:4"].preferred == ("mlx5_4", "mlx5_5")


def test_one_card_and_nothing_known_about_it(tmp_path: Path) -> None:
    assert matrix_of("one_nic", tmp_path) == {"cpu:0": Cards(("mlx5_0", "mlx5_1"), ())}


def test_devices_on_no_bus(tmp_path: Path) -> None:
    matrix = matrix_of("soft_roce", tmp_path)
    assert matrix == {"cpu:0": Cards(("rxe0", "rxe1", "rxe2", "rxe3"), ())}


def test_a_host_without_sysfs_has_nothing(tmp_path: Path) -> None:
    host = read_host(tmp_path / "nowhere")
    assert (host.numa_nodes, host.nics, host.gpus) == ((0,), (), ())
    assert discover(host) == {"cpu:0": Cards((), ())}


def test_gpus_of_different_makers_count_apart(tmp_path: Path) -> None:
    recording = unfold("hgx_h100_4nic", tmp_path)
    listing = sorted((recording.root / "bus/pci/devices").iterdir())
    gpus = [path for path in listing if (path / "vendor").read_text().strip() == "0x10de"]
    (gpus[0] / "vendor").write_text("0x1002\n")
    (gpus[1] / "class").write_text("0x060400\n")
    names = [gpu.name for gpu in read_host(recording.root).gpus]
    assert names == ["hip:0", *(f"cuda:{number}" for number in range(6))]


def test_unknown_nodes_are_far_apart() -> None:
    one, other = PciDevice("a", ("pci0000:00", "x"), -1), PciDevice("b", ("pci0000:10", "y"), -1)
    assert relation(one, other) is Relation.SYS
    assert relation(one._replace(numa_node=0), other._replace(numa_node=0)) is Relation.NODE
    assert relation(one, other._replace(path=("pci0000:00", "y"))) is Relation.PHB


names = st.lists(st.text("abc0123_", min_size=1, max_size=6), max_size=5, unique=True)
matrices = st.dictionaries(
    st.sampled_from(["cpu:0", "cpu:1", "cuda:0"]),
    names.flatmap(
        lambda all_: st.integers(0, len(all_)).map(lambda n: Cards(tuple(all_[:n]), tuple(all_[n:])))
    ),
)


@given(matrices)
def test_the_json_form_is_read_as_it_was_written(matrix: dict[str, Cards]) -> None:
    assert parse_matrix(dump_matrix(matrix)) == matrix


@given(matrices, names)
def test_restricting_leaves_only_what_is_allowed(matrix: dict[str, Cards], allowed: list[str]) -> None:
    for place, cards in restrict(matrix, allowed).items():
        before = {*matrix[place].preferred, *matrix[place].others}
        assert {*cards.preferred, *cards.others} == before & set(allowed)
        assert cards.preferred or not before & set(allowed)


def test_a_matrix_written_for_mooncake_is_understood() -> None:
    text = '{"cpu:0": [["mlx5_2"], ["mlx5_3"]], "cuda:0": [["mlx5_2", "mlx5_1"], []]}'
    matrix = parse_matrix(text)
    assert cards_for(matrix, "cuda:0") == Cards(("mlx5_2", "mlx5_1"), ())
    assert cards_for(matrix, ANYWHERE) == Cards(("mlx5_1", "mlx5_2", "mlx5_3"), ())
    assert json.loads(dump_matrix(matrix)) == json.loads(text)


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"cpu:0": []}', '{"cpu:0": [["a"]]}', '{"cpu:0": [["a"], [1]]}', '{"cpu:0": "a"}']
)
def test_a_wrong_matrix_is_refused_with_its_place(text: str) -> None:
    with pytest.raises(ConfigError, match=r"topology\.json"):
        parse_matrix(text, "topology.json")
