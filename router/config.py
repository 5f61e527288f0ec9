"""Everything a user can set. Flags, the file and the environment (MOONCAKE_ROUTER_*) all end here."""

from typing import Annotated

import msgspec
from msgspec import Meta

from kvcore.errors import ConfigError
from router.breaker import BreakerConfig
from router.core.admission import make_admission
from router.core.policies import make_policy
from router.core.settings import Settings
from router.core.view import Role
from router.http.limits import HttpLimits
from router.instance import InstanceSpec, instance_url
from router.kv_events.source import EventSource, parse_engine_source, parse_event_source
from router.load import LoadConfig
from router.prompts.reader import PromptsConfig

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
    prefill: Annotated[tuple[str, ...], Meta(description="engines that only prefill")] = ()
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
        int, Meta(gt=0, le=65535, description="of prefill engines: SGLang's --disaggregation-bootstrap-port")
    ] = 8998
    kv_events: Annotated[
        tuple[str, ...],
        Meta(description="KV events of engines, URL=ENDPOINT[,REPLAY] each"),
    ] = ()
    store_kv_events: Annotated[
        tuple[str, ...], Meta(description="KV events of mooncake-store nodes, ENDPOINT[,REPLAY] each")
    ] = ()
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

    @property
    def policies(self) -> tuple[str, ...]:
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

    def instance_specs(self) -> list[InstanceSpec]:
        """Checked: ConfigError when nothing could be routed, by whatever mistake."""
        for name in self.policies:
            make_policy(name, self.scheduling)
        make_admission(self.scheduling)
        groups = ((Role.MIXED, self.worker_urls), (Role.PREFILL, self.prefill), (Role.DECODE, self.decode))
        specs: dict[str, InstanceSpec] = {}
        for role, urls in groups:
            for raw in urls:
                url = instance_url(raw)
                if url in specs:
                    raise ConfigError(f"engine {url} is given twice; one engine has one role")
                specs[url] = InstanceSpec(url, role)
        if not specs:
            raise ConfigError("no engines: give --worker-urls, or --prefill and --decode")
        if self.worker_urls and (self.prefill or self.decode):
            raise ConfigError("--worker-urls cannot be mixed with --prefill and --decode")
        if bool(self.prefill) != bool(self.decode):
            missing = "--decode" if self.prefill else "--prefill"
            raise ConfigError(f"{missing} is missing: separate pools need at least one engine each")
        unknown = self.event_sources().keys() - specs.keys()
        if unknown:
            raise ConfigError(f"--kv-events names {unknown.pop()}, which is none of the engines given")
        return list(specs.values())

    def event_sources(self) -> dict[str, EventSource]:
        """By engine URL. ConfigError for what cannot be understood."""
        sources: dict[str, EventSource] = {}
        for text in self.kv_events:
            url, source = parse_engine_source(text)
            if instance_url(url) in sources:
                raise ConfigError(f"--kv-events: {url} is given twice")
            sources[instance_url(url)] = source
        return sources

    def store_sources(self) -> list[EventSource]:
        return [parse_event_source(text) for text in self.store_kv_events]
