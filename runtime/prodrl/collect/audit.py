"""Where did every recorded trajectory go? ``prodrl data audit``: an equation, computed from the store and checked.

    recorded = trained + waiting + excluded(reason) + expired

The left side is counted from the shards (and from the ledger, where shards were deleted), "trained" from the ledger,
the rest by the join's rules. A trajectory that two rounds claim is counted in both, so the equation breaks.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from prodrl.collect import join, ledger, seal
from prodrl.collect.tail import Tail
from prodrl.errors import DataError
from prodrl.records import Reason
from prodrl.store import folders
from prodrl.store.port import Store

DEFAULT_DEADLINE_SECONDS = 86_400.0
_NO_LIMIT = 2**31


@dataclass
class Audit:
    """The counts, and what is wrong."""

    recorded: int = 0
    """Trajectories with a record."""
    trained: int = 0
    """Claims of rounds that were not abandoned."""
    waiting: int = 0
    """May still be taken."""
    expired: int = 0
    """Their reward did not come in time."""
    excluded: dict[str, int] = field(default_factory=dict)
    """Reason -> trajectories."""
    rounds: dict[int, int] = field(default_factory=dict)
    """Round -> trajectories claimed."""
    unmatched_rewards: int = 0
    """Rewarded ids without any record; kept, in case one comes."""
    notes: list[str] = field(default_factory=list)
    """Worth knowing, not wrong."""
    faults: list[str] = field(default_factory=list)
    """Trajectories claimed twice, damaged shards and datasets, claims that differ from their dataset."""

    @property
    def accounted(self) -> int:
        """The right side of the equation."""
        return self.trained + self.waiting + self.expired + sum(self.excluded.values())

    @property
    def holds(self) -> bool:
        """Whether the equation holds and nothing is wrong."""
        return self.recorded == self.accounted and not self.faults

    def equation(self) -> str:
        """The equation with its numbers."""
        reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(self.excluded.items()))
        return (
            f"{self.recorded} recorded {'=' if self.recorded == self.accounted else '!='} {self.trained} trained + "
            f"{self.waiting} waiting + {sum(self.excluded.values())} excluded{f' ({reasons})' if reasons else ''} + "
            f"{self.expired} expired"
        )

    def as_text(self) -> str:
        """For people."""
        lines = [self.equation()]
        lines += [f"round {number}: {count} trajectories claimed" for number, count in sorted(self.rounds.items())]
        if self.unmatched_rewards:
            lines.append(f"rewards for {self.unmatched_rewards} ids without a record")
        lines += [f"note: {note}" for note in self.notes] + [f"FAULT: {fault}" for fault in self.faults]
        return "\n".join([*lines, "the equation holds" if self.holds else "the equation DOES NOT hold"])

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
            "unmatched_rewards": self.unmatched_rewards,
            "equation": self.equation(),
            "holds": self.holds,
            "notes": self.notes,
            "faults": self.faults,
        }


def audit(store: Store, *, reward_deadline_seconds: float | None = None, now_ms: int | None = None) -> Audit:
    """Read everything and count.

    Args:
        store: The run's store.
        reward_deadline_seconds: When an unscored trajectory is expired; None takes it from each policy's last claim,
            and a day where there is none.
        now_ms: Unix milliseconds; None: now.
    """
    tail = Tail(store)
    report = Audit()
    # Claims first: records and rewards only grow, so whatever a claim holds is found by what is read after it.
    claims, claimed, gone = _read_claims(store, report)
    known = join.gather({}, tail.records(), ())
    join.gather(known, (), tail.feedback())
    report.faults += [f"damaged: {message}" for message in tail.damaged.values()]
    recorded = {name: trajectory for name, trajectory in known.items() if trajectory.records}
    report.unmatched_rewards = len(known) - len(recorded)
    _add_deleted(report, recorded, claimed, gone)
    judged = _Judging(claims, reward_deadline_seconds, int(time.time() * 1000) if now_ms is None else now_ms)
    excluded = Counter(report.excluded)
    for name, trajectory in recorded.items():
        report.recorded += 1
        if name in claimed:
            continue
        fate, reason = judged.fate(trajectory)
        report.waiting += fate in (join.Fate.WAITING, join.Fate.READY)
        report.expired += fate is join.Fate.EXPIRED
        excluded.update([reason] if fate is join.Fate.EXCLUDED else [])
    report.excluded = dict(excluded)
    return report


def _read_claims(store: Store, report: Audit) -> tuple[list[ledger.Entry], dict[str, int], dict[str, str]]:
    """Every claim; trajectory -> the round that holds it; id -> reason of what rounds have left out."""
    claims: list[ledger.Entry] = []
    owners: dict[str, int] = {}
    left_out: dict[str, str] = {}
    for number in ledger.rounds(store):
        try:
            entry = ledger.read(store, number)
        except DataError as exc:
            report.faults.append(str(exc))
            continue
        if not isinstance(entry, ledger.Entry):
            continue
        claims.append(entry)
        report.rounds[number] = len(entry.trajectory_ids)
        for name in entry.trajectory_ids:
            if name in owners:
                report.faults.append(f"Trajectory {name}: claimed twice, by rounds {owners[name]} and {number}")
            owners[name] = number
        if ledger.is_abandoned(store, number):
            abandoned = report.excluded.get(Reason.ROUND_ABANDONED, 0)
            report.excluded[Reason.ROUND_ABANDONED.value] = abandoned + len(entry.trajectory_ids)
        else:
            report.trained += len(entry.trajectory_ids)
        _check_dataset(store, entry, report)
        try:
            left_out |= seal.read_excluded(store, entry.excluded_key)
        except DataError as exc:
            report.faults.append(str(exc))
    return claims, owners, left_out


def _check_dataset(store: Store, entry: ledger.Entry, report: Audit) -> None:
    """A claim must be backed by a dataset that verifies and holds exactly the claimed trajectories."""
    try:
        manifest = folders.read_manifest(store, entry.dataset_key, expect_digest=entry.dataset_digest)
        if seal.trajectory_ids(store, entry.dataset_key, manifest) != entry.trajectory_ids:
            report.faults.append(f"Round {entry.round}: the ledger and {entry.dataset_key} name other trajectories")
    except DataError as exc:
        report.faults.append(f"Round {entry.round}: {exc}")


def _add_deleted(
    report: Audit, recorded: Mapping[str, join.Trajectory], claimed: Mapping[str, int], left_out: Mapping[str, str]
) -> None:
    """Trajectories that only the ledger remembers, because their shards were deleted."""
    lost_claims = [name for name in claimed if name not in recorded]
    lost = {name: reason for name, reason in left_out.items() if name not in recorded and name not in claimed}
    report.recorded += len(lost_claims) + len(lost)
    for reason in lost.values():
        if reason == join.Fate.EXPIRED:
            report.expired += 1
        else:
            report.excluded[reason] = report.excluded.get(reason, 0) + 1
    if lost_claims or lost:
        report.notes.append(f"shards of {len(lost_claims)} claimed and {len(lost)} excluded trajectories are deleted")


class _Judging:
    """The rules that hold for each policy: those of the last round that took records of it."""

    def __init__(self, claims: list[ledger.Entry], deadline: float | None, now_ms: int) -> None:
        self._last = {entry.policy_digest: entry for entry in claims}
        self._newest = claims[-1] if claims else None
        self._deadline = deadline
        self._now_ms = now_ms

    def fate(self, trajectory: join.Trajectory) -> tuple[join.Fate, str]:
        """The fate of an unclaimed trajectory, and the reason when it is excluded."""
        first = trajectory.turns()[0]
        found = join.judge(trajectory, self._rules(first.policy_digest), self._now_ms)
        newest = self._newest
        if found.fate not in (join.Fate.READY, join.Fate.WAITING) or newest is None:
            return found.fate, str(found.reason)
        if first.policy_digest == newest.policy_digest or first.policy_round >= newest.policy_round:
            return found.fate, ""
        # A later round already takes records of a newer policy: nobody will come for this one.
        reason = Reason.SURPLUS if first.policy_digest in self._last else Reason.OTHER_POLICY
        return join.Fate.EXCLUDED, reason.value

    def _rules(self, digest: str) -> join.Rules:
        entry = self._last.get(digest)
        newest = self._newest
        deadline = self._deadline
        if deadline is None:
            known = entry or newest
            deadline = known.reward_deadline_seconds if known else DEFAULT_DEADLINE_SECONDS
        return join.Rules(
            digest=digest,
            collect_from_ms=entry.collect_from_ms if entry else 0,
            is_sync=entry.is_sync if entry else False,
            reward_deadline_seconds=deadline,
            settle_seconds=(entry or newest).settle_seconds if (entry or newest) else 0.0,  # type: ignore[union-attr]
            max_sequence_tokens=entry.max_sequence_tokens if entry else _NO_LIMIT,
        )
