"""The extra config, then the file, then the environment; what is not known is said and does no harm."""

import json
import logging
import re
from pathlib import Path

import pytest

from kvcore.errors import ConfigError
from kvcore.transport.protocol import device_of_rank
from sglang_hicache_backend.config import (
    CONFIG_PATH_VARIABLE,
    MOONCAKE_KEYS,
    SGLANG_KEYS,
    BackendConfig,
    backend_config,
)

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    path = tmp_path / "mooncake.json"
    path.write_text(json.dumps({"master_server_address": "file:2", "tenant_id": "file", "protocol": "rdma"}))
    return {
        CONFIG_PATH_VARIABLE: str(path),
        "MOONCAKE_MASTER": "environment:3",
        "MOONCAKE_TENANT_ID": "environment",
        "MOONCAKE_STORE_TOKEN": "secret",
        "MOONCAKE_PROTOCOL": "rdma",
    }


def test_defaults() -> None:
    assert backend_config(None, {}) == BackendConfig()


def test_first_the_extra_config_then_the_file_then_the_environment(environ: dict[str, str]) -> None:
    config = backend_config({"master_server_address": "extra:1"}, environ)
    assert (config.store_address, config.tenant, config.store_token) == ("extra:1", "file", "secret")
    assert backend_config({}, environ).store_address == "file:2"
    del environ[CONFIG_PATH_VARIABLE]
    assert backend_config({}, environ).store_address == "environment:3"


def test_our_own_names_work_everywhere_and_go_first() -> None:
    both = {"master_server_address": "theirs:1", "store_address": "ours:1"}
    assert backend_config(both, {}).store_address == "ours:1"
    environ = {"MOONCAKE_MASTER": "theirs:1", "MOONCAKE_STORE_ADDRESS": "ours:1"}
    assert backend_config({}, environ).store_address == "ours:1"
    assert backend_config({"client_server_address": "near:1"}, {}).store_address == "near:1"


def test_mooncakes_protocol_and_devices() -> None:
    environ = {"MOONCAKE_PROTOCOL": "rdma", "MOONCAKE_DEVICE": '{"0": "mlx5_0"}'}
    config = backend_config({}, environ)
    assert (config.protocol, config.device_name, config.planes) == ("rdma", '{"0": "mlx5_0"}', [])
    assert backend_config({"rdma_devices": "mlx5_1", "protocol": "tcp"}, environ).device_name == "mlx5_1"
    as_object = backend_config({"device_name": {"0": "mlx5_0", "1": "mlx5_1"}}, {})
    assert [device_of_rank(as_object.device_name, rank) for rank in (0, 1)] == ["mlx5_0", "mlx5_1"]
    with pytest.raises(ConfigError, match="tenant"):
        backend_config({"tenant": {"0": "x"}}, {})
    with pytest.raises(ConfigError, match="protocol 'efa'"):
        backend_config({"protocol": "efa"}, {})


def test_values_as_people_write_them() -> None:
    config = backend_config({"load_timeout_ms": "3s", "planes": "tcp"}, {"MOONCAKE_LOOKUP_TIMEOUT_MS": "250"})
    assert (config.load_timeout_ms, config.planes, config.lookup_timeout_ms) == (3000, ["tcp"], 250)


def test_what_says_nothing_to_us_is_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        config = backend_config(dict.fromkeys(sorted(SGLANG_KEYS | MOONCAKE_KEYS), "anything"), {})
    assert config == BackendConfig()
    assert not caplog.records


def test_an_unknown_key_is_named_with_the_nearest_known(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        config = backend_config({"store_adress": "a:1", "tenant": "t"}, {})
    assert (config.store_address, config.tenant) == (BackendConfig().store_address, "t")
    assert "'store_adress' is not known and was ignored (did you mean 'store_address'?)" in caplog.text


@pytest.mark.parametrize(
    "extra_config, message",
    [
        ({"lookup_timeout_ms": 0}, "lookup_timeout_ms"),
        ({"load_timeout_ms": "later"}, "load_timeout_ms: not a duration"),
        ({"store_address": "ftp://x"}, "store address 'ftp://x'"),
        ({"planes": 7}, "planes"),
    ],
)
def test_a_value_that_cannot_be_used_is_named(extra_config: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        backend_config(extra_config, {})


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.json: cannot be read"):
        backend_config({}, {CONFIG_PATH_VARIABLE: str(tmp_path / "gone.json")})


@pytest.mark.parametrize("name", ["sglang-hicache.json", "sglang-hicache-all-settings.json"])
def test_the_configurations_we_ship_are_right(name: str, caplog: pytest.LogCaptureFixture) -> None:
    written = json.loads((ROOT / "configs" / name).read_text())
    with caplog.at_level(logging.WARNING):
        assert backend_config(written, {}) == BackendConfig()
    assert not caplog.records
    if "all-settings" in name:
        assert set(BackendConfig.__struct_fields__) <= set(written)


def test_the_linkers_configuration_is_right() -> None:
    written = json.loads((ROOT / "configs" / "sglang-linker.json").read_text())
    module = ROOT / (written["linker_module_path"].replace(".", "/") + ".py")
    assert f"class {written['linker']}(" in module.read_text()
    assert backend_config(written["linker_extra_config"], {}) == BackendConfig()


def test_the_documentation_has_every_key() -> None:
    text = (ROOT / "docs" / "sglang.md").read_text()
    for name in BackendConfig.__struct_fields__:
        assert re.search(rf"^\| `{name}` \|.*`MOONCAKE_{name.upper()}`", text, re.MULTILINE), name
    for name in SGLANG_KEYS | MOONCAKE_KEYS:
        assert f"`{name}`" in text, name
