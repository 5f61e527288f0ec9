"""The only module that knows how vLLM 0.28 - 0.32 differ, and where they keep what we need."""

import json
from typing import Any

import vllm
from vllm.platforms import current_platform

from kvcore.errors import ConfigError
from kvcore.weights import model_directory
from mooncake_connector.config import engine_hash_seed
from mooncake_connector.namespace import EngineFacts

# A block of these holds the KV of its tokens for as long as the request lives. Sliding-window, chunked,
# recurrent and encoder caches drop or overwrite blocks, which must then be neither saved nor loaded by hash.
_PLAIN_SPECS = ("FullAttentionSpec", "MLAAttentionSpec")
_RANDOM_SEED_ALGORITHMS = ("xxhash", "xxhash_cbor")
# Ways to draft tokens that have no layers, and so no KV.
_DRAFTS_WITHOUT_LAYERS = ("ngram", "ngram_gpu", "suffix")
# Settings of an engine that change what a picture's or a sound's tokens are computed from. vLLM's names of
# media (0.28 - 0.32) have in them what a request sets, not what the engine does.
_MEDIA_SETTINGS = (
    "mm_processor_kwargs",
    "media_io_kwargs",
    "mm_encoder_attn_dtype",
    "video_pruning_rate",
)


def check_has_one_group(kv_cache_config: Any) -> None:
    """Raises ConfigError where vLLM would end at its first request with a connector like ours: it takes for
    granted that the model has one KV cache group (Scheduler._connector_finished, 0.28 - 0.32)."""
    num_groups = len(kv_cache_config.kv_cache_groups)
    if num_groups != 1:
        found = f"{num_groups} KV cache groups" if num_groups else "no KV cache group"
        raise ConfigError(
            f"the model has {found}, and only models with exactly one can share their KV: start this engine "
            "without --kv-transfer-config"
        )


def check_has_no_recurrent_layers(vllm_config: Any) -> None:
    """Raises ConfigError for models that vLLM cannot start without its hybrid cache manager."""
    if vllm_config.model_config.is_hybrid:
        raise ConfigError(
            "the model has Mamba or linear attention beside attention, and its KV cannot be shared: "
            "start this engine without --kv-transfer-config"
        )


def check_supported(vllm_config: Any, kv_cache_config: Any) -> None:
    """Raises ConfigError, saying what to change, for an engine whose blocks we must not share."""
    [group] = kv_cache_config.kv_cache_groups
    odd = sorted({name for name in map(_spec_name, _specs(group)) if name not in _PLAIN_SPECS})
    if odd:
        hint = "; with --disable-sliding-window, which limits --max-model-len to the window, it would be"
        raise ConfigError(
            f"KV cache of kind {', '.join(odd)} is not supported (only {', '.join(_PLAIN_SPECS)})"
            f"{hint if odd == ['SlidingWindowSpec'] else ''}"
        )
    parallel = vllm_config.parallel_config
    if getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        raise ConfigError("prefill context parallelism is not supported")
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        raise ConfigError(
            "--calculate-kv-scales makes KV scales of this engine alone: its KV cannot be shared"
        )
    if not _computes_prompts_in_parts(vllm_config, _specs(group)):
        raise ConfigError(
            "prompts of this model, or with this pooling, are computed only from first token to last: "
            "on top of a prefix from elsewhere answers would be wrong"
        )
    if _returns_routed_experts(vllm_config):
        raise ConfigError(
            "--enable-return-routed-experts is about tokens computed here: vLLM ends where some were loaded"
        )
    hashed_tokens = hash_block_size_tokens(vllm_config, kv_cache_config)
    if hashed_tokens != block_size_tokens(vllm_config, kv_cache_config):
        raise ConfigError(
            f"block hashes cover {hashed_tokens} tokens, blocks "
            f"{block_size_tokens(vllm_config, kv_cache_config)}: unset prefix_match_unit / hash_block_size"
        )


def block_size_tokens(vllm_config: Any, kv_cache_config: Any) -> int:
    """Tokens of one scheduler block; under decode context parallelism its KV lies on several ranks."""
    block_size = int(kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size)
    return block_size * _cp_size(vllm_config, kv_cache_config)


def hash_block_size_tokens(vllm_config: Any, kv_cache_config: Any) -> int:
    """0.32 resolves it in the KV cache config; before, it was the block size unless the user set it."""
    resolved = getattr(kv_cache_config, "hash_block_size", None) or getattr(
        vllm_config.cache_config, "hash_block_size", None
    )
    return int(resolved or block_size_tokens(vllm_config, kv_cache_config))


def engine_facts(vllm_config: Any, kv_cache_config: Any, kv_caches: dict[str, Any]) -> EngineFacts:
    """To be called in a worker after its KV cache was allocated. Raises ConfigError."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    tensor = next(iter(kv_caches.values()))
    cp_size = _cp_size(vllm_config, kv_cache_config)
    return EngineFacts(
        architecture=",".join(
            getattr(model.hf_config, "architectures", None) or [model.hf_config.model_type]
        ),
        model_path=_model_path(vllm_config),
        engine=_engine(vllm_config),
        layout=_layout(vllm_config, kv_cache_config, next(iter(kv_caches))),
        kv_dtype=_kv_dtype(vllm_config, tensor),
        hash_scheme=_hash_scheme(vllm_config),
        block_size_tokens=block_size_tokens(vllm_config, kv_cache_config),
        tp_rank=get_tp_group().rank_in_group,
        tp_size=int(parallel.tensor_parallel_size),
        pp_rank=get_pp_group().rank_in_group,
        pp_size=int(parallel.pipeline_parallel_size),
        cp_size=cp_size,
        kv_replicas=_kv_replicas(vllm_config, kv_cache_config, cp_size),
    )


def failed_loads_stay_local(vllm_config: Any) -> bool:
    """False where others compute on top of a block before anybody can tell them that it did not come: the
    other ranks of a step, or the next step, which asynchronous scheduling has begun by then. What they save
    is wrong, and vLLM (0.32) takes that next step's tokens for good."""
    parallel = vllm_config.parallel_config
    is_alone = parallel.tensor_parallel_size == 1 and parallel.pipeline_parallel_size == 1
    return bool(is_alone and not vllm_config.scheduler_config.async_scheduling)


def layers_run_once(vllm_config: Any) -> bool:
    """False when vLLM runs a layer more than once a step (dual batch overlap): only then, at the end of the
    step, is a layer's KV complete."""
    return not getattr(vllm_config.parallel_config, "enable_dbo", False)


def media_are_named(vllm_config: Any) -> bool:
    """False where vLLM only counts pictures and sounds from its start on (no prefix cache and no cache of
    processed media, 0.28 - 0.32): another engine's first picture then has the name of this one's."""
    multimodal = getattr(vllm_config.model_config, "multimodal_config", None)
    return bool(
        multimodal is None
        or vllm_config.cache_config.enable_prefix_caching
        or multimodal.mm_processor_cache_gb > 0
    )


def recomputes_failed_loads(kv_transfer_config: Any) -> bool:
    """kv_load_failure_policy; its default has been "fail" since 0.19."""
    return bool(getattr(kv_transfer_config, "kv_load_failure_policy", "fail") == "recompute")


def evict_from_prefix_cache(block_pool: Any, block_ids: set[int]) -> None:
    """Forget the hashes of blocks whose content did not arrive (BlockPool.evict_blocks, since 0.15)."""
    if block_pool is not None and block_ids:
        block_pool.evict_blocks(block_ids)


def _cp_size(vllm_config: Any, kv_cache_config: Any) -> int:
    """Ranks over which the tokens of one block are spread; since 0.30 a cache may opt out (dcp_sharded)."""
    sharded = getattr(kv_cache_config.kv_cache_groups[0].kv_cache_spec, "dcp_sharded", True)
    return int(vllm_config.parallel_config.decode_context_parallel_size) if sharded else 1


def _computes_prompts_in_parts(vllm_config: Any, specs: list[Any]) -> bool:
    """False where vLLM has no prefix cache for this reason, rather than because it was told so: pooling over
    all tokens (MEAN, CLS), attention to later tokens, and CPU kernels that look at no earlier KV in a prefill
    (MLA without AMX, RISC-V), with which it turns off both ways to go on from a prefix."""
    has_parts = (
        vllm_config.cache_config.enable_prefix_caching or vllm_config.scheduler_config.enable_chunked_prefill
    )
    return bool(
        vllm_config.model_config.is_prefix_caching_supported
        and not any(getattr(spec, "non_causal", False) for spec in specs)
        and (has_parts or not current_platform.is_cpu())
    )


def _returns_routed_experts(vllm_config: Any) -> bool:
    """A setting of the model in 0.28, one for auxiliary outputs later."""
    holders = (getattr(vllm_config, name, None) for name in ("aux_output_config", "model_config"))
    return any(getattr(holder, "enable_return_routed_experts", False) for holder in holders)


def _specs(group: Any) -> list[Any]:
    spec = group.kv_cache_spec
    per_layer = getattr(spec, "kv_cache_specs", None)  # UniformTypeKVCacheSpecs
    return list(per_layer.values()) if per_layer else [spec]


def _spec_name(spec: Any) -> str:
    return type(spec).__name__


def _engine(vllm_config: Any) -> str:
    model, speculative = vllm_config.model_config, getattr(vllm_config, "speculative_config", None)
    overrides = model.hf_overrides
    if callable(overrides):
        raise ConfigError("hf_overrides given as a function cannot be identified: give them as a dict")
    settings: dict[str, Any] = {
        "dtype": str(model.dtype),
        "quantization": model.quantization,
        "hf_overrides": overrides or {},
    }
    if str(getattr(getattr(vllm_config, "load_config", None), "load_format", "")) == "dummy":
        settings["weights"] = "dummy"
    if details := getattr(model, "quantization_config", None):
        settings["quantization_config"] = details
    if config_path := getattr(model, "hf_config_path", None):
        settings["hf_config_path"] = str(config_path)
    if (long_factors := _uses_long_factors(vllm_config)) is not None:
        settings["long_rope"] = long_factors
    multimodal = getattr(model, "multimodal_config", None)
    if media := {name: value for name in _MEDIA_SETTINGS if (value := getattr(multimodal, name, None))}:
        settings["media"] = {**media, "pruned_by": getattr(multimodal, "video_pruning_method", "")}
    if speculative is not None and speculative.method not in _DRAFTS_WITHOUT_LAYERS:
        # A draft model's layers are part of the KV cache.
        settings["speculative"] = [str(speculative.method), str(speculative.model)]
    return "vllm " + json.dumps(settings, sort_keys=True, default=str)


def _model_path(vllm_config: Any) -> str:
    """Only with HF_HUB_OFFLINE does vLLM itself replace a repository's name by where it lies."""
    model, load = vllm_config.model_config, getattr(vllm_config, "load_config", None)
    for cache_dir in (getattr(load, "download_dir", None), None):
        if directory := model_directory(str(model.model), model.revision, cache_dir):
            return str(directory)
    return str(model.model)


def _uses_long_factors(vllm_config: Any) -> bool | None:
    """Whether a LongRoPE model (Phi-3 and its like) runs with the factors for long contexts, which
    max_model_len decides (Phi3LongRoPEScaledRotaryEmbedding, 0.28 - 0.32); None for other models."""
    model = vllm_config.model_config
    text = getattr(model, "hf_text_config", model.hf_config)
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    # One set of parameters, or one for each type of layer.
    for each in (rope, *rope.values()):
        if isinstance(each, dict) and each.get("rope_type", each.get("type")) in ("longrope", "su"):
            name = "original_max_position_embeddings"
            return bool(model.max_model_len > (each.get(name) or getattr(text, name, 0)))
    return None


def _layout(vllm_config: Any, kv_cache_config: Any, layer_name: str) -> str:
    layer = vllm_config.compilation_config.static_forward_context.get(layer_name)
    backend = layer.get_attn_backend().get_name() if layer is not None else "unknown"
    parts = [f"backend={backend}"]
    if current_platform.is_cpu():
        parts.append(f"isa={_cpu_isa(vllm_config, kv_cache_config)}")
    if (cp_size := vllm_config.parallel_config.decode_context_parallel_size) > 1:
        parts.append(f"cp={cp_size}/{getattr(vllm_config.parallel_config, 'cp_kv_cache_interleave_size', 1)}")
    return " ".join(parts)


def _cpu_isa(vllm_config: Any, kv_cache_config: Any) -> str:
    """The CPU kernels pack keys inside a block for the instruction set they found at run time."""
    import torch
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    spec = _specs(kv_cache_config.kv_cache_groups[0])[0]
    isa = _get_attn_isa(
        vllm_config.model_config.dtype, spec.block_size, spec.head_size, vllm_config.cache_config.cache_dtype
    )
    return f"{isa}/{torch.backends.cpu.get_cpu_capability()}"


def _kv_dtype(vllm_config: Any, tensor: Any) -> str:
    configured = str(vllm_config.cache_config.cache_dtype)
    plain = configured == "auto" or str(tensor.dtype).endswith(configured)
    return str(tensor.dtype) if plain else f"{tensor.dtype}:{configured}"


def _hash_scheme(vllm_config: Any) -> str:
    """Raises ConfigError when this engine's hashes have a random root, which no other process can know."""
    algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
    seed = engine_hash_seed()
    if seed is None:
        # Since 0.30 cryptographic hashes have a fixed root without PYTHONHASHSEED.
        from vllm.v1.core import kv_cache_utils

        seed = getattr(kv_cache_utils, "DEFAULT_NONE_HASH_SEED", None)
        if seed is None or algorithm in _RANDOM_SEED_ALGORITHMS:
            raise ConfigError(
                f"block hashes of vLLM {vllm.__version__} with {algorithm} differ in every process: "
                "set PYTHONHASHSEED=0 in the environment of all engines"
            )
    return f"{algorithm} seed={seed}"


def _kv_replicas(vllm_config: Any, kv_cache_config: Any, cp_size: int) -> int:
    """0.32 computes it; before, we know it of MLA, whose latent every TP rank holds."""
    if (known := getattr(kv_cache_config, "kv_tp_replicas", None)) is not None:
        return int(known)
    mla = all(_spec_name(spec) == "MLAAttentionSpec" for spec in _specs(kv_cache_config.kv_cache_groups[0]))
    return int(vllm_config.parallel_config.tensor_parallel_size) if mla and cp_size == 1 else 1
