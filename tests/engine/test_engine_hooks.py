"""Edges between vLLM's objects and ours: what is refused, counters on vLLM's own roads, the entry point."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvcore import metrics
from kvcore.errors import ConfigError
from tests.engine.rig import (
    BLOCK_TOKENS,
    DOCUMENT,
    EngineHost,
    StoreProcess,
    cached_of,
    request,
    tokens_of,
    transfer_config,
)

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
# vLLM's own imports are not ours to keep free of warnings.
imports_vllm = pytest.mark.filterwarnings("ignore")


def spec(name: str, **attributes: Any) -> Any:
    return type(name, (), {"block_size": BLOCK_TOKENS, **attributes})()


def kv_cache(*specs: Any, **attributes: Any) -> Any:
    groups = [SimpleNamespace(kv_cache_spec=each) for each in specs]
    return SimpleNamespace(kv_cache_groups=groups, **attributes)


def vllm_config(**parallel: Any) -> Any:
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**{"decode_context_parallel_size": 1, **parallel}),
        cache_config=SimpleNamespace(calculate_kv_scales=False, enable_prefix_caching=True),
        model_config=SimpleNamespace(is_prefix_caching_supported=True),
        scheduler_config=SimpleNamespace(enable_chunked_prefill=True),
    )


@imports_vllm
def test_caches_whose_blocks_keep_their_tokens_are_taken() -> None:
    from mooncake_connector import compat

    full, latent = spec("FullAttentionSpec"), spec("MLAAttentionSpec")
    mixed = spec("UniformTypeKVCacheSpecs", kv_cache_specs={"a": full, "b": latent})
    for each in (full, latent, mixed):
        compat.check_supported(vllm_config(), kv_cache(each))
    assert compat.block_size_tokens(vllm_config(decode_context_parallel_size=2), kv_cache(full)) == 64
    assert (
        compat.block_size_tokens(
            vllm_config(decode_context_parallel_size=2),
            kv_cache(spec("FullAttentionSpec", dcp_sharded=False)),
        )
        == 32
    )


@imports_vllm
def test_the_name_of_a_repository_is_where_it_lies_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mooncake_connector import compat

    commit = "0123456789abcdef0123456789abcdef01234567"
    downloads, folder = tmp_path / "downloads", "models--some--model"
    for cache in (tmp_path / "hub", downloads):
        (cache / folder / "snapshots" / commit).mkdir(parents=True)
        (cache / folder / "snapshots" / commit / "config.json").write_text("{}")
        (cache / folder / "refs").mkdir()
        (cache / folder / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    model = SimpleNamespace(model="some/model", revision=None)
    for download_dir, cache in ((None, tmp_path / "hub"), (str(downloads), downloads)):
        load = SimpleNamespace(download_dir=download_dir)
        config = SimpleNamespace(model_config=model, load_config=load)
        assert compat._model_path(config) == str(cache / folder / "snapshots" / commit)
    model.model = "some/other"
    assert compat._model_path(config) == "some/other"


@imports_vllm
@pytest.mark.parametrize("nested", [False, True])
def test_long_rope_is_part_of_what_an_engine_is(nested: bool) -> None:
    from mooncake_connector import compat

    long = {"rope_type": "longrope", "original_max_position_embeddings": 4096}

    def uses(rope: dict[str, Any], max_model_len: int) -> bool | None:
        text = SimpleNamespace(rope_parameters={"full_attention": rope} if nested else rope)
        model = SimpleNamespace(hf_config=text, hf_text_config=text, max_model_len=max_model_len)
        return compat._uses_long_factors(SimpleNamespace(model_config=model))

    assert (uses(long, 4096), uses(long, 4097)) == (False, True)
    assert uses({"rope_type": "yarn", "factor": 2.0}, 8192) is None


@imports_vllm
@pytest.mark.parametrize(
    ("tensor_parallel_size", "pipeline_parallel_size", "async_scheduling", "stays_local"),
    [(1, 1, False, True), (2, 1, False, False), (1, 2, False, False), (1, 1, True, False)],
)
def test_loads_within_a_step_are_for_those_who_hear_of_a_failure_in_time(
    tensor_parallel_size: int, pipeline_parallel_size: int, async_scheduling: bool, stays_local: bool
) -> None:
    from mooncake_connector import compat

    config = vllm_config(
        tensor_parallel_size=tensor_parallel_size, pipeline_parallel_size=pipeline_parallel_size
    )
    config.scheduler_config = SimpleNamespace(async_scheduling=async_scheduling)
    assert compat.failed_loads_stay_local(config) is stays_local


@imports_vllm
@pytest.mark.parametrize(
    ("cache", "config", "reason"),
    [
        (kv_cache(spec("SlidingWindowSpec")), vllm_config(), "SlidingWindowSpec.*--disable-sliding-window"),
        (
            kv_cache(
                spec("UniformTypeKVCacheSpecs", kv_cache_specs={"a": spec("ChunkedLocalAttentionSpec")})
            ),
            vllm_config(),
            "ChunkedLocalAttentionSpec",
        ),
        (
            kv_cache(spec("FullAttentionSpec")),
            vllm_config(prefill_context_parallel_size=2),
            "context parallelism",
        ),
        (kv_cache(spec("FullAttentionSpec"), hash_block_size=16), vllm_config(), "16 tokens"),
    ],
)
def test_what_cannot_be_shared_is_refused_by_name(cache: Any, config: Any, reason: str) -> None:
    from mooncake_connector import compat

    with pytest.raises(ConfigError, match=reason):
        compat.check_supported(config, cache)


@imports_vllm
@pytest.mark.parametrize(
    ("cache", "groups"),
    [(kv_cache(), "no KV cache group,"), (kv_cache(spec("A"), spec("B")), "2 KV cache groups")],
)
@pytest.mark.parametrize("role", ["SCHEDULER", "WORKER"])
def test_a_model_without_one_cache_for_all_layers_ends_the_start_of_the_engine_instead_of_its_first_request(
    cache: Any, groups: str, role: str
) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    from mooncake_connector.connector import MooncakeSuiteConnector

    config = vllm_config()
    config.kv_transfer_config = SimpleNamespace(kv_connector_extra_config={})
    with pytest.raises(ConfigError, match=f"has {groups}.*start this engine without --kv-transfer-config"):
        MooncakeSuiteConnector(config, KVConnectorRole[role], cache)


@imports_vllm
def test_a_model_that_needs_the_hybrid_cache_manager_is_refused_before_vllm_fails_for_want_of_it() -> None:
    from mooncake_connector.connector import MooncakeSuiteConnector

    config = SimpleNamespace(model_config=SimpleNamespace(is_hybrid=False))
    assert MooncakeSuiteConnector.get_required_kvcache_layout(config) is None
    config.model_config.is_hybrid = True
    with pytest.raises(ConfigError, match="start this engine without --kv-transfer-config"):
        MooncakeSuiteConnector.get_required_kvcache_layout(config)


@imports_vllm
def test_what_changes_kv_names_an_engine_and_nothing_else_does() -> None:
    from mooncake_connector import compat

    def engine(speculative: str = "", multimodal: dict[str, Any] | None = None, **model: Any) -> str:
        defaults = {"dtype": "float32", "quantization": None, "hf_overrides": {}, "hf_config": None}
        media = SimpleNamespace(mm_processor_cache_gb=4, video_pruning_method="evs", **(multimodal or {}))
        return compat._engine(
            SimpleNamespace(
                model_config=SimpleNamespace(**{**defaults, "multimodal_config": media, **model}),
                speculative_config=SimpleNamespace(method=speculative, model="m") if speculative else None,
            )
        )

    plain = engine()
    for same in (engine("ngram"), engine("suffix"), engine(multimodal={"media_io_kwargs": {}})):
        assert same == plain
    others = [
        engine("eagle"),
        engine(quantization="fp8"),
        engine(quantization_config={"ignore": ["lm_head"]}),
        # vLLM's hashes of pictures have only what a request asks for in them.
        engine(multimodal={"mm_processor_kwargs": {"do_rescale": False}}),
        engine(multimodal={"media_io_kwargs": {"image": {"image_mode": "L"}}}),
        engine(multimodal={"video_pruning_rate": 0.5}),
    ]
    assert len({plain, *others}) == 1 + len(others)


@imports_vllm
@pytest.mark.parametrize(
    ("prefix_caching", "processed_gb", "named"),
    [(True, 4.0, True), (True, 0.0, True), (False, 4.0, True), (False, 0.0, False)],
)
def test_media_have_names_unless_vllm_only_counts_them(
    prefix_caching: bool, processed_gb: float, named: bool
) -> None:
    from mooncake_connector import compat

    config = SimpleNamespace(
        model_config=SimpleNamespace(multimodal_config=SimpleNamespace(mm_processor_cache_gb=processed_gb)),
        cache_config=SimpleNamespace(enable_prefix_caching=prefix_caching),
    )
    assert compat.media_are_named(config) is named
    config.model_config.multimodal_config = None
    assert compat.media_are_named(config), "a model of text alone"


@imports_vllm
def test_scales_of_one_engine_alone_are_refused() -> None:
    from mooncake_connector import compat

    config = vllm_config()
    config.cache_config.calculate_kv_scales = True
    with pytest.raises(ConfigError, match="calculate-kv-scales"):
        compat.check_supported(config, kv_cache(spec("FullAttentionSpec")))


@imports_vllm
@pytest.mark.parametrize(
    ("supported", "prefix_caching", "chunked_prefill", "non_causal", "refused"),
    [
        (True, False, True, False, False),  # no prefix cache because somebody wanted none
        (True, True, False, False, False),
        (True, False, False, False, True),
        (False, True, True, False, True),
        (True, True, True, True, True),
    ],
)
def test_prompts_that_vllm_computes_only_whole_are_refused(
    supported: bool, prefix_caching: bool, chunked_prefill: bool, non_causal: bool, refused: bool
) -> None:
    from mooncake_connector import compat

    config = vllm_config()
    config.model_config.is_prefix_caching_supported = supported
    config.cache_config.enable_prefix_caching = prefix_caching
    config.scheduler_config.enable_chunked_prefill = chunked_prefill
    expected = pytest.raises(ConfigError, match="first token") if refused else contextlib.nullcontext()
    with expected:
        compat.check_supported(config, kv_cache(spec("FullAttentionSpec", non_causal=non_causal)))


@imports_vllm
@pytest.mark.parametrize("holder", ["aux_output_config", "model_config"])
def test_engines_that_tell_of_every_token_which_experts_it_went_to_are_refused(holder: str) -> None:
    from mooncake_connector import compat

    config = vllm_config()
    config.aux_output_config = SimpleNamespace(enable_return_routed_experts=False)
    getattr(config, holder).enable_return_routed_experts = True
    with pytest.raises(ConfigError, match="routed-experts"):
        compat.check_supported(config, kv_cache(spec("FullAttentionSpec")))


@imports_vllm
def test_stats_of_ranks_add_up_and_are_summed_for_the_log() -> None:
    from mooncake_connector.stats import SuiteConnectorStats

    first = SuiteConnectorStats(data={metrics.SAVED_BLOCKS_TOTAL: 2.0})
    assert SuiteConnectorStats().is_empty()
    total = first.aggregate(SuiteConnectorStats(data={metrics.SAVED_BLOCKS_TOTAL: 3.0, "later": 1}))
    assert total.reduce() == {metrics.SAVED_BLOCKS_TOTAL: 5.0}
    total.reset()
    assert total.is_empty()


@imports_vllm
def test_full_cuda_graphs_are_ruled_out_and_registering_twice_is_fine() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    import mooncake_connector
    from mooncake_connector.connector import MooncakeSuiteConnector

    assert MooncakeSuiteConnector.requires_piecewise_for_cudagraph({})
    mooncake_connector.register()
    mooncake_connector.register()
    assert KVConnectorFactory._registry["MooncakeSuiteConnector"]() is MooncakeSuiteConnector


@imports_vllm
def test_the_hooks_need_nothing_but_our_own_metadata() -> None:
    """vLLM's newer GPU runner has no attn_metadata in its forward context and passes arguments of its own."""
    from mooncake_connector.connector import MooncakeSuiteConnector

    called: list[str] = []
    worker: Any = SimpleNamespace(
        guard=SimpleNamespace(call=lambda default, function, *arguments: function(*arguments)),
        start_loads=lambda: called.append("loads"),
        wait_layer=lambda name: called.append(f"wait {name}"),
        save_layer=lambda name: called.append(f"save {name}"),
        end_step=lambda: called.append("end"),
    )
    connector = MooncakeSuiteConnector.__new__(MooncakeSuiteConnector)
    connector._worker = worker
    connector.start_load_kv(
        object(), scheduler_output=object(), request_state_indices=object(), request_ids=["r"], num_tokens=1
    )
    connector.wait_for_layer_load("l.0")
    connector.save_kv_layer("l.0", None, None, num_tokens=1)
    connector.wait_for_save()
    assert called == ["loads", "wait l.0", "save l.0", "end"]


def test_counters_reach_prometheus_under_our_names_also_for_a_second_engine(
    host: EngineHost, store: StoreProcess, engine_kwargs: dict[str, Any]
) -> None:
    for _ in range(2):
        engine = {**engine_kwargs, "disable_log_stats": False}
        host.call("start", engine=engine, transfer=transfer_config(store))
        host.call("generate", requests=[request(DOCUMENT[:300])])
        host.call("settle")
        # Counters are handed over with a step: this one brings those of the save thread.
        host.call("generate", requests=[request(DOCUMENT[:20], 2)])
        samples = host.call("prometheus", prefix=metrics.CONNECTOR_PREFIX)["samples"]
        moved = (metrics.SAVED_BLOCKS_TOTAL, metrics.LOADED_BLOCKS_TOTAL)
        assert sum(samples[metrics.CONNECTOR_PREFIX + name] for name in moved) >= 9
        assert samples[metrics.CONNECTOR_PREFIX + metrics.HOOK_ERRORS_TOTAL] == 0


def test_a_setting_that_does_not_exist_stops_the_engine_with_its_name(
    new_host: Callable[..., EngineHost], store: StoreProcess, engine_kwargs: dict[str, Any]
) -> None:
    wrong = new_host()
    with pytest.raises(AssertionError, match="store_address"):
        wrong.call("start", engine=engine_kwargs, transfer=transfer_config(store, store_adress="x"))
    wrong.close()


def test_a_reset_of_the_connectors_cache_hides_what_the_store_has_from_this_engine_alone(
    host: EngineHost, peer: EngineHost, store: StoreProcess, engine_kwargs: dict[str, Any]
) -> None:
    prompt, blocks = DOCUMENT[:100], 96 // BLOCK_TOKENS * BLOCK_TOKENS
    host.call("start", engine=engine_kwargs, transfer=transfer_config(store))
    expected = tokens_of(host.call("generate", requests=[request(prompt)]))
    host.call("settle")
    assert host.call("reset", connector=True)["ok"]
    # The weights might be others now: what was stored before is of no use to it, until it has stored its own.
    for cached in (0, blocks):
        answer = host.call("generate", requests=[request(prompt)])
        assert (cached_of(answer), tokens_of(answer)) == ([cached], expected)
        host.call("settle")
        assert host.call("reset")["ok"]
    peer.call("start", engine=engine_kwargs, transfer=transfer_config(store))
    answer = peer.call("generate", requests=[request(prompt)])
    assert (cached_of(answer), tokens_of(answer)) == ([blocks], expected)


def test_inside_a_multi_connector_behind_one_that_shakes_hands_itself(
    host: EngineHost, peer: EngineHost, store: StoreProcess, engine_kwargs: dict[str, Any]
) -> None:
    """vLLM passes only the first child's handshake on, so our ranks answer with the first step instead."""
    multi = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "connectors": [
                {
                    "kv_connector": "HandshakingConnector",
                    "kv_connector_module_path": "tests.engine.handshaking",
                    "kv_role": "kv_both",
                },
                transfer_config(store),
            ]
        },
    }
    prompt = DOCUMENT[:300]
    host.call("start", engine=engine_kwargs, transfer=multi)
    host.call("generate", requests=[request(list(b"first steps"), 3)])
    cold = host.call("generate", requests=[request(prompt)])
    host.call("settle")
    peer.call("start", engine=engine_kwargs, transfer=transfer_config(store))
    warm = peer.call("generate", requests=[request(prompt)])
    assert tokens_of(warm) == tokens_of(cold)
    assert cached_of(warm) == [(len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS]
