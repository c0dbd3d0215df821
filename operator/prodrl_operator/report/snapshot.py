"""One look at a run: objects, the gateway's counters, the step's progress, fates from the audit.

Called by ``local`` every second or two; never fails because a peer is away, it says None instead.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from prodrl_operator import names
from prodrl_operator.api.round import Round
from prodrl_operator.api.run import Run
from prodrl_operator.cluster.port import POD, ROUND, RUN, Cluster


@dataclass(frozen=True)
class Snapshot:
    """All that the views need."""

    run: Run
    """The run as it is."""
    rounds: list[Round]
    """Its rounds, by number."""
    pods: list[dict[str, Any]]
    """Pods of the run, as objects."""
    progress: dict[str, Any] | None = None
    """``done``, ``total``, ``unit``, ``message`` of the working step; None when no step answers."""
    gateway: dict[str, Any] | None = None
    """The gateway's own counters by policy digest."""
    clients: dict[str, Any] | None = None
    """What users counted themselves (``DATA/clients/*.json``), summed."""
    audit: dict[str, Any] | None = None
    """Counts by fate, from ``prodrl data audit``."""
    curves: list[dict[str, Any]] = field(default_factory=list)
    """Diagnostics per optimizer step, from ``prodrl data curves``."""


def _get_json(url: str) -> dict[str, Any] | None:
    try:
        answer = httpx.get(url, timeout=1.0, trust_env=False)
        return dict(answer.json()) if answer.status_code == 200 else None
    except (httpx.HTTPError, ValueError):
        return None


def step_progress(pods: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Progress of the step's pod that runs now."""
    for pod in pods:
        step = pod["metadata"].get("labels", {}).get(names.LABEL_ATTEMPT)
        status = pod.get("status", {})
        if step is not None and status.get("phase") == "Running" and status.get("podIP"):
            return _get_json(f"http://{status['podIP']}:{names.PROGRESS_PORT}/progress")
    return None


def gateway_counters(pods: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Counters of all gateway replicas, summed by policy digest; None when none answers."""
    total: dict[str, dict[str, float]] = {}
    answered = False
    for pod in pods:
        labels, status = pod["metadata"].get("labels", {}), pod.get("status", {})
        if labels.get(names.LABEL_COMPONENT) != "gateway" or not status.get("podIP"):
            continue
        reply = _get_json(f"http://{status['podIP']}:{names.GATEWAY_ADMIN_PORT}/admin/status")
        if reply is None:
            continue
        answered = True
        for digest, counters in reply.get("stats", {}).items():
            mine = total.setdefault(digest, {})
            for key, value in counters.items():
                if isinstance(value, int | float):
                    mine[key] = mine.get(key, 0) + value
    return total if answered else None


def client_reports(data: Path) -> dict[str, Any] | None:
    """Sum of the reports that load generators left in ``DATA/clients``; None without any."""
    reports = []
    for path in sorted((data / "clients").glob("*.json")):
        try:
            reports.append(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError):
            continue  # it is being replaced; the next look reads it
    if not reports:
        return None
    by_digest: dict[str, dict[str, float]] = {}
    for report in reports:
        for digest, counters in report.get("byDigest", {}).items():
            mine = by_digest.setdefault(digest, {})
            for key, value in counters.items():
                mine[key] = mine.get(key, 0) + value
    sums = {
        key: sum(int(report.get(key, 0)) for report in reports) for key in ("sent", "answered", "failed", "aborted")
    }
    return {**sums, "byDigest": by_digest}


def take(cluster: Cluster, namespace: str, name: str, data: Path, last: Snapshot | None) -> Snapshot | None:
    """Look once; audit and curves are carried over from ``last`` (they cost seconds, ``local`` renews them)."""
    found = cluster.get(RUN, namespace, name)
    if found is None:
        return None
    selector = {names.LABEL_RUN: name}
    rounds = [
        Round(metadata=o["metadata"], spec=o["spec"], status=o.get("status") or {})
        for o in cluster.list(ROUND, namespace, selector)
    ]
    pods = cluster.list(POD, namespace, selector)
    return Snapshot(
        run=Run(metadata=found["metadata"], spec=found["spec"], status=found.get("status") or {}),
        rounds=sorted(rounds, key=lambda item: item.spec.number),
        pods=pods,
        progress=step_progress(pods),
        gateway=gateway_counters(pods) or (last.gateway if last else None),
        clients=client_reports(data),
        audit=last.audit if last else None,
        curves=last.curves if last else [],
    )
