"""Engines' metrics read as loads."""

import pytest

from router.core.load_report import LoadReport
from router.load import parse_load

VLLM = b"""\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 1.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting{engine="1",model_name="m"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.25
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",num_gpu_blocks="1000"} 1.0
vllm:cache_config_info{mamba_block_size="8",block_size="16",engine="1",num_gpu_blocks="1000"} 1.0
"""
SGLANG = b"""\
sglang:num_running_reqs{model_name="m",tp_rank="0"} 4.0
sglang:num_queue_reqs{model_name="m",tp_rank="0"} 1
sglang:num_used_tokens{model_name="m"} 1.2e+03
sglang:max_total_num_tokens{model_name="m"} 20000.0
"""


def test_vllm_with_its_ranks_added_up() -> None:
    assert parse_load(VLLM, 5.0) == LoadReport(
        sampled_at=5.0, running_requests=4, waiting_requests=2, kv_used_tokens=12000, kv_capacity_tokens=32000
    )


def test_sglang() -> None:
    assert parse_load(SGLANG, 5.0) == LoadReport(
        sampled_at=5.0, running_requests=4, waiting_requests=1, kv_used_tokens=1200, kv_capacity_tokens=20000
    )


@pytest.mark.parametrize(
    ("queues", "num_waiting"),
    [
        ((b"num_prefill_bootstrap_queue_reqs", b"num_prefill_inflight_queue_reqs"), 1 + 3),
        ((b"num_decode_prealloc_queue_reqs", b"num_decode_transfer_queue_reqs"), 1 + 3 + 3),
    ],
)
def test_sglangs_prefill_and_decode_engines_wait_in_queues_of_their_own(
    queues: tuple[bytes, ...], num_waiting: int
) -> None:
    """In flight is what has been computed, and is only being sent."""
    lines = b"".join(b'sglang:%b{tp_rank="0"} 3.0\n' % name for name in queues)
    report = parse_load(SGLANG + lines, 5.0)
    assert report is not None and report.waiting_requests == num_waiting


def test_what_is_not_said_is_unknown() -> None:
    text = b"vllm:num_requests_running 1.0\nvllm:num_requests_waiting 0.0\nvllm:kv_cache_usage_perc 0.5\n"
    report = parse_load(text, 0.0)
    assert report is not None
    assert (report.running_requests, report.kv_used_tokens, report.kv_capacity_tokens) == (1, -1, -1)


@pytest.mark.parametrize("text", [b"", b"nonsense", b"vllm:num_requests_running 1.0\n", b"\xff\x00"])
def test_other_texts_are_no_load(text: bytes) -> None:
    assert parse_load(text, 0.0) is None


@pytest.mark.parametrize("value", ["1e999", "-1e999", "1e", "+", "..", "1-2"])
def test_what_is_no_number_counts_as_nothing(value: str) -> None:
    text = f"vllm:num_requests_running {value}\nvllm:num_requests_waiting 2\n".encode()
    report = parse_load(text, 1.0)
    assert report is not None and (report.running_requests, report.waiting_requests) == (0, 2)
