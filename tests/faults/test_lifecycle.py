"""A run that goes: in the foreground, with its namespace, without its operator; and what must stay, stays."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from datetime import timedelta

from prodrl_operator import names
from prodrl_operator.builders import Platform
from prodrl_operator.cluster import port
from prodrl_operator.cluster.caching import CachedCluster
from prodrl_operator.cluster.port import Object
from prodrl_operator.controller import Controller
from prodrl_operator.names import Step
from tests.faults.stage import Maker, together
from tests.faults.world import LIMIT_SECONDS, FaultWorld
from tests.support.operator_harness import NAME

CHILDREN = (port.ROUND, port.JOB, port.DEPLOYMENT, port.SERVICE, port.CONFIG_MAP, port.PDB, port.NETWORK_POLICY)
USERS = [
    "Deployment/chess-gateway",
    "Deployment/chess-r0000-serve",
    "Service/chess-gateway",
    "Service/chess-r0000-serve",
]
DELETE: Object = {"onDelete": {"serving": "Delete"}}


def children(it: FaultWorld) -> set[str]:
    """Everything that the operator made, by kind, name and UID."""
    return {
        f"{o['kind']}/{o['metadata']['name']}/{o['metadata']['uid']}"
        for kind in CHILDREN
        for o in it.admin.list(kind, it.namespace)
        if names.LABEL_RUN in o["metadata"].get("labels", {})
    }


def go_until(it: FaultWorld, is_so: Callable[[], bool], allowed: set[str]) -> None:
    """Go on, and at every moment nothing is there that was not before."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while not is_so():
        it.step()
        assert children(it) <= allowed, "something was made for a run that goes"
        assert time.monotonic() < deadline, (sorted(children(it)), it.errors[-3:])
        time.sleep(0.2)


def in_training(it: FaultWorld) -> set[str]:
    it.until(lambda w: w.at(1, Step.TRAINING) and any("r0001-train" in name for name in w.names_of(port.JOB)))
    return children(it)


def hold(it: FaultWorld, finalizers: list[str] | None) -> None:
    patch: Object = {"metadata": {"finalizers": finalizers}}
    it.admin.merge_patch(port.ROUND, it.namespace, f"{NAME}-r0000", patch, field_manager="somebody")


def check_users_are_served(it: FaultWorld, weights: dict[int, int] | None = None) -> None:
    for what in USERS:
        kind, name = what.split("/")
        found = it.get(port.KINDS[kind], name)
        assert "deletionTimestamp" not in found["metadata"]
        assert not [o for o in found["metadata"].get("ownerReferences", []) if o["uid"]], "nothing would collect it"
        assert kind != "Deployment" or found["status"]["readyReplicas"] == 1
    assert it.weights() == (weights or {0: 100})


@together
def test_a_deletion_in_the_foreground_makes_nothing_anew(make: Maker) -> None:
    """k8s-nim-operator#594: children were made again while their parent was deleted in the foreground, for ever."""
    it = make(DELETE)
    before = in_training(it)
    hold(it, ["test.local/hold"])  # a child that takes its time: the run is there meanwhile, and being deleted
    it.kubectl("delete", "prun", NAME, "--cascade=foreground", "--wait=false")
    go_until(it, lambda: len(children(it)) == 1 and not it.names_of(port.POD), before)
    held = children(it)
    for _ in range(5):
        it.step(60.0)
    assert children(it) == held
    assert "deletionTimestamp" in it.raw["metadata"]
    hold(it, None)
    go_until(it, lambda: it.is_run_gone() and not children(it), before)


@together
def test_a_namespace_that_is_deleted_goes_and_nothing_is_made_in_it(make: Maker) -> None:
    """kopf#1088, kueue's NamespaceTerminating: creating is forbidden there, and a finalizer must not hold it."""
    it = make()
    before = in_training(it)
    it.kubectl("delete", "namespace", it.namespace, "--wait=false")

    def is_gone() -> bool:
        return not it.server.kubectl("get", "namespace", it.namespace, "--ignore-not-found").stdout

    go_until(it, is_gone, before)


@together
def test_a_run_whose_operator_was_removed_first_goes_all_the_same(make: Maker) -> None:
    """kopf#75 (zalando), ray#21684: the finalizer of an operator that is gone kept namespaces Terminating for ever."""
    it = make(DELETE)
    before = in_training(it)
    it.is_operated = False
    it.kubectl("delete", "prun", NAME, "--wait=false")
    go_until(it, lambda: it.is_run_gone() and not children(it) and not it.names_of(port.POD), before)


@together
def test_with_keep_and_no_operator_a_run_goes_by_itself_and_users_stay_served(make: Maker) -> None:
    """kopf#75 (zalando), ray#21684: the default setting, too, holds a run only while its users are being moved."""
    it = make()
    before = in_training(it)
    assert not it.raw["metadata"].get("finalizers")
    it.is_operated = False
    it.kubectl("delete", "prun", NAME, "--wait=false")
    go_until(it, lambda: it.is_run_gone() and not it.names_of(port.JOB) and not it.names_of(port.ROUND), before)
    time.sleep(2)  # a garbage collector that is still about to come
    check_users_are_served(it)


@together
def test_a_namespace_whose_operator_is_gone_is_deleted_all_the_same(make: Maker) -> None:
    """kopf#75 (zalando), kopf#1088: Terminating for ever, because of a finalizer that nobody takes off."""
    it = make()
    in_training(it)
    it.is_operated = False
    it.kubectl("delete", "namespace", it.namespace, "--wait=false")
    it.until(lambda w: not w.server.kubectl("get", "namespace", w.namespace, "--ignore-not-found").stdout)


@together
def test_on_a_canary_with_no_operator_two_commands_let_the_run_go_and_users_stay_served(make: Maker) -> None:
    """ray#21684, flagger#686: removed in the wrong order, there is still a way that keeps users served."""
    it = make({"gate": {"canary": {"steps": [{"weight": 50, "minTrajectories": 1_000_000}]}}})
    it.until(lambda w: w.weights() == {0: 50, 1: 50})
    it.is_operated = False
    it.kubectl("delete", "prun", NAME, "--cascade=orphan", "--wait=false")
    it.until(lambda w: w.get(port.RUN, NAME)["metadata"]["finalizers"] == [names.FINALIZER])
    it.kubectl("patch", "prun", NAME, "--type=merge", "-p", json.dumps({"metadata": {"finalizers": None}}))
    it.until(FaultWorld.is_run_gone)
    time.sleep(2)  # a garbage collector that is still about to come
    check_users_are_served(it, weights={0: 50, 1: 50})


@together
def test_a_run_deleted_while_the_operator_was_down_is_cleaned_up_when_it_is_back(make: Maker) -> None:
    """kuberay#735: the deletion was missed, and what had begun before it was never cleaned up."""
    it = make({"gate": {"canary": {"steps": [{"weight": 50, "minTrajectories": 1_000_000}]}}})
    it.until(lambda w: w.weights() == {0: 50, 1: 50})
    before = children(it)
    it.is_operated = False
    it.kubectl("delete", "prun", NAME, "--wait=false")
    it.steps(2)
    assert it.weights() == {0: 50, 1: 50}
    it.restart()
    it.is_operated = True

    def is_clean() -> bool:
        gone = it.is_run_gone() and not it.names_of(port.ROUND) and not it.names_of(port.JOB)
        return gone and not it.is_there(port.DEPLOYMENT, "chess-r0001-serve")

    go_until(it, is_clean, before)
    time.sleep(2)
    check_users_are_served(it)


@together
def test_users_stay_served_whichever_way_the_run_is_deleted(make: Maker) -> None:
    """flagger#686: deleting the controlling object left no pods. Argo CD deletes in the foreground."""
    it = make()
    before = in_training(it)
    it.kubectl("delete", "prun", NAME, "--cascade=foreground", "--wait=false")
    go_until(it, lambda: it.is_run_gone() and not it.names_of(port.ROUND) and not it.names_of(port.JOB), before)
    time.sleep(2)
    check_users_are_served(it)


@together
def test_what_an_orphaning_deletion_left_is_foreign_to_the_next_run_of_that_name(make: Maker) -> None:
    """kopf#309 (zalando): a deletion with --cascade=orphan ended in errors without end."""
    it = make()
    before = in_training(it)
    it.kubectl("delete", "prun", NAME, "--cascade=orphan", "--wait=false")
    go_until(it, it.is_run_gone, before)
    check_users_are_served(it)
    rounds = it.names_of(port.ROUND)
    assert rounds == ["chess-r0000", "chess-r0001"]
    it.apply({"apiVersion": names.API_VERSION, "kind": "ProdRLRun", "metadata": {"name": NAME}, "spec": it.spec})
    it.until(FaultWorld.stalled)
    assert it.stalled() == "ForeignObject"
    assert "chess-r0000" in it.message("Stalled")
    it.kubectl("delete", "pround", *rounds)
    it.until(lambda w: w.stable() == 0 and w.stalled() is None)


@together
def test_two_operators_whose_clocks_differ_by_ten_minutes_make_one_job_each_time(make: Maker) -> None:
    """client-go#448: with clocks apart two leaders are possible; preconditions keep them from harm."""
    it = make()
    cached = CachedCluster(it.admin, [it.namespace])
    other = Controller(cached, Platform(), clock=lambda: it.clock() + timedelta(minutes=10), gateway_admin=it.gateway)
    key = (it.namespace, NAME)

    def both(world: FaultWorld) -> bool:
        cached.renew()
        for _ in range(3):  # in turn, pass by pass, each with what it saw
            other.work(key)
            world.controller.work(key)
        return world.is_finished()

    it.until(both)
    it.check_jobs()
    assert [e.outcome for e in it.run.status.history] == ["Promoted", "Promoted"]


@together
def test_a_watch_that_fell_silent_delays_the_round_and_does_not_stop_it(make: Maker) -> None:
    """kopf#585, kopf#957: the watch was dead without an error, and nothing happened until a restart."""
    it = make()
    it.is_operated = False
    # No watch feeds this cache: it says nothing, for ever.
    controller = Controller(
        CachedCluster(it.admin, [it.namespace]),
        Platform(),
        clock=it.clock,
        gateway_admin=it.gateway,
        resync_seconds=1.0,
    )
    stop = threading.Event()
    thread = threading.Thread(target=controller.run_forever, args=(stop,), daemon=True)
    thread.start()
    try:
        it.until(FaultWorld.is_finished)
    finally:
        stop.set()
        thread.join(30)
    it.check_jobs()
