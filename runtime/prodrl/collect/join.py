"""Records + feedback -> what becomes of each trajectory. Pure; used by ``run`` and ``audit`` alike.

A trajectory is Ready when it is scored and every record of it may be trained on, Waiting while it may still become so,
Expired when its reward did not come in time, Excluded with a reason otherwise. Unscored is never scored 0.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from prodrl.records import CompletionRecord, FeedbackEntry, Reason


class Fate(StrEnum):
    """What became of a trajectory (before it is claimed by a round)."""

    READY = "Ready"
    WAITING = "Waiting"
    EXPIRED = "Expired"
    EXCLUDED = "Excluded"


@dataclass
class Trajectory:
    """All that is known of one conversation."""

    id: str
    records: dict[str, CompletionRecord] = field(default_factory=dict)
    feedback: dict[str, FeedbackEntry] = field(default_factory=dict)
    """By idempotency key: a repeated post counts once."""

    @property
    def first_ms(self) -> int:
        """When its first request was taken."""
        return min(record.started_ms for record in self.records.values())

    @property
    def last_ms(self) -> int:
        """When its last token came."""
        return max(record.finished_ms for record in self.records.values())

    @property
    def scored_ms(self) -> int | None:
        """When its first final reward was received; None while unscored. Revisions do not move it."""
        times = [entry.received_ms for entry in self.feedback.values() if entry.final]
        return min(times) if times else None

    @property
    def reward(self) -> float:
        """The last final reward, plus every reward that was not final."""
        entries = sorted(self.feedback.values(), key=lambda e: (e.received_ms, e.feedback_id))
        finals = [entry.reward for entry in entries if entry.final]
        return finals[-1] + sum(entry.reward for entry in entries if not entry.final)

    def request_ids(self) -> set[str]:
        """Requests that gateways saw answered."""
        return {request for entry in self.feedback.values() for request in entry.request_ids}

    def failed_ids(self) -> set[str]:
        """Requests that gateways saw fail."""
        return {request for entry in self.feedback.values() for request in entry.failed_request_ids}


@dataclass(frozen=True)
class Rules:
    """What a round takes."""

    digest: str
    collect_from_ms: int
    is_sync: bool
    reward_deadline_seconds: float
    settle_seconds: float
    max_sequence_tokens: int


@dataclass(frozen=True)
class Judgement:
    """A fate and, when Excluded, why."""

    fate: Fate
    reason: Reason | None = None


def gather(
    into: dict[str, Trajectory], records: Iterable[CompletionRecord], feedback: Iterable[FeedbackEntry]
) -> dict[str, Trajectory]:
    """Add what was read to what is known; repeated records and posts change nothing."""
    for record in records:
        found = into.setdefault(record.trajectory_id, Trajectory(record.trajectory_id))
        found.records.setdefault(record.record_id, record)
    for entry in feedback:
        found = into.setdefault(entry.trajectory_id, Trajectory(entry.trajectory_id))
        found.feedback.setdefault(entry.idempotency_key, entry)
    return into


def judge(trajectory: Trajectory, rules: Rules, now_ms: int) -> Judgement:
    """What becomes of a recorded trajectory of the source policy, as known now."""
    records = list(trajectory.records.values())
    fixed = _fixed_fault(trajectory, records, rules)
    if fixed is not None:
        return Judgement(Fate.EXCLUDED, fixed)
    scored_ms = trajectory.scored_ms
    if scored_ms is None:
        late = now_ms - trajectory.last_ms > rules.reward_deadline_seconds * 1000
        return Judgement(Fate.EXPIRED) if late else Judgement(Fate.WAITING)
    if not math.isfinite(trajectory.reward):
        return Judgement(Fate.EXCLUDED, Reason.INVALID_REWARD)
    seen = {record.request_id for record in records}
    if not trajectory.request_ids() <= seen:
        settled = now_ms - scored_ms > rules.settle_seconds * 1000
        return Judgement(Fate.EXCLUDED, Reason.RECORD_MISSING) if settled else Judgement(Fate.WAITING)
    return Judgement(Fate.READY)


def _fixed_fault(trajectory: Trajectory, records: list[CompletionRecord], rules: Rules) -> Reason | None:
    """The first fault that no later event can cure."""
    if {record.policy_digest for record in records} != {rules.digest}:
        return Reason.MIXED_POLICY
    if rules.is_sync and trajectory.first_ms < rules.collect_from_ms:
        return Reason.RECORDED_WHILE_TRAINING
    for record in records:
        if not record.trainable:
            return Reason(record.reasons[0]) if record.reasons else Reason.INCONSISTENT
    if trajectory.failed_ids():
        return Reason.ENGINE_ERROR
    if sum(len(record.output_ids) for record in records) == 0:
        return Reason.EMPTY
    if max(len(record.prompt_ids) + len(record.output_ids) for record in records) > rules.max_sequence_tokens:
        return Reason.TOO_LONG
    return None


def choose(trajectories: Iterable[Trajectory], rules: Rules, now_ms: int, claimed: set[str]) -> list[Trajectory]:
    """Ready and unclaimed trajectories by the time of their reward, then id: the order a dataset is filled in."""
    ready = [
        t for t in trajectories if t.records and t.id not in claimed and judge(t, rules, now_ms).fate is Fate.READY
    ]
    return sorted(ready, key=lambda t: (t.scored_ms or 0, t.id))


def count_excluded(trajectories: Iterable[Trajectory], rules: Rules, now_ms: int, claimed: set[str]) -> dict[str, int]:
    """Reason -> trajectories of this policy that can not be taken, Expired among them."""
    counts: dict[str, int] = defaultdict(int)
    for trajectory in trajectories:
        if not trajectory.records or trajectory.id in claimed:
            continue
        found = judge(trajectory, rules, now_ms)
        if found.fate is Fate.EXCLUDED and found.reason is not None:
            counts[found.reason.value] += 1
        elif found.fate is Fate.EXPIRED:
            counts[Fate.EXPIRED.value] += 1
    return dict(sorted(counts.items()))
