"""One size: make it, start the operator, let it idle, load it, let gateways die, kill it. Called by the command."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.support.apiserver import ApiServer, running

from benchmarks.operator import audit
from benchmarks.operator.audit import LOADING, OPERATOR, POPULATING, AuditLog
from benchmarks.operator.gateways import Gateways
from benchmarks.operator.load import Load, latencies
from benchmarks.operator.populate import Http, populate, stamps
from benchmarks.operator.subject import Subject
from benchmarks.operator.template import Stamp, Template

_log = logging.getLogger(__name__)

ETCD_BYTES = str(8 * 1024**3)


@dataclass(frozen=True)
class Plan:
    """What is measured, and for how long."""

    namespaces: int = 50
    idle_seconds: float = 90.0
    rate: float = 20.0
    load_seconds: float = 45.0
    silent_share: float = 0.1
    """Of the gateways, in the second load."""


@dataclass
class Bench:
    """One size.

    Args:
        runs: How many.
        plan: What is done with them.
        log: Where the operator's log goes.
    """

    runs: int
    plan: Plan
    log: Path
    figures: dict[str, Any] = field(default_factory=dict)

    def measure(self) -> dict[str, Any]:
        """All of it; blocks for minutes."""
        folder = Path(tempfile.mkdtemp(prefix="prodrl-bench-"))
        os.environ["ETCD_QUOTA_BACKEND_BYTES"] = ETCD_BYTES
        (folder / "policy.yaml").write_text(audit.policy())
        arguments = [
            "--audit-policy-file",
            "policy.yaml",
            "--audit-log-path",
            "audit.log",
            "--audit-log-maxsize",
            "9999",
        ]
        users = {POPULATING: "system:masters", LOADING: "system:masters", OPERATOR: "system:masters"}
        wanted, template, gateways = stamps(self.runs, min(self.plan.namespaces, self.runs)), Template(), Gateways()
        gateways.start({stamp.pod_address: template.version(stamp) for stamp in wanted})
        try:
            with running(folder, tuple(arguments), controllers=False, tokens=users) as server:
                self._measure(server, gateways, template, wanted)
        finally:
            gateways.stop()
            shutil.rmtree(folder, ignore_errors=True)
        return self.figures

    def _measure(self, server: ApiServer, gateways: Gateways, template: Template, wanted: list[Stamp]) -> None:
        begin = time.monotonic()
        asyncio.run(self._populate(server, template, wanted))
        self._note("runs", self.runs)
        self._note("objects", self.runs * template.size)
        self._note("made_in_seconds", time.monotonic() - begin)
        log = AuditLog(server.folder / "audit.log")
        kubeconfig = server.kubeconfig_of(OPERATOR)
        subject = Subject(kubeconfig, self.log)
        try:
            self._start(subject, log, "start", begin=0.0)
            self._idle(subject, log)
            load = Load(Http(server.url, _certificate(server), LOADING), template)
            self._load(subject, log, load, wanted, "load")
            dead = wanted[:: max(round(1 / self.plan.silent_share), 1)]
            gateways.silent |= {stamp.pod_address for stamp in dead}
            others = [stamp for stamp in wanted if stamp not in set(dead)]
            self._touch(server, dead)
            self._load(subject, log, load, others, "silent")
            gateways.silent.clear()
            subject.kill()
            begin = time.time()
            subject = Subject(kubeconfig, self.log)
            self._start(subject, log, "restart", begin)
            subject.stop()
        finally:
            if subject.process.poll() is None:
                subject.kill()

    async def _populate(self, server: ApiServer, template: Template, wanted: list[Stamp]) -> None:
        async with Http(server.url, _certificate(server), POPULATING) as http:
            await populate(http, template, wanted)

    def _start(self, subject: Subject, log: AuditLog, name: str, begin: float) -> None:
        self._note(f"{name}_synced_seconds", subject.until_synced())
        self._note(f"{name}_looked_seconds", subject.until_looked(self.runs))
        log.read()
        requests = log.of(OPERATOR, begin, time.time())
        self._note(f"{name}_requests", len(requests))
        changing = [r for r in requests if r.verb not in audit.READING and r.resource != "leases"]
        self._note(f"{name}_changes", audit.by_kind(changing))
        weight = subject.weight()
        self._note(f"{name}_cpu_seconds", weight.cpu_seconds)
        self._note(f"{name}_rss_mib", weight.resident_mib)
        self._note(f"{name}_highest_rss_mib", weight.highest_mib)

    def _idle(self, subject: Subject, log: AuditLog) -> None:
        before, begin, told = subject.weight(), time.time(), _told(subject)
        time.sleep(self.plan.idle_seconds)
        after, end = subject.weight(), time.time()
        told = _told(subject) - told
        log.read()
        requests, minutes = log.of(OPERATOR, begin, end), (end - begin) / 60
        self._note("idle_requests_per_run_minute", len(requests) / self.runs / minutes)
        self._note("idle_told_per_run_minute", told / self.runs / minutes)
        self._note("idle_watches_per_minute", log.watches(begin, end) / minutes)
        self._note("idle_by_kind", audit.by_kind(requests))
        self._note("idle_cpu_seconds_per_minute", (after.cpu_seconds - before.cpu_seconds) / minutes)
        self._note("idle_rss_mib", after.resident_mib)

    def _load(self, subject: Subject, log: AuditLog, load: Load, wanted: list[Stamp], name: str) -> None:
        before, begin, passes = subject.weight(), time.time(), _passes(subject)
        asyncio.run(self._loading(load, wanted))
        after, end = subject.weight(), time.time()
        log.read()
        found = latencies(log, wanted, begin, end)
        for key, value in asdict(found).items():
            self._note(f"{name}_{key}", value)
        floor = load.floor()
        self._note(f"{name}_bare_watch_p50", floor[0])
        self._note(f"{name}_bare_watch_p99", floor[1])
        requests = log.of(OPERATOR, begin, end)
        self._note(f"{name}_requests_per_change", len(requests) / max(found.changes, 1))
        self._note(f"{name}_by_kind", audit.by_kind(requests))
        seconds = end - begin
        self._note(f"{name}_cpu_share", (after.cpu_seconds - before.cpu_seconds) / seconds)
        self._note(f"{name}_rss_mib", after.resident_mib)
        self._note(f"{name}_highest_rss_mib", after.highest_mib)
        count, spent = (new - old for new, old in zip(_passes(subject), passes, strict=True))
        self._note(f"{name}_passes_per_change", count / max(found.changes, 1))
        self._note(f"{name}_pass_mean_seconds", spent / max(count, 1))
        self._note(f"{name}_conflicts", subject.figures().get("prodrl_reconcile_total/conflict", 0.0))
        self._note(f"{name}_errors", subject.figures().get("prodrl_reconcile_total/error", 0.0))

    async def _loading(self, load: Load, wanted: list[Stamp]) -> None:
        async with load.http:
            await load.run(wanted, self.plan.rate, self.plan.load_seconds)

    def _touch(self, server: ApiServer, dead: list[Stamp]) -> None:
        """Wake the runs whose gateways went silent, so that the operator finds out."""

        async def touch() -> None:
            async with Http(server.url, _certificate(server), POPULATING) as http:
                for stamp in dead:
                    path = f"/apis/prodrl.dev/v1alpha1/namespaces/{stamp.namespace}/prodrlruns/{stamp.name}"
                    await http.patch(path, {"metadata": {"labels": {"touched": "yes"}}})

        asyncio.run(touch())

    def _note(self, name: str, value: Any) -> None:
        self.figures[name] = round(value, 4) if isinstance(value, float) else value
        self.figures[f"load_average_{name.partition('_')[0]}"] = round(os.getloadavg()[0], 1)
        _log.info("%s runs: %s = %s", self.runs, name, self.figures[name])


def _told(subject: Subject) -> float:
    """Requests as the operator's own metric has them."""
    return sum(value for name, value in subject.figures().items() if name.startswith("prodrl_api_requests_total"))


def _passes(subject: Subject) -> tuple[float, float]:
    """How many, and the seconds in them."""
    figures = subject.figures()
    return figures["prodrl_reconcile_duration_seconds_count"], figures["prodrl_reconcile_duration_seconds_sum"]


def _certificate(server: ApiServer) -> str:
    return str(server.folder / "certs/apiserver.crt")
