"""Everything a user can set. Flags, the file and the environment (MOONCAKE_ROUTER_*) all end here."""

import re
from typing import Annotated

import msgspec
from msgspec import Meta

from kvcore.errors import ConfigError
from kvcore.keys import NAMESPACE_BYTES
from router.breaker import BreakerConfig
from router.core.admission import make_admission
from router.core.policies import make_policy
from router.core.settings import Settings
from router.core.view import Role
from router.discovery.base import EngineEntry, checked
from router.discovery.config import DiscoveryConfig
from router.http.limits import HttpLimits
from router.instance_spec import InstanceSpec, instance_url
from router.kv_events.source import EventSource, parse_engine_source, parse_store_source
from router.load import LoadConfig
from router.prompts.config import PromptsConfig

Milliseconds = Annotated[float, Meta(gt=0)]

# Those that decide by an instance's load or turn alone; for all others prompts are read.
LOAD_POLICIES = frozenset({"round_robin", "least_loaded", "power_of_two", "random", "session_sticky"})


class RetryConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    max_retries: Annotated[
        int, Meta(ge=0, description="other instances tried before the first byte of an answer")
    ] = 5
    budget_ms: Annotated[
        float, Meta(gt=0, description="no retry begins later than this after the request came")
    ] = 60_000


class HealthConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    path: Annotated[str, Meta(pattern="^/", description="probed with GET on each engine; 2xx is healthy")] = (
        "/health"
    )
    interval_ms: Annotated[float, Meta(gt=0, description="between probes of one engine")] = 10_000
    timeout_ms: Annotated[float, Meta(gt=0, description="a probe without an answer by then has failed")] = (
        5_000
    )
    failure_threshold: Annotated[
        int, Meta(gt=0, description="failed probes in a row that take an engine out")
    ] = 3
    success_threshold: Annotated[int, Meta(gt=0, description="good probes in a row that bring it back")] = 2
    startup_interval_ms: Annotated[
        float, Meta(gt=0, description="between probes of an engine that has never been healthy")
    ] = 1_000


class IndexConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    block_size_tokens: Annotated[
        int, Meta(gt=0, description="the engines' --block-size; blocks of other sizes are not indexed")
    ] = 16
    max_size_bytes: Annotated[
        int, Meta(gt=0, description="memory the prefix index may take; the least used is forgotten")
    ] = 512 << 20
    predicted_ttl_ms: Annotated[
        float,
        Meta(gt=0, description="how long a prefix counts as where its request was sent, without events"),
    ] = 30_000


class RouterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    host: Annotated[str, Meta(description="address to listen on")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="port to listen on; 0 picks a free one")] = 30000
    worker_urls: Annotated[
        tuple[str, ...], Meta(description="engines that prefill and decode, http://HOST:PORT")
    ] = ()
    prefill: Annotated[
        tuple[str, ...], Meta(description="engines that only prefill; 'URL PORT' with their bootstrap port")
    ] = ()
    decode: Annotated[tuple[str, ...], Meta(description="engines that decode what others prefilled")] = ()
    policy: Annotated[str, Meta(description="how an engine is chosen")] = "round_robin"
    prefill_policy: Annotated[str, Meta(description="for the prefill pool; empty: as --policy")] = ""
    decode_policy: Annotated[str, Meta(description="for the decode pool; empty: as --policy")] = ""
    pd_protocol: Annotated[str, Meta(description="how prefill and decode engines hand over KV")] = "suite"
    pd_wait_ms: Annotated[
        int,
        Meta(gt=0, description="how long a decode engine waits for layers of its prefill engine"),
    ] = 30_000
    bootstrap_port: Annotated[
        int,
        Meta(
            gt=0,
            le=65535,
            description="of prefill engines without one of their own: SGLang's "
            "--disaggregation-bootstrap-port, vLLM's VLLM_MOONCAKE_BOOTSTRAP_PORT",
        ),
    ] = 8998
    data_parallel_size: Annotated[
        int, Meta(gt=0, description="ranks inside each engine; above 1 each rank is chosen by itself")
    ] = 1
    kv_events: Annotated[
        tuple[str, ...],
        Meta(description="KV events of engines, URL=ENDPOINT[,REPLAY] each"),
    ] = ()
    store_kv_events: Annotated[
        tuple[str, ...],
        Meta(description="KV events of mooncake-store nodes, ENDPOINT[,REPLAY][=ADDRESS] each"),
    ] = ()
    engine_stores: Annotated[
        tuple[str, ...],
        Meta(description="stores of engines that are not on their host, URL=ADDRESS each (or URL=HOST)"),
    ] = ()
    store_namespaces: Annotated[
        tuple[str, ...],
        Meta(
            description="of this model's blocks in stores shared with others, as engines log them; none: all"
        ),
    ] = ()
    store_token: Annotated[str, Meta(description="of the stores that fetch or copy prefixes ahead")] = ""
    api_keys: Annotated[
        tuple[str, ...], Meta(description="keys clients must send as 'Authorization: Bearer KEY'; none: open")
    ] = ()
    max_concurrent_requests: Annotated[
        int, Meta(ge=0, description="more are answered 429; 0: no limit but that of connections")
    ] = 0
    request_timeout_ms: Annotated[float, Meta(gt=0, description="a request may take this long in all")] = (
        1_800_000
    )
    connect_timeout_ms: Annotated[float, Meta(gt=0, description="to connect to an engine")] = 5_000
    upstream_idle_timeout_ms: Annotated[
        float, Meta(gt=0, description="idle engine connections; below the engine's own, which is 5s in vLLM")
    ] = 4_000
    drain_timeout_ms: Annotated[
        float, Meta(ge=0, description="after SIGTERM, running requests have this long to end")
    ] = 30_000
    log_level: Annotated[str, Meta(pattern="^(debug|info|warning|error)$", description="debug ... error")] = (
        "info"
    )
    log_json: Annotated[bool, Meta(description="one JSON object a log line")] = False
    retry: RetryConfig = RetryConfig()
    breaker: BreakerConfig = BreakerConfig()
    health: HealthConfig = HealthConfig()
    http: HttpLimits = HttpLimits()
    scheduling: Settings = Settings()
    index: IndexConfig = IndexConfig()
    prompts: PromptsConfig = PromptsConfig()
    load: LoadConfig = LoadConfig()
    discovery: DiscoveryConfig = DiscoveryConfig()

    @property
    def policies(self) -> tuple[str, str]:
        """Of the mixed or prefill pool, and of the pool that answers."""
        return (self.prefill_policy or self.policy, self.decode_policy or self.policy)

    @property
    def asks_loads(self) -> bool:
        """Whether anything is decided by how busy engines are."""
        blind = {"round_robin", "random", "session_sticky"}
        return self.scheduling.admission != "none" or not blind.issuperset(self.policies)

    @property
    def reads_prompts(self) -> bool:
        """Whether anything is decided by a prompt's length or prefix."""
        return self.scheduling.admission != "none" or not LOAD_POLICIES.issuperset(self.policies)

    def engines(self) -> list[EngineEntry]:
        """Those named here. ConfigError for what cannot be understood."""
        events, stores = self._event_texts(), self._engine_stores()
        groups = ((Role.MIXED, self.worker_urls), (Role.PREFILL, self.prefill), (Role.DECODE, self.decode))
        entries = []
        for role, texts in groups:
            for text in texts:
                raw_url, _, port = text.partition(" ")
                url = instance_url(raw_url)
                if port.strip() and role is not Role.PREFILL:
                    raise ConfigError(f"engine {text!r}: only prefill engines have a bootstrap port")
                entry = EngineEntry(
                    url=url,
                    role=role,
                    bootstrap_port=_bootstrap_port(text, port.strip()),
                    data_parallel_size=self.data_parallel_size,
                    kv_events=events.pop(url, ""),
                    store=stores.pop(url, ""),
                )
                entries.append(entry)
        if events:
            raise ConfigError(f"--kv-events names {min(events)}, which is none of the engines given")
        if stores:
            raise ConfigError(f"--engine-stores names {min(stores)}, which is none of the engines given")
        return entries

    def instance_specs(self) -> list[InstanceSpec]:
        """Of the engines named here, with everything else checked too: ConfigError when nothing could be
        routed, by whatever mistake. Empty when engines are found elsewhere (`discovery`)."""
        for name in self.policies:
            make_policy(name, self.scheduling)
        make_admission(self.scheduling)
        self.store_sources()
        specs = checked(self.engines())
        if self.discovery.source != "static":
            self.discovery.check()
            if specs:
                raise ConfigError(
                    f"--discovery.source {self.discovery.source} finds the engines: "
                    "drop --worker-urls, --prefill and --decode"
                )
            return []
        if not specs:
            raise ConfigError(
                "no engines: give --worker-urls, or --prefill and --decode, or --discovery.source"
            )
        if bool(self.prefill) != bool(self.decode):
            missing = "--decode" if self.prefill else "--prefill"
            raise ConfigError(f"{missing} is missing: separate pools need at least one engine each")
        return specs

    def _event_texts(self) -> dict[str, str]:
        """ENDPOINT[,REPLAY] by engine URL."""
        texts: dict[str, str] = {}
        for text in self.kv_events:
            url, endpoints = parse_engine_source(text)
            if instance_url(url) in texts:
                raise ConfigError(f"--kv-events: {url} is given twice")
            texts[instance_url(url)] = endpoints
        return texts

    def _engine_stores(self) -> dict[str, str]:
        """Host or address of a store by engine URL."""
        known = {name for one in self.store_sources() for name in (one.host, one.store_address)}
        stores: dict[str, str] = {}
        for text in self.engine_stores:
            url, equals, store = text.rpartition("=")
            if not equals or store not in known - {""}:
                raise ConfigError(
                    f"--engine-stores {text!r}: write URL=ADDRESS, with an address of --store-kv-events"
                )
            stores[instance_url(url)] = store
        return stores

    def store_sources(self) -> list[EventSource]:
        for namespace in self.store_namespaces:
            if not re.fullmatch(f"[0-9a-f]{{{2 * NAMESPACE_BYTES}}}", namespace):
                raise ConfigError(
                    f"--store-namespaces {namespace!r}: write the {2 * NAMESPACE_BYTES} hex digits that an "
                    "engine logs at its start"
                )
        return [parse_store_source(text) for text in self.store_kv_events]


def _bootstrap_port(text: str, port: str) -> int:
    """0 for none, which the vllm-router and sglang-router family may spell out."""
    if port in ("", "none"):
        return 0
    if not port.isdigit() or not 0 < int(port) <= 65535:
        raise ConfigError(f"prefill engine {text!r}: {port!r} is no bootstrap port; write URL or 'URL PORT'")
    return int(port)
