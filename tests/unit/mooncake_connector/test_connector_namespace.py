"""Engines that differ in anything that matters never share a name; engines that do not, do."""

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest

from kvcore.errors import ConfigError
from kvcore.weights import weights_identity
from mooncake_connector.namespace import build_namespace
from tests.unit.mooncake_connector.rig import connector_config, engine_facts, host_memory, make_layers


def write_checkpoint(directory: Path, *, value: int = 1, config: dict[str, Any] | None = None) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config or {"hidden_size": 8}))
    tensors = {"a": bytes([value]) * 4096, "b": b"\2" * 100}
    header: dict[str, Any] = {"__metadata__": {"saved": str(directory)}}
    position = 0
    for name, data in tensors.items():
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [position, position + len(data)]}
        position += len(data)
    encoded = json.dumps(header).encode()
    (directory / "model.safetensors").write_bytes(
        struct.pack("<Q", len(encoded)) + encoded + b"".join(tensors.values())
    )
    return directory


def test_a_copy_of_a_checkpoint_is_the_same_weights(tmp_path: Path) -> None:
    first = write_checkpoint(tmp_path / "first")
    shutil.copytree(first, tmp_path / "copy")
    assert weights_identity(str(first)) == weights_identity(str(tmp_path / "copy")) is not None


def test_who_saved_a_checkpoint_does_not_matter(tmp_path: Path) -> None:
    first = write_checkpoint(tmp_path / "a", config={"hidden_size": 8, "transformers_version": "1"})
    other = write_checkpoint(tmp_path / "b", config={"hidden_size": 8, "_name_or_path": "/tmp/x"})
    assert weights_identity(str(first)) == weights_identity(str(other))


def test_fine_tuned_weights_of_the_same_shape_are_others(tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base", value=1)
    tuned = write_checkpoint(tmp_path / "tuned", value=3)
    assert weights_identity(str(base)) != weights_identity(str(tuned))


def test_another_configuration_is_another_model(tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base")
    other = write_checkpoint(tmp_path / "other", config={"hidden_size": 8, "rope_theta": 5e5})
    assert weights_identity(str(base)) != weights_identity(str(other))


def test_a_cached_revision_is_named_by_its_commit(tmp_path: Path) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    snapshot = write_checkpoint(tmp_path / "models--x--y" / "snapshots" / commit)
    assert weights_identity(str(snapshot)) == f"commit:{commit}"


@pytest.mark.parametrize("name", ["missing", "empty"])
def test_weights_that_cannot_be_identified_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    facts, layout = engine_facts(model_path=str(tmp_path / name)), host_memory(make_layers()).layout
    with pytest.raises(ConfigError, match="weights_id"):
        build_namespace(facts, layout, connector_config(weights_id=""))


def test_a_broken_checkpoint_is_refused_not_guessed(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(ValueError, match="not a safetensors file"):
        weights_identity(str(tmp_path))


@pytest.mark.parametrize(
    "change",
    [
        {"architecture": "Other"},
        {"engine": "other"},
        {"layout": "other"},
        {"kv_dtype": "bfloat16"},
        {"hash_scheme": "sha256 seed=1"},
        {"block_size_tokens": 8},
        {"tp_rank": 1, "tp_size": 2},
        {"pp_rank": 1, "pp_size": 2},
        {"tp_size": 2, "cp_size": 2},
    ],
)
def test_every_fact_separates(change: dict[str, Any]) -> None:
    layout, config = host_memory(make_layers()).layout, connector_config()
    assert (
        build_namespace(engine_facts(), layout, config).digest()
        != build_namespace(engine_facts(**change), layout, config).digest()
    )


@pytest.mark.parametrize("change", [{"tenant": "other"}, {"weights_id": "w2"}])
def test_every_setting_separates(change: dict[str, Any]) -> None:
    layout = host_memory(make_layers()).layout
    assert (
        build_namespace(engine_facts(), layout, connector_config()).digest()
        != build_namespace(engine_facts(), layout, connector_config(**change)).digest()
    )


def test_another_number_of_layers_separates() -> None:
    digests = {
        build_namespace(engine_facts(), host_memory(make_layers(n)).layout, connector_config()).digest()
        for n in (2, 3)
    }
    assert len(digests) == 2


def test_ranks_that_hold_the_same_kv_share_a_name_and_one_writes() -> None:
    layout, config = host_memory(make_layers()).layout, connector_config()
    ranks = [engine_facts(tp_rank=rank, tp_size=4, kv_replicas=4) for rank in range(4)]
    alone = build_namespace(engine_facts(), layout, config)
    assert {build_namespace(facts, layout, config) for facts in ranks} == {alone}
    assert [facts.writes for facts in ranks] == [True, False, False, False]


def test_ranks_that_hold_pairs_of_the_same_kv() -> None:
    layout, config = host_memory(make_layers()).layout, connector_config()
    ranks = [engine_facts(tp_rank=rank, tp_size=4, kv_replicas=2) for rank in range(4)]
    digests = [build_namespace(facts, layout, config).digest() for facts in ranks]
    assert digests[0] == digests[1] != digests[2] == digests[3]
    assert [facts.writes for facts in ranks] == [True, False, True, False]
