"""What a finished round means for the run: history, counters, lineage, halt. Called by ``decide`` on every pass.

Idempotent: a round is accounted once it stands in ``status.history``, and the write that puts it there carries all
consequences. Promotions are accounted by their commit (``promoting``); failed rounds wait for a person first.
"""

from __future__ import annotations

from prodrl_operator.api.round import Round
from prodrl_operator.api.run import HistoryEntry, LastGate, Run, RunStatus
from prodrl_operator.names import Reason, Step
from prodrl_operator.rounds.observed import Observed
from prodrl_operator.rounds.promoting import KEPT_HISTORY

ENDED = frozenset({Step.BLOCKED, Step.ABORTED, Step.SUPERSEDED, Step.PROMOTED})
HALTING = frozenset({Reason.IMAGE_PULL, Reason.INSUFFICIENT_CAPACITY, Reason.QUOTA, Reason.CREDENTIALS})
"""A candidate that was blocked for these was never judged, and the next one would meet the same: stop and ask."""


def account(observed: Observed) -> dict[str, object]:
    """Changes of the run's status for the oldest ended round that has none yet; empty: all is accounted."""
    for number in observed.numbers:
        if number <= observed.last_accounted:
            continue
        this = observed.rounds[number]
        # In order: what comes after an unfinished round waits for it.
        return _entry(observed.run, this) if Step(this.status.step) in ENDED else {}
    return {}


def _entry(run: Run, this: Round) -> dict[str, object]:
    status, number, step = run.status, this.spec.number, Step(this.status.step)
    gate, dataset, policy = this.status.gate, this.status.dataset, this.status.policy
    entry = HistoryEntry(
        number=number,
        outcome=step.value,
        digest=policy.digest if policy else None,
        verdict=gate.verdict,
        reason=this.status.reason,
        reward=dataset.reward_mean if dataset else None,
        finished=this.status.since,
    )
    changes: dict[str, object] = {"history": [*status.history, entry][-KEPT_HISTORY:], "canary_weight": 0}
    if number > 0 and _is_made(this):
        changes["rounds_finished"] = status.rounds_finished + 1
    if step is Step.BLOCKED:
        changes |= _blocked(run, this)
    return changes


def _is_made(this: Round) -> bool:
    """Whether it counts among ``rounds.max``: not what had no data, nor a candidate that was never judged."""
    step = Step(this.status.step)
    return step is not Step.SUPERSEDED and not (step is Step.BLOCKED and this.status.reason in HALTING)


def _blocked(run: Run, this: Round) -> dict[str, object]:
    status, number = run.status, this.spec.number
    consecutive = status.consecutive_blocked + 1
    choice = this.spec.settings.on_blocked
    is_over = consecutive >= run.spec.rounds.max_consecutive_blocked
    is_halt = choice == "HaltForHuman" or is_over or this.status.reason in HALTING
    stable = status.stable.round if status.stable else 0
    verdict = this.status.gate.verdict
    return {
        "consecutive_blocked": consecutive,
        "lineage_round": number if choice == "ContinueLineage" and this.status.checkpoint else stable,
        "halted_round": number if is_halt else status.halted_round,
        "last_gate": LastGate(round=number, verdict=verdict or "", message=this.status.gate.message),
    }


def reward(observed: Observed) -> str | None:
    """Mean reward of the newest dataset; what is stored when there is none."""
    sealed = [this.status.dataset for _, this in sorted(observed.rounds.items()) if this.status.dataset is not None]
    return sealed[-1].reward_mean if sealed else observed.run.status.reward


def release(status: RunStatus) -> dict[str, object]:
    """A person lets a halted run go on; the count of blocked rounds begins anew."""
    return {"halted_round": None, "consecutive_blocked": 0}


def is_complete(observed: Observed) -> bool:
    """Whether all rounds were made."""
    status = observed.run.status
    return (
        status.stable is not None
        and observed.current is None
        and status.rounds_finished >= observed.run.spec.rounds.max
    )
