"""Why a run waits for a person, derived from what is stored. Called by ``decide``; ``conditions`` says it."""

from __future__ import annotations

from prodrl_operator.api.round import Round
from prodrl_operator.names import Reason, Step, Verdict
from prodrl_operator.rounds import accounting
from prodrl_operator.rounds.observed import Hindrance, Observed


def stall(observed: Observed) -> Hindrance | None:
    """The first thing that only a person can clear away; None: the loop can turn."""
    if observed.hindrance is not None:
        return observed.hindrance
    current, status = observed.current, observed.run.status
    if status.stable is not None and observed.stable_round is None:
        message = (
            f"ProdRLRound of round {status.stable.round} is missing, but stable was made by it; users stay served, "
            f"restore the object from a backup to go on"
        )
        return Hindrance(Reason.ROUND_MISSING, message)
    if current is not None and missing_rounds(observed, current):
        message = (
            f"round {current.spec.number} is made from rounds {missing_rounds(observed, current)}, whose ProdRLRound "
            f"objects are missing; restore them, or set requests.abortRound: {current.spec.number}"
        )
        return Hindrance(Reason.ROUND_MISSING, message)
    if current is not None and current.status.step == Step.FAILED:
        reason = Reason(current.status.reason or Reason.STEP_FAILED)
        remedy = f"; or set requests.abortRound: {current.spec.number} to go on with another round"
        text = f"round {current.spec.number}: {current.status.message}"
        return Hindrance(reason, text + (remedy if current.spec.number > 0 else ""))
    is_gating = current is not None and current.status.step == Step.GATING
    if current is not None and is_gating and current.status.gate.verdict == Verdict.INCONCLUSIVE:
        return Hindrance(Reason.GATE_INCONCLUSIVE, f"round {current.spec.number}: {current.status.message}")
    return None if accounting.is_complete(observed) else _halt(observed)


def missing_rounds(observed: Observed, this: Round) -> list[int]:
    """Rounds that this one is made from, and whose objects somebody deleted."""
    if this.spec.number == 0:
        return []
    lineage = this.status.lineage_round
    needed = {this.spec.lineage_round if lineage is None else lineage}
    if this.spec.source is not None:
        needed.add(this.spec.source.round)
    return sorted(needed - set(observed.rounds))


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
    message = (
        f"round {number} was blocked ({status.consecutive_blocked} in a row): {why}; {serving}. Set a new "
        f"requests.retryToken to begin the next round from the checkpoint of round {status.lineage_round}"
    )
    return Hindrance(reason, message)
