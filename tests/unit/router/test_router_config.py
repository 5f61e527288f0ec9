"""Flags, file and environment end in one checked configuration."""

import json
from pathlib import Path

import pytest

from kvcore.errors import ConfigError
from router.app import Router
from router.cli import main, make_parser, read_config, summary, write_ready_file
from router.config import RouterConfig
from router.core.view import Role
from router.discovery import StaticDiscovery
from router.instance_spec import InstanceSpec, parse_instance_url
from router.kv_events.source import EventSource

REPOSITORY = Path(__file__).resolve().parents[3]


def test_mixed_engines_from_flags() -> None:
    config, _ = read_config(["--worker-urls", "http://a:1", "http://b:2/", "--policy", "least_loaded"])
    assert config.instance_specs() == [
        InstanceSpec("http://a:1", Role.MIXED),
        InstanceSpec("http://b:2", Role.MIXED),
    ]
    assert summary(config) == "2 engines, least_loaded"


def test_separate_pools_from_flags() -> None:
    config, _ = read_config(
        [
            "--prefill",
            "http://p:1",
            "--decode",
            "d:2",
            "--decode",
            "http://[::1]:3",
            "--decode-policy",
            "random",
        ]
    )
    assert config.instance_specs() == [
        InstanceSpec("http://p:1", Role.PREFILL),
        InstanceSpec("http://d:2", Role.DECODE),
        InstanceSpec("http://[::1]:3", Role.DECODE),
    ]
    assert "1 prefill by round_robin, 2 decode by random" in summary(config)


def test_flags_of_the_vllm_router_family_mean_the_same() -> None:
    flags = """
        --worker-urls http://a:1 --request-timeout-secs 60 --max-payload-size 1000 --retry-max-retries 2
        --cb-failure-threshold 4 --cb-timeout-duration-secs 1.5 --health-check-interval-secs 3
        --health-check-endpoint /ping --health-failure-threshold 9 --disable-circuit-breaker
    """
    config, _ = read_config(flags.split())
    assert config.request_timeout_ms == 60_000
    assert config.http.max_body_bytes == 1000
    assert config.retry.max_retries == 2
    assert (config.breaker.failure_threshold, config.breaker.open_ms) == (4, 1500)
    assert not config.breaker.enabled
    assert (config.health.interval_ms, config.health.path) == (3000, "/ping")
    assert config.health.failure_threshold == 9
    assert read_config(["--disable-retries"])[0].retry.max_retries == 0


def test_label_selectors_of_the_family_choose_pods() -> None:
    flags = (
        "--service-discovery --prefill-selector app=vllm role=prefill --decode-selector app=vllm,role=decode"
    )
    config, _ = read_config([*flags.split(), "--service-discovery-port", "8000"])
    assert config.instance_specs() == []
    assert config.discovery.kubernetes_prefill_selector == "app=vllm,role=prefill"
    assert config.discovery.kubernetes_decode_selector == "app=vllm,role=decode"
    assert config.discovery.kubernetes_port == "8000"


def test_flags_win_over_the_environment_over_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "router.toml"
    file.write_text(
        'port = 1\npolicy = "random"\nworker_urls = ["http://a:1"]\n[http]\nmax_body_bytes = "2kb"\n'
    )
    monkeypatch.setenv("MOONCAKE_ROUTER_PORT", "2")
    monkeypatch.setenv("MOONCAKE_ROUTER_API_KEYS", "one,two")
    config, _ = read_config(["--config", str(file), "--policy", "least_loaded"])
    assert (config.port, config.policy, config.http.max_body_bytes) == (2, "least_loaded", 2048)
    assert config.api_keys == ("one", "two")


def test_the_example_file_is_complete_and_says_the_defaults() -> None:
    config, _ = read_config(["--config", str(REPOSITORY / "configs" / "router.toml")])
    assert config == RouterConfig(prefill=config.prefill, decode=config.decode)
    assert len(config.instance_specs()) >= 2
    text = (REPOSITORY / "configs" / "router.toml").read_text()
    for name in RouterConfig.__struct_fields__:
        assert name in text, f"{name} is missing from the example"


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ([], "no engines"),
        (["--prefill", "http://p:1"], "--decode is missing"),
        (["--decode", "http://p:1"], "--prefill is missing"),
        (["--worker-urls", "http://a:1", "--prefill", "http://p:1"], "cannot be mixed"),
        (["--prefill", "http://a:1", "--decode", "http://a:1"], "given twice"),
        (["--worker-urls", "https://a:1"], "over http://"),
        (["--worker-urls", "http://a:1/v1"], "write it as"),
        (["--worker-urls", "http://a:port"], "a:port"),
        (["--worker-urls", "http://a:1", "--policy", "best"], "least_loaded"),
        (["--prefill", "http://p:1", "--decode", "http://d:1", "--pd-protocol", "x"], "suite"),
        (["--worker-urls", "http://a:1", "--port", "70000"], "port"),
        (["--prefill", "http://p:1", "http", "--decode", "http://d:1"], "no bootstrap port"),
        (["--prefill", "http://p:1", "1", "2", "--decode", "http://d:1"], "no bootstrap port"),
        (["--worker-urls", "http://a:1", "--discovery.source", "file"], "needs --discovery.file"),
        (["--discovery.source", "redis", "--worker-urls", "http://a:1"], "drop --worker-urls"),
        (["--discovery.source", "redis", "--discovery.redis-url", "x"], "redis://"),
        (["--worker-urls", "http://a:1", "--store-namespaces", "our model"], "32 hex digits"),
        (["--service-discovery"], "kubernetes-service"),
        (["--service-discovery", "--prefill-selector", "app=p"], "--decode-selector"),
        (["--service-discovery", "--selector", "a=b", "--decode-selector", "a=c"], "cannot be mixed"),
        (["--service-discovery", "--selector", "a=b", "--discovery.kubernetes-service", "s"], "not both"),
        (["--service-discovery", "--selector", "=b"], "KEY=VALUE"),
        (["--worker-urls", "http://a:1", "--engine-stores", "http://a:1=h:2"], "--store-kv-events"),
        (
            [
                "--worker-urls",
                "http://a:1",
                "--engine-stores",
                "http://b:1=h",
                "--store-kv-events",
                "tcp://h:1",
            ],
            "b:1",
        ),
        (["--discovery.source", "dns"], "discovery"),
        (["--worker-urls", "http://a:1", "--request-timeout-secs", "soon"], "--request-timeout-secs"),
        (["--config", "/does/not/exist.toml"], "cannot be read"),
    ],
)
def test_mistakes_end_with_status_2_and_a_hint(
    flags: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(flags) == 2
    assert complaint in capsys.readouterr().err


def test_a_port_that_is_taken_is_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["--worker-urls", "http://127.0.0.1:1", "--port", str(port)]) == 1
    assert "cannot listen" in capsys.readouterr().err


def test_help_teaches() -> None:
    text = make_parser().format_help()
    for word in ("--worker-urls http://", "--prefill http://", "curl http://", "/metrics", "round_robin"):
        assert word in text


def test_the_ready_file_appears_whole(tmp_path: Path) -> None:
    file = tmp_path / "ready.json"
    write_ready_file(file, {"pid": 1})
    assert json.loads(file.read_text()) == {"pid": 1}
    assert list(tmp_path.iterdir()) == [file]


def test_an_unknown_protocol_or_policy_is_refused_before_listening() -> None:
    with pytest.raises(ConfigError, match="round_robin"):
        Router(RouterConfig(policy="x"), StaticDiscovery([]))


def test_urls() -> None:
    assert parse_instance_url("http://host") == ("host", 80)
    assert parse_instance_url("127.0.0.1:8000") == ("127.0.0.1", 8000)
    for wrong in (
        "http://[zz]:1",
        "http://\u2100:1",
        "http://a:99999",
        "https://a",
        "http://a/v1",
        "http://",
    ):
        with pytest.raises(ConfigError, match="engine URL"):
            parse_instance_url(wrong)


def test_event_sources() -> None:
    config, _ = read_config(
        [
            "--worker-urls",
            "a:1",
            "http://b:2",
            "--kv-events",
            "http://a:1=tcp://a:5557,tcp://a:5558",
            "--kv-event-source",
            "b:2=@tcp://[::1]:5559",
            "--store-kv-events",
            "ipc:///run/store",
        ]
    )
    events = {spec.url: spec.events for spec in config.instance_specs()}
    assert events == {
        "http://a:1": EventSource("tcp://a:5557", "tcp://a:5558"),
        "http://b:2": EventSource("@tcp://[::1]:5559"),
    }
    assert EventSource("@tcp://[::1]:5559").host == "::1"
    assert config.store_sources() == [EventSource("ipc:///run/store")]
    assert config.store_sources()[0].host == ""


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        ("tcp://a:5557", "URL=ENDPOINT"),
        ("a:1=a:5557", "write tcp://HOST:PORT"),
        ("a:1=tcp://a:5557,", "write tcp://HOST:PORT"),
        ("a:1=tcp://a:5557,@tcp://a:5558", "drop its @"),
        ("c:1=tcp://a:5557", "none of the engines"),
    ],
)
def test_mistakes_in_event_sources(value: str, complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--worker-urls", "a:1", "--kv-events", value]) == 2
    assert complaint in capsys.readouterr().err


def test_prefill_engines_have_bootstrap_ports_as_in_the_family() -> None:
    flags = "--prefill http://p:1 9001 --prefill http://q:1 none --prefill r:1 --decode http://d:1"
    config, _ = read_config([*flags.split(), "--intra-node-data-parallel-size", "2"])
    ports = {spec.url: spec.bootstrap_port for spec in config.instance_specs()}
    assert ports == {
        **{f"http://p:1@{rank}": 9001 for rank in range(2)},
        **{f"http://{host}:1@{rank}": 0 for host in "qrd" for rank in range(2)},
    }


def test_flags_of_the_family_that_set_nothing_say_so(caplog: pytest.LogCaptureFixture) -> None:
    flags = """
        --worker-urls http://a:1 --cache-threshold 0.5 --balance-abs-threshold 64 --max-tree-size 1000
        --prometheus-port 29000 --request-id-headers x-a x-b --worker-startup-timeout-secs 600
        --retry-initial-backoff-ms 50 --log-dir /var/log --vllm-pd-disaggregation --kv-connector nixl
    """
    config, _ = read_config(flags.split())
    assert config.pd_protocol == "nixl"
    said = {record.args[0] for record in caplog.records if isinstance(record.args, tuple)}
    assert {"--cache-threshold", "--prometheus-port", "--request-id-headers"} <= said
    assert "--kv-connector" not in said and len(said) == 9


def test_an_engine_may_use_a_store_of_another_host() -> None:
    flags = ["--worker-urls", "http://a:1", "http://b:1", "--store-kv-events", "tcp://s:5557=s:50051"]
    config, _ = read_config([*flags, "--engine-stores", "b:1=s:50051"])
    assert config.instance_specs() == [
        InstanceSpec("http://a:1", Role.MIXED),
        InstanceSpec("http://b:1", Role.MIXED, store="s:50051"),
    ]
    (source,) = config.store_sources()
    assert (source.host, source.store_address) == ("s", "s:50051")
