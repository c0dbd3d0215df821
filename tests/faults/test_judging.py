"""Faults of judgement alone: tables of states, and a whole cluster in memory."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

import pytest

from prodrl_operator import names
from prodrl_operator.api.run import Gate
from prodrl_operator.builders import Platform
from prodrl_operator.cluster import port
from prodrl_operator.cluster.local.store import ObjectStore
from prodrl_operator.cluster.port import Kind, Object
from prodrl_operator.controller import Controller
from prodrl_operator.errors import AlreadyExistsError, ConflictError, NotFoundError
from prodrl_operator.gates import judge_measurements
from prodrl_operator.names import Step
from prodrl_operator.rounds.decision import DeleteServing, EnsureJob
from prodrl_operator.rounds.observed import GatewayReplica
from tests.support.operator_harness import NAME, World, digest, result
from tests.support.runs import PASS, ago, scene, servers, settled

EVALUATION = {"name": "puzzles", "suite": "a.b:c", "metric": "solved", "minItems": 2}
AGREEMENT = result(1, Step.GATING)["agreement"]
FIGURES = {
    "name": "puzzles",
    "metric": "solved",
    "items": 50,
    "candidate_mean": 0.5,
    "stable_mean": 0.5,
    "difference": 0.0,
    "low": -0.01,
    "high": 0.01,
}


def verdict(gate: Object, *evaluations: Object, agreement: Object | None = None) -> tuple[str, str]:
    measured = {"agreement": AGREEMENT if agreement is None else agreement, "evaluations": list(evaluations)}
    judged = judge_measurements(Gate.model_validate(gate), json.dumps(measured), is_first=False)
    return judged.verdict.value, judged.reason.value


@pytest.mark.parametrize(
    ("ready", "is_compared"),
    [(1, True), (0, False)],
)
def test_a_bad_stable_is_no_baseline_and_holds_nobody_up(ready: int, is_compared: bool) -> None:
    """argo-rollouts#1774, #995, #3110: stable crash-loops; the good candidate is judged by itself."""
    stable = servers(ready=ready, restarts=0 if ready else 9, last_exit="" if ready else "OOMKilled")
    observed = scene(Step.GATING, servings={0: stable, 1: servers()})
    gate = next(item for item in settled(observed)[1].intents if isinstance(item, EnsureJob))
    assert (gate.stable == 0) is is_compared


@pytest.mark.parametrize(
    ("gate", "expected"),
    [
        ({"evaluations": [EVALUATION]}, ("Inconclusive", "BaselineUnavailable")),
        ({"agreement": {"maxRatioToStable": "2.0"}}, ("Inconclusive", "BaselineUnavailable")),
        ({}, ("Pass", "GatePassed")),
    ],
)
def test_what_has_no_baseline_is_never_a_pass(gate: Object, expected: tuple[str, str]) -> None:
    """argo-rollouts#1774: without the stable version's figure a comparison says nothing."""
    assert verdict(gate, agreement={**AGREEMENT, "stable_mean_abs": None}) == expected


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (FIGURES, "Pass"),
        ({**FIGURES, "name": "puzzle"}, "Error"),
        ({**FIGURES, "metric": "solve"}, "Error"),
        ({**FIGURES, "items": 1}, "Inconclusive"),
    ],
)
def test_a_metric_that_nobody_wrote_is_an_error(written: Object, expected: str) -> None:
    """flagger#1581: with a wrong metric name the check reported success, always."""
    assert verdict({"evaluations": [EVALUATION]}, written)[0] == expected


@pytest.mark.parametrize(
    "measurements", ["", "{}", '{"agreement": null}', "not JSON", '{"agreement": {"mean_abs": 0}}']
)
def test_measurements_without_a_figure_are_never_a_pass(measurements: str) -> None:
    """flagger#1581: what was not measured did not pass."""
    judged = judge_measurements(Gate(), measurements, is_first=False)
    assert judged.verdict.value in ("Error", "Inconclusive")


@pytest.mark.parametrize("conversations", [{}, {digest(0): 0}])
def test_a_policy_that_crash_loops_is_not_waited_for_until_it_is_idle(conversations: Mapping[str, int]) -> None:
    """LLMKube#1250: the rollout waited for pods to become idle that crash-looped and never would."""
    run = {"previous": {"round": 0, "digest": digest(0)}, "stable": {"round": 1, "digest": digest(1), "since": ago(5)}}
    replica = GatewayReplica("http://g:8081", reachable=True, version="v1", conversations=conversations)
    observed = dataclasses.replace(
        scene(Step.PROMOTED, run=run, replicas=(replica,)),
        servings={0: servers(ready=0, restarts=50), 1: servers()},
        urls={0: "http://s0", 1: "http://s1"},
    )
    assert DeleteServing(0) in settled(observed)[1].intents, "long before drainSeconds"


def test_the_wait_for_idle_ends_though_a_conversation_never_does() -> None:
    """LLMKube#1250: and with one that hangs on a dead policy, the drain's own limit ends it."""
    run = {"previous": {"round": 0, "digest": digest(0)}, "stable": {"round": 1, "digest": digest(1), "since": ago(0)}}
    replica = GatewayReplica("http://g:8081", reachable=True, version="v1", conversations={digest(0): 1})
    observed = dataclasses.replace(
        scene(Step.PROMOTED, run=run, replicas=(replica,)),
        servings={0: servers(ready=0, restarts=50), 1: servers()},
        urls={0: "http://s0", 1: "http://s1"},
    )
    assert DeleteServing(0) not in settled(observed, seconds=55)[1].intents
    assert DeleteServing(0) in settled(observed, seconds=65)[1].intents


def test_the_timer_of_a_canary_step_never_promotes_what_is_inconclusive() -> None:
    """argo-rollouts#3850: the pause elapsed, and the inconclusive canary was promoted."""
    gate = {"canary": {"steps": [{"weight": 5, "minTrajectories": 100, "deadlineSeconds": 60}]}}
    state = {"gate": {"measurements": "{}", "canary": {"index": 0, "started": ago(10)}}}
    observed = scene(Step.GATING, spec={"gate": gate}, status=state, measured=PASS)
    for days in (1, 2, 400):
        observed, _ = settled(observed, seconds=days * 86_400)
        assert observed.rounds[1].status.gate.verdict == "Inconclusive"
        assert observed.rounds[1].status.step == "Gating"
        assert observed.run.status.canary_weight == 0, "and no user is on it meanwhile"


class Lagging(ObjectStore):
    """Not a store of its own: lists of another one as they were some seconds ago, everything else as it is."""

    def __init__(self, world: World, lag: timedelta) -> None:
        self.world, self.lag = world, lag
        self.answers: dict[Any, list[tuple[datetime, list[Object]]]] = {}

    def __getattribute__(self, name: str) -> Any:
        own = ("world", "lag", "answers", "list", "__class__")
        return object.__getattribute__(self, name) if name in own else getattr(self.world.store, name)

    def list(self, kind: Kind, namespace: str | None = None, labels: Mapping[str, str] | None = None) -> list[Object]:
        known = self.answers.setdefault((kind, namespace, tuple(sorted((labels or {}).items()))), [])
        known.append((self.world.now, copy.deepcopy(self.world.store.list(kind, namespace, labels))))
        old = [answer for when, answer in known if when <= self.world.now - self.lag]
        return old[-1] if old else []


def test_a_cache_that_is_old_makes_nothing_twice() -> None:
    """kuberay#715, #704, argo-workflows#14532: a stale cache made duplicate pods and jobs."""
    it = World({"rounds": {"max": 1, "steps": 2, "batchSize": 2}, "serving": {"drainSeconds": 0}})
    stale = Controller(
        Lagging(it, timedelta(seconds=4)),
        Platform(),
        clock=lambda: it.now,
        gateway_admin=it.gateway,
        namespace="default",
    )
    made: dict[str, set[str]] = {}
    for _ in range(900):
        with contextlib.suppress(ConflictError, AlreadyExistsError, NotFoundError):  # the loop looks again
            stale.reconcile("default", NAME)
        it.kubelet.tick()
        it.now += timedelta(seconds=1)
        for kind in (port.JOB, port.DEPLOYMENT, port.ROUND):
            for obj in it.store.list(kind, "default"):
                made.setdefault(f"{kind.kind}/{obj['metadata']['name']}", set()).add(obj["metadata"]["uid"])
        if it.is_true("Completed"):
            break
    assert it.is_true("Completed"), it.run.status
    assert [e.outcome for e in it.run.status.history] == ["Promoted"] * 2
    twice = {name: uids for name, uids in made.items() if len(uids) > 1}
    assert not twice
    assert {key[2] for key in it.jobs_seen} == {"0"}, "no attempt was spent on what was not seen"


class PodsLater(Lagging):
    """Of a run's children only the pods are shown late: their watch is another one."""

    def list(self, kind: Kind, namespace: str | None = None, labels: Mapping[str, str] | None = None) -> list[Object]:
        if kind is port.POD and names.LABEL_RUN in (labels or {}):
            return super().list(kind, namespace, labels)
        return self.world.store.list(kind, namespace, labels)


def test_a_job_that_is_seen_to_end_before_its_pod_is_costs_no_attempt() -> None:
    """kuberay#715, #704: two watches are never at the same moment; a success without its message looked like none."""
    it = World({"rounds": {"max": 1, "steps": 2, "batchSize": 2}, "serving": {"drainSeconds": 0}})
    late = PodsLater(it, timedelta(seconds=7))
    it.controller = Controller(late, Platform(), clock=lambda: it.now, gateway_admin=it.gateway, namespace="default")
    it.until(lambda w: bool(w.run.status.conditions) and w.is_true("Completed"))
    assert {key[2] for key in it.jobs_seen} == {"0"}


def test_two_operators_with_clocks_apart_write_one_history() -> None:
    """client-go#448: both believe that they lead; resourceVersions decide whose write counts."""
    it = World()
    others = [
        Controller(
            it.store,
            Platform(),
            clock=lambda ahead=ahead: it.now + timedelta(minutes=ahead),
            gateway_admin=it.gateway,
            namespace="default",
        )
        for ahead in (0, 10)
    ]
    for _ in range(400):
        for controller in others:
            controller.work(("default", NAME))
        it.kubelet.tick()
        it.now += timedelta(seconds=5)
        if it.is_true("Completed"):
            break
    assert [e.outcome for e in it.run.status.history] == ["Promoted"] * 3
    assert all(len(uids) == 1 for uids in it.jobs_seen.values())
    assert {key[2] for key in it.jobs_seen} == {"0"}
