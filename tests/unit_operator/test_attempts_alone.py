"""Two attempts at one step never work at the same time, however the first one's Job went: its pods are what counts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import pytest

from prodrl_operator import names
from prodrl_operator.builders import Platform
from prodrl_operator.cluster import port
from prodrl_operator.cluster.port import Kind, Object
from prodrl_operator.controller import Controller
from prodrl_operator.names import Reason, Step
from prodrl_operator.pods import LOST_SECONDS
from prodrl_operator.rounds import planning
from prodrl_operator.rounds.decision import EnsureJob
from prodrl_operator.rounds.observed import JobView, LivePods, Observed
from tests.support import runs
from tests.support.fake_kubelet import Outcome
from tests.support.operator_harness import NAME, World, all_well
from tests.support.runs import ago, condition, job, scene, settled

TRAIN = "chess-r0001-train-a0"
HOLD = ["example.com/still-working"]


def training_once(number: int, step: Step, attempt: int) -> Outcome | None:
    """The first attempt never ends by itself."""
    return None if (step, attempt) == (Step.TRAINING, 0) else all_well(number, step, attempt)


def at_work(world: Callable[[], World] = lambda: World(script=training_once)) -> World:
    """Round 1 trains, and its pod takes its time to go once it is told to."""
    it = world()
    it.until(lambda w: bool(trainers(w)) and is_running(trainers(w)[0]))
    it.store.set_finalizers(trainers(it)[0], HOLD)
    return it


def is_running(pod: Object) -> bool:
    return bool(pod.get("status", {}).get("phase") == "Running")


def trainers(it: World) -> list[Object]:
    """Training pods that have not ended."""
    found = [pod for pod in it.store.list(port.POD, "default") if "-train-" in pod["metadata"]["name"]]
    return [pod for pod in found if pod.get("status", {}).get("phase") not in ("Succeeded", "Failed")]


def watched(it: World, steps: int) -> list[str]:
    """Go on, and never see two; the Jobs of the step at the end."""
    for _ in range(steps):
        it.step()
        assert len(trainers(it)) <= 1, "two trainers at once"
    return [name for name in it.names_of(port.JOB) if "-train-" in name]


def let_go(it: World) -> None:
    for pod in trainers(it):
        it.store.set_finalizers(pod, [])


def test_a_job_that_a_person_deletes_is_made_again_when_its_pod_is_gone() -> None:
    it = at_work()
    first = trainers(it)[0]["metadata"]["name"]
    it.store.delete(port.JOB, "default", TRAIN)
    assert watched(it, 20) == []
    assert it.round(1).status.message == f"waits for pod {first}: it has not ended yet"
    it.script = all_well
    let_go(it)
    assert watched(it, 2) == [TRAIN]
    it.until(lambda w: w.at(1, Step.PROMOTED))
    assert it.round(1).status.attempts == []


def test_a_pod_that_an_orphaning_deletion_left_works_to_its_end_first() -> None:
    it = at_work()
    let_go(it)
    it.store.delete(port.JOB, "default", TRAIN, propagation="Orphan")
    assert watched(it, 20) == []
    left = trainers(it)[0]
    assert not left["metadata"].get("ownerReferences")
    it.script = all_well
    it.store.edit(port.POD, "default", left["metadata"]["name"], lambda pod: pod["status"].update(phase="Succeeded"))
    assert watched(it, 2) == [TRAIN]


def test_an_attempt_that_the_operator_gave_up_is_gone_before_the_next_begins() -> None:
    """Its own deadline: the retry's pause is shorter than the time that a pod has to end."""
    it = at_work(lambda: World({"training": {"activeDeadlineSeconds": 3600}}, script=training_once))
    it.now += timedelta(hours=2)
    assert watched(it, 20) == [TRAIN], "with a deletionTimestamp, until its pod is gone"
    assert it.round(1).status.attempts[0].number == 1
    let_go(it)
    watched(it, 5)
    assert ("1", Step.TRAINING, "1") in it.jobs_seen
    it.until(lambda w: w.at(1, Step.PROMOTED))


def test_a_lost_node_stays_a_persons_affair_after_they_deleted_the_job() -> None:
    it = at_work()
    it.store.delete(port.JOB, "default", TRAIN)
    watched(it, 2)
    it.now += timedelta(seconds=LOST_SECONDS + 60)
    assert watched(it, 3) == []
    assert it.condition("Stalled") == ("True", Reason.NODE_LOST)
    let_go(it)  # kubectl delete pod --force, or the Node
    assert watched(it, 2) == [TRAIN]
    assert it.condition("Stalled")[0] == "False"


class Blind:
    """A cluster whose watch of pods fell silent: a run's pods are not seen, a fresh list has them."""

    def __init__(self, it: World) -> None:
        self._store = it.store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def list(self, kind: Kind, namespace: str | None = None, labels: Mapping[str, str] | None = None) -> list[Object]:
        is_of_run = kind is port.POD and names.LABEL_RUN in (labels or {})
        return [] if is_of_run else self._store.list(kind, namespace, labels)


def test_pods_that_no_watch_ever_showed_are_asked_for_before_a_job_is_made() -> None:
    it = at_work()
    it.controller = Controller(Blind(it), Platform(), clock=lambda: it.now, gateway_admin=it.gateway)
    it.store.delete(port.JOB, "default", TRAIN)
    assert watched(it, 10) == []
    let_go(it)
    assert watched(it, 2) == [TRAIN]


def test_another_runs_pods_and_copies_for_debugging_are_in_nobodys_way() -> None:
    it = at_work()
    copied = trainers(it)[0]
    labels = {k: v for k, v in copied["metadata"]["labels"].items() if "job-name" not in k}
    others = {**copied["metadata"]["labels"], names.LABEL_RUN: "other", names.LABEL_JOB_NAME: "other-r0001-train-a0"}
    let_go(it)
    it.script = all_well
    it.store.delete(port.JOB, "default", TRAIN)
    it.step()
    for name, its in {"debugger": labels, "others-trainer": others}.items():
        spec = {key: value for key, value in copied["spec"].items() if key != "nodeName"}
        metadata = {"name": name, "namespace": "default", "labels": its}
        it.store.create({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
    it.until(lambda w: w.at(1, Step.PROMOTED))


def going(number: int, **pods: LivePods) -> tuple[dict[Any, JobView], dict[Any, LivePods]]:
    """An aborted round's training, deleted and not gone."""
    key = (number, Step.TRAINING, 0)
    return {key: job("Running", deleting=True)}, {key: pods.get("its", LivePods("p"))}


@pytest.mark.parametrize(("lost", "is_made"), [("", False), ("pod p should be gone", True)])
def test_a_round_trains_when_the_one_before_has_let_go(lost: str, is_made: bool) -> None:
    """AsyncOneRound: round 1 was aborted while it trained, and round 2 has its data already."""
    jobs, live = going(1, its=LivePods("p", lost))
    observed = scene(Step.TRAINING, number=2)
    aborted = runs.make_round(1, observed.run, **runs.status_at(1, Step.ABORTED))
    observed = dataclasses.replace(observed, rounds={**observed.rounds, 1: aborted}, jobs=jobs, pods=live)
    assert bool(made(observed)) is is_made
    assert made(dataclasses.replace(observed, jobs={}, pods={}))
    still = dataclasses.replace(observed, jobs={})
    assert bool(made(still)) is is_made, "its pods outlive its Job"


def made(observed: Observed) -> list[EnsureJob]:
    return [item for item in planning.plan(observed, runs.NOW, None) if isinstance(item, EnsureJob)]


def test_the_active_deadline_counts_what_a_job_had() -> None:
    """The step waited for a quota for most of its time; then its Job could be made."""
    spec = {"training": {"activeDeadlineSeconds": 3600, "backoffLimit": 2}}

    def after(age: float) -> Observed:
        running = job("Running", begun=runs.NOW - timedelta(seconds=age))
        return settled(scene(Step.TRAINING, spec=spec, since=100_000, jobs={0: running}))[0]

    assert after(3000).rounds[1].status.attempts == []
    assert after(3700).rounds[1].status.attempts[0].failures == 1


def test_the_active_deadline_is_looked_at_when_it_is_due() -> None:
    spec = {"training": {"activeDeadlineSeconds": 3600}}
    running = job("Running", begun=runs.NOW - timedelta(seconds=600))
    _, decision = settled(scene(Step.TRAINING, spec=spec, since=3000, jobs={0: running}))
    assert decision.requeue_after_seconds == 3600 + 60 - 600 + 1


def test_a_lost_pod_of_a_step_that_is_over_is_nobodys_affair() -> None:
    lost = {(1, Step.COLLECTING, 0): LivePods("p", "pod p should be gone")}
    _, decision = settled(scene(Step.TRAINING, jobs={0: job()}, pods=lost))
    assert condition(decision, "Stalled")[0] == "False"
    observed, decision = settled(scene(Step.COLLECTING, jobs={0: job()}, pods=lost, status={"since": ago(5)}))
    assert condition(decision, "Stalled")[1] == Reason.NODE_LOST
    assert observed.run.metadata["name"] == NAME
