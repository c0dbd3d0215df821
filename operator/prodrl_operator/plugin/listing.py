"""Rounds as rows, and a look as a document for machines. Pure. Called by ``cli``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from rich.table import Table
from rich.text import Text

from prodrl_operator.api.model import Api
from prodrl_operator.api.run import HistoryEntry
from prodrl_operator.plugin import ages
from prodrl_operator.plugin.health import Health
from prodrl_operator.plugin.looking import Look, PodLook, RoundLook
from prodrl_operator.rounds import times

PHASE_STYLES = {"Promoted": "green", "Blocked": "red", "Failed": "red", "Aborted": "dim", "Superseded": "dim"}
DIGEST_SHOWN = 19
"""``sha256:`` and twelve digits."""
HEADS = ("ROUND", "PHASE", "DATA OF", "VERDICT", "REWARD", "DIGEST", "DURATION", "REASON")


def short(digest: str | None) -> str:
    """A digest that a person can compare."""
    return digest[:DIGEST_SHOWN] if digest else "-"


@dataclass(frozen=True)
class Row:
    """One round, from its object or, once that is gone, from the run's history."""

    number: int
    phase: str
    source_round: int | None
    source_digest: str | None
    verdict: str | None
    reward: str | None
    digest: str | None
    seconds: float | None
    reason: str | None
    message: str

    def document(self) -> dict[str, Any]:
        """For machines."""
        return {
            "number": self.number,
            "phase": self.phase,
            "source": None if self.source_round is None else {"round": self.source_round, "digest": self.source_digest},
            "verdict": self.verdict,
            "reward": self.reward,
            "digest": self.digest,
            "durationSeconds": self.seconds,
            "reason": self.reason,
            "message": self.message,
        }


def rows(look: Look, now: datetime) -> list[Row]:
    """All rounds that are known, oldest first."""
    history = {entry.number: entry for entry in look.status.history}
    found = {entry.number: _of_history(entry) for entry in look.status.history}
    found |= {item.number: _of_object(item, history.get(item.number), now) for item in look.rounds}
    return [found[number] for number in sorted(found)]


def _of_history(entry: HistoryEntry) -> Row:
    return Row(
        number=entry.number,
        phase=entry.outcome,
        source_round=None,
        source_digest=None,
        verdict=entry.verdict,
        reward=entry.reward,
        digest=entry.digest,
        seconds=None,
        reason=entry.reason,
        message="",
    )


def _of_object(this: RoundLook, entry: HistoryEntry | None, now: datetime) -> Row:
    status, source = this.status, this.spec.get("source") or {}
    began = status.times[0].started if status.times else None
    ended = status.times[-1].finished if status.times else None
    until = times.parse(ended) if ended else now
    return Row(
        number=this.number,
        phase=status.step,
        source_round=source.get("round"),
        source_digest=source.get("digest"),
        verdict=status.gate.verdict,
        reward=status.dataset.reward_mean if status.dataset else (entry.reward if entry else None),
        digest=status.policy.digest if status.policy else None,
        seconds=times.elapsed_seconds(began, until) if began else None,
        reason=status.reason,
        message=status.message or status.gate.message,
    )


def table(found: list[Row]) -> Table:
    """For people."""
    result = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for head in HEADS:
        result.add_column(head, no_wrap=head != "REASON", overflow="fold")
    for row in found:
        data = "-" if row.source_round is None else f"{row.source_round} {short(row.source_digest)}"
        why = ": ".join(part for part in (row.reason or "", row.message) if part)
        result.add_row(
            str(row.number),
            Text(row.phase, style=PHASE_STYLES.get(row.phase, "yellow")),
            data,
            row.verdict or "-",
            _reward(row.reward),
            short(row.digest),
            "-" if row.seconds is None else ages.span(row.seconds),
            Text(why or "-"),
        )
    return result


def document(look: Look, health: Health, now: datetime) -> dict[str, Any]:
    """What ``status -o json`` prints."""
    dump: Callable[[Api | None], Any] = lambda item: item.model_dump(by_alias=True) if item else None  # noqa: E731
    current = look.current
    return {
        "namespace": look.namespace,
        "run": look.name,
        "state": health.state.value,
        "healthy": health.is_well,
        "message": health.message,
        "advice": [{"text": item.text, "command": item.command or None} for item in health.advice],
        "conditions": [dump(item) for item in look.status.conditions],
        "stable": dump(look.status.stable),
        "endpoint": look.status.endpoint,
        "canaryWeight": look.status.canary_weight,
        "currentRound": None if current is None else {"number": current.number, **dump(current.status)},
        "pods": [_pod(item) for item in look.pods],
        "rounds": [row.document() for row in rows(look, now)],
        "hidden": list(look.hidden),
    }


def _pod(item: PodLook) -> dict[str, Any]:
    return {
        "name": item.name,
        "state": item.state,
        "message": item.message,
        "ready": item.is_ready,
        "restarts": item.restarts,
        "labels": {key: value for key, value in item.labels.items() if key.startswith("prodrl.dev/")},
    }


def _reward(text: str | None) -> str:
    return "-" if text is None else f"{float(text):.4g}"
