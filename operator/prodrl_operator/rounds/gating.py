"""Gating: measurements, then canary traffic, then perhaps a person. Called by ``decide``.

The verdict is written once an attempt, with the digest it is about. Until then every look judges the guards again,
also while a person is awaited: block comes before pause, pause before promote.
"""

from __future__ import annotations

from prodrl.config.results import EvaluateResult
from prodrl_operator.api.judgement import Judgement
from prodrl_operator.api.round import CanaryProgress
from prodrl_operator.api.run import CanaryStep
from prodrl_operator.names import Reason, Step, Verdict
from prodrl_operator.rounds import attempts, blocking, deploying, requests, times
from prodrl_operator.rounds.decision import Outcome
from prodrl_operator.rounds.observed import CanaryLook
from prodrl_operator.rounds.turn import LOOK_SECONDS, Turn


def decide(turn: Turn) -> Outcome:
    """One look."""
    gate = turn.status.gate
    cause = deploying.lost(turn)
    if cause is not None and gate.verdict is None:
        return blocking.cannot_serve(turn, cause)
    if gate.verdict == Verdict.INCONCLUSIVE:
        return _await_decision(turn)
    if gate.measurements is None:
        return attempts.work(turn, Step.GATING, EvaluateResult, _measured)
    judgement = turn.observed.measured
    assert judgement is not None, "measurements are judged when they are observed"
    if judgement.verdict in (Verdict.FAIL, Verdict.ERROR):
        return blocking.block(turn, judgement)
    if judgement.verdict is Verdict.INCONCLUSIVE:
        return blocking.inconclusive(turn, judgement)
    return _judge_traffic(turn, judgement)


def _measured(turn: Turn, result: EvaluateResult) -> Outcome:
    gate = turn.status.gate.model_copy(update={"measurements": result.model_dump_json()})
    status = turn.status.model_copy(update={"gate": gate, "reason": None, "message": ""})
    return Outcome(status, requeue_after_seconds=0.0)


def canary_steps(turn: Turn) -> list[CanaryStep]:
    """The shares of traffic before promotion; none in round 0, and none for a policy that is stable's very bytes."""
    stable, policy = turn.run.status.stable, turn.status.policy
    if stable is None or policy is None or policy.digest == stable.digest:
        return []
    return list(turn.settings.gate.canary.steps)


def _judge_traffic(turn: Turn, measured: Judgement) -> Outcome:
    steps, canary, look = canary_steps(turn), turn.status.gate.canary, turn.observed.look
    interim = look.interim if canary is not None and look is not None and not look.is_behind else None
    if interim is not None and interim.verdict is Verdict.FAIL:
        return blocking.block(turn, interim)
    index = canary.index if canary else 0
    if index >= len(steps):
        return _conclude(turn, measured)
    if turn.run.spec.suspend:
        return turn.stay(Reason.SUSPENDED, "suspended: no traffic goes to the candidate", LOOK_SECONDS)
    if canary is None:
        return _begin_step(turn, 0, look)
    return _judge_step(turn, canary, steps[index], look)


def _begin_step(turn: Turn, index: int, look: CanaryLook | None) -> Outcome:
    """The counters of this moment are what the step's traffic is counted from."""
    if look is None:
        return turn.stay(message="waiting for the gateway's counters", requeue=LOOK_SECONDS)
    progress = CanaryProgress(
        index=index,
        started=times.stamp(turn.now),
        baseline_candidate=look.candidate.to_status(),
        baseline_stable=look.stable.to_status(),
    )
    gate = turn.status.gate.model_copy(update={"canary": progress})
    status = turn.status.model_copy(update={"gate": gate, "reason": None, "message": f"canary step {index + 1}"})
    return Outcome(status, requeue_after_seconds=LOOK_SECONDS)


def _judge_step(turn: Turn, canary: CanaryProgress, step: CanaryStep, look: CanaryLook | None) -> Outcome:
    elapsed = times.elapsed_seconds(canary.started, turn.now, turn.status.paused_since)
    is_late = elapsed > step.deadline_seconds
    seen = look.trajectories if look and not look.is_behind else 0
    if look is not None and look.is_behind and not is_late:
        return _rebase(turn, canary, look)
    if look is not None and seen >= step.min_trajectories:
        final = look.final
        assert final is not None, "a step that began is judged"
        if final.is_pass:
            return _next_step(turn, canary, look)
        if is_late:
            is_fail = final.verdict is Verdict.FAIL
            return blocking.block(turn, final) if is_fail else blocking.inconclusive(turn, final)
    if is_late:
        message = (
            f"canary step {canary.index + 1}: {seen} of {step.min_trajectories} trajectories within "
            f"{step.deadline_seconds} s"
        )
        return blocking.inconclusive(turn, Judgement(Verdict.INCONCLUSIVE, message, Reason.NO_DATA))
    message = f"canary step {canary.index + 1}: {seen} of {step.min_trajectories} trajectories at {step.weight}%"
    return turn.stay(message=message, requeue=LOOK_SECONDS)


def _next_step(turn: Turn, canary: CanaryProgress, look: CanaryLook) -> Outcome:
    """Past the last step the baselines stay: the guards go on judging its traffic while a person is awaited."""
    if canary.index + 1 < len(canary_steps(turn)):
        return _begin_step(turn, canary.index + 1, look)
    gate = turn.status.gate.model_copy(update={"canary": canary.model_copy(update={"index": canary.index + 1})})
    status = turn.status.model_copy(update={"gate": gate, "reason": None, "message": "canary traffic passed"})
    return Outcome(status, requeue_after_seconds=0.0)


def _rebase(turn: Turn, canary: CanaryProgress, look: CanaryLook) -> Outcome:
    """A replica started afresh and its counters are gone: count this step again; its deadline runs on."""
    progress = canary.model_copy(
        update={"baseline_candidate": look.candidate.to_status(), "baseline_stable": look.stable.to_status()}
    )
    gate = turn.status.gate.model_copy(update={"canary": progress})
    status = turn.status.model_copy(update={"gate": gate, "message": "a gateway replica restarted: counting again"})
    return Outcome(status, requeue_after_seconds=LOOK_SECONDS)


def _conclude(turn: Turn, measured: Judgement) -> Outcome:
    if turn.run.spec.suspend:
        return turn.stay(Reason.SUSPENDED, "suspended: nothing is promoted", LOOK_SECONDS)
    if requests.needs_approval(turn.run, turn.number):
        message = f"the gate passed: {measured.message}; set requests.approveRound: {turn.number} to promote"
        return turn.stay(Reason.AWAITING_APPROVAL, message, LOOK_SECONDS)
    return turn.go(Step.PROMOTING, status=blocking.with_verdict(turn, measured), reason=Reason.GATE_PASSED)


def _await_decision(turn: Turn) -> Outcome:
    """Inconclusive: only a person lets it go on, no clock does."""
    if not requests.is_approved(turn.run, turn.number) or turn.run.spec.suspend:
        return turn.stay(Reason.GATE_INCONCLUSIVE, turn.status.message)
    return turn.go(Step.PROMOTING, reason=Reason.APPROVED, message="approved by requests.approveRound")
