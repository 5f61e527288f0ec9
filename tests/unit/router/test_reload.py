"""What may change while the router runs."""

from typing import Any

import pytest
from msgspec.structs import replace

from kvcore.errors import ConfigError
from router.admin import is_local
from router.config import IndexConfig, RetryConfig, RouterConfig
from router.core.settings import Settings
from router.reload import changes, check_change

OLD = RouterConfig(worker_urls=("http://a:1",))


def check(new: RouterConfig, **built: Any) -> None:
    check_change(OLD, new, **{"reads_prompts": False, "has_index": False, "records": False, **built})


def test_changes_are_named_by_their_path() -> None:
    new = replace(OLD, policy="random", retry=RetryConfig(max_retries=1), worker_urls=("http://b:1",))
    assert changes(OLD, new) == ["policy", "retry.max_retries", "worker_urls"]
    assert changes(OLD, OLD) == []
    check(new)


@pytest.mark.parametrize(
    ("new", "complaint"),
    [
        (replace(OLD, port=1, host="::1"), "host, port: cannot change"),
        (replace(OLD, index=IndexConfig(block_size_tokens=32)), "index.block_size_tokens"),
        (replace(OLD, policy="cache_aware"), "read prompts"),
        (replace(OLD, scheduling=Settings(admission="early")), "read prompts"),
        (replace(OLD, kv_events=("http://a:1=tcp://a:2",)), "without an index"),
    ],
)
def test_what_needs_a_new_process_is_refused(new: RouterConfig, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        check(new)


def test_a_router_that_reads_prompts_may_change_how() -> None:
    check(replace(OLD, policy="cache_aware"), reads_prompts=True, has_index=True)


def test_a_record_stays_that_of_one_scheduler() -> None:
    check(replace(OLD, api_keys=("k",)), records=True)
    with pytest.raises(ConfigError, match=r"policy, scheduling\.ttft_slo_ms"):
        check(replace(OLD, policy="random", scheduling=Settings(ttft_slo_ms=1.0)), records=True)


def test_who_is_on_this_host() -> None:
    assert (
        is_local(("127.0.0.1", 1)) and is_local(("::1", 1, 0, 0)) and is_local(("::ffff:127.0.0.1", 1, 0, 0))
    )
    assert not is_local(("10.0.0.1", 1)) and not is_local(None) and not is_local("/run/socket")
