"""The simulated cluster: nodes, network and storage around the router's own core.

Everything the router would do is done by router.core, unchanged: ClusterBook keeps the view, Scheduler
decides, PrefixIndex hears of blocks by events. This file carries decisions out and reports what happened.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import msgspec

from kvsim.agenda import Agenda
from kvsim.block_cache import BlockCache
from kvsim.config import SimConfig
from kvsim.coupled_node import CoupledNode
from kvsim.decode_node import DecodeNode
from kvsim.elastic_node import ElasticNode
from kvsim.job import Job, Outcome, jobs_of
from kvsim.metrics import LoadSeries, Summary, summarize
from kvsim.network import Link, Network
from kvsim.prefill_node import PrefillNode
from kvsim.storage import GlobalStorage, NodeStorage, NoStorage, Storage
from kvsim.trace import Trace
from router.core.cluster_book import ClusterBook
from router.core.policies import make_policy
from router.core.prefix_index import PrefixIndex
from router.core.record import Header
from router.core.recording import RecordingBook, RecordingIndex, RecordingScheduler, Write
from router.core.scheduler import Scheduler
from router.core.view import Role

HOT_BLOCKS = 100


class Cluster:
    """One run. `record` gets a line for everything the core is told and decides; `progress` the number of
    requests that have arrived since it was called last."""

    def __init__(
        self,
        config: SimConfig,
        trace: Trace,
        record: Write | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self.config = config
        self.trace = trace
        self.agenda = Agenda()
        self.outcomes: list[Outcome] = []
        self.series = LoadSeries()
        self.settings = config.settings()
        self._progress = progress
        self._jobs = jobs_of(trace)
        self._under_way = 0
        self._num_held = 0
        self._all_arrived = False
        # The blocks used most, of the whole trace, hottest first; their keys as they turn up.
        uses = Counter(hash_id for request in trace.requests for hash_id in request.hash_ids)
        self._hot_keys: dict[int, bytes] = {hash_id: b"" for hash_id, _ in uses.most_common(HOT_BLOCKS)}
        self._network = Network(self.agenda, config.engine.nic_latency_ms)
        self._egress: dict[str, Link] = {}
        self.prefill: dict[str, PrefillNode] = {}
        self.decode: dict[str, DecodeNode | CoupledNode] = {}
        self._ingress: dict[str, Link] = {}
        self._storage: Storage = NoStorage()
        is_indexed = config.cluster.kind == "disaggregated" and config.cluster.cache_scope != "none"
        block_size = trace.block_size_tokens if is_indexed else 0
        policies = (
            make_policy(config.prefill_policy, self.settings),
            make_policy(config.decode_policy, self.settings),
        )
        self.index: PrefixIndex | None = None
        if record is not None:
            record(Header(self.settings, config.prefill_policy, config.decode_policy, block_size))
            self.index = RecordingIndex(block_size, write=record) if is_indexed else None
            self.book: ClusterBook = RecordingBook(self.settings, self.index, record)
            self.scheduler: Scheduler = RecordingScheduler(*policies, self.settings, record)
        else:
            self.index = PrefixIndex(block_size) if is_indexed else None
            self.book = ClusterBook(self.settings, self.index)
            self.scheduler = Scheduler(*policies, self.settings)
        if config.cluster.kind == "disaggregated":
            self._add_separate_nodes()
        else:
            self._add_coupled_nodes()

    def run(self) -> None:
        """Until every request has ended."""
        self._plan_arrival()
        self.agenda.at(0.0, self._sample)
        self.agenda.run()
        self.outcomes.sort(key=lambda outcome: outcome.number)

    def summary(self) -> Summary:
        config, duration_s = self.config, max(self.agenda.now, 1e-9)
        prefill_ms = sum(node.busy_ms for node in self.prefill.values())
        decode_ms = sum(node.busy_ms for node in self.decode.values())
        return summarize(
            config.label,
            self.trace.name,
            self.outcomes,
            self.series,
            ttft_slo_ms=config.slo.ttft_ms,
            tbt_slo_ms=config.slo.tbt_ms,
            transferred_bytes=sum(link.sent_bytes for link in self._egress.values()),
            prefill_utilisation=prefill_ms / 1e3 / duration_s / max(len(self.prefill), 1),
            decode_utilisation=decode_ms / 1e3 / duration_s / len(self.decode),
            duration_s=duration_s,
            num_nodes=config.cluster.num_nodes,
        )

    # ---- nodes ------------------------------------------------------------------------------------------

    def _add_separate_nodes(self) -> None:
        spec, engine = self.config.cluster, self.config.engine
        group = spec.prefill_group_nodes
        names = [f"p{n}" for n in range(spec.prefill_nodes // group)]
        block_bytes = self.trace.block_size_tokens * engine.kv_bytes_per_token
        is_global = spec.cache_scope == "global"
        share = spec.prefill_nodes if is_global else group
        dram_blocks = spec.dram_bytes * share // block_bytes
        ssd_blocks = spec.ssd_bytes * share // block_bytes

        def new_cache() -> BlockCache:
            return BlockCache(spec.eviction_policy, dram_blocks, ssd_blocks)

        store_worker = self.book.add_store_node("store") if is_global else -1
        is_shared, store_node = spec.cache_scope == "pool", "store" if is_global else ""
        workers = [
            self.book.add_instance(name, Role.PREFILL, is_shared=is_shared, store_node=store_node)
            for name in names
        ]
        decoders = [f"d{n}" for n in range(spec.decode_nodes)]
        decode_workers = [
            self.book.add_instance(
                name, Role.DECODE, kv_capacity_tokens=engine.kv_capacity_tokens, is_shared=is_shared
            )
            for name in decoders
        ]
        if spec.decode_chunk_tokens:
            workers += decode_workers
        if self.index is not None and is_global:
            self._storage = GlobalStorage(new_cache(), self.index, store_worker)
        elif self.index is not None:
            self._storage = NodeStorage(new_cache, self.index, workers)
        for number, name in enumerate(names):
            node = self.prefill[name] = PrefillNode(
                number,
                self.agenda,
                self._network,
                self._storage,
                engine,
                group,
                spec.prefill_chunk_tokens,
                self.trace.block_size_tokens,
                spec.layerwise,
                self._prefill_began,
                self._prefilled,
            )
            self._egress[name] = node.egress
        for number, name in enumerate(decoders, start=len(names)):
            self._ingress[name] = Link(engine.nic_bytes_per_s)
            if spec.decode_chunk_tokens:
                elastic = self.decode[name] = ElasticNode(
                    number,
                    self.agenda,
                    self._network,
                    self._storage,
                    engine,
                    self.trace.block_size_tokens,
                    spec.decode_chunk_tokens,
                    self._transfer_over,
                    self._first_token,
                    self._ended,
                )
                self._egress[name] = elastic.egress
            else:
                self.decode[name] = DecodeNode(
                    self.agenda,
                    engine.decode_model(),
                    engine.kv_capacity_tokens,
                    engine.max_batch_requests,
                    self._first_token,
                    self._ended,
                )

    def _add_coupled_nodes(self) -> None:
        spec, engine = self.config.cluster, self.config.engine
        for n in range(spec.mixed_nodes):
            self.book.add_instance(f"m{n}", Role.MIXED, kv_capacity_tokens=engine.kv_capacity_tokens)
            self.decode[f"m{n}"] = CoupledNode(
                self.agenda,
                engine,
                self.trace.block_size_tokens,
                spec.coupled_prefix_caching,
                spec.coupled_chunk_tokens,
                self._first_token,
                self._ended,
            )

    # ---- a request's way --------------------------------------------------------------------------------

    def _plan_arrival(self) -> None:
        job = next(self._jobs, None)
        if job is None:
            self._all_arrived = True
        else:
            self.agenda.at(job.request.at, lambda now: self._arrived(job, now))

    def _arrived(self, job: Job, now: float) -> None:
        self._plan_arrival()
        self.outcomes.append(job.outcome)
        if self._progress is not None:
            self._progress(1)
        for hash_id in self._hot_keys.keys() & set(job.request.hash_ids):
            self._hot_keys[hash_id] = job.keys[job.request.hash_ids.index(hash_id)]
        self._schedule(job, now)

    def _schedule(self, job: Job, now: float) -> None:
        decision = self.scheduler.schedule(job.view, self.book.view(now), now)
        job.decision = decision
        job.outcome.predicted_ttft_ms = decision.ttft_ms
        if decision.hold_ms:
            self._hold(job, now)
            return
        if decision.reject is not None:
            job.outcome.reject_reason = decision.reject.reason.value
            return
        assert decision.decode is not None
        self._under_way += 1
        self.book.sent(job.view, decision, now)
        if decision.prefill is None:
            self._submit_to_decode(job, decision.decode.instance_id, now)
        else:
            self.prefill[decision.prefill.instance_id].submit(job, self._transfer_source(job), now)

    def _hold(self, job: Job, now: float) -> None:
        self._num_held += 1
        self.agenda.at(now + job.decision.hold_ms / 1e3, lambda then: self._again(job, then))

    def _again(self, job: Job, now: float) -> None:
        self._num_held -= 1
        job.view = msgspec.structs.replace(job.view, waited_ms=(now - job.request.at) * 1e3)
        self._schedule(job, now)

    def _submit_to_decode(self, job: Job, name: str, now: float) -> None:
        node = self.decode[name]
        assert isinstance(node, CoupledNode)
        if isinstance(node, ElasticNode):
            node.submit_prompt(job, self._transfer_source(job), self._ingress[name], now)
        else:
            node.submit(job, now)

    def _transfer_source(self, job: Job) -> Link | None:
        transfer = job.decision.transfer
        if transfer is None:
            return None
        self.book.transfer_started(transfer)
        return self._egress[transfer.source]

    def _prefill_began(self, job: Job, now: float) -> None:
        self._transfer_over(job)
        if self.config.cluster.layerwise:
            self._send_to_decode(job)

    def _transfer_over(self, job: Job) -> None:
        if job.decision.transfer is not None:
            self.book.transfer_ended(job.decision.transfer)

    def _send_to_decode(self, job: Job) -> None:
        assert job.decision.prefill is not None and job.decision.decode is not None
        links = [
            self.prefill[job.decision.prefill.instance_id].egress,
            self._ingress[job.decision.decode.instance_id],
        ]
        size_bytes = job.request.prompt_tokens * self.config.engine.kv_bytes_per_token
        self._network.send(links, size_bytes, lambda now: self._hand_over(job, now))

    def _prefilled(self, job: Job, now: float) -> None:
        assert job.decision.prefill is not None and job.decision.decode is not None
        job.prefilled_at = now
        node = self.prefill[job.decision.prefill.instance_id]
        added = self._storage.keep(node.number, job, len(job.keys))
        if self._storage.is_remote:
            node.write_out(added)
        view = self.book.view(now)
        decode = next(d for d in view.decode if d.instance_id == job.decision.decode.instance_id)
        rejection = self.scheduler.after_prefill(job.view, decode, view, now)
        self.book.first_token(job.request_id, now)
        if rejection is not None:
            job.outcome.reject_reason = rejection.reason.value
            job.outcome.wasted_prefill = True
            self._under_way -= 1
            self.book.ended(job.request_id, now)
            return
        if job.request.output_tokens <= 1:
            self._first_token(job, now)
            self._ended(job, now)
            return
        if not self.config.cluster.layerwise:
            self._send_to_decode(job)
        self._hand_over(job, now)

    def _hand_over(self, job: Job, now: float) -> None:
        """The prefill is done, and the KV is there: when both have happened the request decodes."""
        job.handed_over += 1
        if job.handed_over == 2 and job.outcome.is_served and job.request.output_tokens > 1:
            assert job.decision.decode is not None
            node = self.decode[job.decision.decode.instance_id]
            assert isinstance(node, (DecodeNode, ElasticNode))
            node.join(job, now)

    def _first_token(self, job: Job, now: float) -> None:
        """It reaches the client, whom the decode side answers: when the request has joined the batch."""
        job.outcome.ttft_ms = (now - job.request.at) * 1e3
        if job.prefilled_at is not None:
            job.outcome.handover_ms = (now - job.prefilled_at) * 1e3
        self.book.first_token(job.request_id, now)

    def _ended(self, job: Job, now: float) -> None:
        self._under_way -= 1
        job.outcome.ended_at = now
        self.book.ended(job.request_id, now, job.request.output_tokens)

    # ---- load over time ---------------------------------------------------------------------------------

    def _sample(self, now: float) -> None:
        if self._all_arrived and not self._under_way and not self._num_held:
            return
        slo, series = self.config.slo, self.series
        view = self.book.view(now)
        pool = view.prefill or view.mixed
        queue_ms = sum(instance.queue_ms(now) for instance in pool) / len(pool)
        nodes = list(self.decode.values())
        series.at.append(now)
        series.prefill_load.append(queue_ms / slo.ttft_ms)
        step_ms = sum(node.batch.step_ms for node in nodes if len(node.batch)) / len(nodes)
        series.decode_load.append(step_ms / slo.tbt_ms)
        series.kv_share.append(sum(node.kv_share for node in nodes) / len(nodes))
        waiting = self._num_held + sum(node.num_waiting for node in (*nodes, *self.prefill.values()))
        series.waiting_requests.append(waiting)
        series.hot_replicas.append(self._storage.replicas(list(self._hot_keys.values())))
        self.agenda.at(now + self.config.sample_ms / 1e3, self._sample)
