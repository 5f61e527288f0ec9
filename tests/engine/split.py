"""A prefill and a decode engine, both real vLLM, and a router in front of them, for each P/D protocol."""

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.engine.packages import MOONCAKE_ENVIRONMENT, mooncake_transfer_engine, unpacked
from tests.engine.rig import ROOT, StoreProcess, free_port, transfer_config
from tests.engine.served import MODEL, Server, ended, router_server, vllm_server

COMPLETIONS = "/v1/completions"
FETCHED_TOKENS = "vllm:external_prefix_cache_hits_total"
# 1.5.2 asks for a build of itself that was never published.
NIXL = ("nixl==1.5.1", "nixl-cu12==1.5.1")


class Setting(NamedTuple):
    """What makes an engine one of a protocol: --kv-transfer-config, and its environment."""

    transfer: dict[str, Any]
    environment: dict[str, str]


class Cluster(NamedTuple):
    protocol: str
    start_prefill: Callable[[], Server]
    prefill: Server
    decode: Server
    router: Server


def ask(prompt: list[int], **changes: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": 16,
        "temperature": 0,
        "ignore_eos": True,
        **changes,
    }


def answer(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(server.post(COMPLETIONS, body)[1])
    return found


@contextlib.contextmanager
def _suite(directory: Path, bootstrap_port: int) -> Iterator[Callable[[str], Setting]]:
    store = StoreProcess(directory)
    try:
        yield lambda role: Setting(transfer_config(store), {})
    finally:
        store.close()


@contextlib.contextmanager
def _nixl(directory: Path, bootstrap_port: int) -> Iterator[Callable[[str], Setting]]:
    """NIXL with its UCX, which load without CUDA; in a folder of its own beside the engines' packages."""
    path = unpacked("-".join(NIXL), *NIXL)
    transfer = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}

    def setting(role: str) -> Setting:
        environment = {
            "PYTHONPATH": str(path),
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
            "UCX_TLS": "tcp",
        }
        return Setting(transfer, environment)

    yield setting


@contextlib.contextmanager
def _mooncake(directory: Path, bootstrap_port: int) -> Iterator[Callable[[str], Setting]]:
    environment = {
        **MOONCAKE_ENVIRONMENT,
        "PYTHONPATH": os.pathsep.join(map(str, (mooncake_transfer_engine(), ROOT))),
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(bootstrap_port),
    }

    def setting(role: str) -> Setting:
        transfer = {
            "kv_connector": "MooncakeConnectorOnCpu",
            "kv_connector_module_path": "tests.engine.mooncake_on_cpu",
            "kv_role": "kv_producer" if role == "prefill" else "kv_consumer",
            "kv_connector_extra_config": {"mooncake_protocol": "tcp", "num_workers": 2},
        }
        return Setting(transfer, environment)

    yield setting


PROTOCOLS = {"suite": _suite, "nixl": _nixl, "mooncake": _mooncake}


@contextlib.contextmanager
def split_cluster(protocol: str, model: str, directory: Path) -> Iterator[Cluster]:
    prefill_port, bootstrap_port = free_port(), free_port()
    with contextlib.ExitStack() as stack:
        setting_of = stack.enter_context(PROTOCOLS[protocol](directory, bootstrap_port))

        def start(role: str, port: int) -> Server:
            setting = setting_of(role)
            server = vllm_server(
                model, setting.transfer, directory / f"{role}.log", setting.environment, port
            )
            stack.enter_context(ended(server))
            return server

        prefill, decode = start("prefill", prefill_port), start("decode", free_port())
        for engine in (prefill, decode):
            engine.wait("/health")
        router = router_server(
            directory / "router.log",
            *("--prefill", prefill.url, str(bootstrap_port), "--decode", decode.url),
            *("--pd-protocol", protocol, "--health.interval-ms", "500"),
        )
        stack.enter_context(ended(router))
        router.wait("/ready")
        yield Cluster(protocol, lambda: start("prefill", prefill_port), prefill, decode, router)
