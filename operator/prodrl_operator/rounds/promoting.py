"""Promoting: one status write of the run is the commit point; the rest converges. Called by ``decide``."""

from __future__ import annotations

from prodrl_operator.api.run import HistoryEntry, LastGate, StablePolicy
from prodrl_operator.names import Reason, Step, Verdict
from prodrl_operator.rounds import blocking, deploying, requests, times
from prodrl_operator.rounds.decision import Note, Outcome
from prodrl_operator.rounds.turn import LOOK_SECONDS, Turn

KEPT_HISTORY = 200


def decide(turn: Turn) -> Outcome:
    """Commit, then wait until every replica of the gateway follows."""
    stable = turn.run.status.stable
    if stable is not None and stable.round == turn.number:
        return _converge(turn)
    if not may_promote(turn):
        message = f"no passing verdict on {turn.status.policy.digest if turn.status.policy else 'a policy'}"
        return turn.end(Step.FAILED, Reason.STEP_FAILED, message)
    cause = deploying.lost(turn)
    if cause is not None:
        return blocking.cannot_serve(turn, cause)
    return _commit_when_ready(turn)


def _commit_when_ready(turn: Turn) -> Outcome:
    servers = turn.observed.servings.get(turn.number)
    if turn.run.spec.suspend:
        return turn.stay(_reason(turn), "suspended: nothing is promoted")
    if servers is None or not servers.is_ready:
        return turn.stay(_reason(turn), "waiting for the candidate's servers", LOOK_SECONDS)
    return _commit(turn)


def _converge(turn: Turn) -> Outcome:
    if turn.observed.has_converged:
        return turn.go(Step.PROMOTED)
    return turn.stay(_reason(turn), "waiting for the gateway's replicas to apply the routes", LOOK_SECONDS)


def may_promote(turn: Turn) -> bool:
    """A recorded verdict on this very digest: Pass, or Inconclusive and approved by a person."""
    gate, policy = turn.status.gate, turn.status.policy
    if policy is None or gate.digest != policy.digest:
        return False
    if gate.verdict == Verdict.PASS:
        return True
    return gate.verdict == Verdict.INCONCLUSIVE and requests.is_approved(turn.run, turn.number)


def _commit(turn: Turn) -> Outcome:
    status, policy, gate = turn.run.status, turn.status.policy, turn.status.gate
    assert policy is not None, "may_promote was asked"
    assert gate.verdict is not None, "may_promote was asked"
    now = times.stamp(turn.now)
    dataset = turn.status.dataset
    entry = HistoryEntry(
        number=turn.number,
        outcome=Step.PROMOTED.value,
        digest=policy.digest,
        verdict=gate.verdict,
        reason=turn.status.reason,
        reward=dataset.reward_mean if dataset else None,
        finished=now,
    )
    changes: dict[str, object] = {
        "stable": StablePolicy(round=turn.number, digest=policy.digest, since=now),
        "previous": status.stable,
        "canary_weight": 0,
        "lineage_round": turn.number,
        "consecutive_blocked": 0,
        "rounds_finished": status.rounds_finished + (1 if turn.number > 0 else 0),
        "last_gate": LastGate(round=turn.number, verdict=gate.verdict, message=gate.message),
        "history": [*status.history, entry][-KEPT_HISTORY:],
    }
    note = Note("Promoted", f"round {turn.number} is stable: {policy.digest}", turn.number, key=policy.digest)
    return Outcome(turn.status, changes, (note,), 0.0)


def _reason(turn: Turn) -> Reason | None:
    return Reason(turn.status.reason) if turn.status.reason else None
