"""One engine of the benchmark: SGLang's host pool, cache controller and threads, with one storage backend.

A process of its own, run by engines.py: an EngineSpec as its argument, one JSON command a line on stdin, one
JSON answer a line on stdout. The scheduler's part (what unified_radix_cache.py of SGLang 0.5.23 does between
the controller's queues) is played here, without the tree.
"""

import json
import os
import queue
import sys
import threading
import time
from typing import Any

import msgspec
import torch
import xxhash
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import _build_mha_mla_host_pool
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.utils import get_hash_str
from sglang.srt.runtime_context import get_parallel
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
from sglang_on_cpu.plugin import activate

from sglangbench.plan import EngineSpec, Prefetched

DEADLINE_S = 120.0
DEVICE_PAGES = 2  # pages move between host and storage only; the device is there to say what they look like


class Allocator:
    """The one question the controller has for SGLang's device allocator, as far as it is used here."""

    def __init__(self, device_pool: MHATokenToKVPool) -> None:
        self._device_pool = device_pool

    def get_kvcache(self) -> MHATokenToKVPool:
        return self._device_pool


class Engine:
    def __init__(self, spec: EngineSpec) -> None:
        shape = spec.shape
        self.shape = shape
        activate()
        set_global_server_args_for_scheduler(
            ServerArgs(
                model_path="dummy",  # to SGLang: there is no checkpoint to look at
                page_size=shape.page_tokens,
                hicache_mem_layout=spec.layout,
                hicache_io_backend=spec.io_backend,
                hicache_storage_backend=spec.backend,
                hicache_storage_backend_extra_config=json.dumps(spec.extra_config),
            )
        )
        device_pool = MHATokenToKVPool(
            size=DEVICE_PAGES * shape.page_tokens,
            page_size=shape.page_tokens,
            dtype=torch.bfloat16,
            head_num=shape.heads,
            head_dim=shape.head_dim,
            layer_num=shape.layers,
            device="cpu",
            enable_memory_saver=False,
        )
        self.pool = _build_mha_mla_host_pool(
            pool=device_pool,
            # One page more: the first is never given away.
            host_to_device_ratio=(shape.prompt_tokens / shape.page_tokens + 1) / DEVICE_PAGES,
            page_size=shape.page_tokens,
            layout=spec.layout,
            allocator_type="default",
            pool_label="kv",
        )
        self.pool.kv_buffer.zero_()
        with get_parallel().override(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1):
            self.controller = HiCacheController(
                Allocator(device_pool),
                self.pool,
                shape.page_tokens,
                None,
                threading.Event(),
                write_policy="write_through",
                io_backend=spec.io_backend,
                storage_backend=spec.backend,
                prefetch_threshold=1,
                model_name="llama-3.1-8b",
                storage_backend_extra_config=dict(spec.extra_config),
            )

    def tokens(self, prompt: int) -> list[int]:
        first = prompt * self.shape.prompt_tokens
        return list(range(first, first + self.shape.prompt_tokens))

    def save(self, prompt: int) -> int:
        """Random pages into the host pool, and from there to the storage; the digest of their bytes."""
        self.pool.kv_buffer.view(torch.int16).random_(generator=torch.Generator().manual_seed(prompt))
        tokens = self.tokens(prompt)
        hashes = get_hash_str(tokens, page_size=self.shape.page_tokens)
        indices = self.pool.alloc(len(tokens))
        self.controller.write_storage(indices, tokens, hashes)
        done = self.controller.ack_backup_queue.get(timeout=DEADLINE_S)
        if done.completed_tokens != len(tokens):
            raise RuntimeError(f"only {done.completed_tokens} of {len(tokens)} tokens were stored")
        digest = self._digest(indices)
        self._free(indices)
        return digest

    def prefetch(self, prompt: int) -> Prefetched:
        controller, tokens = self.controller, self.tokens(prompt)
        start = time.perf_counter()
        controller.prefetch(f"prompt {prompt}", tokens)
        operation = controller.prefetch_hit_queue.get(timeout=DEADLINE_S)
        operation.host_indices = self.pool.alloc(operation.storage_hit_count)
        controller.prefetch_buffer.put(operation)
        completed = 0
        while True:
            ack = controller.ack_prefetch_queue.get(timeout=DEADLINE_S)
            if ack.completed_tokens is not None:
                completed = ack.completed_tokens
            if ack.completed_req:
                break
        seconds = time.perf_counter() - start
        digest = self._digest(operation.host_indices)
        self._free(operation.host_indices)
        # The next prompt goes to the same slots: what does not arrive must not be there already.
        self.pool.kv_buffer.zero_()
        return Prefetched(seconds=seconds, tokens=completed, digest=digest)

    def _digest(self, indices: torch.Tensor) -> int:
        digest = xxhash.xxh3_64()
        for slot in indices[:: self.shape.page_tokens].tolist():
            page = self.pool.get_data_page(slot).contiguous().view(torch.uint8)
            digest.update(page.numpy().data)
        return digest.intdigest()

    def _free(self, indices: torch.Tensor) -> None:
        self.pool.free(indices)


def main() -> None:
    # Answers alone go to stdout; SGLang and Mooncake print.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    engine = Engine(msgspec.json.decode(sys.argv[1], type=EngineSpec))
    answers.write("{}\n")
    for line in sys.stdin:
        command: dict[str, Any] = json.loads(line)
        try:
            answer = msgspec.to_builtins(getattr(engine, command["do"])(command["prompt"]))
        except (RuntimeError, queue.Empty) as error:
            answer = {"error": f"{type(error).__name__} {error}"}
        answers.write(json.dumps(answer) + "\n")
    # Not by the normal way: SGLang's threads would be waited for.
    os._exit(0)


if __name__ == "__main__":
    main()
