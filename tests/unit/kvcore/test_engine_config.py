"""Settings of the transfer engine, and the names that Mooncake's users have for them."""

import pytest

from kvcore.errors import ConfigError
from kvcore.transport.engine import EngineConfig, TransferEngine, engine_config
from kvcore.transport.slices import RetryPolicy
from kvcore.transport.verbs import RdmaUnavailable
from kvcore.transport.verbs_fake import FakeFabric


def test_no_device_is_no_reason_to_fail_unless_rdma_is_asked_for() -> None:
    with TransferEngine(EngineConfig(protocol="auto"), binding=FakeFabric()) as engine:
        assert engine.reason.startswith("tcp, because")
    with pytest.raises(RdmaUnavailable):
        TransferEngine(EngineConfig(protocol="rdma"), binding=FakeFabric())
    with pytest.raises(ConfigError, match="not on this host"):
        TransferEngine(EngineConfig(device_name="mlx5_9"), binding=FakeFabric("a0"))


def test_mooncakes_names_in_the_environment(tmp_path: object) -> None:
    environ = {
        "MOONCAKE_PROTOCOL": "rdma",
        "MOONCAKE_DEVICE": "mlx5_0,mlx5_1",
        "MOONCAKE_LOCAL_HOSTNAME": "10.0.0.1",
        "MC_SLICE_SIZE": "65536",
        "MC_MAX_EP_PER_CTX": "16",
        "MC_RETRY_CNT": "3",
        "MC_IB_TC": "160",
        "MC_MAX_WR": "",
    }
    config = engine_config(environ, port=17_000)
    assert (config.host, config.port, config.protocol) == ("10.0.0.1", 17_000, "rdma")
    assert (config.device_name, config.slice_bytes, config.max_endpoints) == ("mlx5_0,mlx5_1", 65536, 16)
    assert config.retry == RetryPolicy(max_attempts=3) and config.path.traffic_class == 160
    assert engine_config(environ, protocol="tcp").protocol == "tcp"
    assert engine_config({}) == EngineConfig()


@pytest.mark.parametrize(
    ("environ", "word"),
    [
        ({"MC_SLICE_SIZE": "64k"}, "MC_SLICE_SIZE"),
        ({"MC_SLICE_SIZE": "0"}, "slice_bytes"),
        ({"MOONCAKE_PROTOCOL": "carrier pigeon"}, "protocol"),
        ({"MC_MAX_WR": "1"}, "max_requests"),
    ],
)
def test_wrong_settings_are_named(environ: dict[str, str], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        engine_config(environ)


def test_a_matrix_file_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        TransferEngine(engine_config({"MC_CUSTOM_TOPO_JSON": "/nowhere.json"}), binding=FakeFabric("a0"))
