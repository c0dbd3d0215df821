"""Counters of one replica, by policy. Written by ``proxy`` and ``app``, read by ``admin``, kept on disk by ``spool``.

For each policy ``requests = answered + failed + aborted + switched + in flight``; a test holds the equation.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import asdict, dataclass, field, fields
from typing import Any

MAX_POLICIES = 64
"""Policies remembered; the one that got its first request longest ago is forgotten past it."""
MAX_TRAJECTORIES = 100_000
"""Trajectories whose requests are remembered for their feedback."""
MAX_REQUESTS = 256
"""Requests remembered of one trajectory."""
UNATTRIBUTED = "unattributed"
"""Feedback on trajectories that this replica does not know (another replica served them)."""


@dataclass
class PolicyStats:
    """What users got from one policy."""

    requests: int = 0
    """Sent to this policy."""
    answered: int = 0
    """Complete answers with a status below 500."""
    failed: int = 0
    """Status 500 and above, or a stream that broke."""
    aborted: int = 0
    """The user left before the end."""
    switched: int = 0
    """Left this policy for another one: it was unreachable, or gone from the table."""
    retried: int = 0
    """Attempts that were repeated; the user saw nothing of them."""
    trajectories: int = 0
    """New conversations."""
    feedback: int = 0
    """Rewards on this policy's trajectories."""
    reward_sum: float = 0.0
    reward_squares: float = 0.0
    output_bytes: int = 0
    first_byte_seconds: float = 0.0
    """Sum over ``first_bytes`` requests, from the last byte of the request to the first of the answer."""
    first_bytes: int = 0
    total_seconds: float = 0.0
    """Sum over the answered requests."""


@dataclass
class Stats:
    """All counters; plain attributes, one thread."""

    policies: dict[str, PolicyStats] = field(default_factory=dict)
    inflight: dict[str, int] = field(default_factory=dict)
    unauthorised: int = 0
    refused: int = 0
    """Answered 4xx by the gateway itself."""
    overloaded: int = 0
    """Answered 503 because too many requests were running."""
    unrouted: int = 0
    """Answered 503 because no policy could be reached."""
    feedback_duplicates: int = 0
    feedback_refused: int = 0
    """Conflicts and invalid rewards."""
    feedback_failed: int = 0
    """Answered 503: not durable."""
    changes: int = 0
    """Grows with every change; ``spool`` writes when it did."""

    def of(self, digest: str) -> PolicyStats:
        """The counters of one policy; whoever asks is about to change them."""
        self.changes += 1
        known = self.policies.get(digest)
        if known is None:
            known = self.policies[digest] = PolicyStats()
            while len(self.policies) > MAX_POLICIES:
                idle = next((d for d in self.policies if d != digest and not self.inflight.get(d)), None)
                if idle is None:
                    break
                del self.policies[idle]
        return known

    def entered(self, digest: str) -> None:
        """A request goes to this policy."""
        self.of(digest).requests += 1
        self.inflight[digest] = self.inflight.get(digest, 0) + 1

    def left(self, digest: str, outcome: str) -> None:
        """That request ended here: ``answered``, ``failed``, ``aborted`` or ``switched``."""
        policy = self.of(digest)
        setattr(policy, outcome, getattr(policy, outcome) + 1)
        self.inflight[digest] -= 1
        if not self.inflight[digest]:
            del self.inflight[digest]

    def count(self, name: str, by: int = 1) -> None:
        """Advance one of the counters that belong to no policy."""
        setattr(self, name, getattr(self, name) + by)
        self.changes += 1

    def rewarded(self, digest: str | None, reward: float) -> None:
        """A reward became durable."""
        policy = self.of(digest or UNATTRIBUTED)
        policy.feedback += 1
        policy.reward_sum += reward
        policy.reward_squares += reward * reward

    def snapshot(self) -> dict[str, Any]:
        """Everything that survives a restart, as JSON."""
        counters = {name: getattr(self, name) for name in _COUNTERS}
        return {"policies": {digest: asdict(policy) for digest, policy in self.policies.items()}, **counters}

    @classmethod
    def restore(cls, content: dict[str, Any]) -> Stats:
        """The counters of the process before this one; what it had in flight broke with it.

        Raises:
            ValueError: Not a snapshot of ours.
        """
        try:
            policies = {digest: PolicyStats(**values) for digest, values in content["policies"].items()}
            stats = cls(policies=policies)
            for name in _COUNTERS:
                setattr(stats, name, int(content.get(name, 0)))
        except (TypeError, KeyError, AttributeError) as exc:
            raise ValueError(str(exc)) from exc
        for policy in policies.values():
            ended = policy.answered + policy.failed + policy.aborted + policy.switched
            policy.failed += max(policy.requests - ended, 0)
        return stats


_COUNTERS = tuple(f.name for f in fields(Stats) if f.name not in ("policies", "inflight", "changes"))


class Trails:
    """The requests of recent trajectories that this replica answered, for their feedback entries."""

    def __init__(self, max_trajectories: int = MAX_TRAJECTORIES) -> None:
        self._max = max_trajectories
        self._trails: OrderedDict[str, tuple[list[str], list[str]]] = OrderedDict()

    def add(self, trajectory: str, request_id: str, *, is_failed: bool) -> None:
        """A generating request ended."""
        trail = self._trails.setdefault(trajectory, ([], []))
        self._trails.move_to_end(trajectory)
        ids = trail[1] if is_failed else trail[0]
        ids.append(request_id)
        del ids[:-MAX_REQUESTS]
        while len(self._trails) > self._max:
            self._trails.popitem(last=False)

    def of(self, trajectory: str) -> tuple[list[str], list[str]]:
        """(answered, failed) request ids of the trajectory."""
        answered, failed = self._trails.get(trajectory, ([], []))
        return list(answered), list(failed)


def render_metrics(stats: Stats, conversations: dict[str, int]) -> str:
    """The counters in Prometheus' text format."""
    lines: list[str] = []
    for counter in fields(PolicyStats):
        name = f"prodrl_gateway_{counter.name}_total"
        kind = "gauge" if counter.name.startswith("reward") else "counter"
        lines.append(f"# TYPE {name} {kind}")
        lines += [f'{name}{{policy="{d}"}} {getattr(p, counter.name)}' for d, p in stats.policies.items()]
    for gauge, values in (("inflight", stats.inflight), ("conversations", conversations)):
        lines.append(f"# TYPE prodrl_gateway_{gauge} gauge")
        lines += [f'prodrl_gateway_{gauge}{{policy="{digest}"}} {value}' for digest, value in values.items()]
    for counter_name in _COUNTERS:
        lines.append(f"# TYPE prodrl_gateway_{counter_name}_total counter")
        lines.append(f"prodrl_gateway_{counter_name}_total {getattr(stats, counter_name)}")
    return "\n".join(lines) + "\n"
