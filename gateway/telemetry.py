"""What the gateway counts, for Prometheus: requests, waits, errors of our own, replicas by state.

Every series carries the label ``gateway``, the name of the instance that counted it. Instances on one node share
the metrics port, so a scrape reaches one of them: sums over ``gateway`` are complete only where each instance has a
node (or pod) of its own. Labels are bounded: pools come from the settings; an unknown model has pool ``none``.
"""

import asyncio
from collections import Counter as Tally
from collections.abc import Iterable
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.routing.router import Router
from wire.errors import ErrorKind
from wire.membership import ReplicaState, RequestClass

#: Upper bounds of the histograms. Seconds.
_REQUEST_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_HOLD_BUCKETS = (0.01, 0.05, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0)


class Observer(Protocol):
    """What a door tells of each request. Called once per request, on the event loop; must not raise or wait."""

    def request_ended(
        self,
        *,
        pool: str | None,
        protocol: str,
        status: int,
        own_error: ErrorKind | None,
        held_seconds: float,
        total_seconds: float,
    ) -> None:
        """A request is over.

        ``pool`` is None when no pool was found for it; ``protocol`` is ``http`` or ``grpc``; ``status`` is the HTTP
        status (499 when the caller left before an answer) or the gRPC status code; ``own_error`` is set when the
        answer is an error made here; ``held_seconds`` is the part of ``total_seconds`` that it waited for a replica.
        """


class Telemetry:
    """The counters of one gateway instance; implements :class:`Observer`."""

    def __init__(self, instance: str) -> None:
        self.registry = CollectorRegistry()
        self._instance = instance
        self._requests = Counter(
            "tidegate_requests",
            "Requests answered, by status (HTTP status or gRPC code; 499 or 1: the caller left).",
            ("gateway", "pool", "protocol", "status"),
            registry=self.registry,
        )
        self._errors = Counter(
            "tidegate_own_errors",
            "Requests answered by the gateway itself with an error, by kind.",
            ("gateway", "pool", "protocol", "kind"),
            registry=self.registry,
        )
        self._request_seconds = Histogram(
            "tidegate_request_seconds",
            "Time from the head of a request to the end of its answer, holding included.",
            ("gateway", "pool", "protocol"),
            buckets=_REQUEST_BUCKETS,
            registry=self.registry,
        )
        self._hold_seconds = Histogram(
            "tidegate_hold_seconds",
            "Time that held requests waited for a replica; requests that did not wait are not counted.",
            ("gateway", "pool", "protocol"),
            buckets=_HOLD_BUCKETS,
            registry=self.registry,
        )
        # Looking a child up by its labels costs more than counting; the label sets are few.
        self._counters: dict[tuple[str, str, int], Counter] = {}
        self._histograms: dict[tuple[str, str], Histogram] = {}

    def request_ended(
        self,
        *,
        pool: str | None,
        protocol: str,
        status: int,
        own_error: ErrorKind | None,
        held_seconds: float,
        total_seconds: float,
    ) -> None:
        name = pool or "none"
        counter = self._counters.get((name, protocol, status))
        if counter is None:
            counter = self._requests.labels(self._instance, name, protocol, str(status))
            self._counters[name, protocol, status] = counter
        counter.inc()
        histogram = self._histograms.get((name, protocol))
        if histogram is None:
            histogram = self._request_seconds.labels(self._instance, name, protocol)
            self._histograms[name, protocol] = histogram
        histogram.observe(total_seconds)
        if held_seconds > 0:
            self._hold_seconds.labels(self._instance, name, protocol).observe(held_seconds)
        if own_error is not None:
            self._errors.labels(self._instance, name, protocol, own_error.value).inc()

    def watch(self, router: Router) -> None:
        """From now on a scrape also shows the state of ``router``'s pools."""
        self.registry.register(_PoolCollector(router, self._instance))

    def exposition(self) -> bytes:
        """All series in Prometheus' text format."""
        return generate_latest(self.registry)


class _PoolCollector(Collector):
    """Gauges that are read off the pools when somebody scrapes."""

    def __init__(self, router: Router, instance: str) -> None:
        self._router = router
        self._instance = instance

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        labels = ("gateway", "pool")
        held = GaugeMetricFamily("tidegate_held_requests", "Requests waiting for a replica.", labels=labels)
        in_flight = GaugeMetricFamily("tidegate_in_flight_requests", "Requests on a replica now.", labels=labels)
        replicas = GaugeMetricFamily("tidegate_replicas", "Replicas by state.", labels=(*labels, "state"))
        by_class = GaugeMetricFamily(
            "tidegate_held_requests_of_class", "Requests of a class waiting for a replica.", labels=(*labels, "class")
        )
        model = (*labels, "model")
        slots = GaugeMetricFamily("tidegate_slots", "Requests of a model that its replicas may have.", labels=model)
        used = GaugeMetricFamily("tidegate_slots_used", "Requests of a model that its replicas have.", labels=model)
        ejected = GaugeMetricFamily(
            "tidegate_ejected_replicas", "Replicas left alone for their failures.", labels=labels
        )
        ejections = CounterMetricFamily("tidegate_ejections", "Times that a replica was ejected.", labels=labels)
        for name, pool in self._router.pools.items():
            for kind in RequestClass:
                count = pool.held_of(batch=kind is RequestClass.BATCH)
                by_class.add_metric((self._instance, name, kind.value), count)
            for of_model, (there, taken) in pool.slots().items():
                slots.add_metric((self._instance, name, of_model), there)
                used.add_metric((self._instance, name, of_model), taken)
            ejected.add_metric((self._instance, name), pool.health.ejected)
            ejections.add_metric((self._instance, name), pool.health.ejections_total)
            held.add_metric((self._instance, name), pool.held)
            in_flight.add_metric((self._instance, name), pool.in_flight)
            states = Tally(lease.state for lease in pool.replicas)
            for state in ReplicaState:
                replicas.add_metric((self._instance, name, state.value), states[state])
        reachable = GaugeMetricFamily(
            "tidegate_store_reachable", "1 while the store answers this instance.", labels=("gateway",)
        )
        reachable.add_metric((self._instance,), float(self._router.store_seen_at is not None))
        return [held, by_class, in_flight, slots, used, replicas, ejected, ejections, reachable]


class MetricsListener:
    """A small HTTP server for ``GET /metrics`` on the data plane's event loop."""

    #: Longest wait for a scraper's request. Seconds.
    _PATIENCE_SECONDS = 5.0

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> None:
        """Open the port. Raises OSError when it is taken."""
        self._server = await asyncio.start_server(self._serve, host, port, reuse_port=True, limit=16384)

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request per connection, which is what scrapers at intervals of seconds need."""
        try:
            async with asyncio.timeout(self._PATIENCE_SECONDS):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(self._answer(head.split(b"\r\n", 1)[0]))
                await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # a scraper that does not finish its request gets no answer
        finally:
            writer.close()

    def _answer(self, request_line: bytes) -> bytes:
        parts = request_line.split(b" ")
        if len(parts) != 3 or parts[0] not in (b"GET", b"HEAD"):
            return _response(405, "Method Not Allowed", b"Method Not Allowed\n")
        if parts[1].split(b"?", 1)[0] != b"/metrics":
            return _response(404, "Not Found", b"Not Found\n")
        body = self._telemetry.exposition()
        return _response(200, "OK", body, head_only=parts[0] == b"HEAD")


def _response(status: int, phrase: str, body: bytes, *, head_only: bool = False) -> bytes:
    content_type = "text/plain; version=0.0.4; charset=utf-8" if status == 200 else "text/plain"
    head = (
        f"HTTP/1.1 {status} {phrase}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode() + (b"" if head_only else body)
