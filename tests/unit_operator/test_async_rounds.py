"""AsyncOneRound: the next round collects while this one trains, and never gets ahead of what a person must decide."""

from __future__ import annotations

import dataclasses
from typing import Any

from prodrl_operator.cluster import port
from prodrl_operator.names import Step
from prodrl_operator.rounds.decision import CreateRound, EnsureJob
from prodrl_operator.rounds.observed import Observed
from tests.support import runs
from tests.support.fake_kubelet import Outcome
from tests.support.operator_harness import World, all_well, blocking, digest
from tests.support.runs import ago, condition, decide, job, scene, settled


def of(observed: Observed, kind: Any) -> list[Any]:
    return [item for item in settled(observed)[1].intents if isinstance(item, kind)]


ASYNC = {"mode": "AsyncOneRound"}


def pair(first: Step, second: Step, *, jobs: dict[Any, Any] | None = None, **changes: Any) -> Observed:
    """Rounds 1 and 2 in work; round 0 is stable."""
    observed = scene(first, spec=ASYNC, **changes)
    ahead = runs.make_round(2, observed.run, source=0, lineage=0, **runs.status_at(2, second))
    return dataclasses.replace(observed, rounds={**observed.rounds, 2: ahead}, jobs=jobs or observed.jobs)


def test_async_the_next_round_collects_while_this_one_trains() -> None:
    observed = scene(Step.TRAINING, spec=ASYNC, jobs={0: job()})
    created = of(observed, CreateRound)
    assert [(item.number, item.source.digest) for item in created] == [(2, digest(0))]
    assert not of(scene(Step.COLLECTING, spec=ASYNC, jobs={0: job()}), CreateRound)
    assert not of(scene(Step.TRAINING, jobs={0: job()}), CreateRound)


def test_async_no_more_than_one_round_is_ahead() -> None:
    observed = pair(Step.TRAINING, Step.COLLECTING)
    assert not of(observed, CreateRound)
    assert {(item.number, item.step) for item in of(observed, EnsureJob)} == {
        (1, Step.TRAINING),
        (2, Step.COLLECTING),
    }


def test_async_a_sealed_dataset_waits_for_the_round_before() -> None:
    observed = pair(Step.TRAINING, Step.COLLECTING, jobs={(1, Step.TRAINING, 0): job()})
    sealed = {"dataset": runs.status_at(2, Step.TRAINING)["dataset"], **runs.status_at(2, Step.COLLECTING)}
    ahead = runs.make_round(2, observed.run, **sealed)
    observed = dataclasses.replace(observed, rounds={**observed.rounds, 2: ahead})
    observed, _ = settled(observed)
    assert observed.rounds[2].status.step == "Collecting"


def test_async_the_lineage_is_settled_when_training_begins() -> None:
    observed = scene(Step.PROMOTED, spec=ASYNC, run=runs.stable_status(1, lineageRound=1))
    sealed = {"dataset": runs.status_at(2, Step.TRAINING)["dataset"], **runs.status_at(2, Step.COLLECTING)}
    ahead = runs.make_round(2, observed.run, source=0, lineage=0, **sealed)
    observed, decision = settled(dataclasses.replace(observed, rounds={**observed.rounds, 2: ahead}))
    assert (observed.rounds[2].status.step, observed.rounds[2].status.lineage_round) == ("Training", 1)
    trained = next(item for item in decision.intents if isinstance(item, EnsureJob) and item.number == 2)
    assert (trained.lineage, trained.source) == (1, 0)


def test_async_a_round_whose_policy_is_gone_is_superseded_once_its_records_settled() -> None:
    """Grace: 60 s drain, 5 s flush, 30 s settle."""

    def after(seconds: float) -> Observed:
        promoted = runs.stable_status(1)
        promoted["stable"]["since"] = ago(seconds)
        observed = scene(Step.PROMOTED, spec=ASYNC, run=promoted)
        ahead = runs.make_round(2, observed.run, source=0, **runs.status_at(2, Step.COLLECTING))
        jobs = {(2, Step.COLLECTING, 0): job()}
        return settled(dataclasses.replace(observed, rounds={**observed.rounds, 2: ahead}, jobs=jobs))[0]

    assert after(90).rounds[2].status.step == "Collecting"
    observed = after(96)
    assert observed.rounds[2].status.step == "Superseded"
    assert observed.run.status.rounds_finished == 0
    created = of(observed, CreateRound)
    assert [(item.number, item.source.round) for item in created] == [(3, 1)]


def test_async_rounds_overlap_and_train_on_the_policy_before() -> None:
    it = World({"mode": "AsyncOneRound", "rounds": {"max": 3, "steps": 2, "batchSize": 2}})
    overlap = False
    for _ in range(80):
        it.step()
        overlap |= it.has_round(2) and it.round(1).status.step in ("Training", "Exporting", "Gating")
        if it.run.status.conditions and it.is_true("Completed"):
            break
    assert overlap
    trained = [item.number for item in it.run.status.history if item.outcome == "Promoted"]
    assert trained[0] == 0
    assert it.run.status.rounds_finished == 3
    second = it.round(2)
    assert second.spec.source is not None
    assert second.spec.source.round == 0, "data of the policy before"
    assert second.status.lineage_round == 1, "and yet the trainer goes on from round 1"


def test_async_a_starving_round_is_superseded_by_one_on_the_new_policy() -> None:
    def script(number: int, step: Step, attempt: int) -> Outcome | None:
        is_starved = step is Step.COLLECTING and number == 2
        return None if is_starved else all_well(number, step, attempt)

    it = World({"mode": "AsyncOneRound"}, script)
    it.until(lambda w: w.has_round(2) and w.at(2, Step.SUPERSEDED))
    it.until(lambda w: w.is_true("Completed"))
    assert [(item.number, item.outcome) for item in it.run.status.history][1:] == [
        (1, "Promoted"),
        (2, "Superseded"),
        (3, "Promoted"),
    ]
    assert "chess-r0002-collect-a0" not in it.names_of(port.JOB), "the starving Job was stopped"


# Halted.


def sealed(number: int) -> dict[str, Any]:
    """The status of a round that has its data and has not begun to train."""
    return {"dataset": runs.status_at(number, Step.TRAINING)["dataset"], **runs.status_at(number, Step.COLLECTING)}


def test_async_a_round_ahead_waits_for_the_person_who_is_asked_about_the_blocked_one() -> None:
    it = World({**ASYNC, "onBlocked": "HaltForHuman", "rounds": {"max": 3, "steps": 2, "batchSize": 2}}, blocking(1))
    it.until(lambda w: w.at(1, Step.BLOCKED))
    it.steps(40)
    assert it.round(2).status.step == "Collecting"
    assert it.round(2).status.dataset is not None
    assert "round 1 was blocked, and a person decides" in it.round(2).status.message
    assert not [name for name in it.names_of(port.JOB) if "r0002-train" in name]
    assert it.condition("Stalled") == ("True", "GateBlocked")
    assert it.run.status.halted_round == 1
    it.edit(requests={"retryToken": "go on"})
    it.until(lambda w: w.at(2, Step.PROMOTED))
    assert it.run.status.halted_round is None


def test_async_a_halted_run_says_that_the_round_ahead_goes_on() -> None:
    observed = scene(Step.BLOCKED, spec=ASYNC, run={"haltedRound": 1, "consecutiveBlocked": 1})
    entry = observed.run.status.history[0].model_copy(update={"number": 1, "outcome": "Blocked"})
    history = [*observed.run.status.history, entry]
    run = observed.run.model_copy(update={"status": observed.run.status.model_copy(update={"history": history})})
    ahead = runs.make_round(2, run, **sealed(2))
    both = dataclasses.replace(observed, run=run, rounds={**observed.rounds, 2: ahead})
    assert "retryToken to let round 2 train on" in condition(settled(both)[1], "Stalled")[2]
    assert "to begin the next round" in condition(settled(dataclasses.replace(observed, run=run))[1], "Stalled")[2]


def test_async_a_round_that_has_just_ended_is_accounted_for_before_the_next_one_trains() -> None:
    """Its status is written before the run's: whether the run halts is not known between the two."""
    observed = scene(Step.BLOCKED, spec={**ASYNC, "onBlocked": "HaltForHuman"})
    ahead = runs.make_round(2, observed.run, **sealed(2))
    observed = dataclasses.replace(observed, rounds={**observed.rounds, 2: ahead})
    assert observed.last_accounted == 0
    first = decide(observed)
    assert first.run_status.halted_round == 1
    assert first.round_status is None or first.round_status.step == "Collecting"
    assert settled(observed)[0].rounds[2].status.step == "Collecting"
