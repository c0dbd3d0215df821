"""The one-shot verbs of ``spec.requests``: abort, approve, retry. Called by ``decide`` and the step files.

Each names what it is about, so that Git can hold it for ever: once handled it does nothing more.
"""

from __future__ import annotations

from prodrl_operator.api.round import GateStatus, RoundStatus
from prodrl_operator.api.run import HandledRequests, Run
from prodrl_operator.names import Reason, Step, Verdict
from prodrl_operator.rounds import times, transitions
from prodrl_operator.rounds.decision import Note, Outcome
from prodrl_operator.rounds.observed import Observed
from prodrl_operator.rounds.turn import Turn


def is_approved(run: Run, number: int) -> bool:
    """Whether a person approved this round."""
    return number > 0 and number in (run.spec.requests.approve_round, run.status.handled_requests.approve_round)


def needs_approval(run: Run, number: int) -> bool:
    """Whether a round that passed its gate waits for a person all the same."""
    return run.spec.gate.approval == "Required" and number > 0 and not is_approved(run, number)


def wants_abort(observed: Observed) -> bool:
    """Whether an abort was asked for that nothing has answered yet."""
    wanted = observed.run.spec.requests.abort_round
    return wanted not in (0, observed.run.status.handled_requests.abort_round)


def wants_retry(observed: Observed) -> bool:
    """Whether a new retry token was set."""
    wanted = observed.run.spec.requests.retry_token
    return wanted not in ("", observed.run.status.handled_requests.retry_token)


def is_spec_new(observed: Observed) -> bool:
    """Whether the spec was edited since the last status."""
    seen = observed.run.status.observed_generation
    return seen is not None and seen != observed.run.metadata.get("generation")


def abort(turn: Turn) -> Outcome | None:
    """The current round ends at once, unless it is promoted already or another round was meant."""
    wanted = turn.run.spec.requests.abort_round
    stable = turn.run.status.stable
    is_committed = stable is not None and stable.round == turn.number
    if wanted != turn.number or is_committed:
        return None
    return turn.end(Step.ABORTED, Reason.ABORTED, f"requests.abortRound: {wanted}")


def handled(observed: Observed) -> tuple[HandledRequests, tuple[Note, ...]]:
    """The verbs as handled, and what is to be said of one that had nothing to act on."""
    wanted, seen = observed.run.spec.requests, observed.run.status.handled_requests
    update: dict[str, object] = {}
    notes: list[Note] = []
    if wants_abort(observed):
        update["abort_round"] = wanted.abort_round
        named = observed.rounds.get(wanted.abort_round)
        if named is None or named.status.step != Step.ABORTED:
            text = f"requests.abortRound: {wanted.abort_round} is not the current round; nothing was done"
            notes.append(Note(Reason.REQUEST_IGNORED, text, key=f"abort/{wanted.abort_round}"))
    if wants_retry(observed):
        update["retry_token"] = wanted.retry_token
    approved = observed.rounds.get(wanted.approve_round) if wanted.approve_round else None
    if approved is not None and approved.status.step in (Step.PROMOTING, Step.PROMOTED):
        update["approve_round"] = wanted.approve_round
    return (seen.model_copy(update=update) if update else seen), tuple(notes)


def retry(turn: Turn) -> Outcome | None:
    """A failed round goes on from the step that failed; an inconclusive gate is measured again."""
    if turn.status.step == Step.FAILED:
        return _resume(turn, _resume_step(turn))
    return _measure_again(turn) if is_inconclusive(turn.status) else None


def is_inconclusive(status: RoundStatus) -> bool:
    """Whether the gate measured and could not tell: a person approves, or a retry measures again."""
    return status.step == Step.GATING and status.gate.verdict == Verdict.INCONCLUSIVE


def _resume_step(turn: Turn) -> Step:
    failed = transitions.last_working_step(turn.status)
    # The candidate's servers were removed when the round failed.
    return Step.CANARY_DEPLOYING if failed in (Step.GATING, Step.PROMOTING) else failed


def _resume(turn: Turn, step: Step) -> Outcome:
    is_redeployed = step is Step.CANARY_DEPLOYING
    # A gate measured before the servers went away says nothing of the new ones.
    attempt = transitions.attempt_of(turn.status, Step.GATING if is_redeployed else step)
    fresh = attempt.model_copy(update={"number": attempt.number + 1, "failures": 0, "disruptions": 0})
    status = transitions.with_attempt(turn.status, fresh)
    if is_redeployed:
        status = status.model_copy(update={"gate": GateStatus()})
    gone = turn.go(step, status=status, message="tries again")
    note = Note(Reason.RETRY_REQUESTED, f"round {turn.number} tries {step} again", turn.number, key=turn.key)
    return Outcome(gone.round, gone.changes, (note,), 0.0)


def _measure_again(turn: Turn) -> Outcome:
    attempt = transitions.attempt_of(turn.status, Step.GATING)
    fresh = attempt.model_copy(update={"number": attempt.number + 1, "failures": 0, "disruptions": 0})
    status = transitions.with_attempt(turn.status, fresh).model_copy(
        update={"gate": GateStatus(), "reason": None, "message": "measures again", "since": times.stamp(turn.now)}
    )
    note = Note(Reason.RETRY_REQUESTED, f"round {turn.number} is measured again", turn.number, key=turn.key)
    return Outcome(status, {}, (note,), 0.0)
