"""Changes that need an answer, at a steady rate, and how long each waited for it. Called by ``bench``."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

import aiohttp

from benchmarks.operator.audit import LOADING, OPERATOR, AuditLog
from benchmarks.operator.populate import Http
from benchmarks.operator.template import Stamp, Template
from prodrl_operator.cluster.port import Object

_log = logging.getLogger(__name__)

WAIT_SECONDS = 15.0
"""After the last change."""
KINDS = ("servers", "edit", "servers", "edit", "job")
"""In turn: the stable policy's servers go or come back, a user edits the spec, the collect Job ends."""


@dataclass
class Load:
    """Chooses what changes next.

    Args:
        http: As the user whose requests are recorded.
        template: What the runs were stamped from.
    """

    http: Http
    template: Template
    gone: set[str] = field(default_factory=set)
    """Runs whose servers are not ready."""
    ended: set[str] = field(default_factory=set)
    """Runs whose collect Job ended; they train."""
    edits: int = 0
    committed: dict[str, float] = field(default_factory=dict)
    """resourceVersion -> when the change was answered."""
    seen: dict[str, float] = field(default_factory=dict)
    """resourceVersion -> when a bare watch had it: what the machine and the API server cost without an operator."""

    async def run(self, stamps: Sequence[Stamp], rate: float, seconds: float) -> None:
        """Each run in turn, so that two changes of one run are as far apart as can be."""
        order = random.sample(list(stamps), len(stamps))
        watch = asyncio.create_task(self.http.watch("/apis/apps/v1/deployments", self._see))
        await asyncio.sleep(WAIT_SECONDS / 3)  # it begins with what is there
        begin = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for index in range(round(rate * seconds)):
                await asyncio.sleep(max(begin + index / rate - time.monotonic(), 0))
                group.create_task(self._change(order[index % len(order)], KINDS[index % len(KINDS)]))
        await asyncio.sleep(WAIT_SECONDS)
        watch.cancel()

    def _see(self, obj: Object) -> None:
        self.seen[obj["metadata"]["resourceVersion"]] = time.monotonic()

    def floor(self) -> tuple[float, float]:
        """Median and 99th percentile of the bare watch; empties what was noted."""
        waits = sorted(self.seen[key] - done for key, done in self.committed.items() if key in self.seen)
        self.seen.clear()
        self.committed.clear()
        return _at(waits, 0.5), _at(waits, 0.99)

    async def _change(self, stamp: Stamp, kind: str) -> None:
        if kind == "job" and stamp.name in self.ended:
            kind = "edit"
        try:
            if kind == "servers":
                await self._servers(stamp)
            elif kind == "edit":
                self.edits += 1
                path = f"/apis/prodrl.dev/v1alpha1/namespaces/{stamp.namespace}/prodrlruns/{stamp.name}"
                await self.http.patch(path, {"spec": {"requests": {"retryToken": f"token-{self.edits}"}}})
            else:
                await self._job(stamp)
        except aiohttp.ClientError as exc:
            _log.warning("%s of %s: %s", kind, stamp.name, exc)

    async def _servers(self, stamp: Stamp) -> None:
        is_back = stamp.name in self.gone
        (self.gone.discard if is_back else self.gone.add)(stamp.name)
        ready = int(is_back)
        status = {"readyReplicas": ready, "availableReplicas": ready, "unavailableReplicas": 1 - ready}
        path = f"/apis/apps/v1/namespaces/{stamp.namespace}/deployments/{stamp.name}-r0000-serve/status"
        answer = await self.http.patch(path, {"status": status})
        self.committed[answer["resourceVersion"]] = time.monotonic()

    async def _job(self, stamp: Stamp) -> None:
        self.ended.add(stamp.name)
        job = f"{stamp.name}{self.template.collect_job}"
        pod = self.template.pod_of(job, stamp)
        path = f"/api/v1/namespaces/{stamp.namespace}/pods/{pod['metadata']['name']}/status"
        await self.http.patch(path, {"status": _ended(pod, self.template.collect_result)})
        now = _now()
        done = [
            {"type": kind, "status": "True", "reason": "CompletionsReached", "lastTransitionTime": now, "message": ""}
            for kind in ("SuccessCriteriaMet", "Complete")
        ]
        status = {"active": 0, "ready": 0, "succeeded": 1, "terminating": 0, "completionTime": now, "conditions": done}
        path = f"/apis/batch/v1/namespaces/{stamp.namespace}/jobs/{job}/status"
        await self.http.patch(path, {"status": status})


def _ended(pod: Object, message: str) -> Object:
    now = _now()
    ended = {"exitCode": 0, "reason": "Completed", "message": message, "startedAt": now, "finishedAt": now}
    containers = [
        {"name": c["name"], "image": c["image"], "imageID": "", "ready": False, "started": False, "restartCount": 0}
        | {"state": {"terminated": ended}}
        for c in pod["spec"]["containers"]
    ]
    return {"phase": "Succeeded", "containerStatuses": containers}


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass(frozen=True)
class Latencies:
    """Seconds from commit to the first request about that run."""

    changes: int
    unanswered: int
    p50: float
    p99: float
    longest: float


def latencies(log: AuditLog, stamps: Sequence[Stamp], begin: float, end: float) -> Latencies:
    """From the audit log alone; a change is unanswered when the next change of its run comes before any request."""
    answers: dict[str, list[float]] = defaultdict(list)
    changes: dict[str, list[float]] = defaultdict(list)
    wanted = {stamp.name for stamp in stamps}
    for request in log.of(OPERATOR, begin, end):
        run = _run_of(request.name)
        if run in wanted:
            answers[run].append(request.received)
    for request in log.of(LOADING, begin, end):
        if request.code < 300 and request.resource != "pods":  # the pod is half of a Job's end
            changes[_run_of(request.name)].append(request.answered)
    waits, unanswered = [], 0
    for run, times in changes.items():
        received = sorted(answers[run])
        for this, following in zip(times, [*times[1:], end], strict=True):
            first = next((moment for moment in received if moment > this), None)
            if first is None or first > following:
                unanswered += 1
            else:
                waits.append(first - this)
    waits.sort()
    return Latencies(len(waits) + unanswered, unanswered, _at(waits, 0.5), _at(waits, 0.99), _at(waits, 1.0))


def _at(ordered: Sequence[float], share: float) -> float:
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else float("nan")


def _run_of(name: str) -> str:
    return name[:9]  # run-00000
