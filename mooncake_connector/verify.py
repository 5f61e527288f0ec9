"""`python -m mooncake_connector.verify`: is a running vLLM server served by the store, with the right KV?

Uses of vLLM's server (0.28 to 0.32): /v1/models, /v1/completions, /tokenize, /metrics, and
/reset_prefix_cache, which it has only when started with VLLM_SERVER_DEV_MODE=1.
"""

import sys
from collections.abc import Sequence
from typing import Any, ClassVar

from kvcore.verify.cli import main as verify_main
from kvcore.verify.engine import Engine, HttpJson, VerifyError
from kvcore.verify.verdict import Answer

DESCRIPTION = """
Is this vLLM server served by mooncake-store, and with the right KV?

A prompt that nobody has sent before goes to the server three times: computed, from vLLM's own cache, and,
after vLLM's cache was flushed, from the store. The hit, the tokens and their log probabilities are compared.

    verify-vllm http://127.0.0.1:8000
    verify-vllm http://HOST-A:8000 --second-url http://HOST-B:8000
        two engines on one store; nothing is flushed

Flushing needs a server started with VLLM_SERVER_DEV_MODE=1 and takes every user's cached prefix with it; the
store is not touched. The form with --second-url needs neither.
"""
_HITS = "vllm:{}prefix_cache_hits_total"


class VllmEngine(Engine):
    hints: ClassVar[dict[str, list[str]]] = {
        "no_hit": [
            "was vLLM started with --kv-transfer-config naming MooncakeSuiteConnector and kv_role kv_both?",
            "its log says 'disabled' with the reason when the connector cannot work with this model",
            "is mooncake-store running at store_address? `mooncake-store stats` shows what is saved",
            "are the store and the plugin of one version? else the engine's log says that the store hangs up",
            "two engines: the same model, dtype, block size, TP size and PYTHONHASHSEED?",
        ],
        "partial_hit": [
            "was everything saved by then? allow more with --settle-s",
            "is the store full, or is a block a large part of the prompt? try --prompt-tokens 4000",
        ],
        "own_cache": ["is --second-url really an engine that has not seen the prompt?", "try again"],
        "hit_unknown": ["start vLLM with --enable-prompt-tokens-details, or without --disable-log-stats"],
        "wrong_tokens": ["stop using the store with this model, and report this with the JSON of --json"],
        "logprobs_differ": [
            "if the engine is that noisy by itself, raise --logprob-tolerance; otherwise report it"
        ],
        "engine_unstable": ["compare fewer tokens with --max-tokens 1"],
    }

    def __init__(self, http: HttpJson, admin: HttpJson) -> None:
        super().__init__(http)
        self._admin = admin
        self._model = ""

    def model(self) -> str:
        if not self._model:
            models = self.http.ask_json("GET", "/v1/models")
            self._model = str(_part(models, "data", 0, "id"))
        return self._model

    def describe(self) -> str:
        version = _part(self.http.ask_json("GET", "/version"), "version")
        return f"vLLM {version}, {self.model()}, at {self.http.base_url}"

    def ask_greedy(self, prompt: str, max_tokens: int) -> Answer:
        before = self._counted_hits()
        answer = self.http.ask_json(
            "POST",
            "/v1/completions",
            {
                "model": self.model(),
                "prompt": prompt,
                "max_tokens": max_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "logprobs": 1,
                "return_token_ids": True,
            },
        )
        choice = _part(answer, "choices", 0)
        details = _part(answer, "usage").get("prompt_tokens_details") or {}
        prompt_tokens = int(_part(answer, "usage", "prompt_tokens"))
        cached = details.get("cached_tokens")
        store = cached
        after = self._counted_hits()
        if before and after:
            # These count everybody's requests: on a server that has others too much, never too little.
            own, store = (
                min(prompt_tokens, int(now - then)) for now, then in zip(after, before, strict=True)
            )
            cached = min(prompt_tokens, own + store) if cached is None else cached
            store = min(store, cached)
        return Answer(
            tokens=choice.get("token_ids") or _part(choice, "logprobs", "tokens"),
            logprobs=_part(choice, "logprobs", "token_logprobs"),
            prompt_tokens=prompt_tokens,
            cached_tokens=cached,
            store_tokens=store,
            seconds=0.0,
        )

    def flush(self) -> bool:
        status, body = self._admin.ask("POST", "/reset_prefix_cache")
        if status == 404:
            raise VerifyError(
                f"{self.http.base_url} has no /reset_prefix_cache",
                "start it with VLLM_SERVER_DEV_MODE=1, or name another engine on its store with --second-url",
            )
        # Before 0.30 the answer has no body, and the reset its own retries.
        return status == 200 and "false" not in body.lower()

    def _counted_hits(self) -> tuple[float, float] | None:
        """Tokens from vLLM's cache, and from connectors, since it started; None without statistics."""
        status, text = self.http.ask("GET", "/metrics")
        samples = [line.rpartition(" ") for line in text.splitlines() if status == 200]
        own, external = (
            [float(value) for name, _, value in samples if name.startswith(_HITS.format(which))]
            for which in ("", "external_")
        )
        return (sum(own), sum(external)) if own and external else None


def _part(answer: Any, *path: str | int) -> Any:
    try:
        for step in path:
            answer = answer[step]
    except (KeyError, IndexError, TypeError) as error:
        raise VerifyError(
            f"the answer has no {path[-1]!r}: {str(answer)[:200]}", "is this a vLLM server of 0.28 or newer?"
        ) from error
    return answer


def main(argv: Sequence[str] | None = None) -> int:
    return verify_main("verify-vllm", DESCRIPTION, VllmEngine, "http://127.0.0.1:8000", argv)


if __name__ == "__main__":
    sys.exit(main())
