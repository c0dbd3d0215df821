"""The verbs as changes of ``spec`` that Git could hold as well. Pure; refused where they would do nothing.

Called by ``writing``, which may have to decide again on a newer look.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from prodrl_operator.cluster.port import ROUND
from prodrl_operator.errors import ForbiddenError, InvalidError
from prodrl_operator.names import TERMINAL, Condition, Reason, Step
from prodrl_operator.plugin.health import answers_retry, awaits_approval
from prodrl_operator.plugin.looking import Look, RoundLook

MAX_TOKEN = 64


@dataclass(frozen=True)
class Change:
    """What is to be written."""

    spec: dict[str, Any]
    """The fragment of ``spec``."""
    effect: str
    """What the operator will do."""
    is_in_force: bool = False
    """The spec says so already."""


Verb = Callable[[Look], Change]


def suspend(look: Look) -> Change:
    """Nothing new starts; running Jobs are suspended; users stay served."""
    effect = "running Jobs are suspended and nothing new starts; users stay served"
    return Change({"suspend": True}, effect, is_in_force=bool(look.spec.get("suspend")))


def resume(look: Look) -> Change:
    """The loop goes on."""
    return Change({"suspend": False}, "the loop goes on", is_in_force=not look.spec.get("suspend"))


def approve(look: Look, number: int | None) -> Change:
    """Promote a round that waits for a person."""
    this = _current(look, number, "approve")
    if not awaits_approval(this):
        why = f"it is at {this.status.step}" + (f" ({this.status.reason})" if this.status.reason else "")
        raise InvalidError(f"{_what(look, this)}: does not wait for approval, {why}; there is nothing to approve")
    change = Change({"requests": {"approveRound": this.number}}, f"round {this.number} is promoted")
    return _checked(look, change, "approveRound", this.number)


def abort(look: Look, number: int | None) -> Change:
    """End the current round; users stay with stable."""
    this = _current(look, number, "abort")
    stable = look.status.stable
    if this.number == 0:
        raise InvalidError(
            f"{_what(look, this)}: deploys the base model and cannot be aborted; correct the cause and retry, or "
            f"delete the run"
        )
    is_over = this.status.step in TERMINAL and this.status.step != Step.FAILED
    if is_over or (stable is not None and stable.round == this.number):
        where = "stable" if not is_over else this.status.step
        raise InvalidError(f"{_what(look, this)}: is {where}; there is nothing to abort")
    handled = look.status.handled_requests.abort_round
    if handled == this.number:
        raise InvalidError(
            f"{_what(look, this)}: requests.abortRound: {handled} was handled before this round was current and does "
            f"nothing more; set another number first, then {handled}"
        )
    change = Change({"requests": {"abortRound": this.number}}, f"round {this.number} ends; users stay with stable")
    return _checked(look, change, "abortRound", this.number)


def retry(look: Look, token: str) -> Change:
    """Let a stalled run try again."""
    if not 0 < len(token) <= MAX_TOKEN:
        raise InvalidError(f"--token: must have 1 to {MAX_TOKEN} characters, got {len(token)}; shorten it")
    stalled = next((item for item in look.status.conditions if item.type == Condition.STALLED), None)
    if stalled is None or stalled.status != "True":
        raise InvalidError(f"{_run(look)}: is not stalled; there is nothing to retry")
    if stalled.reason == Reason.INVALID_SPEC:
        raise InvalidError(f"{_run(look)}: a retry cannot cure its spec: {stalled.message}; correct the spec")
    _must_see_rounds(look)
    if not answers_retry(look):
        what = "its settings" if stalled.reason == Reason.INVALID_CONFIGURATION else stalled.reason
        raise InvalidError(f"{_run(look)}: a retry cannot cure {what}: {stalled.message}")
    if look.status.handled_requests.retry_token == token:
        raise InvalidError(f"{_run(look)}: retryToken {token!r} was used before and does nothing more; choose another")
    change = Change({"requests": {"retryToken": token}}, _retried(look))
    return _checked(look, change, "retryToken", token)


def _retried(look: Look) -> str:
    current = look.current
    if current is not None and current.status.step == Step.GATING:
        return f"round {current.number} is measured again"
    if current is not None and current.status.step == Step.FAILED:
        return f"round {current.number} tries again from the step that failed"
    return f"the next round begins from the checkpoint of round {look.status.lineage_round}"


def _current(look: Look, number: int | None, verb: str) -> RoundLook:
    """The round that is meant, which must be the current one: the operator acts on no other."""
    _must_see_rounds(look)
    current = look.current
    if current is None:
        raise InvalidError(f"{_run(look)}: has no round in work; there is nothing to {verb}")
    if number is not None and number != current.number:
        raise InvalidError(
            f"{_run(look)}: round {number} is not the current one, which is {current.number} ({current.status.step}); "
            f"leave the number out or name {current.number}"
        )
    return current


def _must_see_rounds(look: Look) -> None:
    if ROUND.plural in look.hidden:
        raise ForbiddenError(f"{_run(look)}: you may not list {ROUND.plural}; ask for the verb list on them")


def _checked(look: Look, change: Change, field: str, value: int | str) -> Change:
    present = (look.spec.get("requests") or {}).get(field)
    return Change(change.spec, change.effect, is_in_force=present == value)


def _run(look: Look) -> str:
    return f"ProdRLRun {look.namespace}/{look.name}"


def _what(look: Look, this: RoundLook) -> str:
    return f"{_run(look)} round {this.number}"
