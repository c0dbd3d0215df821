"""What gates say and what they say it about. Shared by ``gates`` (makes them) and ``rounds`` (acts on them)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from prodrl_operator.names import Reason, Verdict

MICRO = 1_000_000


@dataclass(frozen=True)
class Judgement:
    """A verdict with its grounds."""

    verdict: Verdict
    message: str
    reason: Reason

    @property
    def is_pass(self) -> bool:
        """Whether nothing speaks against the candidate."""
        return self.verdict is Verdict.PASS


@dataclass(frozen=True)
class Counters:
    """What users got from one policy, summed over the gateway's replicas."""

    requests: int = 0
    failed: int = 0
    aborted: int = 0
    trajectories: int = 0
    feedback: int = 0
    reward_sum: float = 0.0
    reward_squares: float = 0.0

    def __add__(self, other: Counters) -> Counters:
        return Counters(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Counters)))

    def since(self, baseline: Counters) -> Counters:
        """What came after ``baseline``."""
        return Counters(*(getattr(self, f.name) - getattr(baseline, f.name) for f in fields(Counters)))

    def is_behind(self, baseline: Counters) -> bool:
        """Whether a counter went backwards: a replica started afresh."""
        return any(getattr(self, name) < getattr(baseline, name) for name in COUNTS)

    def to_status(self) -> dict[str, int]:
        """As integers: the API has no floats."""
        sums = {"rewardSum": round(self.reward_sum * MICRO), "rewardSquares": round(self.reward_squares * MICRO)}
        return {name: getattr(self, name) for name in COUNTS} | sums

    @classmethod
    def from_status(cls, stored: Mapping[str, int]) -> Counters:
        """The inverse of :meth:`to_status`; what is missing is 0."""
        counts = {name: stored.get(name, 0) for name in COUNTS}
        sums = stored.get("rewardSum", 0) / MICRO, stored.get("rewardSquares", 0) / MICRO
        return cls(**counts, reward_sum=sums[0], reward_squares=sums[1])


COUNTS = ("requests", "failed", "aborted", "trajectories", "feedback")
