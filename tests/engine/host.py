"""A process that holds one real vLLM engine at a time and runs commands for a test.

One JSON object a line on stdin, one on stdout; vLLM's own output goes to stderr. The engine core and the
worker live in this process (VLLM_ENABLE_V1_MULTIPROCESSING=0), so that a test can end it, or the store, at an
exact point of a step. Run by rig.EngineHost.
"""

import json
import os
import signal
import sys
import time
import traceback
from collections import Counter
from typing import Any


class EngineHolder:
    def __init__(self) -> None:
        self.llm: Any = None
        self.totals: Counter[str] = Counter()
        self.num_preemptions = 0

    # ---- commands

    def start(self, engine: dict[str, Any], transfer: dict[str, Any] | None) -> dict[str, Any]:
        """Replaces the engine. `transfer` is vLLM's --kv-transfer-config, None for a plain engine; `engine`
        may hold a --kv-events-config."""
        import vllm
        from vllm.config import KVEventsConfig, KVTransferConfig

        self.stop()
        config = KVTransferConfig(**transfer) if transfer else None
        if events := engine.pop("kv_events_config", None):
            engine["kv_events_config"] = KVEventsConfig(**events)
        self.llm = vllm.LLM(kv_transfer_config=config, **engine)
        self.totals.clear()
        self.num_preemptions = 0
        scheduler_core = self.llm.llm_engine.engine_core.engine_core.scheduler
        preempt = scheduler_core._preempt_request

        def count_preemption(*args: Any, **kwargs: Any) -> None:
            self.num_preemptions += 1
            preempt(*args, **kwargs)

        scheduler_core._preempt_request = count_preemption
        answer: dict[str, Any] = {"version": vllm.__version__, "namespace": "", "reason": ""}
        if config is not None:
            scheduler, worker = self._sides()
            answer["reason"] = scheduler.disabled_reason
            self._tap(scheduler.counters)
            if worker is not None:
                self._tap(worker.counters)
                answer["namespace"] = worker.answer.namespace.hex()
        return answer

    def stop(self) -> dict[str, Any]:
        if self.llm is not None:
            from vllm.distributed import kv_transfer

            self.llm.llm_engine.engine_core.shutdown()
            kv_transfer.ensure_kv_transfer_shutdown()
            self.llm = None
        return {}

    def generate(self, requests: list[dict[str, Any]], max_steps: int = 0) -> dict[str, Any]:
        """Adds all requests at once and steps until they are done, or `max_steps`; then aborts the rest.

        A request: {"tokens": [...], "max_tokens": n, "params": kv_transfer_params or None} and, if wanted,
        "adapter": the directory of a LoRA adapter, "picture": a seed for one of noise, "prompt_logprobs": n.
        """
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        engine = self.llm.llm_engine
        done: dict[str, Any] = {}
        names = [f"{time.monotonic_ns()}-{index}" for index in range(len(requests))]
        for name, request in zip(names, requests, strict=True):
            extra = {"kv_transfer_params": request["params"]} if request.get("params") else None
            sampling = SamplingParams(
                temperature=0,
                max_tokens=request["max_tokens"],
                ignore_eos=True,
                extra_args=extra,
                prompt_logprobs=request.get("prompt_logprobs"),
            )
            path = request.get("adapter")
            adapter = LoRARequest("adapter", 1, path) if path else None
            prompt = {"prompt_token_ids": request["tokens"]}
            if (seed := request.get("picture")) is not None:
                prompt["multi_modal_data"] = {"image": _noise(seed)}
            engine.add_request(name, prompt, sampling, lora_request=adapter)
        steps = 0
        while engine.has_unfinished_requests() and not (max_steps and steps >= max_steps):
            for output in engine.step():
                if output.finished:
                    done[output.request_id] = output
            steps += 1
        unfinished = [name for name in names if name not in done]
        if unfinished:
            engine.abort_request(unfinished)
            engine.step()
        return {
            "outputs": [self._output(done[name]) if name in done else None for name in names],
            "steps": steps,
        }

    def settle(self, timeout_s: float = 60) -> dict[str, Any]:
        """Steps until no block is held any more and everything saved is in the store; False: it never was."""
        core = self.llm.llm_engine.engine_core.engine_core
        deadline = time.monotonic() + timeout_s
        while core.scheduler.has_requests() and time.monotonic() < deadline:
            self.llm.llm_engine.step()
        scheduler, worker = self._sides()
        drained = worker is None or worker.drain(timeout_s * 1e3)
        totals = Counter(self.totals)
        for side in (scheduler, worker):
            if side is not None:
                # Counted since the last step: it would go to vLLM with the next one.
                with side.counters._lock:
                    totals.update(side.counters._values)
        manager = core.scheduler.kv_cache_manager
        return {
            "drained": drained,
            "requests": len(core.scheduler.requests),
            "usage": manager.usage,
            "totals": dict(totals),
        }

    def reset(self, connector: bool = False) -> dict[str, Any]:
        return {"ok": bool(self.llm.reset_prefix_cache(reset_connector=connector))}

    def prometheus(self, prefix: str) -> dict[str, Any]:
        from prometheus_client import REGISTRY

        samples = [sample for family in REGISTRY.collect() for sample in family.samples]
        return {"samples": {each.name: each.value for each in samples if each.name.startswith(prefix)}}

    def store_counters(self) -> dict[str, Any]:
        """Of the worker's client of the store."""
        return dict(self._sides()[1]._store.counters())

    def kill_at(self, place: str, pid: int, after: int = 0) -> dict[str, Any]:
        """SIGKILL to `pid` (0: this process) when the worker has passed `place` for the (after + 1)-th time.

        Places: "load" (loads of a step have been started), "save" (a layer has been handed over).
        """
        _, worker = self._sides()
        name = {"load": "start_loads", "save": "save_layer"}[place]
        original, left = getattr(worker, name), [after]

        def wrapped(*args: Any) -> None:
            has_work = bool(worker._plan.loads) if place == "load" else worker._saver._step is not None
            now = has_work and left[0] == 0
            if now and pid:
                os.kill(pid, signal.SIGSTOP)  # nothing of what starts now can be finished before the kill
            original(*args)
            if now:
                os.kill(pid or os.getpid(), signal.SIGKILL)
            left[0] -= has_work

        setattr(worker, name, wrapped)
        return {}

    def stop_killing(self) -> dict[str, Any]:
        _, worker = self._sides()
        for name in ("start_loads", "save_layer"):
            worker.__dict__.pop(name, None)
        return {}

    def preemptions(self) -> dict[str, Any]:
        return {"count": self.num_preemptions}

    # ---- parts

    def _sides(self) -> tuple[Any, Any]:
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        core = self.llm.llm_engine.engine_core.engine_core
        scheduler = _ours(core.scheduler.connector)
        worker = _ours(get_kv_transfer_group()) if has_kv_transfer_group() else None
        return getattr(scheduler, "_scheduler", None), getattr(worker, "_worker", None)

    def _tap(self, counters: Any) -> None:
        """vLLM takes the counters away every step; keep a sum for the test."""
        original = counters.take

        def take() -> dict[str, float]:
            values: dict[str, float] = original()
            self.totals.update(values)
            return values

        counters.take = take

    @staticmethod
    def _output(output: Any) -> dict[str, Any]:
        return {
            "tokens": list(output.outputs[0].token_ids),
            "cached": output.num_cached_tokens or 0,
            "finish": output.outputs[0].finish_reason,
            "params": output.kv_transfer_params,
            "num_prompt_logprobs": len(output.prompt_logprobs or ()),
        }


def _noise(seed: int) -> Any:
    import numpy as np
    from PIL import Image

    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (28, 28, 3), dtype=np.uint8))


def _ours(connector: Any) -> Any:
    """Our connector, also as a child of a MultiConnector."""
    children = getattr(connector, "_connectors", [connector])
    return next((child for child in children if type(child).__name__ == "MooncakeSuiteConnector"), None)


def main() -> None:
    # Everything that prints to stdout must not reach the test's pipe.
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    holder = EngineHolder()
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = getattr(holder, command.pop("command"))(**command)
        except Exception:
            answer = {"error": traceback.format_exc()}
        replies.write(json.dumps(answer) + "\n")
    holder.stop()


if __name__ == "__main__":
    main()
