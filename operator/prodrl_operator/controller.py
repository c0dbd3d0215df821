"""The controller: observe, decide, act, one status write, then events. Called by ``handlers`` and by the local session.

Level-based: every pass reads everything and derives everything; a watch only says where to look. A pass carries out
at most one mutation of children and then writes statuses, the round's before the run's, each under its
resourceVersion. A crash between any two of these calls converges, because only stored statuses lead to acts.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from pydantic import ValidationError

from prodrl_operator import builders, names
from prodrl_operator.acting import Actor, HinderedError, NotYetError
from prodrl_operator.api.run import Run, RunStatus
from prodrl_operator.builders import Platform
from prodrl_operator.cluster import port
from prodrl_operator.cluster.port import Object, Watched, WatchEvent
from prodrl_operator.errors import (
    AlreadyExistsError,
    ConflictError,
    ForbiddenError,
    NotFoundError,
    OperatorError,
    UnreadableError,
)
from prodrl_operator.gateway_admin import GatewayAdmin, HttpGatewayAdmin
from prodrl_operator.names import Reason
from prodrl_operator.observing import Observer, Snapshot
from prodrl_operator.queueing import Key, WorkQueue
from prodrl_operator.rounds import Decision, decide, starting, times
from prodrl_operator.rounds.decision import Note

_log = logging.getLogger(__name__)

RESYNC_SECONDS = 60.0
RESYNC_RETRY_SECONDS = 2.0
NOT_YET_SECONDS = 2.0
HINDERED_SECONDS = 30.0
CONFLICT_SECONDS = 0.05
LONGEST_BACKOFF_SECONDS = 60.0
EVENT_MESSAGE = 1024


def now_utc() -> datetime:
    """The wall clock."""
    return datetime.now(UTC)


class Controller:
    """Keeps all runs of a cluster, or of one namespace, turning.

    Args:
        cluster: The port.
        platform: What differs between clusters.
        clock: The time that deadlines are judged by.
        gateway_admin: The gateways' admin port.
        namespace: Only this one; None: all.
        resync_seconds: Every run is looked at so often, whatever the watches say.
    """

    def __init__(
        self,
        cluster: Watched,
        platform: Platform,
        *,
        clock: Callable[[], datetime] = now_utc,
        gateway_admin: GatewayAdmin | None = None,
        namespace: str | None = None,
        resync_seconds: float = RESYNC_SECONDS,
    ) -> None:
        self._cluster = cluster
        self._clock = clock
        self._namespace = namespace
        self._resync_seconds = resync_seconds
        self._admin: GatewayAdmin = gateway_admin or HttpGatewayAdmin()
        self._observer = Observer(cluster, self._admin)
        self._actor = Actor(cluster, platform)
        self._failures: Counter[Key] = Counter()
        self._begun: dict[Key, float] = {}
        self._has_looked = False
        self.queue = WorkQueue()
        self.results: Counter[str] = Counter()
        """Passes by result: ok, conflict, error; and resync_error."""
        self.last_success: datetime | None = None
        """For health checks."""
        self.verdicts: Counter[tuple[str, str, str]] = Counter()
        """Verdicts written, by namespace, run and verdict; of runs that exist."""
        self.on_pass: Callable[[float], object] = lambda _: None
        """Told the length of every pass in seconds."""
        self.may_act: Callable[[], bool] = lambda: True
        """Asked before each act: who lost the Lease in the middle of a pass must not tell the gateways old news."""

    # One pass.

    def reconcile(self, namespace: str, name: str) -> float | None:
        """One pass over one run. Returns the seconds after which it wants another; None: when something changes."""
        raw = self._cluster.get(port.RUN, namespace, name)
        if raw is None:
            self._forget(namespace, name)
            return None
        now = self._clock()
        try:
            parts = {"metadata": raw["metadata"], "spec": raw["spec"], "status": raw.get("status") or {}}
            run = Run.model_validate(parts)
        except ValidationError as exc:
            self._refuse(raw, _faults(exc), now)
            return None
        try:
            snapshot = self._observer.observe(run, raw, now)
        except UnreadableError as exc:
            self._refuse(raw, [str(exc)], now)
            return None
        decision = decide(snapshot.observed, now)
        self._push_routes(snapshot, decision)
        if not self.may_act():
            return None
        return self._carry_out(snapshot, decision, now)

    def _carry_out(self, snapshot: Snapshot, decision: Decision, now: datetime) -> float | None:
        requeue = decision.requeue_after_seconds
        try:
            if self._actor.act(snapshot, decision.intents):
                requeue = 0.0
        except NotYetError as exc:
            _log.info("%s", exc)
            requeue = NOT_YET_SECONDS
        except HinderedError as exc:
            if "deletionTimestamp" in snapshot.observed.run.metadata:
                raise
            observed = dataclasses.replace(snapshot.observed, hindrance=exc.hindrance)
            decision = dataclasses.replace(decide(observed, now), intents=())
            requeue = HINDERED_SECONDS
        self._write(snapshot, decision)
        self._emit(snapshot, decision.events, now)
        return requeue

    def _refuse(self, raw: Object, faults: list[str], now: datetime) -> None:
        """A run, or a round of it, that cannot even be read: nothing is done but to let it go when it is deleted."""
        metadata = raw["metadata"]
        held = metadata.get("finalizers", [])
        if "deletionTimestamp" in metadata and names.FINALIZER in held:
            self._cluster.set_finalizers(raw, [item for item in held if item != names.FINALIZER])
            return
        status = RunStatus.model_validate(raw.get("status") or {})
        self._write_run(raw, status, starting.invalid(status, metadata.get("generation"), faults, now))

    def _push_routes(self, snapshot: Snapshot, decision: Decision) -> None:
        """Idempotent, and no mutation of the cluster: every replica that applied something else gets the table."""
        if decision.routes is None:
            return
        table = builders.route_table(decision.routes)
        for replica in snapshot.observed.replicas:
            if replica.reachable and replica.version != table.version and self.may_act():
                self._admin.push(replica.url, table)

    def _write(self, snapshot: Snapshot, decision: Decision) -> None:
        """The round first: what the run says is derived from it once more if the second write never happens."""
        if decision.round_number is not None and decision.round_status is not None:
            raw = snapshot.rounds[decision.round_number]
            self._cluster.update_status({**raw, "status": _dump(decision.round_status)})
        raw = snapshot.run
        if any(type(intent).__name__ in ("AddFinalizer", "RemoveFinalizer") for intent in decision.intents):
            return  # the object that was read is not the present one any more
        self._write_run(raw, snapshot.observed.run.status, decision.run_status)

    def _write_run(self, raw: Object, old: RunStatus, new: RunStatus) -> None:
        if new == old:
            return
        self._cluster.update_status({**raw, "status": _dump(new)})
        if new.last_gate is not None and new.last_gate != old.last_gate:
            metadata = raw["metadata"]
            self.verdicts[metadata["namespace"], metadata["name"], new.last_gate.verdict] += 1

    def _forget(self, namespace: str, name: str) -> None:
        """A run that is gone is counted no more."""
        for counted in tuple(self.verdicts):
            if counted[:2] == (namespace, name):
                del self.verdicts[counted]

    # Events.

    def _emit(self, snapshot: Snapshot, notes: tuple[Note, ...], now: datetime) -> None:
        for note in notes:
            targets = [snapshot.run]
            if note.number is not None and note.number in snapshot.rounds:
                targets.append(snapshot.rounds[note.number])
            for target in targets:
                try:
                    self._cluster.create(_event(target, note, now))
                except AlreadyExistsError:
                    continue
                except OperatorError as exc:
                    # Status is the source of truth; an event that is lost is lost.
                    _log.warning("Event %s of %s: %s", note.reason, target["metadata"]["name"], exc)

    # The loop.

    def run_forever(self, stop: threading.Event, workers: int = 1) -> None:
        """Work until ``stop`` is set, and until the passes under way have ended. Blocks.

        Args:
            stop: Ends it.
            workers: Runs that are worked on at the same time; none is twice.
        """
        unwatch = self._cluster.watch(self._hint)
        closer = threading.Thread(target=self._close_after, args=(stop,), name="controller-stop", daemon=True)
        resync = threading.Thread(target=self._resync_until, args=(stop,), name="controller-resync", daemon=True)
        others = [
            threading.Thread(target=self._work_until, args=(stop,), name=f"controller-{number}", daemon=True)
            for number in range(1, workers)
        ]
        for thread in (closer, resync, *others):
            thread.start()
        try:
            self._work_until(stop)
        finally:
            unwatch()
        for thread in others:
            thread.join()

    def _work_until(self, stop: threading.Event) -> None:
        while not stop.is_set():
            key = self.queue.get()
            if key is not None:
                self.work(key)

    def _close_after(self, stop: threading.Event) -> None:
        stop.wait()
        self.queue.close()

    def work(self, key: Key) -> None:
        """One pass, with whatever went wrong turned into a delay: the edge where faults are logged and counted."""
        delay: float | None
        begin = self._begun[key] = time.monotonic()
        try:
            delay = self.reconcile(*key)
            self.results["ok"] += 1
            self.last_success = self._clock()
            self._failures.pop(key, None)
        except (ConflictError, NotFoundError) as exc:
            _log.debug("%s/%s: %s", *key, exc)
            self.results["conflict"] += 1
            self._failures[key] += 1
            # Soon, but where reads stay old not without a pause: 3 s at most.
            delay = CONFLICT_SECONDS * 2.0 ** min(self._failures[key] - 1, 6)
        except Exception as exc:
            self.results["error"] += 1
            self._failures[key] += 1
            delay = min(2.0 ** min(self._failures[key] - 1, 10), LONGEST_BACKOFF_SECONDS)
            known = isinstance(exc, OperatorError)
            _log.error("%s/%s: %s; trying again in %g s", *key, exc, delay, exc_info=None if known else exc)
        self._begun.pop(key, None)
        self.on_pass(time.monotonic() - begin)
        self.queue.done(key)
        if delay is not None:
            self.queue.add(key, delay)

    def longest_seconds(self) -> float:
        """Since when the oldest pass under way is under way; 0: there is none."""
        return max((time.monotonic() - begin for begin in tuple(self._begun.values())), default=0.0)

    def resync(self) -> None:
        """Make every run due: what a watch missed is found here. At first at once, then spread until the next time."""
        try:
            self._cluster.renew()
        except ForbiddenError:
            self._make_due()  # what may not be listed in one namespace must not keep the runs of the others waiting
            raise
        self._make_due()

    def _make_due(self) -> None:
        runs = self._cluster.list(port.RUN, self._namespace)
        pause = self._resync_seconds / len(runs) if self._has_looked and runs else 0.0
        for index, raw in enumerate(runs):
            self.queue.add((raw["metadata"]["namespace"], raw["metadata"]["name"]), index * pause, is_routine=True)
        self._has_looked = True

    def _resync_until(self, stop: threading.Event) -> None:
        delay = 0.0
        while not stop.wait(delay):
            try:
                self.resync()
                delay = self._resync_seconds
            except Exception as exc:
                self.results["resync_error"] += 1
                is_lasting = isinstance(exc, ForbiddenError)  # until somebody grants it
                delay = self._resync_seconds if is_lasting else min(self._resync_seconds, RESYNC_RETRY_SECONDS)
                known = isinstance(exc, OperatorError)
                _log.error("resync: %s; trying again in %g s", exc, delay, exc_info=None if known else exc)

    def _hint(self, event: WatchEvent) -> None:
        metadata: dict[str, Any] = event.object.get("metadata", {})
        is_run = event.object.get("kind") == port.RUN.kind
        name = metadata.get("name") if is_run else metadata.get("labels", {}).get(names.LABEL_RUN)
        namespace = metadata.get("namespace", "default")
        if name and self._namespace in (None, namespace):
            self.queue.add((namespace, name))


def _faults(exc: ValidationError) -> list[str]:
    return [f"{'.'.join(str(part) for part in e['loc'])}: {e['msg']}" for e in exc.errors()]


def _dump(status: Any) -> dict[str, Any]:
    dumped: dict[str, Any] = status.model_dump(mode="json", by_alias=True, exclude_none=True)
    return dumped


def _event(target: Object, note: Note, now: datetime) -> Object:
    """An event whose name is a function of the transition: the same transition decided twice is one event."""
    metadata = target["metadata"]
    identity = f"{metadata['uid']}/{note.reason}/{note.number}/{note.key}"
    suffix = hashlib.sha256(identity.encode()).hexdigest()[:12]
    stamp = times.stamp(now)
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{metadata['name']}.{suffix}", "namespace": metadata["namespace"]},
        "involvedObject": {
            "apiVersion": target["apiVersion"],
            "kind": target["kind"],
            "name": metadata["name"],
            "namespace": metadata["namespace"],
            "uid": metadata["uid"],
        },
        "reason": str(note.reason.value if isinstance(note.reason, Reason) else note.reason),
        "message": note.message[:EVENT_MESSAGE],
        "type": note.type,
        "firstTimestamp": stamp,
        "lastTimestamp": stamp,
        "count": 1,
        "source": {"component": names.MANAGED_BY},
        "reportingComponent": names.MANAGED_BY,
        "reportingInstance": names.MANAGED_BY,
    }
