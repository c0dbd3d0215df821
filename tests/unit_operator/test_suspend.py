"""``spec.suspend``: Jobs of the operator's own are suspended, those of a queue taken away, and both come back."""

from __future__ import annotations

from typing import Any

from prodrl_operator.cluster import port
from prodrl_operator.names import Step
from tests.support.fake_kubelet import Outcome
from tests.support.operator_harness import World, all_well


def test_suspend_reaches_the_job_and_leaves_again() -> None:
    it = World(script=lambda number, step, attempt: None if step is Step.TRAINING else all_well(number, step, attempt))
    it.until(lambda w: w.at(1, Step.TRAINING))
    it.steps(2)
    it.edit(suspend=True)
    it.steps(2)

    def job() -> dict[str, Any]:
        found = it.store.get(port.JOB, "default", "chess-r0001-train-a0")
        assert found is not None
        return found

    assert job()["spec"]["suspend"] is True
    assert job()["spec"]["template"]["spec"]["containers"], "nothing but suspend was touched"
    assert it.condition("Ready") == ("True", "Suspended")
    assert it.condition("Reconciling")[0] == "False"
    it.steps(10, seconds=86_400)
    assert it.round(1).status.step == "Training"
    it.edit(suspend=False)
    it.steps(2)
    assert job()["spec"]["suspend"] is False
    assert it.round(1).status.attempts == []


def test_suspend_takes_a_queued_job_away_and_brings_it_back() -> None:
    """Kueue owns ``suspend`` of such a Job; no attempt is spent, no deadline runs."""

    def script(number: int, step: Step, attempt: int) -> Outcome | None:
        is_over = step is not Step.TRAINING or is_let_go
        return all_well(number, step, attempt) if is_over else None

    is_let_go = False
    it = World({"training": {"queueName": "gpus"}}, script)
    it.until(lambda w: "chess-r0001-train-a0" in w.names_of(port.JOB))

    def admit() -> None:  # as Kueue does
        it.store.edit(port.JOB, "default", "chess-r0001-train-a0", lambda obj: obj["spec"].update(suspend=False))

    admit()
    it.steps(2)
    first = it.store.get(port.JOB, "default", "chess-r0001-train-a0")
    it.edit(suspend=True)
    it.steps(3)
    assert "chess-r0001-train-a0" not in it.names_of(port.JOB)
    assert not [name for name in it.names_of(port.POD) if "train" in name]
    assert it.condition("Suspended") == ("True", "UserRequested")
    assert it.condition("Reconciling")[0] == "False"
    it.steps(10, seconds=86_400)
    it.edit(suspend=False)
    it.steps(2)
    second = it.store.get(port.JOB, "default", "chess-r0001-train-a0")
    assert first is not None
    assert second is not None
    assert first["metadata"]["uid"] != second["metadata"]["uid"]
    assert second["spec"]["suspend"] is True, "it queues again"
    assert it.condition("Suspended") == ("True", "Queued")
    admit()
    is_let_go = True
    it.until(lambda w: w.at(1, Step.PROMOTED))
    assert it.round(1).status.attempts == []
