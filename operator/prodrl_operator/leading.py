"""Who of several operators acts: a Lease, judged by locally observed time. Called by ``process``.

Nobody's clock is compared with another's. A holder is alive while its record changes; a record that has not changed
for its duration, counted here from when it was first seen so, is free. The Lease keeps two operators from working
against each other; that two never harm is the doing of names, resourceVersions and UIDs. The gateways' routes have no
such fence: the controller asks whether it still leads right before it pushes them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any

from prodrl_operator.cluster import port
from prodrl_operator.cluster.kubernetes import KubernetesCluster
from prodrl_operator.cluster.port import Object
from prodrl_operator.controller import now_utc
from prodrl_operator.errors import OperatorError

_log = logging.getLogger(__name__)

DURATION_SECONDS = 15
"""Others may take over a record that has not changed for so long."""
DEADLINE_SECONDS = 10.0
"""A leader that could not renew for so long stops acting: before others may begin."""
RETRY_SECONDS = 2.0
CHECK_SECONDS = 0.2


class Elector:
    """Takes, keeps and gives back one Lease.

    Args:
        cluster: The API server.
        namespace: Of the Lease.
        name: Of the Lease.
        identity: Ours; unique to this process.
        monotonic: Seconds that only go forward.
        clock: The time that is written for people to read; nobody judges by it.
    """

    def __init__(
        self,
        cluster: KubernetesCluster,
        namespace: str,
        name: str,
        identity: str,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        clock: Callable[[], datetime] = now_utc,
    ) -> None:
        self._cluster = cluster
        self._namespace, self._name, self._identity = namespace, name, identity
        self._monotonic, self._clock = monotonic, clock
        self._seen: tuple[Any, ...] | None = None
        self._seen_at = 0.0
        self._renewed_at: float | None = None
        self._is_holder = False

    @property
    def is_leading(self) -> bool:
        """Whether the Lease is ours and was renewed in time; a request that hangs does not hold this up."""
        renewed = self._renewed_at
        return self._is_holder and renewed is not None and self._monotonic() - renewed <= DEADLINE_SECONDS

    def run(self, stop: threading.Event, on_elected: Callable[[], None]) -> None:
        """Block until elected, call ``on_elected``, and block until the Lease is lost or ``stop`` is set."""
        ended = threading.Event()
        looking = threading.Thread(target=self._look_until, args=(ended,), name="lease-looking", daemon=True)
        looking.start()
        was_leading = False
        try:
            while looking.is_alive() and not stop.wait(CHECK_SECONDS):
                is_leading = self.is_leading
                if is_leading and not was_leading:
                    _log.info("Lease %s/%s: %s leads", self._namespace, self._name, self._identity)
                    on_elected()
                if was_leading and not is_leading:
                    _log.error("Lease %s/%s: lost by %s", self._namespace, self._name, self._identity)
                    return
                was_leading = is_leading
        finally:
            ended.set()
            looking.join(RETRY_SECONDS)  # a look under way could take again what is given back next

    def _look_until(self, ended: threading.Event) -> None:
        while not ended.is_set():
            self.look()
            ended.wait(RETRY_SECONDS)

    def look(self) -> None:
        """One try to take or to keep it."""
        before = self._monotonic()
        try:
            self._is_holder = self._try(before)
        except OperatorError as exc:
            _log.warning("Lease %s/%s: %s", self._namespace, self._name, exc)

    def _try(self, before: float) -> bool:
        lease = self._cluster.get(port.LEASE, self._namespace, self._name)
        if lease is None:
            self._cluster.create(self._record({"metadata": {"name": self._name, "namespace": self._namespace}}, 0))
            self._renewed_at = before
            return True
        spec = lease.get("spec", {})
        record = (spec.get("holderIdentity"), spec.get("renewTime"), lease["metadata"]["resourceVersion"])
        if record != self._seen:
            # From when the answer was here: it may have been on its way for long.
            self._seen, self._seen_at = record, self._monotonic()
        holder = spec.get("holderIdentity") or ""
        duration = float(spec.get("leaseDurationSeconds") or DURATION_SECONDS)
        if holder not in ("", self._identity) and before - self._seen_at <= duration:
            return False
        transitions = int(spec.get("leaseTransitions") or 0) + (holder != self._identity)
        self._cluster.replace(self._record(lease, transitions))
        self._renewed_at = before
        return True

    def _record(self, lease: Object, transitions: int) -> Object:
        now = self._clock().isoformat(timespec="microseconds").replace("+00:00", "Z")
        is_renewal = lease.get("spec", {}).get("holderIdentity") == self._identity
        return {
            "apiVersion": port.LEASE.api_version,
            "kind": port.LEASE.kind,
            "metadata": lease["metadata"],
            "spec": {
                "holderIdentity": self._identity,
                "leaseDurationSeconds": DURATION_SECONDS,
                "acquireTime": lease["spec"]["acquireTime"] if is_renewal else now,
                "renewTime": now,
                "leaseTransitions": transitions,
            },
        }

    def give_back(self) -> None:
        """Let the next one begin at once; to be called when nothing of ours acts any more."""
        if not self.is_leading:
            return
        self._is_holder = False
        try:
            lease = self._cluster.get(port.LEASE, self._namespace, self._name)
            if lease is not None and lease["spec"].get("holderIdentity") == self._identity:
                self._cluster.replace({**lease, "spec": {**lease["spec"], "holderIdentity": ""}})
        except OperatorError as exc:
            _log.info("Lease %s/%s: not given back, %s", self._namespace, self._name, exc)
