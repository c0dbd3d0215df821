"""What the cache leaves out of objects is nothing that a pass sees."""

from __future__ import annotations

import json

from prodrl_operator.api.run import Run
from prodrl_operator.cluster import port, slimming
from prodrl_operator.cluster.caching import LISTED, WATCHED, CachedCluster
from prodrl_operator.cluster.slimming import slim
from prodrl_operator.names import Step
from prodrl_operator.observing import Observer, Snapshot
from tests.support.fake_kubelet import Outcome
from tests.support.operator_harness import NAME, World, all_well


def observed(world: World, cluster) -> Snapshot:
    raw = world.store.get(port.RUN, "default", NAME)
    run = Run.model_validate({"metadata": raw["metadata"], "spec": raw["spec"], "status": raw.get("status") or {}})
    return Observer(cluster, world.gateway).observe(run, raw, world.now)


def cached(world: World) -> CachedCluster:
    """As the watches would fill it."""
    made = CachedCluster(world.store)
    for kind in (*WATCHED, *LISTED):
        for obj in world.store.list(kind):
            made.note(kind, None, json.loads(json.dumps(obj)))
    return made


def failing_at_first(number: int, step: Step, attempt: int) -> Outcome | None:
    if step is Step.TRAINING and attempt == 0:
        return Outcome('{"reason": "PeerUnavailable", "message": "rank 1 is gone"}', exit_code=69, reason="Error")
    return all_well(number, step, attempt)


def test_a_pass_sees_the_same_with_and_without_what_is_left_out():
    world = World({"rounds": {"max": 2, "steps": 2, "batchSize": 2}}, failing_at_first)
    world.deployments = lambda _: world.now.second % 3 == 0 or "ImagePullBackOff"
    world.users_per_step = 50
    steps = set()
    for _ in range(80):
        world.step()
        whole, kept = observed(world, world.store), observed(world, cached(world))
        assert kept.observed == whole.observed
        assert kept.rounds == whole.rounds, "they are sent back with a new status"
        steps.update(item.status.step for item in whole.observed.rounds.values())
    assert {Step.COLLECTING, Step.TRAINING, Step.GATING, Step.PROMOTED} <= steps


def test_a_run_is_kept_whole():
    world = World()
    world.steps(5)
    raw = world.store.get(port.RUN, "default", NAME)
    assert cached(world).get(port.RUN, "default", NAME) == raw


def test_what_is_left_out_is_most_of_it():
    world = World()
    world.until(lambda it: it.at(1, Step.TRAINING))
    children = [obj for kind in (*WATCHED[2:], *LISTED) for obj in world.store.list(kind)]
    assert {obj["kind"] for obj in children} >= {"Job", "Pod", "Deployment", "ConfigMap", "Service"}
    assert len(json.dumps([slim(obj) for obj in children])) < 0.5 * len(json.dumps(children))


def test_strings_of_objects_that_are_gone_do_not_stay(monkeypatch):
    monkeypatch.setattr(slimming, "MOST_SHARED", 100)
    for number in range(1000):
        metadata = {"name": f"pod-{number}", "labels": {"of": "".join(["one", "name"])}}
        kept = slim({"apiVersion": "v1", "kind": "Pod", "metadata": metadata})
        assert kept["metadata"] == metadata
    assert len(slimming._known) <= 100
    one, other = (slim({"apiVersion": "v1", "kind": "Pod", "metadata": {"uid": "".join(["a", "b"])}}) for _ in "12")
    assert one["metadata"]["uid"] is other["metadata"]["uid"]
