"""What people and machines do to a run's objects: labels taken off, copies made, nodes lost, rounds deleted."""

from __future__ import annotations

import copy
import dataclasses
from datetime import timedelta
from typing import Any

import pytest

from prodrl_operator import names, pods
from prodrl_operator.cluster import port
from prodrl_operator.cluster.local import podspec
from prodrl_operator.cluster.port import Kind, Object
from prodrl_operator.errors import ForbiddenError
from prodrl_operator.names import Reason, Step
from prodrl_operator.rounds import turn
from prodrl_operator.rounds.decide import UNREACHABLE_SECONDS
from prodrl_operator.rounds.observed import GatewayReplica, LivePods
from tests.support.fake_kubelet import Outcome
from tests.support.operator_harness import START, World, all_well, blocking, digest, result
from tests.support.runs import condition, job, scene, settled

TOLD = (names.LABEL_RUN, names.LABEL_MANAGED_BY, names.LABEL_COMPONENT, names.LABEL_ROUND)
STABLE = "chess-r0000-serve"


def training_forever(number: int, step: Step, attempt: int) -> Outcome | None:
    return None if number == 1 and step is Step.TRAINING else all_well(number, step, attempt)


def served(script: Any = training_forever, spec: dict[str, Any] | None = None) -> World:
    it = World(spec, script=script)
    it.until(lambda w: w.has_round(1) and w.weights() == {0: 100})
    return it


def without(label: str) -> Any:
    def take_off(obj: Object) -> None:
        obj["metadata"]["labels"].pop(label, None)

    return take_off


def labels_of(it: World, kind: Kind, name: str) -> dict[str, str]:
    found = it.store.get(kind, "default", name)
    assert found is not None
    labels: dict[str, str] = found["metadata"]["labels"]
    return labels


# Labels.


@pytest.mark.parametrize("label", TOLD)
@pytest.mark.parametrize("kind", [port.SERVICE, port.DEPLOYMENT, port.CONFIG_MAP], ids=lambda kind: kind.kind)
def test_what_serves_users_gets_its_labels_back_and_they_stay_served(kind: Kind, label: str) -> None:
    it = served()
    before = labels_of(it, kind, STABLE)
    it.store.edit(kind, "default", STABLE, without(label))
    for _ in range(5):
        it.step()
        assert it.weights() == {0: 100}, "an address that is not seen is no reason to serve nobody"
    assert labels_of(it, kind, STABLE) == before
    assert it.condition("Ready")[0] == "True"
    assert not it.is_true("Stalled")


def test_stable_is_not_called_available_while_its_address_is_not_known() -> None:
    it = served()
    observed = scene(Step.TRAINING)
    assert condition(settled(observed)[1], "StableAvailable")[0] == "True"
    observed.urls.clear()  # type: ignore[attr-defined]
    assert condition(settled(observed)[1], "StableAvailable")[0] == "False"
    assert it.is_true("StableAvailable")


@pytest.mark.parametrize("label", [*TOLD, names.LABEL_STEP, names.LABEL_ATTEMPT])
def test_a_job_gets_its_labels_back_and_is_never_made_twice(label: str) -> None:
    it = World(script=training_forever)
    it.until(lambda w: "chess-r0001-train-a0" in w.names_of(port.JOB))
    it.steps(2)
    before = it.store.get(port.JOB, "default", "chess-r0001-train-a0")
    assert before is not None
    it.store.edit(port.JOB, "default", "chess-r0001-train-a0", without(label))
    it.steps(3)
    after = it.store.get(port.JOB, "default", "chess-r0001-train-a0")
    assert after is not None
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    assert after["metadata"]["labels"] == before["metadata"]["labels"]
    it.script = all_well
    it.until(lambda w: w.at(1, Step.PROMOTED))
    assert it.round(1).status.attempts == []


@pytest.mark.parametrize("kind", [port.SERVICE, port.JOB], ids=lambda kind: kind.kind)
def test_a_policy_that_takes_a_label_off_each_time_is_not_argued_with(kind: Kind) -> None:
    it = served()
    it.until(lambda w: "chess-r0001-train-a0" in w.names_of(port.JOB))
    it.steps(2)
    name = {port.SERVICE.kind: STABLE, port.JOB.kind: "chess-r0001-train-a0"}[kind.kind]
    apply = it.store.apply

    def admitted(manifest: Object) -> Object:
        if (manifest["kind"], manifest["metadata"]["name"]) == (kind.kind, name):
            labels = {**manifest["metadata"]["labels"], names.LABEL_MANAGED_BY: "the-platform"}
            manifest = {**manifest, "metadata": {**manifest["metadata"], "labels": labels}}
        return apply(manifest)

    it.store.apply = admitted  # type: ignore[method-assign]
    mark = {names.LABEL_MANAGED_BY: "the-platform"}
    it.store.edit(kind, "default", name, lambda obj: obj["metadata"]["labels"].update(mark))
    for _ in range(3):
        it.step()  # fails where passes follow each other without end
    assert it.weights() == {0: 100}
    assert it.is_true("Ready")


@pytest.mark.parametrize("label", [names.LABEL_ROUND, names.LABEL_COMPONENT, names.LABEL_RUN])
def test_a_pod_that_somebody_set_aside_does_not_stop_the_loop(label: str) -> None:
    it = served(all_well)
    pod = next(name for name in it.names_of(port.POD) if name.startswith(STABLE))
    it.store.edit(port.POD, "default", pod, without(label))
    it.until(lambda w: w.at(2, Step.PROMOTED))


# Copies.


def exposed(it: World, source: str, name: str) -> None:
    """As ``kubectl expose`` does: the labels come along."""
    live = it.store.get(port.SERVICE, "default", source)
    assert live is not None
    metadata = {"name": name, "namespace": "default", "labels": live["metadata"]["labels"]}
    ports = [{"name": "http", "port": 9999, "targetPort": 9999}]
    spec = {"selector": live["spec"]["selector"], "ports": ports}
    it.store.create({"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec})


def test_a_service_that_somebody_exposed_gets_no_traffic_and_is_nobodys_to_delete() -> None:
    it = served(spec={"onDelete": {"serving": "Delete"}})
    exposed(it, STABLE, "debug")
    exposed(it, "chess-gateway", "a-public-one")
    it.steps(5)
    assert it.gateway.routes is not None
    assert [route.url for route in it.gateway.routes.routes] == [f"http://{STABLE}.default.svc:8000"]
    assert it.run.status.endpoint == "http://chess-gateway.default.svc:8080"
    it.store.delete(port.RUN, "default", "chess")
    it.steps(5)
    assert it.store.get(port.RUN, "default", "chess") is None
    assert {"debug", "a-public-one"} <= set(it.names_of(port.SERVICE))


def test_a_copy_of_stables_servers_is_not_taken_for_them() -> None:
    it = served()
    live = it.store.get(port.DEPLOYMENT, "default", STABLE)
    assert live is not None
    twin = copy.deepcopy(live)
    kept = ("labels", "annotations")
    twin["metadata"] = {"name": "a-copy", "namespace": "default", **{key: live["metadata"][key] for key in kept}}
    twin["spec"]["replicas"] = 0
    it.store.create(twin)
    it.steps(5)
    assert it.is_true("StableAvailable")


def test_a_pod_that_only_carries_our_labels_is_no_gateway() -> None:
    it = served()
    live = next(
        pod for pod in it.store.list(port.POD, "default") if pod["metadata"]["name"].startswith("chess-gateway")
    )
    owner = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "mine", "uid": "somebodys", "controller": True}
    named = {"name": "pretender", "namespace": "default", "labels": live["metadata"]["labels"]}
    metadata = {**named, "ownerReferences": [owner]}
    it.store.create({**live, "metadata": metadata})
    status = {**live["status"], "podIP": "10.9.9.9"}
    it.store.edit(port.POD, "default", "pretender", lambda obj: obj.update(status=status))
    asked: list[str] = []
    answer = it.gateway.status
    it.gateway.status = lambda url: (asked.append(url), answer(url))[1]  # type: ignore[method-assign]
    it.steps(2)
    assert asked
    assert not [url for url in asked if "10.9.9.9" in url]


# Deletion of a round.


def test_a_round_that_is_being_deleted_gets_nothing_new() -> None:
    it = World(script=training_forever)
    it.until(lambda w: "chess-r0001-train-a0" in w.names_of(port.JOB))
    it.store.delete(port.ROUND, "default", "chess-r0001", propagation="Foreground")
    it.turn()
    made: list[str] = []
    it.store.on_mutation = lambda _when, verb, *_: made.append(verb) if verb in ("create", "apply") else None
    it.turn()
    it.turn()
    assert made == [], "every object made now would hold the deletion up"


def test_a_round_that_a_finalizer_holds_is_not_promoted() -> None:
    it = World()
    it.until(lambda w: w.at(1, Step.TRAINING))
    raw = it.store.get(port.ROUND, "default", "chess-r0001")
    assert raw is not None
    it.store.set_finalizers(raw, ["example.com/backup"])
    it.store.delete(port.ROUND, "default", "chess-r0001")
    it.steps(10)
    assert it.round(1).status.step == "Training"
    assert "is being deleted" in it.round(1).status.message


# Time that nobody had.


def test_an_attempt_is_as_old_as_its_job() -> None:
    """The operator dies between the status that names an attempt and its Job, and comes back the next day."""
    it = World({"training": {"backoffLimit": 0}}, script=training_forever)
    it.until(lambda w: w.at(1, Step.COLLECTING))
    while not it.at(1, Step.TRAINING):
        it.controller.reconcile("default", "chess")
        it.kubelet.tick()
    assert "chess-r0001-train-a0" not in it.names_of(port.JOB)
    it.now += timedelta(days=1)
    it.turn()
    assert "chess-r0001-train-a0" in it.names_of(port.JOB)
    it.turn()
    assert it.round(1).status.step == "Training"
    assert it.round(1).status.attempts == []


def test_a_candidate_is_as_old_as_its_servers() -> None:
    """A foreign object stood in the way for longer than the deadline; then a person removed it, as told."""
    it = World()
    it.until(lambda w: w.at(1, Step.TRAINING))
    metadata = {"name": "chess-r0001-serve", "namespace": "default"}
    it.store.create({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {}})
    it.until(lambda w: w.is_true("Stalled"))
    assert it.condition("Stalled")[1] == Reason.FOREIGN_OBJECT
    it.now += timedelta(hours=2)
    it.store.delete(port.CONFIG_MAP, "default", "chess-r0001-serve")
    it.until(lambda w: w.at(1, Step.PROMOTED))


# Nodes.


def test_a_pod_that_never_goes_says_that_its_node_is_lost() -> None:
    gone = START.strftime("%Y-%m-%dT%H:%M:%SZ")
    pod = {"metadata": {"name": "p-0", "deletionTimestamp": gone}, "status": {"phase": "Running"}}
    assert pods.lost([pod], START + timedelta(seconds=pods.LOST_SECONDS - 1)) == ""
    said = pods.lost([pod], START + timedelta(seconds=pods.LOST_SECONDS + 1))
    assert said == f"pod p-0 should be gone since {gone}, its node does not answer"
    assert pods.lost([{**pod, "status": {"phase": "Failed"}}], START + timedelta(days=1)) == ""
    assert pods.lost([{"metadata": {"name": "q"}, "status": {"phase": "Running"}}], START + timedelta(days=1)) == ""
    _, decision = settled(scene(Step.COLLECTING, pods={(1, Step.COLLECTING, 0): LivePods("p-0", said)}))
    assert condition(decision, "Stalled")[:2] == ("True", Reason.NODE_LOST)
    _, decision = settled(scene(Step.COLLECTING, jobs={0: job("Running")}))
    assert condition(decision, "Stalled")[0] == "False"


def test_servers_on_a_lost_node_do_not_keep_stable_away() -> None:
    """Where one policy replaces the other, the hardware must be free first; that of a lost node is not to be had."""
    it = World({"serving": {"surge": "Replace", "drainSeconds": 0}}, script=blocking(1))
    it.until(lambda w: w.at(1, Step.GATING))
    pod = next(item for item in it.store.list(port.POD, "default") if "r0001-serve" in item["metadata"]["name"])
    it.store.set_finalizers(pod, ["example.com/never"])
    it.until(lambda w: w.at(1, Step.BLOCKED))
    it.steps(5)
    assert STABLE not in it.names_of(port.DEPLOYMENT)
    it.now += timedelta(seconds=pods.LOST_SECONDS + 120)
    it.until(lambda w: w.weights() == {0: 100} and w.is_true("StableAvailable"))


# Settings.


def test_settings_are_tried_out_before_a_round_takes_them() -> None:
    """What would be refused days later is refused before users' data is spent on it."""
    it = World({"training": {"queueName": "gpus"}})
    it.store._admit = podspec.check
    it.until(lambda w: w.is_true("Stalled"))
    assert it.condition("Stalled")[1] == Reason.INVALID_CONFIGURATION
    stalled = next(item for item in it.run.status.conditions if item.type == "Stalled")
    assert "chess-r0001-train-a0" in stalled.message
    assert "queueName" in stalled.message
    assert it.at(0, Step.PROMOTED), "round 0 trains nothing"
    assert not it.has_round(1)
    it.store.edit(port.RUN, "default", "chess", lambda obj: obj["spec"]["training"].pop("queueName"))
    it.until(lambda w: w.at(1, Step.PROMOTED))
    assert not it.is_true("Stalled")


def test_the_gateways_settings_are_tried_out_too() -> None:
    """Frozen into a round, they could be corrected only with the next: every pass would be refused till then."""
    it = World({"rounds": {"max": 2, "steps": 2, "batchSize": 2}})
    it.until(lambda w: w.at(1, Step.COLLECTING))
    it.store._admit = podspec.check
    nfs = {"volumes": [{"name": "data", "nfs": {"server": "s", "path": "/"}}]}
    it.store.edit(port.RUN, "default", "chess", lambda obj: obj["spec"]["gateway"].update(podSpecPatch=nfs))
    it.until(lambda w: w.is_true("Stalled"))
    stalled = next(item for item in it.run.status.conditions if item.type == "Stalled")
    assert stalled.reason == Reason.INVALID_CONFIGURATION
    assert "chess-gateway" in stalled.message
    assert it.at(1, Step.PROMOTED), "the round in work keeps its settings"
    assert not it.has_round(2)
    it.store.edit(port.RUN, "default", "chess", lambda obj: obj["spec"]["gateway"].pop("podSpecPatch"))
    it.until(lambda w: w.at(2, Step.PROMOTED))


# Gateways that do not answer.


def test_a_replica_that_does_not_answer_is_not_looked_at_all_the_time() -> None:
    """A thousand of them would be all that the operator does; what goes on and needs them asks by itself."""

    def next_look(**changes: Any) -> float | None:
        replica = GatewayReplica("http://g", **changes)
        observed = dataclasses.replace(scene(Step.TRAINING), replicas=(replica,), routes_version="now")
        return settled(observed)[1].requeue_after_seconds

    silent = next_look(reachable=False)
    assert next_look(reachable=True, version="old") == turn.LOOK_SECONDS
    assert silent == UNREACHABLE_SECONDS
    well = next_look(reachable=True, version="now")
    assert well is None or well > UNREACHABLE_SECONDS


# Objects of another version.


def test_a_round_that_cannot_be_read_stalls_the_run_by_name_and_lets_it_go(monkeypatch: pytest.MonkeyPatch) -> None:
    it = World()
    it.until(lambda w: w.at(1, Step.TRAINING))
    listed = it.store.list

    def of_another_version(kind: Kind, *arguments: Any, **options: Any) -> list[Object]:
        found = listed(kind, *arguments, **options)
        for obj in found:
            if kind is port.ROUND and obj["spec"]["number"] == 0:
                obj["spec"]["settings"]["gateway"]["unheardOf"] = "1Gi"
        return found

    monkeypatch.setattr(it.store, "list", of_another_version)
    it.controller.reconcile("default", "chess")
    stalled = next(item for item in it.run.status.conditions if item.type == "Stalled")
    assert (stalled.status, stalled.reason) == ("True", Reason.INVALID_SPEC)
    assert "ProdRLRound chess-r0000: spec.settings.gateway.unheardOf" in stalled.message
    run = it.store.get(port.RUN, "default", "chess")
    assert run is not None
    it.store.set_finalizers(run, [names.FINALIZER])
    it.store.delete(port.RUN, "default", "chess")
    it.controller.reconcile("default", "chess")
    assert it.store.get(port.RUN, "default", "chess") is None


def test_a_round_0_that_begins_again_serves_what_it_made_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its servers' ConfigMap was made and their Service was not, for want of quota; then the spec was edited."""
    made = ["a"]

    def script(number: int, step: Step, attempt: int) -> Outcome:
        if (number, step) == (0, Step.EXPORTING):
            return Outcome(result(0, step, policy_digest=digest(0, made[0])))
        return all_well(number, step, attempt)

    it = World(script=script)
    apply = it.store.apply

    def without_room(manifest: Object) -> Object:
        if (manifest["kind"], manifest["metadata"]["name"]) == ("Service", "chess-r0000-serve"):
            raise ForbiddenError('services "chess-r0000-serve" is forbidden: exceeded quota: services')
        return apply(manifest)

    monkeypatch.setattr(it.store, "apply", without_room)
    it.until(lambda w: bool(w.run.status.conditions) and w.condition("Stalled") == ("True", Reason.QUOTA))
    assert digest(0, "a") in policy_of(it)
    made[0], first = "b", it.round(0).metadata["uid"]
    it.edit(rounds={"max": 1})
    it.until(lambda w: w.has_round(0) and w.round(0).metadata["uid"] != first and w.at(0, Step.EXPORTING))
    monkeypatch.setattr(it.store, "apply", apply)
    it.until(lambda w: "chess-r0000-serve" in w.names_of(port.DEPLOYMENT))
    assert digest(0, "b") in policy_of(it), "its pods read it when they start"
    assert digest(0, "a") not in policy_of(it)
    it.until(lambda w: w.at(0, Step.PROMOTED))


def policy_of(it: World) -> str:
    """What round 0's servers are told to fetch."""
    found = it.store.get(port.CONFIG_MAP, "default", "chess-r0000-serve")
    assert found is not None
    return str(found["data"]["fetch.json"])
