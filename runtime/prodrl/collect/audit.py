"""Where did every recorded trajectory go? ``prodrl data audit``: an equation, computed from the store and checked.

    recorded = trained + waiting + excluded(reason) + expired

Each term is counted on its own: recorded from the shards, trained from the ledger, the others by the join's rules.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from prodrl.collect import join, ledger
from prodrl.collect.tail import Tail
from prodrl.records import Reason
from prodrl.store import layout
from prodrl.store.port import Store

MAX_GAP = 50
"""Rounds may be missing from the ledger (failed, superseded); so many in a row end the search by name."""


@dataclass
class Audit:
    """The counts, and what is wrong."""

    recorded: int = 0
    trained: int = 0
    waiting: int = 0
    expired: int = 0
    excluded: dict[str, int] = field(default_factory=dict)
    rounds: dict[int, int] = field(default_factory=dict)
    """Round -> trajectories claimed."""
    faults: list[str] = field(default_factory=list)
    """Trajectories claimed twice, claims without records, damaged shards."""

    @property
    def holds(self) -> bool:
        """Whether the equation holds and nothing is wrong."""
        total = self.trained + self.waiting + self.expired + sum(self.excluded.values())
        return self.recorded == total and not self.faults

    def equation(self) -> str:
        """The equation with its numbers."""
        excluded = sum(self.excluded.values())
        reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(self.excluded.items()))
        shown = f"{excluded} excluded" + (f" ({reasons})" if reasons else "")
        sign = "=" if self.recorded == self.trained + self.waiting + self.expired + excluded else "!="
        return (
            f"{self.recorded} recorded {sign} {self.trained} trained + {self.waiting} waiting + {shown} + "
            f"{self.expired} expired"
        )

    def as_text(self) -> str:
        """For people."""
        lines = [self.equation()]
        lines += [f"round {number}: {count} trajectories claimed" for number, count in sorted(self.rounds.items())]
        return "\n".join([*lines, *(f"FAULT {fault}" for fault in self.faults)])

    def as_json(self) -> dict[str, Any]:
        """For machines."""
        return {
            "fate": {
                "recorded": self.recorded,
                "trained": self.trained,
                "waiting": self.waiting,
                "expired": self.expired,
                "excluded": dict(sorted(self.excluded.items())),
            },
            "rounds": {str(number): count for number, count in sorted(self.rounds.items())},
            "equation": self.equation(),
            "holds": self.holds,
            "faults": self.faults,
        }


def entries(store: Store) -> list[ledger.Entry]:
    """Every claim, by round."""
    found: list[ledger.Entry] = []
    number = 1
    while number <= (found[-1].round if found else 0) + MAX_GAP:
        entry = ledger.read(store, number)
        if entry is not None:
            found.append(entry)
        number += 1
    return found


def _claims(store: Store, claims: list[ledger.Entry], report: Audit) -> tuple[set[str], set[str]]:
    """Trajectories trained on, and those claimed by rounds that never trained."""
    owners: dict[str, int] = {}
    trained: set[str] = set()
    abandoned: set[str] = set()
    for entry in claims:
        report.rounds[entry.round] = len(entry.trajectory_ids)
        for trajectory in entry.trajectory_ids:
            if trajectory in owners:
                report.faults.append(f"{trajectory}: claimed by rounds {owners[trajectory]} and {entry.round}")
            owners[trajectory] = entry.round
        (abandoned if ledger.is_abandoned(store, entry.round) else trained).update(entry.trajectory_ids)
    return trained, abandoned


def _rules_by_digest(claims: list[ledger.Entry], deadline: float) -> dict[str, join.Rules]:
    """The last round's rules of each policy: they say what its unclaimed trajectories can still become."""
    return {
        entry.policy_digest: join.Rules(
            digest=entry.policy_digest,
            collect_from_ms=entry.collect_from_ms,
            is_sync=entry.collect_from_ms > 0,
            reward_deadline_seconds=deadline,
            settle_seconds=entry.settle_seconds,
            max_sequence_tokens=entry.max_sequence_tokens,
        )
        for entry in claims
    }


def audit(store: Store, *, reward_deadline_seconds: float, now_ms: int | None = None) -> Audit:
    """Read everything and count."""
    now_ms = int(time.time() * 1000) if now_ms is None else now_ms
    tail = Tail(store, [layout.RECORDS.rstrip("/")])
    known = join.gather({}, tail.records(), tail.feedback())
    report = Audit(faults=[f"damaged: {message}" for message in tail.damaged])
    claims = entries(store)
    trained, abandoned = _claims(store, claims, report)
    rules = _rules_by_digest(claims, reward_deadline_seconds)
    last_digest = claims[-1].policy_digest if claims else None
    excluded: Counter[str] = Counter()
    for trajectory in known.values():
        if not trajectory.records:
            continue  # feedback for something that was never recorded is not a recorded trajectory
        report.recorded += 1
        if trajectory.id in trained:
            report.trained += 1
        elif trajectory.id in abandoned:
            excluded[Reason.ROUND_ABANDONED.value] += 1
        else:
            _count(trajectory, rules, last_digest, reward_deadline_seconds, now_ms, report, excluded)
    lost = (trained | abandoned) - {t.id for t in known.values() if t.records}
    report.faults += [f"{trajectory}: claimed but its records are gone" for trajectory in sorted(lost)]
    report.excluded = dict(excluded)
    return report


def _count(  # noqa: PLR0913, PLR0917  (one tally, split off for its length)
    trajectory: join.Trajectory,
    rules: dict[str, join.Rules],
    last_digest: str | None,
    deadline: float,
    now_ms: int,
    report: Audit,
    excluded: Counter[str],
) -> None:
    digest = next(iter(trajectory.records.values())).policy_digest
    default = join.Rules(digest, 0, False, deadline, 0.0, 2**31)
    rule = rules.get(digest, default)
    found = join.judge(trajectory, rule, now_ms)
    if found.fate is join.Fate.EXCLUDED and found.reason is not None:
        excluded[found.reason.value] += 1
    elif found.fate is join.Fate.EXPIRED:
        report.expired += 1
    elif found.fate is join.Fate.READY and digest in rules and digest != last_digest:
        excluded[Reason.SURPLUS.value] += 1  # a later round trains on another policy: nobody will take it
    else:
        report.waiting += 1
