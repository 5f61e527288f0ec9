"""Which engines are alike: what SGLang was started with, and which weights it has loaded."""

import json
import pkgutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvcore.errors import ConfigError
from sglang_hicache_backend import weight_updates
from sglang_hicache_backend.config import BackendConfig
from sglang_hicache_backend.served_weights import Weights
from tests.engine.sglang.bare import ServerArgs, compat, set_global_server_args_for_scheduler

pytestmark = pytest.mark.sglang

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cached_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A repository as Hugging Face's cache keeps it."""
    folder = tmp_path / "models--some--model"
    snapshot = folder / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(COMMIT)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    return "some/model"


def arguments(model_path: str, **changes: Any) -> Any:
    """Those that SGLang itself fills in, for a model that it cannot look at here."""
    values = {"model_path": model_path, "revision": None, "load_format": "auto", "dtype": "auto"}
    return SimpleNamespace(**values | changes)


def test_a_repository_is_named_by_its_commit(cached_model: str) -> None:
    facts = compat.engine_facts(arguments(cached_model), BackendConfig())
    assert (facts.architecture, facts.weights_id) == ("LlamaForCausalLM", f"commit:{COMMIT}")
    asked_for = compat.engine_facts(arguments(cached_model, revision=COMMIT), BackendConfig())
    assert asked_for == facts


def test_a_directory_is_the_repository_that_it_is_a_snapshot_of(cached_model: str, tmp_path: Path) -> None:
    snapshot = tmp_path / "models--some--model" / "snapshots" / COMMIT
    by_name = compat.engine_facts(arguments(cached_model), BackendConfig())
    assert compat.engine_facts(arguments(str(snapshot)), BackendConfig()) == by_name


def test_a_checkpoint_without_a_commit_is_named_by_its_files(make_model: Callable[..., str]) -> None:
    facts = compat.engine_facts(arguments(make_model()), BackendConfig())
    assert facts.weights_id.startswith("sha256:")
    assert facts.architecture.endswith("ForCausalLM")


@pytest.mark.parametrize("model_path", ["some/other-model", "/nowhere/at/all", "neither a path: nor a name"])
def test_weights_that_cannot_be_told_from_others_are_refused(cached_model: str, model_path: str) -> None:
    with pytest.raises(ConfigError, match="set weights_id in the extra config"):
        compat.engine_facts(arguments(model_path), BackendConfig())
    named = compat.engine_facts(arguments(model_path), BackendConfig(weights_id="mine"))
    assert named.weights_id == "mine"


def test_adapters_given_at_start_are_part_of_what_an_engine_is(
    cached_model: str, make_model: Callable[..., str]
) -> None:
    plain = compat.engine_facts(arguments(cached_model), BackendConfig())

    def with_adapter(path: str, config: BackendConfig) -> Any:
        adapter = SimpleNamespace(lora_id="stable", lora_name="sql", lora_path=path)
        return compat.engine_facts(arguments(cached_model), config, adapters=[adapter])

    known = with_adapter(make_model(), BackendConfig())
    assert "sha256:" in known.engine
    assert known.engine != plain.engine
    with pytest.raises(ConfigError, match="adapter '/nowhere'"):
        with_adapter("/nowhere", BackendConfig())
    assert with_adapter("/nowhere", BackendConfig(weights_id="mine")).weights_id == "mine"


def test_adapters_are_found_where_sglang_keeps_them(make_model: Callable[..., str]) -> None:
    """Not among its arguments, where they stay the strings of the command line."""
    model = make_model()
    given = ServerArgs(
        model_path=model,
        device="cpu",
        attention_backend="torch_native",
        lora_backend="torch_native",
        lora_paths=[f"sql={model}"],
    )
    given.resolve_once()
    given.check_server_args()
    set_global_server_args_for_scheduler(given)
    facts = compat.served_engine(BackendConfig())
    assert list(json.loads(facts.engine)["adapters"].values()) == [facts.weights_id]


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "float16"},
        {"quantization": "fp8"},
        {"kv_cache_dtype": "fp8_e4m3"},
        {"quantization_param_path": "/scales.json"},
        {"modelopt_quant": "fp8"},
        {"rl_quant_profile": "/profile.json"},
        {"weight_version": "2"},
        {"json_model_override_args": '{"rope_theta": 5}'},
        {"speculative_algorithm": "EAGLE"},
        {"speculative_draft_model_path": "some/draft"},
        {"speculative_draft_model_quantization": "fp8"},
        {"kt_weight_path": "/experts"},
        {"kt_method": "AMXINT8"},
        {"kt_num_gpu_experts": 8},
        {"kt_max_deferred_experts_per_token": 2},
        {"load_format": "dummy"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_settings_that_change_kv_make_another_engine(cached_model: str, change: dict[str, str]) -> None:
    plain = compat.engine_facts(arguments(cached_model), BackendConfig())
    assert compat.engine_facts(arguments(cached_model, **change), BackendConfig()) != plain
    # They are SGLang's own names; one that it has renamed would go unnoticed otherwise.
    assert set(change) <= set(ServerArgs.__struct_fields__)


def test_weights_of_an_update_go_by_their_own_name(cached_model: str, make_model: Callable[..., str]) -> None:
    config = BackendConfig(weights_id="those of the start")
    started = compat.engine_facts(arguments(cached_model), config)
    updated = Weights(1, make_model("--seed", "1"))
    facts = compat.engine_facts(arguments(cached_model), config, updated)
    # As an engine that has been started with them.
    assert facts == compat.engine_facts(arguments(make_model("--seed", "1")), BackendConfig())
    assert facts.weights_id not in (started.weights_id, "")
    with pytest.raises(ConfigError, match="have been replaced"):
        compat.engine_facts(arguments(cached_model), config, Weights(2, is_known=False))
    with pytest.raises(ConfigError, match="cannot be identified"):
        compat.engine_facts(arguments(cached_model), config, Weights(3, "/nowhere/at/all"))
    # A draft model is loaded from there, too.
    drafting = arguments(cached_model, speculative_algorithm="EAGLE")
    assert compat.engine_facts(drafting, config, updated).engine != facts.engine


def test_every_way_of_replacing_weights_is_hooked() -> None:
    """By SGLang's own names; one that it has renamed would go unnoticed otherwise."""
    hooked = {weight_updates.FROM_DISK, *weight_updates.IN_MEMORY}
    for target in (*hooked, weight_updates.FLUSH):
        assert callable(pkgutil.resolve_name(target))
    updater = pkgutil.resolve_name(weight_updates.UPDATER)
    ways = [name for name in vars(updater) if name.startswith(("update_weights", "begin_", "load_"))]
    assert hooked == {f"{weight_updates.UPDATER}.{name}" for name in ways}
