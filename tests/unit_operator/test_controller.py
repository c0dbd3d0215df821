"""The controller over the in-memory cluster: what tables cannot show because it takes many passes or real objects."""

from __future__ import annotations

from typing import Any

import pytest

from prodrl_operator import names
from prodrl_operator.cluster import port
from prodrl_operator.errors import ForbiddenError
from prodrl_operator.names import Step
from tests.support.fake_kubelet import Outcome
from tests.support.operator_harness import NAME, World, all_well, blocking, digest

CANARY = {"canary": {"steps": [{"weight": 10, "minTrajectories": 20}, {"weight": 50, "minTrajectories": 20}]}}


def deployment(it: World, number: int) -> dict[str, Any]:
    found = it.store.get(port.DEPLOYMENT, "default", f"{NAME}-r{number:04d}-serve")
    assert found is not None
    return found


def owners(obj: dict[str, Any]) -> list[str]:
    return [owner["name"] for owner in obj["metadata"].get("ownerReferences", [])]


def test_a_run_turns_by_itself_until_its_rounds_are_made() -> None:
    it = World({"gate": CANARY})
    it.users_per_step = 200
    seen: list[int] = []
    for _ in range(80):
        it.step()
        seen.append(it.run.status.canary_weight)
        if it.is_true("Completed"):
            break
    assert [item.outcome for item in it.run.status.history] == ["Promoted"] * 3
    assert sorted(set(seen)) == [0, 10, 50]
    assert it.weights()[2] == 100
    it.steps(15)
    assert it.names_of(port.DEPLOYMENT) == ["chess-gateway", "chess-r0002-serve"]
    assert it.names_of(port.SERVICE) == ["chess-gateway", "chess-r0002-serve"]


def test_a_pass_with_nothing_to_do_writes_nothing() -> None:
    it = World(script=lambda number, step, attempt: None if step is Step.TRAINING else all_well(number, step, attempt))
    it.until(lambda w: w.at(1, Step.TRAINING))
    it.steps(3)
    writes: list[Any] = []
    it.store.on_mutation = lambda _, mutation: writes.append(mutation)
    it.steps(20, seconds=1)
    assert writes == []


def test_i8_the_operator_never_writes_the_spec_or_annotations_of_a_users_object() -> None:
    it = World(script=blocking(2))
    before = it.store.get(port.RUN, "default", NAME)
    it.until(lambda w: bool(w.run.status.conditions) and (w.is_true("Completed") or w.is_true("Stalled")))
    after = it.store.get(port.RUN, "default", NAME)
    assert before is not None
    assert after is not None
    assert after["spec"] == before["spec"]
    assert after["metadata"]["generation"] == before["metadata"]["generation"]
    assert after["metadata"].get("annotations") == before["metadata"].get("annotations")


def test_i1_stable_never_loses_a_ready_replica_because_of_a_round() -> None:
    it = World({"serving": {"replicas": 2}, "onBlocked": "RestartFromStable"}, blocking(1))
    it.until(lambda w: w.run.status.stable is not None)
    it.steps(2)
    for _ in range(40):
        it.step()
        stable = it.run.status.stable
        assert stable is not None
        assert deployment(it, stable.round)["status"]["readyReplicas"] == 2


def test_an_inconclusive_gate_makes_no_further_job_in_a_hundred_resyncs() -> None:
    def few(number: int, step: Step, attempt: int) -> Outcome:
        good = all_well(number, step, attempt)
        if step is not Step.GATING or number == 0 or not isinstance(good.message, dict):
            return good
        figures = good.message["agreement"]
        return Outcome({**good.message, "agreement": {**figures, "samples": 0, "tokens": 0}})

    it = World(script=few)
    it.until(lambda w: bool(w.run.status.conditions) and w.is_true("Stalled"))
    assert it.condition("Stalled") == ("True", "GateInconclusive")
    it.steps(100, seconds=3600)
    assert [name for name in it.names_of(port.JOB) if "r0001-gate" in name] == ["chess-r0001-gate-a0"]
    assert it.round(1).status.step == "Gating"
    it.edit(requests={"retryToken": "again"})
    it.until(lambda w: "chess-r0001-gate-a1" in w.names_of(port.JOB))


def test_edits_at_every_step_take_effect_with_the_next_round() -> None:
    it = World({"rounds": {"max": 3, "steps": 2, "batchSize": 2}})
    it.until(lambda w: w.at(1, Step.COLLECTING))
    for step in (Step.COLLECTING, Step.TRAINING, Step.EXPORTING, Step.CANARY_DEPLOYING, Step.GATING):
        it.until(lambda w, step=step: w.at(1, step))  # type: ignore[misc]
        it.edit(serving={"image": f"at-{step.value}:1"})
    it.until(lambda w: w.has_round(2))
    assert it.round(1).spec.settings.serving.image is None
    assert it.round(2).spec.settings.serving.image == "at-Gating:1"
    it.until(lambda w: w.at(2, Step.GATING))
    server = deployment(it, 2)["spec"]["template"]["spec"]["containers"][0]
    assert server["image"] == "at-Gating:1"


def test_a_stale_list_leads_to_no_second_job() -> None:
    """The LIST answers what was true a while ago; the deterministic name makes the second create fail."""
    running = lambda number, step, attempt: None if step is Step.TRAINING else all_well(number, step, attempt)  # noqa: E731
    it = World(script=running)
    it.until(lambda w: w.at(1, Step.TRAINING))
    it.steps(2)
    fresh = it.store.list
    uids = {obj["metadata"]["uid"] for obj in fresh(port.JOB)}

    def stale(kind: port.Kind, namespace: str | None = None, labels: Any = None) -> list[Any]:
        found = fresh(kind, namespace, labels)
        return [obj for obj in found if "train" not in obj["metadata"]["name"]]

    it.store.list = stale  # type: ignore[method-assign]
    for _ in range(5):
        it.controller.reconcile("default", NAME)
    it.store.list = fresh  # type: ignore[method-assign]
    assert {obj["metadata"]["uid"] for obj in it.store.list(port.JOB)} == uids
    assert it.condition("Stalled")[0] == "False"


def test_a_job_that_belongs_to_somebody_else_stalls_the_run_until_it_goes() -> None:
    it = World()
    it.turn()
    foreign = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "chess-r0000-export-a0", "namespace": "default"},
        "data": {"mine": "yes"},
    }
    it.store.delete(port.CONFIG_MAP, "default", "chess-r0000-export-a0")
    it.store.delete(port.JOB, "default", "chess-r0000-export-a0")
    it.store.create(foreign)
    it.steps(3)
    assert it.condition("Stalled") == ("True", "ForeignObject")
    kept = it.store.get(port.CONFIG_MAP, "default", "chess-r0000-export-a0")
    assert kept is not None
    assert kept["data"] == {"mine": "yes"}
    it.store.delete(port.CONFIG_MAP, "default", "chess-r0000-export-a0")
    it.until(lambda w: w.run.status.stable is not None)
    assert it.condition("Stalled")[0] == "False"


def test_a_service_that_belongs_to_somebody_else_is_not_overwritten() -> None:
    it = World()
    spec = {"selector": {"app": "theirs"}, "ports": [{"port": 1}]}
    metadata = {"name": "chess-gateway", "namespace": "default"}
    it.store.create({"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec})
    it.steps(3)
    assert it.condition("Stalled") == ("True", "ForeignObject")
    kept = it.store.get(port.SERVICE, "default", "chess-gateway")
    assert kept is not None
    assert kept["spec"]["selector"] == {"app": "theirs"}


@pytest.mark.parametrize(
    ("message", "reason"),
    [("jobs is forbidden: exceeded quota: gpus", "QuotaExceeded"), ("no rights to create jobs", "Forbidden")],
)
def test_a_refusal_of_the_api_server_is_said_and_goes_away(message: str, reason: str) -> None:
    it = World()

    def refuse(moment: str, mutation: Any) -> None:
        if moment == "before" and mutation["object"]["kind"] == "Job":
            raise ForbiddenError(message)

    it.store.on_mutation = refuse
    it.steps(4)
    assert it.condition("Stalled") == ("True", reason)
    it.store.on_mutation = None
    it.until(lambda w: w.run.status.stable is not None)
    assert it.condition("Stalled")[0] == "False"


# Attempts.


def test_a_failed_attempt_is_followed_by_one_of_another_name() -> None:
    def script(number: int, step: Step, attempt: int) -> Outcome:
        if step is Step.TRAINING and attempt < 2:
            codes = {0: 69, 1: 80}
            return Outcome({"reason": "x", "message": "away"}, exit_code=codes[attempt])
        return all_well(number, step, attempt)

    it = World(script=script)
    it.until(lambda w: w.at(1, Step.PROMOTED))
    trained = [name for name in it.names_of(port.JOB) if "r0001-train" in name]
    assert trained == [f"chess-r0001-train-a{attempt}" for attempt in range(3)]
    attempt = next(item for item in it.round(1).status.attempts if item.step == "Training")
    assert (attempt.number, attempt.failures, attempt.disruptions) == (2, 1, 1)


def test_a_round_that_failed_goes_on_after_a_retry_token() -> None:
    broken = True

    def script(number: int, step: Step, attempt: int) -> Outcome:
        if step is Step.TRAINING and broken:
            return Outcome({"reason": "CredentialsRejected", "message": "bad key"}, exit_code=77)
        return all_well(number, step, attempt)

    it = World(script=script)
    it.until(lambda w: bool(w.run.status.conditions) and w.is_true("Stalled"))
    assert it.condition("Stalled") == ("True", "CredentialsRejected")
    assert it.condition("Ready") == ("True", "CredentialsRejected")
    it.steps(5)
    broken = False
    it.edit(requests={"retryToken": "renewed"})
    it.until(lambda w: w.is_true("Completed"))
    assert "chess-r0001-train-a1" in it.names_of(port.JOB)


def test_round_0_that_failed_begins_again_when_its_settings_are_corrected() -> None:
    it = World({"serving": {"image": "typo:1"}})
    image_of = lambda item: item["spec"]["template"]["spec"]["containers"][0]["image"]  # noqa: E731
    it.deployments = lambda item: "InvalidImageName" if image_of(item) == "typo:1" else True
    it.until(lambda w: bool(w.run.status.conditions) and w.is_true("Stalled"))
    assert it.condition("Stalled") == ("True", "ImagePullFailed")
    it.edit(serving={"image": "right:1"})
    it.until(lambda w: w.run.status.stable is not None)
    assert it.round(0).spec.settings.serving.image == "right:1"
    assert it.condition("Stalled")[0] == "False"


# The canary.


def test_a_canary_that_fails_its_users_is_taken_back_at_once() -> None:
    it = World({"gate": CANARY, "onBlocked": "HaltForHuman"})
    it.users_per_step = 400
    it.gateway.failures[digest(1)] = 0.9
    it.until(lambda w: w.at(1, Step.BLOCKED))
    assert it.run.status.canary_weight == 0
    it.steps(2)
    assert it.weights() == {0: 100}
    assert "chess-r0001-serve" not in it.names_of(port.DEPLOYMENT)
    assert it.condition("Stalled") == ("True", "GateBlocked")
    assert it.run.status.last_gate is not None
    assert "failed requests" in it.run.status.last_gate.message


def test_a_replica_of_the_gateway_that_restarts_in_the_canary_only_costs_time() -> None:
    it = World({"gate": CANARY})
    it.users_per_step = 100
    it.until(lambda w: w.run.status.canary_weight == 50)
    it.gateway.stats.clear()
    it.until(lambda w: w.at(1, Step.PROMOTED))
    assert it.run.status.history[-1].verdict == "Pass"


def test_a_gateway_that_cannot_be_reached_holds_the_promotion_and_not_the_commit() -> None:
    it = World()
    it.until(lambda w: w.at(1, Step.GATING))
    it.gateway.is_up = False
    it.steps(10)
    assert it.run.status.stable is not None
    assert it.run.status.stable.round == 1
    assert it.round(1).status.step == "Promoting"
    assert not it.has_round(2)
    it.gateway.is_up = True
    it.until(lambda w: w.at(2, Step.PROMOTED))


def test_a_restarted_replica_gets_its_routes_again() -> None:
    it = World()
    it.until(lambda w: w.is_true("Completed") if w.run.status.conditions else False)
    it.gateway.routes = None
    it.steps(1)
    assert it.weights()[2] == 100


# Retention.


def test_old_round_objects_go_with_their_jobs() -> None:
    it = World({"rounds": {"max": 5, "steps": 2, "batchSize": 2, "historyLimit": 1}})
    it.until(lambda w: bool(w.run.status.conditions) and w.is_true("Completed"))
    it.steps(20)
    assert it.names_of(port.ROUND) == ["chess-r0004", "chess-r0005"], "stable and the one before"
    assert not [name for name in it.names_of(port.JOB) if "r0001" in name]


# Deletion.


def deleted(keep: str) -> World:
    it = World({"onDelete": {"serving": keep}}, lambda n, s, a: None if s is Step.TRAINING else all_well(n, s, a))
    it.until(lambda w: w.at(1, Step.TRAINING))
    it.steps(2)
    it.store.delete(port.RUN, "default", NAME)
    return it


def after_deletion(it: World) -> list[dict[str, Any]]:
    created: list[dict[str, Any]] = []
    present = {(obj.body["kind"], obj.body["metadata"]["name"]) for obj in it.store._entries.values()}

    def hook(moment: str, mutation: Any) -> None:
        obj = mutation["object"]
        is_new = (obj["kind"], obj["metadata"]["name"]) not in present
        if moment == "before" and mutation["verb"] in ("create", "apply") and is_new:
            created.append(obj)

    it.store.on_mutation = hook
    for _ in range(30):
        it.controller.reconcile("default", NAME)
        it.kubelet.tick()
    it.store.on_mutation = None
    return created


@pytest.mark.parametrize("keep", ["Keep", "Delete"])
def test_i7_a_deleted_run_creates_nothing_more_and_goes(keep: str) -> None:
    it = deleted(keep)
    assert after_deletion(it) == []
    assert it.store.get(port.RUN, "default", NAME) is None
    assert it.names_of(port.JOB) == []
    assert it.names_of(port.ROUND) == []


def test_keep_leaves_users_served_as_they_were() -> None:
    it = deleted("Keep")

    def serving() -> set[str]:
        wanted = ("serving", "gateway")
        pods = it.store.list(port.POD)
        return {p["metadata"]["uid"] for p in pods if p["metadata"]["labels"][names.LABEL_COMPONENT] in wanted}

    before = serving()
    assert len(before) == 2
    template = deployment(it, 0)["spec"]["template"]
    after_deletion(it)
    assert it.names_of(port.DEPLOYMENT) == ["chess-gateway", "chess-r0000-serve"]
    assert it.names_of(port.SERVICE) == ["chess-gateway", "chess-r0000-serve"]
    assert "chess-routes" in it.names_of(port.CONFIG_MAP)
    assert owners(deployment(it, 0)) == []
    assert deployment(it, 0)["spec"]["template"] == template
    assert serving() == before, "no pod was restarted"
    assert it.weights() == {0: 100}


def test_delete_leaves_nothing() -> None:
    it = deleted("Delete")
    after_deletion(it)
    for kind in (port.DEPLOYMENT, port.SERVICE, port.CONFIG_MAP, port.POD):
        assert it.names_of(kind) == [], kind


def test_a_foreground_deletion_recreates_nothing() -> None:
    it = World({"onDelete": {"serving": "Delete"}})
    it.until(lambda w: w.run.status.stable is not None)
    it.store.delete(port.RUN, "default", NAME, propagation="Foreground")
    assert after_deletion(it) == []
    assert it.store.get(port.RUN, "default", NAME) is None


def test_a_run_deleted_while_the_operator_was_away_is_finished_by_the_next() -> None:
    it = deleted("Keep")
    it.restart()
    after_deletion(it)
    assert it.store.get(port.RUN, "default", NAME) is None
    assert it.names_of(port.DEPLOYMENT) == ["chess-gateway", "chess-r0000-serve"]


def test_a_run_of_the_same_name_adopts_what_an_earlier_one_left() -> None:
    it = deleted("Keep")
    after_deletion(it)
    base = {
        "model": {"uri": "file:///models/other", "servedName": NAME},
        "storage": {"uri": "file:///store"},
        "gateway": {"authentication": "Anonymous"},
        "rounds": {"max": 1, "steps": 2, "batchSize": 2},
        "onDelete": {"serving": "Delete"},
    }
    metadata = {"name": NAME, "namespace": "default"}
    it.store.create({"apiVersion": names.API_VERSION, "kind": "ProdRLRun", "metadata": metadata, "spec": base})
    it.script = all_well
    it.until(lambda w: bool(w.run.status.conditions) and w.is_true("Completed"))
    gateway = it.store.get(port.DEPLOYMENT, "default", "chess-gateway")
    assert gateway is not None
    assert owners(gateway) == [NAME]


# Specs that cannot be used.


def test_an_unreadable_spec_is_refused_by_name_and_users_stay_served(monkeypatch: pytest.MonkeyPatch) -> None:
    it = World()
    it.until(lambda w: w.is_true("Completed") if w.run.status.conditions else False)
    it.edit(futureField={"x": 1})
    written: list[dict[str, Any]] = []
    # A newer CRD would let the field through; the CRD of this version refuses even the status write.
    monkeypatch.setattr(it.store, "update_status", written.append)
    it.controller.reconcile("default", NAME)
    stalled = next(item for item in written[0]["status"]["conditions"] if item["type"] == "Stalled")
    assert (stalled["status"], stalled["reason"]) == ("True", "InvalidSpec")
    assert "futureField" in stalled["message"]
    assert it.names_of(port.DEPLOYMENT)


# Events.


def test_one_event_a_transition_on_the_run_and_on_the_round() -> None:
    it = World()
    it.until(lambda w: bool(w.run.status.conditions) and w.is_true("Completed"))
    it.steps(30)
    found = [
        (obj["involvedObject"]["kind"], obj["involvedObject"]["name"], obj["reason"])
        for obj in it.store.list(port.EVENT)
        if obj["reason"] in ("StepTraining", "Promoted", "MaxRoundsReached") and "r0001" in obj["message"] + "r0001"
    ]
    assert found.count(("ProdRLRound", "chess-r0001", "StepTraining")) == 1
    assert found.count(("ProdRLRun", "chess", "StepTraining")) == 2, "one for each training round"
    assert found.count(("ProdRLRound", "chess-r0001", "Promoted")) == 1
    assert found.count(("ProdRLRun", "chess", "MaxRoundsReached")) == 1


@pytest.mark.parametrize("lost_after", range(4))
def test_who_lost_the_lease_in_the_middle_of_a_pass_acts_no_more(lost_after: int) -> None:
    """Another operator may have promoted meanwhile: a route pushed now would be old news."""
    it = World()
    it.until(lambda w: w.at(1, Step.GATING))
    it.gateway.routes, it.gateway.pushes = None, []
    writes: list[Any] = []
    it.store.on_mutation = lambda _, mutation: writes.append(mutation)
    asked = 0

    def may_act() -> bool:
        nonlocal asked
        asked += 1
        return asked <= lost_after

    it.controller.may_act = may_act
    it.controller.reconcile("default", NAME)
    assert bool(it.gateway.pushes) is (lost_after > 0)
    assert not writes or lost_after > 1
    assert asked <= 2
