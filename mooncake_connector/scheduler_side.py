"""The scheduler's half of the connector: what each step loads and saves. Duck-typed on vLLM's objects.

Per request and in order (vLLM's Scheduler): on_new_request, match, update_after_alloc, build_plan of every
step it runs in, update_output, request_finished. A preempted request goes through match again.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kvcore.client.base import LayerwiseStore
from kvcore.errors import KVError
from kvcore.guard import Guard
from mooncake_connector.config import ConnectorConfig
from mooncake_connector.counters import Counters
from mooncake_connector.follow_trust import FollowTrust
from mooncake_connector.log import get_logger
from mooncake_connector.lookup import PrefixLookup
from mooncake_connector.metadata import LoadMode, LoadSpec, RankAnswer, SaveSpec, StepPlan
from mooncake_connector.pd import PARAMS_KEY, parse_pd_params
from mooncake_connector.request_state import RequestState
from mooncake_connector.variants import Variants

logger = get_logger(__name__)


class SchedulerSide:
    """`loads` and `saves` follow kv_role; the legs of a P/D pair do what their role says in any case."""

    def __init__(
        self,
        config: ConnectorConfig,
        make_store: Callable[[], LayerwiseStore],
        block_size_tokens: int,
        *,
        loads: bool = True,
        saves: bool = True,
        load_mode: LoadMode = LoadMode.ASYNC,
        media_are_named: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`media_are_named`: block hashes of prompts with pictures or sound say which; else such prompts are
        not shared."""
        self.config = config
        self.counters = Counters()
        self.guard = Guard(logger, self.counters.add)
        self.disabled_reason = ""
        self.evict_from_prefix_cache: Callable[[set[int]], None] = lambda block_ids: None
        self._make_store = make_store
        self._block_size_tokens = block_size_tokens
        self._loads = loads
        self._saves = saves
        self._load_mode = load_mode
        self._media_are_named = media_are_named
        self._store: LayerwiseStore | None = None
        self._lookup: PrefixLookup | None = None
        self._states: dict[str, RequestState] = {}
        self._pending_loads: list[LoadSpec] = []
        self._trust = FollowTrust(clock)
        self._variants = Variants()
        self._distrusts_loads = False

    def connect(self, answers: Iterable[RankAnswer]) -> None:
        """What all ranks said about their KV caches; one that cannot take part disables the connector."""
        answers = list(answers)
        if not answers or self._lookup is not None:
            return
        if refused := [answer.reason for answer in answers if not answer.namespace]:
            self._disable(refused[0])
            return
        try:
            self._store = self._make_store()
        except KVError as error:
            self._disable(str(error))
            return
        self.disabled_reason = ""
        self._lookup = PrefixLookup(
            self._store,
            sorted({answer.namespace for answer in answers}),
            self.counters,
            timeout_ms=self.config.lookup_timeout_ms,
            step_wait_ms=self.config.lookup_wait_ms,
        )

    def _disable(self, reason: str) -> None:
        self.disabled_reason = reason
        logger.error("prefixes are neither looked up nor saved: %s", reason)

    # ---- matching

    def on_new_request(self, request: Any) -> None:
        if self._lookup is None:
            return
        state = self._state(request)
        if state.needs_every_token:
            return
        if self._loads and state.variant is not None and not self._may_follow(state):
            hashes = state.hashes(0, state.loadable_blocks(self._block_size_tokens))
            self._lookup.ask(request.request_id, state.variant, hashes)

    def match(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """(tokens to load beyond `num_computed_tokens`, loaded asynchronously?); (None, False): ask again.

        No effects besides remembering; vLLM may ask many times.
        """
        if self._lookup is None:
            return 0, False
        state = self._state(request)
        local = num_computed_tokens // self._block_size_tokens
        limit = state.loadable_blocks(self._block_size_tokens)
        state.num_local_blocks = local
        state.follows = False
        if state.variant is None:
            # A request that begins anew after a reset is computed with the weights of now.
            state.variant = self._variant_of(request)
        if state.load_failed or state.variant is None:
            # vLLM asks again after a failed load. What is missing is computed here, for sure.
            return 0, False
        if state.needs_every_token:
            state.num_handled_blocks = 0
            return 0, False
        if self._may_follow(state):
            state.num_handled_blocks = 0
            state.follows = limit > local
            return max(0, limit - local) * self._block_size_tokens, state.follows
        if not (self._loads or state.is_decode_leg):
            state.num_handled_blocks = 0
            return 0, False
        return self._match_store(self._lookup, state, state.variant, local, limit)

    def _match_store(
        self, lookup: PrefixLookup, state: RequestState, variant: bytes, local: int, limit: int
    ) -> tuple[int | None, bool]:
        request_id = state.request.request_id

        def hashes_from(first: int) -> list[bytes]:
            return state.hashes(first, limit)

        leading = lookup.answer(request_id, variant, hashes_from)
        if leading is None:
            return None, False
        state.num_handled_blocks = leading
        num_blocks = leading - local
        if leading < local < limit:
            # The store lacks blocks that we have ourselves, and may still hold those behind them.
            behind = lookup.answer(f"{request_id}+", variant, hashes_from, local)
            if behind is None:
                return None, False
            num_blocks = behind
        num_blocks = max(0, num_blocks)
        return num_blocks * self._block_size_tokens, num_blocks > 0 and self._load_mode is not LoadMode.SYNC

    def update_after_alloc(self, request: Any, block_ids: list[int], num_external_tokens: int) -> None:
        """`block_ids`: the whole table of the request. Decides by num_external_tokens alone, as vLLM asks."""
        if self._lookup is None:
            return
        state = self._state(request)
        state.block_ids = list(block_ids)
        self._forget_answers(request.request_id)
        if num_external_tokens <= 0 or state.variant is None:
            return
        begin = state.num_local_blocks
        end = begin + num_external_tokens // self._block_size_tokens
        mode, timeout_ms = self._load_mode, self.config.load_timeout_ms
        if state.follows and state.pd is not None:
            # A client may shorten the wait, but not hold the engine's blocks for longer than we allow.
            limit_ms = self.config.pd_wait_ms
            mode, timeout_ms = LoadMode.FOLLOW, min(state.pd.wait_ms or limit_ms, limit_ms)
        self._pending_loads.append(
            LoadSpec(
                request.request_id,
                state.hashes(begin, end),
                state.block_ids[begin:end],
                mode,
                timeout_ms,
                state.variant,
            )
        )
        state.first_loaded_block, state.num_loaded_blocks = begin, end - begin
        if begin <= state.num_handled_blocks or state.follows:
            state.num_handled_blocks = max(state.num_handled_blocks, end)

    # ---- one step

    def build_plan(self, scheduler_output: Any) -> StepPlan:
        loads, self._pending_loads = self._pending_loads, []
        distrusts_loads, self._distrusts_loads = self._distrusts_loads, False
        saves: list[SaveSpec] = []
        if self._lookup is not None:
            self._lookup.new_step()
            # Loads must go out whatever happens here: their requests wait for them.
            saves = self.guard.call([], self._plan_saves, scheduler_output)
        return StepPlan(
            loads,
            saves,
            runs_model=scheduler_output.total_num_scheduled_tokens > 0,
            asks_ranks=self._lookup is None and not self.disabled_reason,
            distrusts_loads=distrusts_loads,
        )

    def _plan_saves(self, scheduler_output: Any) -> list[SaveSpec]:
        saves: list[SaveSpec] = []
        for request_id, num_computed_tokens in self._update_block_tables(scheduler_output):
            state = self._states[request_id]
            if state.variant is None or not (self._saves or state.is_prefill_leg):
                continue
            # Draft tokens may yet be rejected; a block is full when its last confirmed token is computed.
            drafts = len(scheduler_output.scheduled_spec_decode_tokens.get(request_id, ()))
            num_tokens = num_computed_tokens + scheduler_output.num_scheduled_tokens[request_id] - drafts
            if not self.config.save_decode_blocks:
                num_tokens = min(num_tokens, state.request.num_prompt_tokens)
            end = min(
                num_tokens // self._block_size_tokens, len(state.request.block_hashes), len(state.block_ids)
            )
            begin = state.num_handled_blocks
            if begin < end:
                saves.append(
                    SaveSpec(
                        request_id,
                        state.hashes(begin, end),
                        state.block_ids[begin:end],
                        state.is_prefill_leg,
                        state.hashes(begin - 1, begin)[0] if begin else b"",
                        state.variant,
                    )
                )
                state.num_handled_blocks = end
                state.num_saved_blocks += end - begin
        return saves

    def _update_block_tables(self, scheduler_output: Any) -> Iterable[tuple[str, int]]:
        """Requests of this step with the number of tokens computed before it."""
        for new in scheduler_output.scheduled_new_reqs:
            if (state := self._states.get(new.req_id)) is not None:
                state.block_ids = list(new.block_ids[0])
                yield new.req_id, new.num_computed_tokens
        cached = scheduler_output.scheduled_cached_reqs
        for request_id, new_block_ids, num_computed_tokens in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if (state := self._states.get(request_id)) is not None:
                if request_id in cached.resumed_req_ids:
                    state.block_ids = list(new_block_ids[0])
                elif new_block_ids is not None:
                    state.block_ids.extend(new_block_ids[0])
                yield request_id, num_computed_tokens

    def update_output(self, lost_block_ids: set[int]) -> None:
        """Blocks whose load failed in the last step, from all ranks."""
        if not lost_block_ids:
            return
        distrusted: set[int] = set()
        for state in self._states.values():
            first = state.first_lost_block(lost_block_ids)
            if first is None:
                continue
            if state.follows and not state.load_failed and first == state.first_loaded_block:
                self._trust.lose()
            state.load_failed = True
            # What is recomputed may be saved again: the store has lost it too.
            state.num_handled_blocks = min(state.num_handled_blocks, first)
            distrusted.update(state.block_ids[first:])
        if self._load_mode is LoadMode.SYNC:
            # vLLM cached these when it scheduled them, before their KV was there, and its recompute policy
            # leaves them cached: another request could use them before they are computed again.
            self.evict_from_prefix_cache(distrusted)

    def request_finished(self, request: Any) -> dict[str, Any] | None:
        """Forgets the request; the answer goes to the client as kv_transfer_params."""
        state = self._states.pop(request.request_id, None)
        self._forget_answers(request.request_id)
        if state is None or state.pd is None:
            return None
        if state.follows and not state.load_failed:
            self._trust.restore()
        if state.is_prefill_leg and self._lookup is not None and state.variant is not None:
            prompt_blocks = min(
                request.num_prompt_tokens // self._block_size_tokens, len(request.block_hashes)
            )
            unsaved = state.hashes(state.num_handled_blocks, prompt_blocks)
            if unsaved:
                # Aborted or refused before its prompt was done: a decode engine may be waiting.
                self._lookup.abandon(state.variant, unsaved)
        return {
            PARAMS_KEY: {
                "role": state.pd.role,
                "transfer_id": state.pd.transfer_id,
                "saved_blocks": state.num_saved_blocks,
                "loaded_blocks": 0 if state.load_failed else state.num_loaded_blocks,
            }
        }

    def reset(self) -> bool:
        """The engine's KV is to be forgotten: its weights may be others from now on (reset_prefix_cache with
        reset_connector, sleep, a pause that clears caches). Blocks of before are neither found nor saved any
        more, by requests that go on neither; and nobody else is given what is computed from now on."""
        if self._lookup is not None and not self._variants.is_private:
            logger.warning(
                "the KV cache was reset: this engine shares KV with itself alone until it is started again"
            )
        self._variants.make_private()
        self._distrusts_loads = True
        for request_id, state in self._states.items():
            state.variant = None
            self._forget_answers(request_id)
        return True

    def shutdown(self) -> None:
        """May be called more than once."""
        if self._lookup is not None:
            self._lookup.close()
        if self._store is not None:
            self._store.close()
        self._lookup = self._store = None

    def _may_follow(self, state: RequestState) -> bool:
        return state.may_follow and self._trust.given and not self._variants.is_private

    def _forget_answers(self, request_id: str) -> None:
        if self._lookup is not None:
            self._lookup.forget(request_id)
            self._lookup.forget(f"{request_id}+")

    def _state(self, request: Any) -> RequestState:
        state = self._states.get(request.request_id)
        if state is None:
            params: Mapping[str, Any] | None = request.kv_transfer_params
            pd, problem = parse_pd_params(params)
            if problem:
                logger.warning("request %s is served without P/D: %s", request.request_id, problem)
            state = self._states[request.request_id] = RequestState(request, pd, self._variant_of(request))
        return state

    def _variant_of(self, request: Any) -> bytes | None:
        if request.mm_features and not self._media_are_named:
            return None
        return self._variants.of(request.lora_request)
