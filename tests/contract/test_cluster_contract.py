"""What every implementation of the Cluster port must do. Add an implementation to ``IMPLEMENTATIONS``.

An entry makes a fresh cluster (or namespace) with our CRDs and yields it. Garbage collection and watches may be
asynchronous: these cases wait for them.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from prodrl_operator.cluster import port
from prodrl_operator.cluster.caching import CachedCluster
from prodrl_operator.cluster.local.store import ObjectStore
from prodrl_operator.errors import AlreadyExistsError, ConflictError, InvalidError, NotFoundError
from tests.support.local_cluster import CRDS, eventually
from tests.support.watching import watching

NS = "default"


@contextmanager
def _in_memory(request, tmp_path) -> Iterator[port.Watched]:
    store = ObjectStore(crds=CRDS)
    yield store
    store.close()


@contextmanager
def _in_a_file(request, tmp_path) -> Iterator[port.Watched]:
    store = ObjectStore(tmp_path / "state.db", crds=CRDS)
    yield store
    store.close()


@contextmanager
def _on_an_api_server(request, tmp_path) -> Iterator[port.Watched]:
    """As the operator uses it: the cache in front."""
    cached = CachedCluster(request.getfixturevalue("api"))
    cached.renew()
    yield cached


IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    "memory": _in_memory,
    "file": _in_a_file,
    "kubernetes": _on_an_api_server,
}


@pytest.fixture(params=list(IMPLEMENTATIONS))
def cluster(request, tmp_path) -> Iterator[port.Watched]:
    with IMPLEMENTATIONS[request.param](request, tmp_path) as made:
        yield made


@pytest.fixture
def others(cluster) -> Iterator[port.Cluster]:
    """The cluster as others write to it, while ``cluster`` is watching: with kopf, where it is a real one."""
    if not isinstance(cluster, CachedCluster):
        yield cluster
        return
    with watching(cluster.server, cluster):
        yield cluster.server


def config(name: str = "one", data: dict[str, str] | None = None, **metadata: Any) -> port.Object:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "namespace": NS} | metadata,
        "data": data or {"a": "1"},
    }


def deployment(replicas: int = 0, **container: Any) -> port.Object:
    template = {
        "metadata": {"labels": {"app": "d"}},
        "spec": {"containers": [{"name": "main", "image": "example.invalid/none:1", "command": ["true"]} | container]},
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "d", "namespace": NS},
        "spec": {"replicas": replicas, "selector": {"matchLabels": {"app": "d"}}, "template": template},
    }


def job(name: str = "j", **spec: Any) -> port.Object:
    pod = {
        "restartPolicy": "Never",
        "containers": [{"name": "m", "image": "example.invalid/none:1", "command": ["true"]}],
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "namespace": NS},
        "spec": {"suspend": True, "template": {"spec": pod}} | spec,
    }


def run(name: str = "chess", **spec: Any) -> port.Object:
    return {
        "apiVersion": "prodrl.dev/v1alpha1",
        "kind": "ProdRLRun",
        "metadata": {"name": name, "namespace": NS},
        "spec": copy.deepcopy(RUN_SPEC) | spec,
    }


RUN_SPEC: port.Object = {
    "model": {"uri": "file:///models/base", "servedName": "chess"},
    "storage": {"uri": "file:///store"},
    "gateway": {"authentication": "Anonymous"},
    "rounds": {"max": 3, "steps": 2, "batchSize": 4},
}


def owned_by(owner: port.Object, *, blocks: bool = True) -> list[port.Object]:
    reference = {"apiVersion": owner["apiVersion"], "kind": owner["kind"], "name": owner["metadata"]["name"]}
    return [reference | {"uid": owner["metadata"]["uid"], "controller": True, "blockOwnerDeletion": blocks}]


# Create, read, list.


def test_create_fills_in_what_the_server_owns(cluster):
    made = cluster.create(run())
    metadata = made["metadata"]
    assert metadata["uid"]
    assert metadata["resourceVersion"]
    assert metadata["generation"] == 1
    assert metadata["creationTimestamp"].endswith("Z")
    assert cluster.get(port.RUN, NS, "chess") == made


def test_create_twice_is_refused(cluster):
    cluster.create(config())
    with pytest.raises(AlreadyExistsError):
        cluster.create(config())


def test_create_ignores_status(cluster):
    made = cluster.create(deployment() | {"status": {"replicas": 7}})
    assert made.get("status", {}).get("replicas", 0) == 0


def test_a_missing_object_is_none(cluster):
    assert cluster.get(port.CONFIG_MAP, NS, "nothing") is None


def test_list_selects_by_labels_and_sorts(cluster):
    for name, labels in (("c", {"x": "1", "y": "1"}), ("a", {"x": "1"}), ("b", {"x": "2"})):
        cluster.create(config(name, labels=labels))
    assert [o["metadata"]["name"] for o in cluster.list(port.CONFIG_MAP, NS, {"x": "1"})] == ["a", "c"]
    assert [o["metadata"]["name"] for o in cluster.list(port.CONFIG_MAP, NS, {"x": "1", "y": "1"})] == ["c"]


def test_what_was_read_is_a_copy(cluster):
    cluster.create(config())
    cluster.get(port.CONFIG_MAP, NS, "one")["data"]["a"] = "changed"
    assert cluster.get(port.CONFIG_MAP, NS, "one")["data"] == {"a": "1"}


@pytest.mark.parametrize("name", ["Upper", "under_score", "-dash", "a" * 254, ""])
def test_bad_names_are_refused(cluster, name):
    with pytest.raises(InvalidError):
        cluster.create(config(name))


def test_bad_labels_are_refused(cluster):
    with pytest.raises(InvalidError):
        cluster.create(config(labels={"x": "a" * 64}))


def test_secrets_take_text_and_give_base64(cluster):
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "s", "namespace": NS},
        "stringData": {"k": "v"},
    }
    assert cluster.create(secret)["data"] == {"k": "dg=="}


# Apply.


def test_apply_creates_then_changes(cluster):
    first = cluster.apply(config(data={"a": "1"}))
    second = cluster.apply(config(data={"a": "2"}))
    assert second["data"] == {"a": "2"}
    assert second["metadata"]["uid"] == first["metadata"]["uid"]
    assert second["metadata"]["resourceVersion"] != first["metadata"]["resourceVersion"]


def test_apply_of_the_same_writes_nothing(cluster):
    first = cluster.apply(run())  # nobody else writes to it, as a controller does to a Deployment
    second = cluster.apply(run())
    assert second["metadata"]["resourceVersion"] == first["metadata"]["resourceVersion"]
    cluster.apply(deployment())
    assert cluster.apply(deployment())["metadata"]["generation"] == 1


def test_apply_removes_what_it_set_before(cluster):
    cluster.apply(config(data={"a": "1", "b": "2"}, labels={"x": "1", "y": "2"}))
    after = cluster.apply(config(data={"a": "1"}, labels={"x": "1"}))
    assert after["data"] == {"a": "1"}
    assert after["metadata"]["labels"] == {"x": "1"}


def test_apply_keeps_what_create_set(cluster):
    cluster.create(config(data={"a": "1", "b": "2"}))
    cluster.apply(config(data={"a": "3"}))
    after = cluster.apply(config(data={"c": "4"}))
    assert after["data"] == {"b": "2", "c": "4"}


def test_apply_merges_lists_by_key_and_replaces_others(cluster):
    env = [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}]
    cluster.apply(deployment(env=env, args=["x", "y"]))
    after = cluster.apply(deployment(env=[{"name": "B", "value": "3"}], args=["z"]))
    (container,) = after["spec"]["template"]["spec"]["containers"]
    assert container["env"] == [{"name": "B", "value": "3"}]
    assert container["args"] == ["z"]


def test_apply_refuses_a_list_that_names_something_twice(cluster):
    with pytest.raises(InvalidError):
        cluster.apply(deployment(env=[{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]))


def test_apply_brings_a_default_back(cluster):
    cluster.apply(deployment(replicas=3))
    manifest = deployment()
    del manifest["spec"]["replicas"]
    assert cluster.apply(manifest)["spec"]["replicas"] == 1


def test_apply_with_an_old_version_conflicts(cluster):
    old = cluster.apply(config())["metadata"]["resourceVersion"]
    cluster.apply(config(data={"a": "2"}))
    with pytest.raises(ConflictError):
        cluster.apply(config(data={"a": "3"}, resourceVersion=old))


def test_apply_ignores_status(cluster):
    made = cluster.apply(run() | {"status": {"observedGeneration": 9}})
    assert "status" not in made


# Generation and status.


def test_generation_counts_changes_of_spec_only(cluster):
    cluster.apply(deployment())
    labelled = deployment()
    labelled["metadata"]["labels"] = {"x": "1"}
    assert cluster.apply(labelled)["metadata"]["generation"] == 1
    assert cluster.apply(deployment(args=["new"]))["metadata"]["generation"] == 2


def test_update_status_writes_status_only(cluster):
    made = cluster.create(run())
    changed = copy.deepcopy(made)
    changed["status"] = {"observedGeneration": 1}
    changed["spec"]["rounds"]["max"] = 99
    after = cluster.update_status(changed)
    assert after["status"]["observedGeneration"] == 1
    assert after["spec"] == made["spec"]
    assert after["metadata"]["generation"] == 1
    assert after["metadata"]["resourceVersion"] != made["metadata"]["resourceVersion"]


def test_update_status_replaces_all_of_it(cluster):
    made = cluster.create(run())
    made["status"] = {"observedGeneration": 1, "stable": {"round": 0, "digest": "d"}}
    made = cluster.update_status(made)
    made["status"] = {"observedGeneration": 2}
    assert "stable" not in cluster.update_status(made)["status"]


def test_update_status_with_an_old_version_conflicts(cluster):
    made = cluster.create(run())
    made["status"] = {"observedGeneration": 1}
    cluster.update_status(made)
    made["status"] = {"observedGeneration": 2}
    with pytest.raises(ConflictError):
        cluster.update_status(made)


def test_update_status_of_a_missing_object(cluster):
    made = cluster.create(run())
    cluster.delete(port.RUN, NS, "chess")
    with pytest.raises(NotFoundError):
        cluster.update_status(made | {"status": {"observedGeneration": 1}})


def test_status_survives_an_apply(cluster):
    made = cluster.apply(run())
    made["status"] = {"observedGeneration": 1}
    cluster.update_status(made)
    assert cluster.apply(run(suspend=True))["status"]["observedGeneration"] == 1


# Our kinds' schemas.


def test_crd_defaults_are_filled_in(cluster):
    assert cluster.create(run())["spec"]["suspend"] is False


def test_crd_bounds_are_checked(cluster):
    with pytest.raises(InvalidError):
        cluster.create(run(rounds={"max": "many", "steps": 2, "batchSize": 4}))


def test_crd_unknown_fields_are_refused(cluster):
    with pytest.raises(InvalidError, match="modle"):
        cluster.create(run(modle={}))


def test_crd_rules_are_evaluated(cluster):
    with pytest.raises(InvalidError):
        cluster.create(run("a" * 41))


def test_crd_transition_rules_are_evaluated(cluster):
    cluster.apply(run())
    with pytest.raises(InvalidError, match="immutable"):
        cluster.apply(run(mode="AsyncOneRound"))
    assert cluster.get(port.RUN, NS, "chess")["spec"]["mode"] == "Sync"


def test_immutable_fields_of_built_in_kinds(cluster):
    cluster.apply(job())
    changed = job()
    changed["spec"]["template"]["spec"]["containers"][0]["command"] = ["false"]
    with pytest.raises(InvalidError):
        cluster.apply(changed)
    cluster.apply(deployment())
    other = deployment()
    other["spec"]["selector"] = {"matchLabels": {"app": "e"}}
    other["spec"]["template"]["metadata"]["labels"] = {"app": "e"}
    with pytest.raises(InvalidError):
        cluster.apply(other)


# Deletion, finalizers, garbage collection.


def test_deleting_nothing_is_fine(cluster):
    cluster.delete(port.CONFIG_MAP, NS, "nothing", uid="1234")


def test_delete_checks_its_preconditions(cluster):
    made = cluster.create(config())
    with pytest.raises(ConflictError):
        cluster.delete(port.CONFIG_MAP, NS, "one", uid="00000000-0000-0000-0000-000000000000")
    with pytest.raises(ConflictError):
        cluster.delete(port.CONFIG_MAP, NS, "one", resource_version="1000000")
    metadata = made["metadata"]
    cluster.delete(port.CONFIG_MAP, NS, "one", uid=metadata["uid"], resource_version=metadata["resourceVersion"])
    assert cluster.get(port.CONFIG_MAP, NS, "one") is None


def test_finalizers_hold_the_object(cluster):
    made = cluster.create(config(finalizers=["prodrl.dev/finalizer"]))
    cluster.delete(port.CONFIG_MAP, NS, "one")
    dying = cluster.get(port.CONFIG_MAP, NS, "one")
    assert dying["metadata"]["deletionTimestamp"]
    assert dying["metadata"]["uid"] == made["metadata"]["uid"]
    with pytest.raises(AlreadyExistsError):
        cluster.create(config())
    with pytest.raises(ConflictError):
        cluster.set_finalizers(made, [])
    cluster.set_finalizers(dying, [])
    assert cluster.get(port.CONFIG_MAP, NS, "one") is None


def test_finalizers_can_be_set_and_not_while_deleting(cluster):
    made = cluster.set_finalizers(cluster.create(config()), ["prodrl.dev/finalizer"])
    assert made["metadata"]["finalizers"] == ["prodrl.dev/finalizer"]
    cluster.delete(port.CONFIG_MAP, NS, "one")
    dying = cluster.get(port.CONFIG_MAP, NS, "one")
    with pytest.raises(InvalidError):
        cluster.set_finalizers(dying, ["prodrl.dev/finalizer", "prodrl.dev/other"])
    cluster.set_finalizers(dying, [])


def test_deleting_counts_as_a_generation(cluster):
    made = cluster.create(run())
    cluster.set_finalizers(made, ["prodrl.dev/finalizer"])
    cluster.delete(port.RUN, NS, "chess")
    assert cluster.get(port.RUN, NS, "chess")["metadata"]["generation"] == 2


def test_background_deletion_takes_dependents_afterwards(cluster):
    owner = cluster.create(config("owner"))
    child = cluster.create(config("child", ownerReferences=owned_by(owner)))
    cluster.create(config("grandchild", ownerReferences=owned_by(child)))
    cluster.delete(port.CONFIG_MAP, NS, "owner", propagation="Background")
    eventually(lambda: cluster.get(port.CONFIG_MAP, NS, "grandchild") is None)
    assert cluster.get(port.CONFIG_MAP, NS, "child") is None


def test_foreground_deletion_waits_for_blocking_dependents(cluster):
    owner = cluster.create(config("owner"))
    held = config("child", ownerReferences=owned_by(owner), finalizers=["prodrl.dev/finalizer"])
    cluster.create(held)
    cluster.delete(port.CONFIG_MAP, NS, "owner", propagation="Foreground")
    child = eventually(lambda: _dying(cluster, "child"))
    assert _dying(cluster, "owner")["metadata"]["finalizers"] == ["foregroundDeletion"]
    cluster.set_finalizers(child, [])
    eventually(lambda: cluster.get(port.CONFIG_MAP, NS, "owner") is None)


def test_orphans_lose_their_reference_and_stay(cluster):
    owner = cluster.create(config("owner"))
    cluster.create(config("child", ownerReferences=owned_by(owner)))
    cluster.delete(port.CONFIG_MAP, NS, "owner", propagation="Orphan")
    eventually(lambda: cluster.get(port.CONFIG_MAP, NS, "owner") is None)
    child = cluster.get(port.CONFIG_MAP, NS, "child")
    assert "ownerReferences" not in child["metadata"]


def test_a_dependent_of_two_owners_stays_while_one_does(cluster):
    one, two = cluster.create(config("one")), cluster.create(config("two"))
    cluster.create(config("child", ownerReferences=[*owned_by(one), owned_by(two)[0] | {"controller": False}]))
    cluster.delete(port.CONFIG_MAP, NS, "one")
    eventually(lambda: len(cluster.get(port.CONFIG_MAP, NS, "child")["metadata"]["ownerReferences"]) == 1)
    cluster.delete(port.CONFIG_MAP, NS, "two")
    eventually(lambda: cluster.get(port.CONFIG_MAP, NS, "child") is None)


def test_an_owner_that_never_was_does_not_keep_its_dependent(cluster):
    ghost = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "ghost", "uid": "5d1e-no-such-uid"}}
    cluster.create(config("child", ownerReferences=owned_by(ghost)))
    eventually(lambda: cluster.get(port.CONFIG_MAP, NS, "child") is None, seconds=60)


def test_a_run_takes_its_children_with_it(cluster):
    owner = cluster.create(run())
    cluster.create(job() | {"metadata": {"name": "j", "namespace": NS, "ownerReferences": owned_by(owner)}})
    cluster.delete(port.RUN, NS, "chess")
    eventually(lambda: cluster.get(port.JOB, NS, "j") is None)


# Watches.


def test_a_watch_hints_at_every_change(cluster, others):
    seen: list[tuple[str, str, str | None]] = []

    def receive(event: port.WatchEvent) -> None:
        metadata = event.object["metadata"]
        seen.append((event.type, metadata["name"], metadata.get("labels", {}).get("step")))

    stop = cluster.watch(receive)
    watched = job("watched")
    ours = watched["metadata"]["labels"] = {"app.kubernetes.io/managed-by": "prodrl-operator"}
    try:
        time.sleep(0.1)
        others.create(watched)
        eventually(lambda: ("ADDED", "watched", None) in seen)
        watched["metadata"]["labels"] = ours | {"step": "changed"}
        others.apply(watched)  # a status would race with the Job controller's
        eventually(lambda: ("MODIFIED", "watched", "changed") in seen)
        others.delete(port.JOB, NS, "watched")
        eventually(lambda: ("DELETED", "watched", "changed") in seen)
    finally:
        stop()
    num_seen = len(seen)
    others.create(run("unseen"))
    time.sleep(0.5)
    assert len(seen) == num_seen


def test_a_failing_receiver_keeps_its_watch(cluster, others):
    seen: list[str] = []

    def receive(event: port.WatchEvent) -> None:
        seen.append(event.object["metadata"]["name"])
        raise ValueError("a bug")

    stop = cluster.watch(receive)
    try:
        others.create(run("first"))
        others.create(run("second"))
        eventually(lambda: {"first", "second"} <= set(seen))
    finally:
        stop()


def _dying(cluster: port.Cluster, name: str) -> port.Object | None:
    found = cluster.get(port.CONFIG_MAP, NS, name)
    return found if found and "deletionTimestamp" in found["metadata"] else None
