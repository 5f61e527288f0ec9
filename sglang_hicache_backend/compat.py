"""The only module that knows how SGLang 0.5.22 and 0.5.23 differ, and where they keep what we need."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.observability.metrics_collector import StorageMetrics
from sglang.srt.runtime_context import get_lora, get_parallel, get_server_args

from kvcore.errors import ConfigError
from kvcore.weights import model_directory, weights_identity
from sglang_hicache_backend.config import BackendConfig
from sglang_hicache_backend.keys import EngineFacts, RankFacts
from sglang_hicache_backend.served_weights import SERVED, Weights
from sglang_hicache_backend.stats import Transfers

# Settings outside the checkpoint that change the KV of a prompt.
_SETTINGS = (
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "quantization_param_path",
    "modelopt_quant",
    "rl_quant_profile",
    "weight_version",
    "json_model_override_args",
    "speculative_algorithm",
    "speculative_draft_model_path",
    "speculative_draft_model_revision",
    "speculative_draft_model_quantization",
    # KTransformers: experts from other files, in another precision, or late.
    "kt_weight_path",
    "kt_method",
    "kt_num_gpu_experts",
    "kt_max_deferred_experts_per_token",
)


def served_engine(config: BackendConfig) -> EngineFacts:
    """What this process serves at the moment; raises as `engine_facts`."""
    # The arguments are as they were given; that of the adapters is a list of strings, without their ids.
    return engine_facts(get_server_args(), config, SERVED.now, get_lora().lora_paths or ())


def engine_facts(
    args: Any, config: BackendConfig, weights: Weights | None = None, adapters: Sequence[Any] = ()
) -> EngineFacts:
    """`weights`: those of now, if not those of `args`. `adapters`: SGLang's LoRARefs. Raises ConfigError,
    saying what to set, when weights cannot be told apart from others'."""
    weights = weights or Weights()
    if not weights.is_known:
        raise ConfigError(
            "the engine's weights have been replaced, in memory or without a flush of its caches since; "
            "an update from disk and a flush give them a name again"
        )
    is_updated = weights.model_path is not None
    model_path = str(weights.model_path if is_updated else args.model_path)
    directory = model_directory(model_path, None if is_updated else getattr(args, "revision", None))
    # A name that was given for other weights is none for these.
    weights_id = "" if is_updated else config.weights_id
    weights_id = weights_id or (weights_identity(str(directory)) if directory else None) or ""
    if not weights_id:
        raise ConfigError(
            f"the weights of {model_path!r} cannot be identified: set weights_id in the extra config "
            "to a name that changes whenever the weights do"
        )
    settings = {name: getattr(args, name, None) for name in _SETTINGS}
    if (weights.load_format or getattr(args, "load_format", "auto")) == "dummy":
        settings["weights"] = "dummy"
    if is_updated and settings["speculative_algorithm"]:
        # The draft model has been loaded from there, too.
        settings["draft_weights"] = weights_id
    if adapters:
        settings["adapters"] = _adapters(adapters, config)
    if config.extra_backend_tag:
        settings["tag"] = config.extra_backend_tag
    return EngineFacts(
        architecture=_architecture(directory) or Path(model_path).name,
        weights_id=weights_id,
        engine=json.dumps(settings, sort_keys=True, default=str),
        tenant=config.tenant,
    )


def _adapters(adapters: Sequence[Any], config: BackendConfig) -> dict[str, str]:
    """Identities of the adapters of --lora-paths: SGLang's page hashes know these by name and path, so that
    other weights in the same place would be taken for them. Adapters that are loaded later have random ids.
    Whoever sets weights_id answers for them, too. Raises ConfigError for one that cannot be identified."""
    found: dict[str, str] = {}
    for adapter in adapters:
        directory = model_directory(str(adapter.lora_path))
        identity = weights_identity(str(directory)) if directory else None
        if not identity and not config.weights_id:
            raise ConfigError(
                f"the weights of adapter {adapter.lora_path!r} cannot be identified: set weights_id in the "
                "extra config to a name that changes whenever those of the model or an adapter do"
            )
        found[str(adapter.lora_id)] = identity or ""
    return found


def rank_facts(storage_config: HiCacheStorageConfig) -> RankFacts:
    """Ranks of DP attention are no part of it: they compute the same KV."""
    return RankFacts(
        tp_rank=storage_config.tp_rank,
        tp_size=storage_config.tp_size,
        pp_rank=storage_config.pp_rank,
        pp_size=storage_config.pp_size,
        attn_cp_rank=storage_config.attn_cp_rank,
        attn_cp_size=storage_config.attn_cp_size,
        # Since 0.5.23.
        dcp_rank=getattr(storage_config, "dcp_rank", 0),
        dcp_size=getattr(storage_config, "dcp_size", 1),
        is_replicated=storage_config.is_mla_model,
    )


def linker_rank_facts(params: Any, *, is_replicated: bool) -> RankFacts:
    """`params`: SGLang's CacheInitParams. The linker is told no TP rank; it is the one in the group that
    shares the KV heads."""
    parallel = get_parallel()
    tp_rank, tp_size = 0, int(parallel.tp_size)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        group = params.attn_tp_cache_group or params.tp_cache_group
        tp_rank, tp_size = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
    return RankFacts(
        tp_rank=tp_rank,
        tp_size=tp_size,
        pp_rank=params.pp_rank,
        pp_size=params.pp_size,
        attn_cp_rank=params.attn_cp_rank,
        attn_cp_size=params.attn_cp_size,
        is_replicated=is_replicated,
    )


def num_heads_split(storage_config: HiCacheStorageConfig) -> int:
    """Into how many objects a page is cut, so that engines of other TP sizes can share it (tp_lcm_size)."""
    if not storage_config.should_split_heads:
        return 1
    return int(storage_config.tp_lcm_size) // int(storage_config.tp_size)


def first_page(pool: Any) -> torch.Tensor:
    """The slots of a host pool's first page; under DCP one row holds several."""
    return torch.arange(int(getattr(pool, "logical_page_size", None) or pool.page_size))


def storage_metrics(loads: Transfers, saves: Transfers) -> Any:
    return StorageMetrics(
        prefetch_pgs=loads.pages,
        backup_pgs=saves.pages,
        prefetch_bandwidth=loads.gib_per_s,
        backup_bandwidth=saves.gib_per_s,
    )


def _architecture(directory: Path | None) -> str:
    if directory is None or not (directory / "config.json").is_file():
        return ""
    return ",".join(json.loads((directory / "config.json").read_text()).get("architectures") or [])
