"""kv_connector_extra_config: what it accepts, and how it says no."""

import json
from pathlib import Path

import pytest

from kvcore.errors import ConfigError
from mooncake_connector.config import ConnectorConfig, connector_config, engine_hash_seed
from mooncake_connector.pd import PDParams, parse_pd_params


def test_defaults_need_no_key_at_all() -> None:
    config = connector_config(None, {})
    assert (config.load_mode, config.protocol, config.save_decode_blocks) == ("async", "auto", True)


@pytest.mark.parametrize("name", ["vllm-kv-both.json", "vllm-kv-both-all-settings.json"])
def test_the_example_files_say_what_the_defaults_are(name: str) -> None:
    transfer = json.loads((Path(__file__).parents[3] / "configs" / name).read_text())
    extra = transfer["kv_connector_extra_config"]
    assert connector_config(extra, {}) == ConnectorConfig()
    assert transfer["kv_load_failure_policy"] == "recompute"
    if "all-settings" in name:
        assert sorted(extra) == sorted(ConnectorConfig.__struct_fields__)


def test_the_documentation_has_every_key_with_its_default() -> None:
    root = Path(__file__).parents[3]
    text = (root / "docs" / "vllm.md").read_text()
    transfer = json.loads((root / "configs" / "vllm-kv-both-all-settings.json").read_text())
    for name, default in transfer["kv_connector_extra_config"].items():
        (row,) = (
            line for line in text.splitlines() if line.startswith("| ") and f"`{name}`" in line.split("|")[1]
        )
        written = row.split("|")[2].strip(" `")
        assert written == (default if isinstance(default, str) else json.dumps(default)), name


def test_sizes_and_durations_are_written_as_people_do() -> None:
    config = connector_config({"staging_size_bytes": "64mb", "load_timeout_ms": "5s"}, {})
    assert (config.staging_size_bytes, config.load_timeout_ms) == (64 << 20, 5000)


def test_the_environment_gives_defaults_that_the_engine_may_override() -> None:
    environ = {"MOONCAKE_STORE_ADDRESS": "far:1", "MOONCAKE_TENANT": "blue", "MOONCAKE_PLANES": "tcp"}
    config = connector_config({"store_address": "near:2"}, environ)
    assert (config.store_address, config.tenant, config.planes) == ("near:2", "blue", ["tcp"])


def test_the_environment_of_mooncakes_users_works() -> None:
    environ = {"MOONCAKE_MASTER": "far:1", "MOONCAKE_PROTOCOL": "rdma", "MOONCAKE_DEVICE": "mlx5_0,mlx5_1"}
    config = connector_config(None, {**environ, "MOONCAKE_TENANT_ID": "blue"})
    assert (config.store_address, config.protocol, config.device_name) == ("far:1", "rdma", "mlx5_0,mlx5_1")
    assert config.tenant == "blue"
    ours = connector_config({"device_name": "mlx5_2"}, {**environ, "MOONCAKE_STORE_ADDRESS": "near:2"})
    assert (ours.store_address, ours.device_name) == ("near:2", "mlx5_2")


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"store_adress": "x"}, "store_address"),
        ({"load_mode": "lazy"}, "load_mode"),
        ({"planes": 7}, "planes"),
        ({"protocol": "efa"}, "protocol"),
        ({"load_threads": 0}, "load_threads"),
        ({"staging_size_bytes": "lots"}, "staging_size_bytes"),
        ({"load_timeout_ms": -1}, "load_timeout_ms"),
    ],
)
def test_a_bad_value_is_refused_by_name(extra: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        connector_config(extra, {})


def test_hash_seed_comes_from_the_environment() -> None:
    assert engine_hash_seed({"PYTHONHASHSEED": "7"}) == "7"
    assert engine_hash_seed({}) is None


def test_pd_parameters_of_the_router() -> None:
    params = {"mooncake_pd": {"role": "decode", "transfer_id": "t", "wait_ms": 100, "later": 1}, "other": 1}
    assert parse_pd_params(params) == (PDParams("decode", "t", 100), "")


@pytest.mark.parametrize("params", [None, {}, {"do_remote_prefill": True}])
def test_requests_of_others_have_no_pd_parameters(params: dict[str, object] | None) -> None:
    assert parse_pd_params(params) == (None, "")


@pytest.mark.parametrize("raw", [{"role": "both"}, {}, "decode", {"role": "decode", "wait_ms": "soon"}])
def test_malformed_pd_parameters_are_named_and_never_raise(raw: object) -> None:
    parsed, problem = parse_pd_params({"mooncake_pd": raw})
    assert parsed is None
    assert "mooncake_pd" in problem
