"""verify-vllm against a server that answers as vLLM does; the real one is in tests/engine."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from mooncake_connector.verify import main
from tests.unit.kvcore.verify.http_server import CannedServer, canned_server

FAST = ["--settle-s", "0.01", "--timeout-s", "20", "--json"]


class FakeVllm:
    """vLLM with a store that has everything (`store_tokens` of 1000), unless told otherwise."""

    def __init__(self, canned: CannedServer) -> None:
        self.canned = canned
        self.store_tokens = 992
        self.with_details = True
        self.restored_tokens: list[int] | None = None
        self.num_answers = 0
        self.is_flushed = True
        self.own_hits = self.external_hits = 0.0
        self.flushes = True
        canned.routes = {
            ("GET", "/v1/models"): lambda body: (200, {"data": [{"id": "tiny"}]}),
            ("GET", "/version"): lambda body: (200, {"version": "0.32.0"}),
            ("GET", "/metrics"): lambda body: (200, self.metrics()),
            ("POST", "/tokenize"): lambda body: (200, {"count": len(body["prompt"].split())}),
            ("POST", "/v1/completions"): lambda body: (200, self.complete(body)),
            ("POST", "/reset_prefix_cache"): lambda body: (200, self.reset()),
        }

    def metrics(self) -> str:
        return (
            "# HELP vllm:external_prefix_cache_hits_total tokens\n"
            f'vllm:external_prefix_cache_hits_total{{engine="0"}} {self.external_hits}\n'
            f'vllm:prefix_cache_hits_total{{engine="0"}} {self.own_hits}\n'
        )

    def reset(self) -> dict[str, bool]:
        self.is_flushed = self.flushes
        return {"success": True}

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        assert (body["model"], body["temperature"]) == ("tiny", 0)
        self.num_answers += 1
        cached = 0 if self.num_answers == 1 else self.store_tokens if self.is_flushed else 992
        restored = self.is_flushed and self.num_answers > 1
        self.is_flushed = False
        if restored:
            self.external_hits += cached
        else:
            self.own_hits += cached
        tokens = list(range(body["max_tokens"]))
        if restored and self.restored_tokens is not None:
            tokens = self.restored_tokens
        usage: dict[str, Any] = {"prompt_tokens": 1000}
        if self.with_details:
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        logprobs = {"tokens": [str(token) for token in tokens], "token_logprobs": [-1.0] * len(tokens)}
        return {"choices": [{"token_ids": tokens, "logprobs": logprobs}], "usage": usage}


@pytest.fixture
def fake() -> Iterator[FakeVllm]:
    with canned_server() as canned:
        yield FakeVllm(canned)


def verdict(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)["verdict"]
    return answer


def test_passes(fake: FakeVllm, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([fake.canned.url, *FAST]) == 0
    assert verdict(capsys)["code"] == "passed"
    # reset_external would empty the store as well.
    assert "/reset_prefix_cache" in [path for path, _, _ in fake.canned.asked]


def test_counts_by_metrics_where_answers_do_not_tell(
    fake: FakeVllm, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.with_details = False
    assert main([fake.canned.url, *FAST]) == 0
    assert verdict(capsys)["hit_percent"] == 99.2
    fake.canned.routes.pop(("GET", "/metrics"))
    assert main([fake.canned.url, *FAST]) == 2
    assert verdict(capsys)["code"] == "hit_unknown"


def test_fails_when_nothing_or_something_wrong_comes(
    fake: FakeVllm, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.store_tokens = 0
    assert main([fake.canned.url, *FAST]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["verdict"]["code"] == "no_hit"
    assert any("kv-transfer-config" in hint for hint in report["hints"])
    fake.store_tokens, fake.restored_tokens, fake.num_answers = 992, [9] * 16, 0
    assert main([fake.canned.url, *FAST]) == 1
    assert verdict(capsys)["code"] == "wrong_tokens"


def test_a_flush_that_did_nothing_is_no_hit_of_the_store(
    fake: FakeVllm, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.flushes = False
    assert main([fake.canned.url, *FAST]) == 2
    assert verdict(capsys)["code"] == "own_cache"


def test_a_server_without_dev_mode_is_explained(fake: FakeVllm, capsys: pytest.CaptureFixture[str]) -> None:
    fake.canned.routes.pop(("POST", "/reset_prefix_cache"))
    assert main([fake.canned.url, *FAST]) == 2
    captured = capsys.readouterr()
    assert "VLLM_SERVER_DEV_MODE=1" in captured.err
    assert "VLLM_SERVER_DEV_MODE=1" in captured.out


def test_the_second_engine_needs_no_flush(fake: FakeVllm, capsys: pytest.CaptureFixture[str]) -> None:
    with canned_server() as other_canned:
        other = FakeVllm(other_canned)
        other.num_answers = 1
        assert main([fake.canned.url, "--second-url", other_canned.url, *FAST]) == 0
        assert verdict(capsys)["code"] == "passed"
        assert "/reset_prefix_cache" not in [path for path, _, _ in fake.canned.asked + other_canned.asked]


def test_keys_go_where_they_belong(fake: FakeVllm, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([fake.canned.url, "--api-key", "a", "--admin-key", "b", *FAST]) == 0
    sent = {path: authorization for path, _, authorization in fake.canned.asked}
    assert (sent["/v1/completions"], sent["/reset_prefix_cache"]) == ("Bearer a", "Bearer b")
    assert verdict(capsys)["code"] == "passed"


@pytest.mark.parametrize(
    ("status", "body", "advice"),
    [(401, "no", "--api-key"), (200, "<html>", "right kind of engine"), (200, {"data": []}, "vLLM server")],
)
def test_strange_servers_are_explained(
    fake: FakeVllm, capsys: pytest.CaptureFixture[str], status: int, body: Any, advice: str
) -> None:
    fake.canned.routes["GET", "/v1/models"] = lambda asked: (status, body)
    assert main([fake.canned.url, *FAST]) == 2
    assert advice in capsys.readouterr().err


def test_nobody_there(capsys: pytest.CaptureFixture[str]) -> None:
    with canned_server() as canned:
        url = canned.url
    assert main([url, *FAST]) == 2
    assert "is the engine's HTTP server running there" in capsys.readouterr().err
    assert main(["ftp://x", *FAST]) == 2
    assert "http://HOST:PORT" in capsys.readouterr().err


def test_the_table_says_the_verdict_in_words(fake: FakeVllm, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([fake.canned.url, "--settle-s", "0.01"]) == 0
    captured = capsys.readouterr()
    assert "PASSED: 992 of 1000 prompt tokens came from the store" in captured.out
    assert "the first answer, computed" in captured.err
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    assert "--second-url" in capsys.readouterr().out


def test_without_rich_json_is_offered_before_anything_is_asked(
    fake: FakeVllm, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit) as end:
        main([fake.canned.url])
    assert (end.value.code, fake.canned.asked) == (2, [])
    assert "--json" in capsys.readouterr().err
    assert main([fake.canned.url, *FAST]) == 0
