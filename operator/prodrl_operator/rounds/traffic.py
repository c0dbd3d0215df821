"""Which policies must be served, and who gets which share of new conversations, from status alone.

Called by ``decide``, ``planning`` and ``observing``: the answer is derived anew on every pass and stored nowhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from prodrl.config.serving import Route
from prodrl_operator.api.round import Round
from prodrl_operator.names import Step, Verdict
from prodrl_operator.rounds import requests, times
from prodrl_operator.rounds.observed import Observed

CANDIDATE_STEPS = frozenset({Step.CANARY_DEPLOYING, Step.GATING, Step.PROMOTING})


@dataclass(frozen=True)
class Servings:
    """Rounds whose policies are served."""

    required: frozenset[int]
    """Must exist."""
    kept: frozenset[int]
    """May go on until their conversations ended; never created."""
    displaced: frozenset[int]
    """Gave their hardware away and come back (surge Replace)."""


def candidate(observed: Observed) -> Round | None:
    """The round whose policy is on its way to users, if there is one that is not stable yet."""
    current, stable = observed.current, observed.run.status.stable
    if current is None or current.status.policy is None or Step(current.status.step) not in CANDIDATE_STEPS:
        return None
    return None if stable is not None and stable.round == current.spec.number else current


def is_replacing(observed: Observed) -> bool:
    """Whether there is hardware for one policy only."""
    numbers = observed.numbers
    return bool(numbers) and observed.rounds[numbers[-1]].spec.settings.serving.surge == "Replace"


def servings(observed: Observed, now: datetime) -> Servings:
    """What must, and what may, exist now."""
    stable, new = observed.run.status.stable, candidate(observed)
    required = {stable.round} if stable else set()
    displaced: set[int] = set()
    if new is not None and new.spec.settings.serving.surge == "Replace" and stable is not None:
        if is_resting(observed, new.spec.number):
            new = None
        else:
            displaced = {stable.round}
            required = set()
    if new is not None:
        required.add(new.spec.number)
    previous = observed.run.status.previous
    kept = {previous.round} if previous and is_draining(observed, now) else set()
    return Servings(frozenset(required), frozenset(kept - required), frozenset(displaced))


def is_resting(observed: Observed, number: int) -> bool:
    """Whether stable has the only hardware back, for as long as a person thinks or the run is suspended."""
    this = observed.rounds[number]
    if this.spec.settings.serving.surge != "Replace" or observed.run.status.stable is None:
        return False
    return observed.run.spec.suspend or _awaits_person(observed, this)


def _awaits_person(observed: Observed, this: Round) -> bool:
    """By what was measured, not by what is said: a suspension speaks of itself only."""
    if requests.is_inconclusive(this.status):
        return True
    is_passed = observed.measured is not None and observed.measured.is_pass
    is_undecided = this.status.step == Step.GATING and this.status.gate.verdict is None
    return is_undecided and is_passed and requests.needs_approval(observed.run, this.spec.number)


def is_draining(observed: Observed, now: datetime) -> bool:
    """Whether conversations may still go on with the policy before the last promotion, or new ones begin on it."""
    status = observed.run.status
    if status.previous is None or status.stable is None:
        return False
    servers = observed.servings.get(status.previous.round)
    if servers is None or servers.deleting:
        return False
    if not all(replica.version in observed.settled_versions for replica in observed.replicas):
        return True  # a ready replica that does not answer us sends users there, for however long
    made_stable = observed.stable_round
    seconds = (made_stable.spec.settings if made_stable else observed.run.spec).serving.drain_seconds
    if times.elapsed_seconds(status.stable.since, now) >= seconds:
        return False
    return observed.remaining_conversations(status.previous.digest) != 0


def canary_weight(observed: Observed, this: Round) -> int:
    """Percent of new conversations that shall begin on the candidate; none while no server of it is ready."""
    run, status = observed.run, this.status
    canary, gate = status.gate.canary, status.gate
    stable, servers = run.status.stable, observed.servings.get(this.spec.number)
    if canary is None or run.spec.suspend or (stable is not None and stable.round == this.spec.number):
        return 0
    if servers is None or servers.deleting or servers.ready == 0:
        return 0
    steps = this.spec.settings.gate.canary.steps
    is_judged = status.step == Step.PROMOTING and gate.verdict == Verdict.PASS
    if not steps or not (is_judged or (status.step == Step.GATING and gate.verdict is None)):
        return 0
    return steps[min(canary.index, len(steps) - 1)].weight


def routes(observed: Observed, now: datetime) -> tuple[Route, ...] | None:
    """The gateway's table: stable, the candidate during its canary, the previous policy while it drains.

    None: stable's address is not known at this moment. What the gateway has is then better than nothing.
    """
    return table(observed, has_previous=is_draining(observed, now))


def table(observed: Observed, *, has_previous: bool) -> tuple[Route, ...] | None:
    """The same, with or without the previous policy."""
    status = observed.run.status
    if status.stable is None:
        # What an earlier run of the name left goes on serving until this one has a policy.
        return None if observed.has_orphans else ()
    if status.stable.round not in observed.urls:
        return None
    is_deleting = "deletionTimestamp" in observed.run.metadata
    new = None if is_deleting else candidate(observed)
    others: list[Route] = []
    if new is not None and new.status.gate.canary is not None and new.spec.number in observed.urls:
        assert new.status.policy is not None, "a candidate has a policy"
        others.append(_route(observed, new.spec.number, new.status.policy.digest, status.canary_weight))
    draining = status.previous if has_previous and not is_deleting else None
    if draining is not None and draining.round in observed.urls:
        others.append(_route(observed, draining.round, draining.digest, 0))
    others = [route for route in others if route.digest != status.stable.digest]
    share = 100 - sum(route.weight for route in others)
    return (_route(observed, status.stable.round, status.stable.digest, share), *others)


def _route(observed: Observed, number: int, digest: str, weight: int) -> Route:
    return Route(digest=digest, round=number, url=observed.urls[number], weight=weight)
