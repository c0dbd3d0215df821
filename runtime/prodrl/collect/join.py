"""Records + feedback -> what becomes of each trajectory. Pure; used by ``run`` and ``audit`` alike.

A trajectory is Ready when it is scored and every record of it may be trained on, Waiting while it may still become so,
Expired when its reward did not come in time, Excluded with a reason otherwise. Unscored is never scored 0.

Its reward is the last final one received, plus every reward that was not final. Whatever is decided depends on what
was received and when, not on the order in which it was read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from enum import StrEnum

from prodrl.collect.tail import Line
from prodrl.records import FeedbackEntry, Reason


class Fate(StrEnum):
    """What became of a trajectory that no round has claimed."""

    READY = "Ready"
    WAITING = "Waiting"
    EXPIRED = "Expired"
    EXCLUDED = "Excluded"


@dataclass
class Trajectory:
    """All that is known of one conversation."""

    id: str
    records: dict[str, Line] = field(default_factory=dict)
    """By record id: a shard that was uploaded twice counts once."""
    feedback: dict[str, FeedbackEntry] = field(default_factory=dict)
    """By idempotency key: a repeated post counts once."""

    @property
    def first_ms(self) -> int:
        """When its first request was taken."""
        return min(line.started_ms for line in self.records.values())

    @property
    def last_ms(self) -> int:
        """When its last token came."""
        return max(line.finished_ms for line in self.records.values())

    @property
    def num_tokens(self) -> int:
        """T_i: model-generated tokens."""
        return sum(line.num_output for line in self.records.values())

    @property
    def scored_ms(self) -> int | None:
        """When its first final reward was received; None while unscored. Revisions do not move it."""
        return min((entry.received_ms for entry in self.feedback.values() if entry.final), default=None)

    @property
    def reward(self) -> float:
        """The last final reward, plus every reward that was not final."""
        entries = sorted(self.feedback.values(), key=lambda e: (e.received_ms, e.feedback_id))
        finals = [entry.reward for entry in entries if entry.final]
        return finals[-1] + math.fsum(entry.reward for entry in entries if not entry.final)

    def turns(self) -> list[Line]:
        """Its records as the engine took them."""
        return sorted(self.records.values(), key=lambda line: (line.started_ms, line.num_prompt, line.record_id))

    def add(self, entry: FeedbackEntry) -> None:
        """Count a reward; of two posts under one key the one received first, with the requests of both."""
        known = self.feedback.get(entry.idempotency_key)
        if known is None:
            self.feedback[entry.idempotency_key] = entry
            return
        first, other = sorted((known, entry), key=lambda e: (e.received_ms, e.model_dump_json()))
        self.feedback[entry.idempotency_key] = first.model_copy(
            update={
                "request_ids": sorted({*first.request_ids, *other.request_ids}),
                "failed_request_ids": sorted({*first.failed_request_ids, *other.failed_request_ids}),
            }
        )

    @property
    def last_feedback_ms(self) -> int:
        """When a gateway last told of it."""
        return max(entry.received_ms for entry in self.feedback.values())

    def recorded_requests(self) -> set[str]:
        """Requests that an engine recorded."""
        return {line.request_id for line in self.records.values()}

    def answered_requests(self) -> set[str]:
        """Requests that a gateway saw answered, as it told with the rewards."""
        return {request for entry in self.feedback.values() for request in entry.request_ids}


Known = dict[str, Trajectory]
"""By trajectory id."""


@dataclass(frozen=True)
class Rules:
    """What a round takes; times in the units of :class:`~prodrl.config.CollectConfig`."""

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
    reason: str = ""


def gather(into: Known, records: Iterable[Line], feedback: Iterable[FeedbackEntry]) -> Known:
    """Add what was read to what is known; repeated records and posts change nothing."""
    for line in records:
        into.setdefault(line.trajectory_id, Trajectory(line.trajectory_id)).records.setdefault(line.record_id, line)
    for entry in feedback:
        into.setdefault(entry.trajectory_id, Trajectory(entry.trajectory_id)).add(entry)
    return into


def judge(trajectory: Trajectory, rules: Rules, now_ms: int) -> Judgement:
    """What becomes of a trajectory that has a record, as known at ``now_ms``."""
    if fault := _lasting_fault(trajectory, rules):
        return Judgement(Fate.EXCLUDED, fault)
    scored_ms = trajectory.scored_ms
    # A reward that came after the deadline is as late when it is read early: the fate must not depend on polling.
    if (now_ms if scored_ms is None else scored_ms) - trajectory.last_ms > rules.reward_deadline_seconds * 1000:
        return Judgement(Fate.EXPIRED)
    if scored_ms is None:
        return Judgement(Fate.WAITING)
    if not math.isfinite(trajectory.reward):
        return Judgement(Fate.EXCLUDED, Reason.INVALID_REWARD)
    return _completeness(trajectory, rules, now_ms)


def _completeness(trajectory: Trajectory, rules: Rules, now_ms: int) -> Judgement:
    """Whether all records of a scored trajectory are here."""
    recorded, answered = trajectory.recorded_requests(), trajectory.answered_requests()
    if recorded == answered:
        return Judgement(Fate.READY)
    # Where a gateway does not know of a request that was recorded (another replica answered it, or it restarted), its
    # list proves nothing: records that are still on their way get the same time to arrive as those known to miss.
    if now_ms - trajectory.last_feedback_ms <= rules.settle_seconds * 1000:
        return Judgement(Fate.WAITING)
    return Judgement(Fate.READY) if answered <= recorded else Judgement(Fate.EXCLUDED, Reason.RECORD_MISSING)


def _lasting_fault(trajectory: Trajectory, rules: Rules) -> str:
    """The first fault that no later event cures; empty when there is none."""
    turns = trajectory.turns()
    recorded_faults = [reason for line in turns for reason in line.reasons]
    has_failed = any(entry.failed_request_ids for entry in trajectory.feedback.values())
    # A sample ends with its last turn, whose prompt holds all before it: no sample is longer than the longest turn.
    longest = max(line.num_prompt + line.num_output for line in turns)
    faults = (
        (any(line.policy_digest != rules.digest for line in turns), Reason.MIXED_POLICY),
        (rules.is_sync and trajectory.first_ms < rules.collect_from_ms, Reason.RECORDED_WHILE_TRAINING),
        (bool(recorded_faults), recorded_faults[0] if recorded_faults else ""),
        (has_failed, Reason.ENGINE_ERROR),
        (trajectory.num_tokens == 0, Reason.EMPTY),
        (longest > rules.max_sequence_tokens, Reason.TOO_LONG),
    )
    return next((str(reason) for is_found, reason in faults if is_found), "")


def of_policy(known: Known, digest: str) -> list[Trajectory]:
    """Trajectories with at least one record of the policy."""
    return [t for t in known.values() if any(line.policy_digest == digest for line in t.records.values())]


def sort_out(
    known: Known, rules: Rules, now_ms: int, claimed: AbstractSet[str]
) -> tuple[list[Trajectory], Mapping[str, str]]:
    """What a round could take now, in the order in which a dataset is filled; and id -> reason of what it cannot.

    Expired ones are among the latter, under that name.
    """
    ready: list[Trajectory] = []
    refused: dict[str, str] = {}
    for trajectory in of_policy(known, rules.digest):
        if trajectory.id in claimed:
            continue
        found = judge(trajectory, rules, now_ms)
        if found.fate is Fate.READY:
            ready.append(trajectory)
        elif found.fate is not Fate.WAITING:
            refused[trajectory.id] = str(found.reason) if found.fate is Fate.EXCLUDED else Fate.EXPIRED.value
    return sorted(ready, key=lambda t: (t.scored_ms or 0, t.id)), refused
