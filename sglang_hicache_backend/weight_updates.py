"""Weights that are replaced while SGLang runs. It tells no storage backend; hooks of its plugin system (entry
point `sglang.srt.plugins`) tell us, before the first byte of a weight has changed.
"""

from typing import Any

from sglang_hicache_backend.log import get_logger
from sglang_hicache_backend.served_weights import SERVED

logger = get_logger(__name__)

# SGLang 0.5.22 and 0.5.23: what every update goes through, for each model of each rank.
UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
FROM_DISK = f"{UPDATER}.update_weights_from_disk"
IN_MEMORY = (
    f"{UPDATER}.update_weights_from_tensor",
    f"{UPDATER}.update_weights_from_ipc",
    f"{UPDATER}.load_weights_from_distributed",
    # From here on others may write to the weights from outside.
    f"{UPDATER}.begin_weight_update",
)
FLUSH = "sglang.srt.managers.scheduler.Scheduler.flush_cache"


def register() -> None:
    """The entry point; SGLang calls it in each of its processes."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target in (FROM_DISK, *IN_MEMORY):
        HookRegistry.register(target, before_update, HookType.BEFORE)
    HookRegistry.register(FROM_DISK, after_update_from_disk, HookType.AFTER)
    HookRegistry.register(FLUSH, after_flush, HookType.AFTER)
    SERVED.is_watched = True


def warn_if_unwatched() -> None:
    if not SERVED.is_watched:
        logger.warning(
            "weights that are replaced while this engine runs will go unnoticed: install mooncake-kv-suite "
            "into SGLang's environment, and keep mooncake_suite in SGLANG_PLUGINS if that is set"
        )


def before_update(*args: Any, **kwargs: Any) -> None:
    SERVED.replacing()


def after_update_from_disk(
    result: tuple[bool, str], updater: Any, model_path: str, load_format: str | None, **kwargs: Any
) -> None:
    """An update that has failed may have changed some weights."""
    if result[0]:
        SERVED.loaded(model_path, load_format)


def after_flush(is_flushed: bool, *args: Any, **kwargs: Any) -> None:
    """SGLang refuses while it has requests, or pages on their way."""
    if is_flushed:
        SERVED.flushed()
