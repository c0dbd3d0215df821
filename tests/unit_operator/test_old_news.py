"""Answers and events that are old, or never come: what is believed of them, and what is asked again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import pytest

from prodrl_operator import names
from prodrl_operator.builders import Platform
from prodrl_operator.cluster import port
from prodrl_operator.cluster.caching import CachedCluster
from prodrl_operator.cluster.kubernetes import KubernetesCluster
from prodrl_operator.cluster.port import Kind, Object
from prodrl_operator.controller import Controller
from prodrl_operator.errors import ClusterUnavailableError, ForbiddenError
from prodrl_operator.names import Step
from tests.support.operator_harness import World


class Old:
    """A store whose pods are remembered from one moment on, as by a watch that fell silent."""

    def __init__(self, it: World) -> None:
        self._store = it.store
        self.pods: list[Object] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def list(self, kind: Kind, namespace: str | None = None, labels: Mapping[str, str] | None = None) -> list[Object]:
        is_of_run = kind is port.POD and names.LABEL_RUN in (labels or {})
        return self.pods if is_of_run and self.pods is not None else self._store.list(kind, namespace, labels)


@pytest.mark.parametrize("is_unseen", [False, True], ids=["still running", "never seen"])
def test_the_end_of_a_job_is_not_judged_by_older_news_of_its_pod(is_unseen: bool) -> None:
    it = World({"rounds": {"max": 1, "steps": 2, "batchSize": 2}})
    old = Old(it)
    it.controller = Controller(
        cast(Any, old), Platform(), clock=lambda: it.now, gateway_admin=it.gateway, namespace="default"
    )
    script, it.script = it.script, lambda *_: None
    it.until(lambda w: w.at(0, Step.EXPORTING) and bool(w.names_of(port.POD)))
    it.steps(2)
    jobs = {job["metadata"]["uid"] for job in it.store.list(port.JOB)}
    pods = it.store.list(port.POD, "default")
    assert any(o["uid"] in jobs for pod in pods for o in pod["metadata"]["ownerReferences"])
    old.pods = [pod for pod in pods if not is_unseen]
    it.script = script
    it.until(lambda w: not w.at(0, Step.EXPORTING))
    assert it.round(0).status.step == Step.CANARY_DEPLOYING
    assert {key[2] for key in it.jobs_seen} == {"0"}, "no attempt was spent"


class Server:
    """What a cache asks, with one fault at a time."""

    def __init__(self, it: World) -> None:
        self._store = it.store
        self.faulty: Kind | None = None
        self.hides: str | None = None
        self.forbidden: str | None = None

    def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        return None if name == self.hides else self._store.get(kind, namespace, name)

    def list(self, kind: Kind, namespace: str | None = None, labels: Mapping[str, str] | None = None) -> list[Object]:
        if kind is self.faulty:
            raise ClusterUnavailableError(f"{kind.kind}: made up")
        if namespace == self.forbidden:
            raise ForbiddenError(f"{kind.kind}: not in {namespace}")
        return [o for o in self._store.list(kind, namespace, labels) if o["metadata"]["name"] != self.hides]

    def each(self, kind: Kind, namespace: str, labels: Mapping[str, str] | None) -> Any:
        return self.list(kind, namespace, labels)

    def list_metadata(self, kind: Kind, namespace: str, labels: Mapping[str, str] | None) -> Any:
        return self.list(kind, namespace, labels)


@pytest.fixture
def at_work() -> tuple[World, Server, CachedCluster]:
    it = World()
    it.script = lambda *_: None
    it.until(lambda w: bool(w.names_of(port.JOB)))
    server = Server(it)
    return it, server, CachedCluster(cast(KubernetesCluster, server), ["default"])


def jobs(cached: CachedCluster) -> list[str]:
    return [o["metadata"]["name"] for o in cached.list(port.JOB, "default", {names.LABEL_RUN: "chess"})]


def test_what_an_old_answer_did_not_show_comes_back(at_work: tuple[World, Server, CachedCluster]) -> None:
    it, server, cached = at_work
    cached.renew()
    known = jobs(cached)
    assert known == it.names_of(port.JOB)
    server.hides = known[0]
    cached.renew()
    assert jobs(cached) == []
    server.hides = None
    cached.renew()
    assert jobs(cached) == known


def test_a_kind_that_cannot_be_listed_does_not_hide_the_others(at_work: tuple[World, Server, CachedCluster]) -> None:
    it, server, cached = at_work
    server.faulty = port.RUN
    with pytest.raises(ClusterUnavailableError):
        cached.renew()
    assert jobs(cached) == it.names_of(port.JOB)
    assert not cached.is_synced.is_set()
    server.faulty = port.PDB
    with pytest.raises(ClusterUnavailableError):
        cached.renew()
    assert cached.is_synced.is_set(), "each was listed by now"


def test_a_namespace_that_is_forbidden_does_not_hide_the_others(at_work: tuple[World, Server, CachedCluster]) -> None:
    it, server, _ = at_work
    cached = CachedCluster(cast(KubernetesCluster, server), ["a", "closed", "default"])
    server.forbidden = "closed"
    with pytest.raises(ForbiddenError):
        cached.renew()
    assert jobs(cached) == it.names_of(port.JOB)


def at_version(obj: Object, later: int, **metadata: str) -> Object:
    version = str(int(obj["metadata"]["resourceVersion"]) + later)
    return {**obj, "metadata": {**obj["metadata"], "resourceVersion": version, **metadata}}


def test_a_label_that_comes_back_brings_its_object_back(at_work: tuple[World, Server, CachedCluster]) -> None:
    """To a watch that selects by label, an object without it is deleted; older news of it is not believed."""
    it, _, cached = at_work
    cached.renew()
    old = it.store.list(port.JOB, "default")[0]
    cached.note(port.JOB, "DELETED", at_version(old, 10))
    assert jobs(cached) == []
    cached.note(port.JOB, "MODIFIED", old)
    assert jobs(cached) == []
    cached.note(port.JOB, "MODIFIED", at_version(old, 11))
    assert jobs(cached) == [old["metadata"]["name"]]


def test_an_object_that_lost_our_label_is_hinted_as_gone(at_work: tuple[World, Server, CachedCluster]) -> None:
    it, _, cached = at_work
    cached.renew()
    seen: list[tuple[str, str]] = []
    cached.watch(lambda event: seen.append((event.type, event.object["metadata"]["name"])))
    name = it.names_of(port.SERVICE)[0]
    it.store.edit(port.SERVICE, "default", name, lambda o: o["metadata"]["labels"].pop(names.LABEL_MANAGED_BY))
    cached.renew()
    assert ("DELETED", name) in seen


def test_which_of_two_is_newer_is_told_by_versions_not_by_seconds(at_work: tuple[World, Server, CachedCluster]) -> None:
    it, _, cached = at_work
    cached.renew()
    made = it.store.list(port.JOB, "default")[0]
    before = at_version(made, -1, uid="an-earlier-one")
    cached.note(port.JOB, "MODIFIED", before)
    cached.note(port.JOB, "DELETED", before)
    found = cached.list(port.JOB, "default", {names.LABEL_RUN: "chess"})
    assert [item["metadata"]["uid"] for item in found] == [made["metadata"]["uid"]]


def test_asking_for_a_run_that_is_not_there_leaves_nothing_behind(at_work: tuple[World, Server, CachedCluster]) -> None:
    _, _, cached = at_work
    before = len(cached._by_run)
    for number in range(100):
        assert cached.list(port.JOB, "default", {names.LABEL_RUN: f"nobody-{number}"}) == []
    assert len(cached._by_run) == before
