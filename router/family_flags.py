"""Flags of vllm-router (0.1.17) and sglang-router (0.3.2), so that their command lines start this router too.

Some set what we call otherwise; some have nothing to set here, which is said once and not refused.
"""

import argparse
import logging
from typing import Any

from kvcore.errors import ConfigError

logger = logging.getLogger(__name__)

# (our field, how many of our units one of theirs is; None: not a number).
_SET: dict[str, tuple[str, float | None]] = {
    "--request-timeout-secs": ("request_timeout_ms", 1000),
    "--max-payload-size": ("http.max_body_bytes", 1),
    "--max-idle-secs": ("http.idle_timeout_ms", 1000),
    "--shutdown-grace-period-secs": ("drain_timeout_ms", 1000),
    "--retry-max-retries": ("retry.max_retries", 1),
    "--cb-failure-threshold": ("breaker.failure_threshold", 1),
    "--cb-success-threshold": ("breaker.success_threshold", 1),
    "--cb-timeout-duration-secs": ("breaker.open_ms", 1000),
    "--cb-window-duration-secs": ("breaker.window_ms", 1000),
    "--admission": ("scheduling.admission", None),
    "--ttft-slo-ms": ("scheduling.ttft_slo_ms", 1),
    "--tpot-slo-ms": ("scheduling.tbt_slo_ms", 1),
    "--tokenizer-path": ("prompts.tokenizer", None),
    "--chat-template": ("prompts.chat_template", None),
    "--block-size": ("index.block_size_tokens", 1),
    "--kv-event-block-size": ("index.block_size_tokens", 1),
    "--intra-node-data-parallel-size": ("data_parallel_size", 1),
    "--kv-connector": ("pd_protocol", None),
    "--service-discovery-namespace": ("discovery.kubernetes_namespace", None),
    "--service-discovery-port": ("discovery.kubernetes_port", None),
    "--bootstrap-port-annotation": ("discovery.kubernetes_bootstrap_annotation", None),
    "--health-check-endpoint": ("health.path", None),
    "--health-check-interval-secs": ("health.interval_ms", 1000),
    "--health-check-timeout-secs": ("health.timeout_ms", 1000),
    "--health-failure-threshold": ("health.failure_threshold", 1),
    "--health-success-threshold": ("health.success_threshold", 1),
}

# Terms of label selectors, KEY=VALUE each, one or more.
_TERMS: dict[str, str] = {
    "--selector": "discovery.kubernetes_selector",
    "--prefill-selector": "discovery.kubernetes_prefill_selector",
    "--decode-selector": "discovery.kubernetes_decode_selector",
}

# Without a value; what they set.
_SWITCHES: dict[str, tuple[str, Any]] = {
    "--disable-retries": ("retry.max_retries", 0),
    "--disable-circuit-breaker": ("breaker.enabled", False),
    "--service-discovery": ("discovery.source", "kubernetes"),
    "--pd-disaggregation": ("pd_protocol", "sglang"),
}

_PREFIXES = "prefixes are looked up in an index with a cap of its own, --index.max-size-bytes"
_LOAD = "queues are predicted and weighed, not compared with a threshold"
_RETRY = "a retry goes to another engine, at once"
_START = "an engine counts from its first good health probe on"
_METRICS = "GET /metrics is served on the router's own port"
_NOTHING: dict[str, tuple[int | str, str]] = {  # (argparse's nargs, why)
    "--cache-threshold": (1, _PREFIXES),
    "--max-tree-size": (1, _PREFIXES),
    "--eviction-interval-secs": (1, _PREFIXES),
    "--balance-abs-threshold": (1, _LOAD),
    "--balance-rel-threshold": (1, _LOAD),
    "--retry-initial-backoff-ms": (1, _RETRY),
    "--retry-max-backoff-ms": (1, _RETRY),
    "--retry-backoff-multiplier": (1, _RETRY),
    "--retry-jitter-factor": (1, _RETRY),
    "--worker-startup-timeout-secs": (1, _START),
    "--worker-startup-check-interval": (1, _START),
    "--prometheus-host": (1, _METRICS),
    "--prometheus-port": (1, _METRICS),
    "--log-dir": (1, "logs go to standard error"),
    "--vllm-pd-disaggregation": (0, "--prefill and --decode say so already"),
    "--request-id-headers": ("+", "x-request-id and every other header of a client pass through"),
}


def add_family_flags(parser: argparse.ArgumentParser) -> None:
    family = parser.add_argument_group("shorter names, most of them those of the vllm-router family")
    for flag, (field, _) in _SET.items():
        family.add_argument(flag, dest=f"family {flag}", metavar="VALUE", help=f"sets {field}")
    for flag, field in _TERMS.items():
        family.add_argument(flag, dest=f"family {flag}", nargs="+", metavar="KEY=VALUE", help=f"sets {field}")
    for flag, (field, value) in _SWITCHES.items():
        shown = str(value).lower() if isinstance(value, bool) else value
        family.add_argument(flag, dest=f"family {flag}", action="store_true", help=f"sets {field} to {shown}")
    ignored = parser.add_argument_group("accepted so that a command line need not change, without effect")
    for flag, (nargs, why) in _NOTHING.items():
        if nargs == 0:
            ignored.add_argument(flag, dest=f"family {flag}", action="store_true", help=why)
        else:
            ignored.add_argument(flag, dest=f"family {flag}", nargs=nargs, metavar="VALUE", help=why)


def family_overrides(args: argparse.Namespace) -> dict[str, Any]:
    """What was given, by our (dotted) field names. ConfigError for a number that is none."""
    overrides: dict[str, Any] = {}
    for flag, (field, unit) in _SET.items():
        value = getattr(args, f"family {flag}")
        if value is not None:
            overrides[field] = value if unit in (None, 1) else _scaled(flag, value, unit)
    for flag, field in _TERMS.items():
        if terms := getattr(args, f"family {flag}"):
            overrides[field] = ",".join(terms)
    for flag, (field, value) in _SWITCHES.items():
        if getattr(args, f"family {flag}"):
            overrides[field] = value
    for flag, (_, why) in _NOTHING.items():
        if getattr(args, f"family {flag}") not in (None, False):
            logger.warning("%s has no effect here: %s", flag, why)
    return overrides


def _scaled(flag: str, value: str, unit: float | None) -> float:
    try:
        return float(value) * (unit or 1.0)
    except ValueError:
        raise ConfigError(f"{flag} {value!r}: not a number of seconds") from None
