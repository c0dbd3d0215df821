"""Metrics and health of the operator's process over HTTP. Called by ``process``; it only reads.

Gauges about runs are computed from their statuses when they are asked for: what is gone has no series left behind.
Label cardinality is by run. Names follow Prometheus' conventions; see docs/architecture.md for the table.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from prodrl_operator.cluster.port import Object
from prodrl_operator.controller import Controller
from prodrl_operator.errors import InvalidError
from prodrl_operator.rounds.times import parse

RUN_LABELS = ("namespace", "run")
CLIENT_SECONDS = 10
"""Whoever asks and then says nothing for so long is let go."""
BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)

Check = Callable[[], str]
"""The empty string when all is well, else what is not."""


Lister = Callable[[], Iterable[Object]]
"""All runs, as the cache knows them."""


@dataclass(frozen=True)
class Facts:
    """What the process says of itself."""

    is_leader: bool
    cache_objects: int
    requests: dict[str, int]
    """To the API server, by verb."""


Asking = Callable[[], Facts]


def metrics_of(controller: Controller, runs: Lister, facts: Asking) -> CollectorRegistry:
    """A registry with everything that can be asked for; the controller reports the length of its passes to it."""
    registry = CollectorRegistry()
    registry.register(_Runs(controller, runs, facts))
    durations = Histogram(
        "prodrl_reconcile_duration_seconds", "Length of one pass over one run.", registry=registry, buckets=BUCKETS
    )
    controller.on_pass = durations.observe
    return registry


class _Runs(Collector):
    def __init__(self, controller: Controller, runs: Lister, facts: Asking) -> None:
        self._controller, self._runs, self._facts = controller, runs, facts

    def collect(self) -> Iterable[Metric]:
        yield from self._of_process()
        yield from self._of_runs()

    def _of_process(self) -> Iterable[Metric]:
        passes = CounterMetricFamily("prodrl_reconcile", "Passes over runs by result.", labels=["result"])
        for result, count in dict(self._controller.results).items():
            passes.add_metric([result], count)
        yield passes
        yield GaugeMetricFamily("prodrl_queue_depth", "Runs that are due or wait.", len(self._controller.queue))
        last = self._controller.last_success
        yield GaugeMetricFamily(
            "prodrl_last_success_timestamp_seconds", "When a pass last succeeded.", last.timestamp() if last else 0.0
        )
        facts = self._facts()
        yield GaugeMetricFamily("prodrl_leader", "1 where this process acts.", float(facts.is_leader))
        yield GaugeMetricFamily("prodrl_cache_objects", "Objects known.", facts.cache_objects)
        requests = CounterMetricFamily("prodrl_api_requests", "Requests to the API server.", labels=["verb"])
        for verb, count in facts.requests.items():
            requests.add_metric([verb], count)
        yield requests
        verdicts = CounterMetricFamily("prodrl_gate_verdict", "Verdicts written.", labels=[*RUN_LABELS, "verdict"])
        for labels, count in dict(self._controller.verdicts).items():
            verdicts.add_metric(list(labels), count)
        yield verdicts

    def _of_runs(self) -> Iterable[Metric]:
        info = GaugeMetricFamily("prodrl_run_info", "Every run.", labels=[*RUN_LABELS, "model", "step"])
        ready = GaugeMetricFamily("prodrl_run_ready", "1 where Ready is True.", labels=RUN_LABELS)
        stalled = GaugeMetricFamily("prodrl_run_stalled", "1 where a person must decide.", labels=RUN_LABELS)
        stable = GaugeMetricFamily("prodrl_stable_round", "The round that users are served by.", labels=RUN_LABELS)
        current = GaugeMetricFamily("prodrl_current_round", "The round in work.", labels=RUN_LABELS)
        phase = GaugeMetricFamily(
            "prodrl_round_phase_seconds", "How long the current round has been in its step.", labels=RUN_LABELS
        )
        reward = GaugeMetricFamily("prodrl_reward_mean", "Mean reward of the newest dataset.", labels=RUN_LABELS)
        now = datetime.now(UTC)
        for run in self._runs():
            labels = [run["metadata"]["namespace"], run["metadata"]["name"]]
            status: Object = run.get("status") or {}
            conditions = {item["type"]: item["status"] for item in status.get("conditions", [])}
            step = status.get("currentRound") or {}
            info.add_metric([*labels, run["spec"]["model"]["servedName"], step.get("step", "")], 1)
            ready.add_metric(labels, float(conditions.get("Ready") == "True"))
            stalled.add_metric(labels, float(conditions.get("Stalled") == "True"))
            if "stable" in status:
                stable.add_metric(labels, status["stable"]["round"])
            if "number" in step:
                current.add_metric(labels, step["number"])
            if step.get("since"):
                phase.add_metric(labels, max((now - parse(step["since"])).total_seconds(), 0.0))
            if status.get("reward"):
                reward.add_metric(labels, float(status["reward"]))
        return (info, ready, stalled, stable, current, phase, reward)


class Server:
    """Answers ``/metrics``, ``/healthz`` (alive: restart me otherwise) and ``/readyz`` (the watches are synced).

    Args:
        listen: ``HOST:PORT``, an IPv6 host in brackets; ``[::]`` is every address of both families; port 0 takes any
            free one.
        registry: The metrics.
        checks: Path to its check.

    Raises:
        InvalidError: The address cannot be taken.
    """

    def __init__(self, listen: str, registry: CollectorRegistry, checks: dict[str, Check]) -> None:
        try:
            self._server = _taken(listen, _handler(registry, checks))
        except (OSError, ValueError, OverflowError) as exc:
            raise InvalidError(f"--listen: cannot be taken, got {listen!r} ({exc}); use HOST:PORT") from exc
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, name="http", daemon=True)

    def start(self) -> None:
        """Answer from a thread of its own."""
        self._thread.start()

    def stop(self) -> None:
        """Stop answering."""
        self._server.shutdown()
        self._server.server_close()


class _Server6(ThreadingHTTPServer):
    """Hears both families where the address is that of all."""

    address_family = socket.AF_INET6

    def server_bind(self) -> None:
        self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()


def _taken(listen: str, handler: type[BaseHTTPRequestHandler]) -> ThreadingHTTPServer:
    host, _, number = listen.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if host in ("", "::") and not _has_ipv6():
        host = "0.0.0.0"  # noqa: S104
    return (_Server6 if ":" in host or not host else ThreadingHTTPServer)((host or "::", int(number)), handler)


def _has_ipv6() -> bool:
    """A kernel may know it and have it turned off."""
    try:
        with socket.socket(socket.AF_INET6) as tried:
            tried.bind(("::", 0))
    except OSError:
        return False
    return True


def _handler(registry: CollectorRegistry, checks: dict[str, Check]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = CLIENT_SECONDS

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path == "/metrics":
                self._answer(200, generate_latest(registry), CONTENT_TYPE_LATEST)
            elif path in checks:
                fault = checks[path]()
                self._answer(503 if fault else 200, (fault or "ok").encode() + b"\n", "text/plain; charset=utf-8")
            else:
                self._answer(404, b"not found; ask for /metrics, /healthz or /readyz\n", "text/plain; charset=utf-8")

        def _answer(self, code: int, body: bytes, content_type: str) -> None:
            self.send_response(code)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Probes are not news."""

    return Handler
