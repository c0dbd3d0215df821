"""What simulated users count, and the report file they leave. Called by ``users``."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class PolicyTally:
    """Of one policy."""

    answered: int = 0
    """Requests."""
    trajectories: int = 0
    """Finished attempts."""
    solved: int = 0
    """Attempts with reward 1."""

    @property
    def rate(self) -> float | None:
        """Share solved; None before the first attempt."""
        return self.solved / self.trajectories if self.trajectories else None


@dataclass
class Tally:
    """Requests are ``sent``, then one of answered, failed (an error instead of an answer) or aborted (by the user)."""

    sent: int = 0
    answered: int = 0
    failed: int = 0
    aborted: int = 0
    rewards: int = 0
    """Rewards that the gateway took, the repeated ones apart."""
    duplicates: int = 0
    """Rewards posted a second time."""
    unscored: int = 0
    """Attempts whose reward was never posted, on purpose."""
    rewards_failed: int = 0
    """Rewards that could not be posted."""
    by_digest: dict[str, PolicyTally] = field(default_factory=dict)
    errors: Counter[str] = field(default_factory=Counter)
    """Kind of error -> times."""

    def of(self, digest: str) -> PolicyTally:
        """The counters of a policy."""
        return self.by_digest.setdefault(digest, PolicyTally())

    def answer(self, digest: str) -> None:
        """Count an answered request."""
        self.answered += 1
        self.of(digest).answered += 1

    def fail(self, error: str) -> None:
        """Count a request that got an error."""
        self.failed += 1
        self.errors[error] += 1

    def finish(self, digest: str, reward: float) -> None:
        """Count a finished attempt."""
        self.of(digest).trajectories += 1
        self.of(digest).solved += int(reward > 0)

    def as_json(self) -> dict[str, Any]:
        """The report."""
        by_digest = {
            digest: {"answered": one.answered, "solved": one.solved, "trajectories": one.trajectories}
            for digest, one in self.by_digest.items()
        }
        return {
            "sent": self.sent,
            "answered": self.answered,
            "failed": self.failed,
            "aborted": self.aborted,
            "rewards": self.rewards,
            "duplicates": self.duplicates,
            "unscored": self.unscored,
            "rewardsFailed": self.rewards_failed,
            "byDigest": by_digest,
            "errors": dict(self.errors),
            "updatedMs": int(time.time() * 1000),
        }

    def write(self, path: Path) -> None:
        """Replace the report in one step."""
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_text(json.dumps(self.as_json(), indent=1), encoding="utf-8")
        temporary.replace(path)


def read_tally(path: Path) -> Tally:
    """The counters of an earlier start, to count on from; fresh ones where there is no readable report."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        by_digest = {digest: PolicyTally(**one) for digest, one in report["byDigest"].items()}
        counts = {key: int(report[key]) for key in ("sent", "answered", "failed", "aborted", "rewards", "duplicates")}
        others = {"unscored": int(report["unscored"]), "rewards_failed": int(report["rewardsFailed"])}
        return Tally(**counts, **others, by_digest=by_digest, errors=Counter(report["errors"]))
    except (OSError, ValueError, KeyError, TypeError):
        return Tally()
