"""Small parts of the shell: ids, logs, responses, metrics, the cluster's bookkeeping, health streaks."""

import json
import logging

import pytest

from kvcore.logs import JsonFormatter, TextFormatter
from router.breaker import BreakerConfig
from router.cluster import Cluster
from router.config import HealthConfig
from router.core.cluster_book import ClusterBook
from router.core.decision import Decision
from router.core.prefix_index import PrefixIndex
from router.core.settings import Settings
from router.core.view import InstanceState, RequestView, Role
from router.endpoints import key_is_known
from router.health import Streak
from router.http.response import Response, error_response, stream_error_event
from router.ids import IdSource
from router.instance_spec import Health, InstanceSpec
from router.metrics import Histogram, RouterMetrics, exposition


def make_cluster() -> Cluster:
    book = ClusterBook(Settings())
    return Cluster(book, breaker=BreakerConfig(), upstream_idle_timeout_s=1, connect_timeout_s=1)


def test_an_engine_reads_from_the_store_it_names_or_the_one_on_its_host() -> None:
    book = ClusterBook(Settings(), PrefixIndex(16))
    cluster = Cluster(book, breaker=BreakerConfig(), upstream_idle_timeout_s=1, connect_timeout_s=1)
    cluster.add_store_node("first", "node-1", "node-1:50051")
    cluster.add_store_node("second", "node-2", "")
    mixed = Role.MIXED
    cluster.apply(
        [
            InstanceSpec("http://node-1:1", mixed),
            InstanceSpec("http://pod-of-2:1", mixed, store="node-2"),
            InstanceSpec("http://node-2:1", mixed, store="node-1:50051"),
            InstanceSpec("http://node-1:2", mixed, store="unknown"),
            InstanceSpec("http://node-3:1", mixed),
        ]
    )
    found = [book.store_node_of(url) for url in cluster.instances]
    assert found == ["first", "second", "first", "first", ""]
    assert book.store_node_of("nobody") == ""


def specs(**roles: Role) -> list[InstanceSpec]:
    return [InstanceSpec(f"http://{name}:1", role) for name, role in roles.items()]


def test_ids_do_not_repeat_within_or_across_sources() -> None:
    one, other = IdSource(), IdSource()
    ids = [source.next_id() for source in (one, other) for _ in range(1000)]
    assert len(set(ids)) == 2000


def record(message: str, **extra: object) -> logging.LogRecord:
    made = logging.makeLogRecord({"msg": message, "levelname": "WARNING", "created": 0.25, "msecs": 250.0})
    made.__dict__.update(extra)
    return made


def test_log_lines_for_people_and_machines() -> None:
    line = record("leg failed", instance="http://a:1", reason="")
    assert TextFormatter().format(line) == "1970-01-01T00:00:00.250Z warning leg failed instance=http://a:1"
    decoded = json.loads(JsonFormatter().format(line))
    assert decoded["message"] == "leg failed" and decoded["instance"] == "http://a:1"
    assert decoded["level"] == "warning"


def test_responses_on_the_wire() -> None:
    assert Response(200, b"ok", b"text/plain").encode(close=False) == (
        b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: 2\r\n\r\nok"
    )
    head = Response(599, b"ok").encode(close=True, with_body=False)
    assert head.startswith(b"HTTP/1.1 599 Unknown\r\n") and head.endswith(b"connection: close\r\n\r\n")


def test_errors_have_openais_shape() -> None:
    error = json.loads(error_response(429, "full", code="queue_full").body)["error"]
    assert error == {"message": "full", "type": "rate_limit_error", "param": None, "code": "queue_full"}
    event = stream_error_event(502, "gone")
    assert event.startswith(b"data: {") and event.endswith(b"\n\n")
    assert json.loads(event[6:])["error"]["code"] == 502


def test_histogram_buckets_are_cumulative() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.observe(value)
    samples = {s.labels.get("le", s.name): s.value for s in histogram.family("h", "help").samples}
    assert (samples["1.0"], samples["2.0"], samples["+Inf"]) == (2, 3, 4)
    assert (samples["h_count"], samples["h_sum"]) == (4, 12.0)


def test_every_family_is_in_the_exposition() -> None:
    cluster = make_cluster()
    cluster.apply(specs(a=Role.PREFILL))
    metrics = RouterMetrics()
    metrics.retries["answer", "lost"] += 2
    text = exposition(metrics.families(cluster, 0.0)).decode()
    assert 'mooncake_router_instance_in_flight{engine="http://a:1",role="prefill"} 0.0' in text
    assert 'mooncake_router_retries_total{leg="answer",reason="lost"} 2.0' in text
    assert "mooncake_router_decode_only_total 0.0" in text


def test_the_view_holds_available_instances_with_their_load() -> None:
    cluster = make_cluster()
    cluster.apply(specs(p=Role.PREFILL, d=Role.DECODE, e=Role.DECODE))
    for number in range(3):
        cluster.book.sent(RequestView(f"r{number}"), Decision(decode=InstanceState("http://d:1")), 0.0)
    cluster.instances["http://e:1"].health = Health.DOWN
    view = cluster.view(0.0)
    assert [i.instance_id for i in view.prefill] == ["http://p:1"]
    assert [(i.instance_id, i.in_flight_requests) for i in view.decode] == [("http://d:1", 3)]
    assert cluster.separates_prefill and not cluster.is_ready()
    cluster.instances["http://d:1"].health = Health.UP
    assert cluster.is_ready()


def test_instances_come_and_go_without_losing_their_requests() -> None:
    cluster = make_cluster()
    cluster.apply(specs(a=Role.MIXED, b=Role.MIXED))
    leaving = cluster.instances["http://a:1"]
    leaving.in_flight = 1
    cluster.apply(specs(b=Role.MIXED, c=Role.MIXED))
    assert leaving.draining and set(cluster.instances) == {"http://b:1", "http://c:1"}
    assert [i.instance_id for i in cluster.view(0.0).mixed] == ["http://b:1", "http://c:1"]
    cluster.sweep(0.0)
    assert cluster._leaving == [leaving]
    leaving.in_flight = 0
    cluster.sweep(0.0)
    assert cluster._leaving == []
    # The same engine in another role is another instance.
    cluster.apply(specs(b=Role.DECODE, c=Role.PREFILL))
    assert cluster.view(0.0).mixed == () and len(cluster.view(0.0).decode) == 1


def test_health_changes_after_streaks_only() -> None:
    streak = Streak(HealthConfig(failure_threshold=2, success_threshold=2))
    health, seen = Health.UNKNOWN, []
    for good in (False, True, False, True, False, False, True, False, True, True):
        health = streak.next_health(health, good=good)
        seen.append(health.value)
    assert seen == ["unknown", "up", "up", "up", "up", "down", "down", "down", "down", "up"]


@pytest.mark.parametrize(
    ("authorization", "known"),
    [
        (b"Bearer one", True),
        (b"bearer  two ", True),
        (b"Bearer three", False),
        (b"Basic one", False),
        (b"one", False),
        (b"", False),
    ],
)
def test_api_keys(authorization: bytes, known: bool) -> None:
    assert key_is_known(authorization, (b"one", b"two")) is known
