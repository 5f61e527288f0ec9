"""`python -m sglang_hicache_backend.verify`: is a running SGLang server served by the store, with right KV?

Uses of SGLang's server (0.5.23): /server_info, /generate, /tokenize and /flush_cache.
"""

import sys
from collections.abc import Sequence
from typing import Any, ClassVar

from kvcore.verify.cli import main as verify_main
from kvcore.verify.engine import Engine, HttpJson, VerifyError
from kvcore.verify.verdict import Answer

DESCRIPTION = """
Is this SGLang server served by mooncake-store, and with the right KV?

A prompt that nobody has sent before goes to the server three times: computed, from SGLang's own cache, and,
after its device and host caches were flushed, from the store. The hit, the tokens and their log probabilities
are compared.

    verify-sglang http://127.0.0.1:30000
    verify-sglang http://HOST-A:30000 --second-url http://HOST-B:30000
        two engines on one store; nothing is flushed

Flushing takes every user's cached prefix with it, waits for an idle engine and, if the server has an admin
key, needs --admin-key; the store is not touched. The form with --second-url needs none of that.
"""


class SglangEngine(Engine):
    hints: ClassVar[dict[str, list[str]]] = {
        "no_hit": [
            "is mooncake-store running at store_address? `mooncake-store stats` shows what is saved",
            "are the store and the plugin of one version? else the engine's log says that the store hangs up",
            "--hicache-write-policy write_back saves only what the host cache evicts; use write_through",
            "prefetch_threshold (256 tokens) must be below the prompt's length",
            "two engines: the same model, dtype, page size, memory layout and TP size?",
        ],
        "partial_hit": [
            "--hicache-storage-prefetch-policy best_effort takes what is there in time; "
            "try wait_complete or timeout",
            "was everything saved by then? allow more with --settle-s; or is the store full?",
        ],
        "own_cache": ["is --second-url really an engine that has not seen the prompt?", "try again"],
        "wrong_tokens": ["stop using the store with this model, and report this with the JSON of --json"],
        "logprobs_differ": [
            "if the engine is that noisy by itself, raise --logprob-tolerance; otherwise report it"
        ],
        "engine_unstable": [
            "compare fewer tokens with --max-tokens 1, or start it with --enable-deterministic-inference"
        ],
    }

    def __init__(self, http: HttpJson, admin: HttpJson) -> None:
        super().__init__(http)
        self._admin = admin
        self._info: dict[str, Any] = {}

    def _server_info(self) -> dict[str, Any]:
        if not self._info:
            info = self.http.ask_json("GET", "/server_info")
            if not isinstance(info, dict) or "model_path" not in info:
                raise VerifyError(f"{self.http.base_url} is no SGLang server", "is it the right URL?")
            self._info = info
        return self._info

    def model(self) -> str:
        info = self._server_info()
        return str(info.get("served_model_name") or info["model_path"])

    def describe(self) -> str:
        info = self._server_info()
        linker = info.get("enable_unified_cache_external_linker")
        if not linker and not info.get("enable_hierarchical_cache"):
            raise VerifyError(
                f"{self.http.base_url} runs without HiCache", "start SGLang with --enable-hierarchical-cache"
            )
        return f"SGLang {info.get('version', '?')}, {self.model()}, at {self.http.base_url}"

    def ask_greedy(self, prompt: str, max_tokens: int) -> Answer:
        answer = self.http.ask_json(
            "POST",
            "/generate",
            {
                "text": prompt,
                "sampling_params": {"temperature": 0, "max_new_tokens": max_tokens, "ignore_eos": True},
                "return_logprob": True,
            },
        )
        try:
            meta = answer["meta_info"]
            chosen = meta["output_token_logprobs"]
            cached = int(meta["cached_tokens"])
            # Only with --enable-cache-report; without, the flush that succeeded has to be believed.
            own = int((meta.get("cached_tokens_details") or {}).get("device", 0))
            return Answer(
                tokens=[int(entry[1]) for entry in chosen],
                logprobs=[float(entry[0]) for entry in chosen],
                prompt_tokens=int(meta["prompt_tokens"]),
                cached_tokens=cached,
                store_tokens=max(0, cached - own),
                seconds=0.0,
            )
        except (KeyError, IndexError, TypeError) as error:
            raise VerifyError(
                f"an answer without {error}: {str(answer)[:200]}",
                "is this an SGLang server of 0.5.23 or newer?",
            ) from error

    def flush(self) -> bool:
        status, _ = self._admin.ask("POST", "/flush_cache")
        if status in (401, 403):
            raise VerifyError(
                f"{self.http.base_url} refused to flush its cache: {status}", "give --admin-key"
            )
        if status == 404:
            raise VerifyError(f"{self.http.base_url} has no /flush_cache", "is this an SGLang server?")
        return status == 200


def main(argv: Sequence[str] | None = None) -> int:
    return verify_main("verify-sglang", DESCRIPTION, SglangEngine, "http://127.0.0.1:30000", argv)


if __name__ == "__main__":
    sys.exit(main())
