"""The operator as a process on a cluster: client, cache, watches, Lease, controller, HTTP. Called by ``cli``.

Watches and cache run on every replica, so that one that takes over is warm; only the holder of the Lease acts. A
process that lost the Lease, or whose watches kopf could not go on with, ends: a fresh one is the cheapest cure.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime

from prodrl_operator import handlers
from prodrl_operator.builders import Platform
from prodrl_operator.cluster import port
from prodrl_operator.cluster.caching import LISTED, OURS, WATCHED, CachedCluster
from prodrl_operator.cluster.kubernetes import KubernetesCluster
from prodrl_operator.cluster.port import Kind
from prodrl_operator.controller import RESYNC_RETRY_SECONDS, Controller, now_utc
from prodrl_operator.errors import ClusterUnavailableError, ForbiddenError, OperatorError
from prodrl_operator.gateway_admin import GatewayAdmin
from prodrl_operator.leading import Elector
from prodrl_operator.serve import Facts, Server, metrics_of

_log = logging.getLogger(__name__)

EVERY_RUN_SECONDS = 300.0
"""Each run is looked at so often though nothing changed; changes that watches missed are found by the resync."""
SILENT_RESYNCS = 4
"""Resyncs that may be missed before the process calls itself dead."""
STUCK_SECONDS = 900.0
"""Longer than a pass whose every request runs into its time limit."""
LEASE_CONNECT_SECONDS, LEASE_READ_SECONDS = 1.0, 3.0
FRESH_SECONDS = 5.0
"""A new leader looks at everything once more, unless that is so short a time ago."""
STOP_SECONDS = 20.0


def _leave(*_: object) -> None:
    raise SystemExit(0)


@dataclass(frozen=True)
class Options:
    """What the command line says."""

    platform: Platform
    namespaces: tuple[str, ...] | None = None
    """Those whose runs are turned; None: all."""
    workers: int = 8
    """Runs that are worked on at the same time; a pass waits for the API server and for gateways most of its time."""
    resync_seconds: float = 60.0
    listen: str = "[::]:8080"
    lease_namespace: str = "default"
    lease_name: str = "prodrl-operator"


class Process:
    """Everything that one operator process is made of.

    Args:
        cluster: The API server.
        options: The command line.
        gateway_admin: The gateways' admin ports.
        clock: The time that deadlines are judged by.
    """

    def __init__(
        self,
        cluster: KubernetesCluster,
        options: Options,
        *,
        gateway_admin: GatewayAdmin | None = None,
        clock: Callable[[], datetime] = now_utc,
    ) -> None:
        self._options = options
        self._cluster = cluster
        self.cached = CachedCluster(cluster, options.namespaces)
        self.controller = Controller(
            self.cached, options.platform, clock=clock, gateway_admin=gateway_admin, resync_seconds=EVERY_RUN_SECONDS
        )
        self.controller.may_act = lambda: self.elector.is_leading
        # Pod name and a part of our own: a container that starts again in its pod is another process.
        identity = f"{os.environ.get('POD_NAME') or socket.gethostname()}_{uuid.uuid4().hex[:8]}"
        # One request that hangs must not cost the Lease: there is time for another before the deadline.
        hurried = cluster.hurried(LEASE_CONNECT_SECONDS, LEASE_READ_SECONDS)
        self.elector = Elector(hurried, options.lease_namespace, options.lease_name, identity, clock=clock)
        handlers.connection_info(cluster.api.configuration)  # what the watches could not use is said now
        self._namespaces = options.namespaces
        self._stop = threading.Event()
        self._has_failed = threading.Event()
        self._looked_at = time.monotonic()
        self._renewed_at: float | None = None
        """When the last resync that ended well began."""
        registry = metrics_of(self.controller, lambda: self.cached.list(port.RUN), self._facts)
        self.server = Server(options.listen, registry, {"/healthz": self._is_alive, "/readyz": self._is_ready})

    def run(self) -> int:
        """Block until a signal, or until it cannot go on. Returns the exit code."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, _leave)  # until kopf takes over; a container's first process has no default
        self.server.start()
        threads: list[threading.Thread] = []
        try:
            self._await_kinds()
            threads.append(self._thread("renew", self._keep_renewing))
            threads.append(self._thread("lease", lambda: self.elector.run(self._stop, lambda: self._elected(threads))))
            self._await_first_look()
            handlers.watch_forever(self.cached, self._cluster.api.configuration, self._namespaces, self._stop)
        finally:
            self._stop.set()
            if self._has_ended(threads):
                self.elector.give_back()
            self.server.stop()
        return 1 if self._has_failed.is_set() else 0

    def _has_ended(self, threads: list[threading.Thread]) -> bool:
        """Wait for what is under way, all of it together not for long; one that still acts keeps the Lease."""
        deadline = time.monotonic() + STOP_SECONDS
        for thread in list(threads):
            thread.join(max(deadline - time.monotonic(), 0.0))
        return not any(thread.is_alive() for thread in threads)

    def stop(self) -> None:
        """End as after a signal."""
        self._stop.set()

    # Threads. One that ends early ends the process.

    def _thread(self, name: str, body: Callable[[], None]) -> threading.Thread:
        def guarded() -> None:
            try:
                body()
            except Exception:
                _log.exception("%s: ended by a fault; the process ends too", name)
            if not self._stop.is_set():
                self._has_failed.set()
                self._stop.set()

        thread = threading.Thread(target=guarded, name=name, daemon=True)
        thread.start()
        return thread

    def _elected(self, threads: list[threading.Thread]) -> None:
        threads.append(self._thread("controller", self._act))

    def _act(self) -> None:
        while not self.cached.is_synced.wait(0.2):
            if self._stop.is_set():
                return
        renewed = self._renewed_at
        if renewed is None or time.monotonic() - renewed > FRESH_SECONDS:
            try:
                self.cached.renew()  # what is not watched may have changed since the last leader acted
            except OperatorError as exc:
                _log.error("resync: %s", exc)
        self.controller.run_forever(self._stop, self._options.workers)

    def _keep_renewing(self) -> None:
        delay = 0.0
        while not self._stop.wait(delay):
            begin = time.monotonic()
            try:
                self.cached.renew()
                self._renewed_at = begin
                delay = self._options.resync_seconds
            except OperatorError as exc:
                is_lasting = isinstance(exc, ForbiddenError)  # until somebody grants it
                delay = self._options.resync_seconds if is_lasting else RESYNC_RETRY_SECONDS
                _log.error("resync: %s; trying again in %g s", exc, delay)
            self._looked_at = time.monotonic()

    def _await_kinds(self) -> None:
        """Watches would see nothing where the CRDs are not there yet; say what is missing, and wait."""
        said = ""
        while not self._stop.is_set():
            try:
                self._namespaces = self._readable()
                self.cached.limit(self._namespaces)
                return
            except ClusterUnavailableError as exc:
                if str(exc) != said:
                    said = str(exc)
                    _log.warning(
                        "waiting for the API server and our CRDs (kubectl apply --server-side -f crds/): %s", exc
                    )
                self._looked_at = time.monotonic()
                time.sleep(2.0)

    def _readable(self) -> tuple[str, ...] | None:
        """The namespaces that we may look at: one whose Role lacks something must not keep the others waiting."""
        if self._options.namespaces is None:
            self._look_at(None, (port.RUN, port.ROUND))
            return None
        found, refusal = [], None
        for namespace in self._options.namespaces:
            try:
                self._look_at(namespace, (*WATCHED, *LISTED))
                found.append(namespace)
            except ForbiddenError as exc:
                refusal = exc
                _log.error("namespace %s: left out until this process starts again, %s", namespace, exc)
        if refusal is not None and not found:
            raise refusal
        return tuple(found)

    def _look_at(self, namespace: str | None, kinds: Iterable[Kind]) -> None:
        for kind in kinds:
            self._cluster.list_metadata(kind, namespace, None if kind is port.RUN else OURS)

    def _await_first_look(self) -> None:
        """The watches begin with lists of their own; one after the other, the two need half the memory."""
        while not (self.cached.is_synced.is_set() or self._stop.is_set()):
            time.sleep(0.1)
        # A full collection waits until a quarter of what lives is new: with the cache in the count, until far too late
        # for the cycles of tasks and events that the watches leave behind. The cache itself holds none.
        gc.collect()
        gc.freeze()

    # Looking.

    def _facts(self) -> Facts:
        return Facts(self.elector.is_leading, len(self.cached), dict(self._cluster.calls))

    def _is_alive(self) -> str:
        silent = time.monotonic() - self._looked_at
        limit = self._options.resync_seconds * SILENT_RESYNCS + 60
        if silent > limit:
            return f"no resync was tried for {silent:.0f} s"
        longest = self.controller.longest_seconds()
        return f"a pass has been under way for {longest:.0f} s" if longest > STUCK_SECONDS else ""

    def _is_ready(self) -> str:
        return "" if self.cached.is_synced.is_set() else "the cache is not synced yet"
