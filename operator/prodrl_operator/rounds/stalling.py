"""Why a run waits for a person, derived from what is stored. Called by ``decide``; ``conditions`` says it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from datetime import datetime

from prodrl_operator.api.round import Round
from prodrl_operator.names import Reason, Step
from prodrl_operator.rounds import accounting, failures, requests
from prodrl_operator.rounds.failures import Cause
from prodrl_operator.rounds.observed import DeploymentView, Hindrance, Observed

REFUSALS = frozenset({Reason.INVALID_CONFIGURATION, Reason.FORBIDDEN, Reason.QUOTA})
"""What an API server says of an object that it does not take: other settings may be the cure."""


LOOK = "look at its pods' events and logs"
GATEWAY_REMEDIES = failures.REMEDIES | {
    Reason.INSUFFICIENT_CAPACITY: "add nodes, or lower gateway.resources",
    Reason.START_DEADLINE: LOOK,
    Reason.OUT_OF_MEMORY: "raise gateway.resources.limits.memory",
}
PASSING = frozenset({Reason.INSUFFICIENT_CAPACITY, Reason.START_DEADLINE, Reason.QUOTA})
"""While others of their kind serve, pods that are late for these are the cluster's affair."""


def stall(observed: Observed, now: datetime) -> Hindrance | None:
    """The first thing that only a person can clear away; None: the loop can turn."""
    if observed.hindrance is not None:
        return _with_remedy(observed, observed.hindrance)
    gone = _missing(observed) or _lost(observed)
    if gone is not None:
        return gone
    cannot = next(itertools.chain(_down(observed, now), _lacking(observed, now)), None)
    if cannot is not None:
        return cannot
    current = observed.current
    if current is not None and current.status.step == Step.FAILED:
        reason = Reason(current.status.reason or Reason.STEP_FAILED)
        remedy = f"; or set requests.abortRound: {current.spec.number} to go on with another round"
        text = f"round {current.spec.number}: {current.status.message}"
        return Hindrance(reason, text + (remedy if current.spec.number > 0 else ""))
    if current is not None and requests.is_inconclusive(current.status):
        return Hindrance(Reason.GATE_INCONCLUSIVE, f"round {current.spec.number}: {current.status.message}")
    return None if accounting.is_complete(observed) else _halt(observed) or _headless(observed)


def _with_remedy(observed: Observed, hindrance: Hindrance) -> Hindrance:
    """What can be done about settings that are refused: a round has its own, frozen when it began."""
    if hindrance.reason is not Reason.INVALID_CONFIGURATION:
        return hindrance
    current = observed.current
    remedy = "correct the spec"
    if current is not None and current.spec.number == 0:
        remedy += "; round 0 then begins again"
    elif current is not None:
        number = current.spec.number
        remedy += f" and set requests.abortRound: {number}; round {number} keeps its settings, the next takes the new"
    return Hindrance(hindrance.reason, f"{hindrance.message}; {remedy}")


def _missing(observed: Observed) -> Hindrance | None:
    current, stable = observed.current, observed.run.status.stable
    if stable is not None and observed.stable_round is None:
        message = (
            f"ProdRLRound of round {stable.round} is missing, but stable was made by it; users stay served, "
            f"restore the object from a backup to go on"
        )
        return Hindrance(Reason.ROUND_MISSING, message)
    if current is not None and missing_rounds(observed, current):
        message = (
            f"round {current.spec.number} is made from rounds {missing_rounds(observed, current)}, whose ProdRLRound "
            f"objects are missing; restore them, or set requests.abortRound: {current.spec.number}"
        )
        return Hindrance(Reason.ROUND_MISSING, message)
    return None


def _lost(observed: Observed) -> Hindrance | None:
    """A pod on a node that went away: Kubernetes does not replace it, for it may still be writing."""
    for (number, step, _), pods in sorted(observed.pods.items()):
        this = observed.rounds.get(number)
        if pods.lost and this is not None and this.status.step == step:
            remedy = "delete the Node, or once the machine is off: kubectl delete pod --force --grace-period=0"
            return Hindrance(Reason.NODE_LOST, f"round {number}: {step}: {pods.lost}; {remedy}")
    return None


def _down(observed: Observed, now: datetime) -> Iterator[Hindrance]:
    """What serves users and cannot run; nothing fails for it, and it goes on by itself once it is cured."""
    stable, number = observed.stable_round, observed.gateway_settings_of
    settings = stable.spec.settings if stable is not None else observed.run.spec
    limit = float(settings.serving.start_deadline_seconds)
    gateway = _serving_cause(observed.gateway, limit, now)
    if gateway is not None:
        remedy = GATEWAY_REMEDIES.get(gateway.reason, LOOK)
        if number:
            remedy += f"; round {number} keeps its settings, requests.abortRound: {number} lets the new ones in"
        yield Hindrance(gateway.reason, f"the gateway cannot run: {gateway.reason}: {gateway.message}; {remedy}")
    servers = _serving_cause(observed.servings.get(stable.spec.number), limit, now) if stable is not None else None
    if servers is not None:
        remedy = failures.REMEDIES.get(servers.reason, LOOK)
        yield Hindrance(servers.reason, f"stable cannot run: {servers.reason}: {servers.message}; {remedy}")


def _lacking(observed: Observed, now: datetime) -> Iterator[Hindrance]:
    """What lacks something that a person must provide, long before it fails for it."""
    for name, waiting, message, since in _waiting(observed):
        age = (now - since).total_seconds() if since is not None else 0.0
        if failures.is_refused(waiting, message) and age > failures.REFUSED_GRACE_SECONDS:
            remedy = f"{failures.REMEDIES[Reason.INVALID_CONFIGURATION]}; it starts by itself then"
            yield Hindrance(Reason.INVALID_CONFIGURATION, f"{name} cannot start: {waiting}: {message}; {remedy}")


def _serving_cause(view: DeploymentView | None, deadline: float, now: datetime) -> Cause | None:
    if view is None or view.deleting or view.unready_since is None:
        return None
    cause = failures.serving_cause(view, max((now - view.unready_since).total_seconds(), 0.0), deadline)
    if cause is None or view.ready == 0:
        return cause
    is_crashing = view.waiting == "CrashLoopBackOff"  # restarts are counted for a pod's whole life
    is_passing = cause.reason in PASSING or (not is_crashing and failures.crash_cause(view) == cause)
    return None if is_passing else cause


def _waiting(observed: Observed) -> Iterator[tuple[str, str, str, datetime | None]]:
    """(name, why it waits, the same for people, since when) of all that runs for users or for a round in work."""
    stable, current = observed.run.status.stable, observed.current
    if observed.gateway is not None:
        view = observed.gateway
        yield "the gateway", view.waiting, view.waiting_message, view.unready_since
    for number, view in sorted(observed.servings.items()):
        if (stable and stable.round == number) or (current and current.spec.number == number):
            yield f"a server of round {number}", view.waiting, view.waiting_message, view.unready_since
    for (number, step, _), job in sorted(observed.jobs.items()):
        is_due = observed.is_unfinished(number) and observed.rounds[number].status.step == step
        if is_due and job.state == "Pending" and not job.suspended and not job.deleting:
            yield f"round {number}: {step}: Job {job.name}", job.waiting, job.waiting_message, job.begun


def missing_rounds(observed: Observed, this: Round) -> list[int]:
    """Rounds that this one is made from, and whose objects somebody deleted."""
    if this.spec.number == 0:
        return []
    lineage = this.status.lineage_round
    needed = {this.spec.lineage_round if lineage is None else lineage}
    if this.spec.source is not None:
        needed.add(this.spec.source.round)
    return sorted(needed - set(observed.rounds))


def lacks_heads(observed: Observed) -> bool:
    """Whether the next round would train by ScoreCentering on records of a policy that is served without heads.

    Servers record as the round says that made them: what was edited since holds for the next policy.
    """
    stable = observed.stable_round
    is_needed = observed.run.spec.training.correction.type == "ScoreCentering"
    return is_needed and stable is not None and stable.spec.settings.recording.metadata != "ScoreCentering"


def _headless(observed: Observed) -> Hindrance | None:
    stable = observed.stable_round
    if observed.current is not None or stable is None or not lacks_heads(observed):
        return None  # the round in work may make a policy that is served with them
    recorded = stable.spec.settings.recording.metadata
    message = (
        f"training.correction.type ScoreCentering needs the recorded head of the distribution, but round "
        f"{stable.spec.number}, which users are served by, records {recorded}: leave recording.metadata at "
        "ScoreCentering and set training.correction.type to ImportanceSampling until one round more is promoted"
    )
    return Hindrance(Reason.INVALID_CONFIGURATION, message)


def _halt(observed: Observed) -> Hindrance | None:
    status = observed.run.status
    number = status.halted_round
    if number is None:
        return None
    entry = next((item for item in status.history if item.number == number), None)
    reason = Reason.GATE_BLOCKED
    if entry is not None and entry.reason in accounting.HALTING:
        reason = Reason(entry.reason)
    elif status.consecutive_blocked >= observed.run.spec.rounds.max_consecutive_blocked:
        reason = Reason.CONSECUTIVE_BLOCKS
    why = status.last_gate.message if status.last_gate and status.last_gate.round == number else ""
    serving = f"round {status.stable.round} stays stable" if status.stable else "nothing is served"
    ahead = observed.current  # AsyncOneRound: it has collected already, or still does
    begin = f"let round {ahead.spec.number} train on" if ahead is not None else "begin the next round"
    message = (
        f"round {number} was blocked ({status.consecutive_blocked} in a row): {why}; {serving}. Set a new "
        f"requests.retryToken to {begin} from the checkpoint of round {status.lineage_round}"
    )
    return Hindrance(reason, message)
