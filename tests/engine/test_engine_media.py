"""Prompts with pictures: the same words about another picture are another prompt, whatever vLLM calls it."""

from collections.abc import Callable
from typing import Any

import pytest

from kvcore import metrics
from tests.engine.rig import (
    BLOCK_TOKENS,
    DOCUMENT,
    EngineHost,
    StoreProcess,
    cached_of,
    engine_settings,
    make_tiny_model,
    request,
    tokens_of,
    transfer_config,
)

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

PICTURE_TOKENS = 32  # of the model of kind "tiny-pictures"
WORDS = DOCUMENT[:150]
FULL = (PICTURE_TOKENS + len(WORDS) - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def about(picture: int) -> dict[str, Any]:
    return request(WORDS) | {"picture": picture}


@pytest.mark.parametrize("counted", [False, True])
def test_a_picture_is_never_taken_for_another(
    host: EngineHost, store: StoreProcess, counted: bool, picture_tokens: Callable[[int], list[int]]
) -> None:
    """`counted`: without a prefix cache and a cache of processed pictures vLLM only counts them, so that the
    first that an engine sees has the same name in every engine."""
    engine = engine_settings(make_tiny_model(kind="tiny-pictures"))
    if counted:
        engine |= {"mm_processor_cache_gb": 0, "enable_prefix_caching": False}
    for picture in (1, 2, 2):
        started = host.call("start", engine=dict(engine), transfer=transfer_config(store))
        assert started["reason"] == ""
        answer = host.call("generate", requests=[about(picture)])
        assert tokens_of(answer) == [picture_tokens(picture)]
        assert host.call("settle")["drained"]
    assert cached_of(answer) == [0 if counted else FULL]
    words = host.call("generate", requests=[request(WORDS), about(1)])
    assert tokens_of(words)[1] == picture_tokens(1)
    # What has no picture is shared all the same.
    assert host.call("settle")["totals"][metrics.SAVED_BLOCKS_TOTAL] >= len(WORDS) // BLOCK_TOKENS


@pytest.fixture(scope="module")
def picture_tokens(new_host: Callable[..., EngineHost]) -> Callable[[int], list[int]]:
    """What an engine without us says about a picture."""
    plain = new_host()
    plain.call("start", engine=engine_settings(make_tiny_model(kind="tiny-pictures")), transfer=None)
    known = dict(zip((1, 2), tokens_of(plain.call("generate", requests=[about(1), about(2)])), strict=True))
    plain.close()
    assert known[1] != known[2], "the model must look at its pictures"
    return known.__getitem__
