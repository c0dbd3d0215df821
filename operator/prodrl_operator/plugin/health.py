"""What a look means: is the run well, and what must a person do? Pure. Called by every view and by ``--exit-code``."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from prodrl_operator.api.model import Condition as Said
from prodrl_operator.builders.metadata import STEP_WORDS
from prodrl_operator.cluster.port import ROUND
from prodrl_operator.names import Condition, Reason, Step
from prodrl_operator.plugin.looking import Look, RoundLook
from prodrl_operator.rounds import failures, requests, transitions


class State(StrEnum):
    """In the order in which they are looked for."""

    DELETING = "Deleting"
    UNSEEN = "Unseen"
    UPDATING = "Updating"
    STALLED = "Stalled"
    STARTING = "Starting"
    UNAVAILABLE = "Unavailable"
    WAITING = "WaitingForApproval"
    SUSPENDED = "Suspended"
    COMPLETED = "Completed"
    HEALTHY = "Healthy"


BY_HAND: dict[str, str] = {
    Reason.INVALID_SPEC: "correct the spec where it is kept; the message names each field",
    Reason.ROUND_MISSING: "restore the ProdRLRound that the message names from a backup",
    Reason.FOREIGN_OBJECT: "rename or delete the object that stands in the way; the loop then goes on by itself",
    Reason.FORBIDDEN: "allow what the message names (role, quota); the loop then goes on by itself",
    Reason.NODE_LOST: "delete the Node, or force-delete the pod that the message names once its machine is off",
    Reason.QUOTA: "raise the quota that the message names, or free some of it; the loop then goes on by itself",
}
"""Stalls that no verb cures."""

WELL = frozenset({State.WAITING, State.SUSPENDED, State.COMPLETED, State.HEALTHY})
"""Users are served and nothing is stuck; kstatus says Current."""


@dataclass(frozen=True)
class Advice:
    """Something that a person can do."""

    text: str
    command: str = ""


@dataclass(frozen=True)
class Health:
    """What a look means."""

    state: State
    message: str
    advice: tuple[Advice, ...] = ()

    @property
    def is_well(self) -> bool:
        """Exit code 0 of ``status --exit-code``."""
        return self.state in WELL


def judge(look: Look) -> Health:
    """The first state that applies."""
    conditions = {item.type: item for item in look.status.conditions}
    ready, stalled = conditions.get(Condition.READY), conditions.get(Condition.STALLED)
    if "deletionTimestamp" in look.raw["metadata"]:
        return Health(State.DELETING, "the run is being deleted")
    if ready is None:
        return _unseen(look)
    if stalled is not None and stalled.status == "True" and not _is_behind(look):
        return Health(State.STALLED, stalled.message or stalled.reason, _unstall(look, stalled))
    if _is_behind(look) or look.is_true(Condition.RECONCILING):
        return _updating(look, conditions.get(Condition.RECONCILING))
    return _well(look, ready) if ready.status == "True" else _not_ready(look, ready)


def awaits_approval(this: RoundLook | None) -> bool:
    """Whether this round stands until a person approves it."""
    if this is None:
        return False
    is_asked = this.status.step == Step.GATING and this.status.reason == Reason.AWAITING_APPROVAL
    return is_asked or requests.is_inconclusive(this.status)


def answers_retry(look: Look) -> bool:
    """Whether a new retry token changes anything: as ``rounds.requests.retry`` and ``rounds.decide`` read it."""
    current = look.current
    is_answered = current is not None and (_has_failed(current) or requests.is_inconclusive(current.status))
    return is_answered or look.status.halted_round is not None


def command(look: Look, *words: str) -> str:
    """A command as a person would type it."""
    return " ".join(["kubectl prodrl", *words, "-n", look.namespace])


def _is_behind(look: Look) -> bool:
    return look.generation is not None and look.status.observed_generation != look.generation


def _unseen(look: Look) -> Health:
    text = "no status yet: the operator has not looked at this run"
    return Health(State.UNSEEN, text, (Advice(f"is prodrl-operator running, and does it watch {look.namespace}?"),))


def _updating(look: Look, reconciling: Said | None) -> Health:
    if reconciling is not None and not _is_behind(look):
        return Health(State.UPDATING, reconciling.message)
    text = f"the operator has seen generation {look.status.observed_generation} of {look.generation}"
    return Health(State.UPDATING, text, (Advice("if this stays so, look whether the operator runs"),))


def _not_ready(look: Look, ready: Said) -> Health:
    if look.status.stable is None:
        return Health(State.STARTING, ready.message or "the first policy is on its way")
    advice = (
        Advice("users are not served: see why the servers are not ready", command(look, "logs", look.name, "serve")),
        Advice("... and the gateway", command(look, "logs", look.name, "gateway")),
    )
    return Health(State.UNAVAILABLE, ready.message, advice)


def _well(look: Look, ready: Said) -> Health:
    current = look.current
    if current is not None and awaits_approval(current):
        return Health(State.WAITING, f"round {current.number}: {current.status.message}", _decide(look, current.number))
    if look.is_true(Condition.SUSPENDED) and look.spec.get("suspend"):
        return Health(State.SUSPENDED, ready.message, (Advice("go on", command(look, "resume", look.name)),))
    if look.is_true(Condition.COMPLETED):
        return Health(State.COMPLETED, f"{look.status.rounds_finished} rounds were made; {ready.message}")
    return Health(State.HEALTHY, ready.message)


def _decide(look: Look, number: int) -> tuple[Advice, ...]:
    return (
        Advice(f"promote round {number}", command(look, "approve", look.name, str(number))),
        Advice(f"give round {number} up", command(look, "abort", look.name, str(number))),
    )


def _unstall(look: Look, stalled: Said) -> tuple[Advice, ...]:
    retry = command(look, "retry", look.name)
    current = look.current
    if stalled.reason in BY_HAND and not _has_failed(current):
        return (Advice(BY_HAND[stalled.reason]),)
    if stalled.reason == Reason.INVALID_CONFIGURATION and not _has_failed(current):
        return _refused(look, current)
    if current is not None and current.status.step == Step.FAILED:
        return _failed(look, current, stalled.reason)
    if stalled.reason == Reason.GATE_INCONCLUSIVE and current is not None and awaits_approval(current):
        return (Advice("measure again", retry), *_decide(look, current.number))
    is_hidden = ROUND.plural in look.hidden
    if is_hidden or look.status.halted_round is None:
        seeing = f"see the rounds to know more: ask for the verb list on {ROUND.plural}"
        return (Advice(seeing if is_hidden else "cure what the message names; the loop then goes on by itself"),)
    return (
        Advice("read why", command(look, "rounds", look.name)),
        Advice(f"then begin the next round from the checkpoint of round {look.status.lineage_round}", retry),
    )


def _has_failed(current: RoundLook | None) -> bool:
    return current is not None and current.status.step == Step.FAILED


def _refused(look: Look, current: RoundLook | None) -> tuple[Advice, ...]:
    """The API server does not take an object that follows from the settings."""
    correct = Advice("correct the spec where it is kept; the message names the field")
    if current is None or current.number == 0:
        return (correct,)
    number = str(current.number)
    text = f"then give round {number} up, which keeps the settings it began with"
    return (correct, Advice(text, command(look, "abort", look.name, number)))


def _failed(look: Look, current: RoundLook, reason: str) -> tuple[Advice, ...]:
    known = {str(key): text for key, text in failures.REMEDIES.items()}
    step = transitions.last_working_step(current.status)
    advice = []
    if step in STEP_WORDS:
        words = ("logs", look.name, STEP_WORDS[step], "--round", str(current.number))
        advice.append(Advice(f"see what {step} said", command(look, *words)))
    advice.append(
        Advice(f"{known.get(reason, 'correct the cause')}, then try again", command(look, "retry", look.name))
    )
    if current.number > 0:
        number = str(current.number)
        advice.append(Advice("or give the round up", command(look, "abort", look.name, number)))
    return tuple(advice)
