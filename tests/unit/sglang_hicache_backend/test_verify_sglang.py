"""verify-sglang against a server that answers as SGLang does; the real one is in tests/engine/sglang."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from sglang_hicache_backend.verify import main
from tests.unit.kvcore.verify.http_server import CannedServer, canned_server

FAST = ["--settle-s", "0.01", "--timeout-s", "20", "--json"]


class FakeSglang:
    def __init__(self, canned: CannedServer) -> None:
        self.canned = canned
        self.info: dict[str, Any] = {
            "model_path": "tiny",
            "version": "0.5.23",
            "enable_hierarchical_cache": True,
        }
        self.flush_statuses: list[int] = []
        self.cached = [0, 992, 992]
        self.logprobs = [-1.0, -1.0, -1.0]
        self.details: dict[str, int] | None = None
        canned.routes = {
            ("GET", "/server_info"): lambda body: (200, self.info),
            ("POST", "/tokenize"): lambda body: (200, {"count": len(body["prompt"].split())}),
            ("POST", "/flush_cache"): lambda body: (
                self.flush_statuses.pop(0) if self.flush_statuses else 200,
                "",
            ),
            ("POST", "/generate"): lambda body: (200, self.generate(body)),
        }

    def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        num_tokens, logprob = body["sampling_params"]["max_new_tokens"], self.logprobs.pop(0)
        chosen = [[logprob, token, None] for token in range(num_tokens)]
        meta = {"prompt_tokens": 1000, "cached_tokens": self.cached.pop(0), "output_token_logprobs": chosen}
        return {"text": "", "meta_info": {**meta, "cached_tokens_details": self.details}}


@pytest.fixture
def fake() -> Iterator[FakeSglang]:
    with canned_server() as canned:
        yield FakeSglang(canned)


def code(capsys: pytest.CaptureFixture[str]) -> str:
    return str(json.loads(capsys.readouterr().out)["verdict"]["code"])


def test_passes(fake: FakeSglang, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([fake.canned.url, *FAST]) == 0
    assert code(capsys) == "passed"


def test_what_the_device_had_is_no_hit_of_the_store(
    fake: FakeSglang, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.details = {"device": 992, "host": 0, "storage": 0}
    fake.cached, fake.logprobs = [0, 992, 992, 992, 992], [-1.0] * 5
    assert main([fake.canned.url, *FAST]) == 2
    assert code(capsys) == "own_cache"


def test_a_busy_server_is_flushed_later(fake: FakeSglang, capsys: pytest.CaptureFixture[str]) -> None:
    fake.flush_statuses = [400]
    assert main([fake.canned.url, *FAST]) == 0
    assert [path for path, _, _ in fake.canned.asked].count("/flush_cache") == 2
    assert code(capsys) == "passed"


def test_wrong_bytes_show_in_the_log_probabilities(
    fake: FakeSglang, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.logprobs = [-1.0, -1.0, -3.0]
    assert main([fake.canned.url, *FAST]) == 1
    assert code(capsys) == "logprobs_differ"


def test_a_write_back_cache_is_suspected(fake: FakeSglang, capsys: pytest.CaptureFixture[str]) -> None:
    fake.cached, fake.logprobs = [0, 992, 0, 0, 0], [-1.0] * 5
    assert main([fake.canned.url, *FAST]) == 1
    assert any("write_back" in hint for hint in json.loads(capsys.readouterr().out)["hints"])


@pytest.mark.parametrize(
    ("info", "advice"),
    [
        ({"model_path": "tiny"}, "--enable-hierarchical-cache"),
        ({"something": 1}, "right URL"),
    ],
)
def test_a_server_that_cannot_be_verified_is_explained(
    fake: FakeSglang, capsys: pytest.CaptureFixture[str], info: dict[str, Any], advice: str
) -> None:
    fake.info = info
    assert main([fake.canned.url, *FAST]) == 2
    assert advice in capsys.readouterr().err


def test_the_linker_needs_no_host_cache(fake: FakeSglang, capsys: pytest.CaptureFixture[str]) -> None:
    fake.info = {"model_path": "tiny", "enable_unified_cache_external_linker": True}
    assert main([fake.canned.url, *FAST]) == 0
    assert code(capsys) == "passed"


def test_a_flush_that_is_refused_asks_for_the_admin_key(
    fake: FakeSglang, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.flush_statuses = [401]
    assert main([fake.canned.url, "--api-key", "k", *FAST]) == 2
    assert "--admin-key" in capsys.readouterr().err


def test_an_answer_without_log_probabilities_is_explained(
    fake: FakeSglang, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.canned.routes["POST", "/generate"] = lambda body: (200, {"text": "x"})
    assert main([fake.canned.url, *FAST]) == 2
    assert "meta_info" in capsys.readouterr().err
