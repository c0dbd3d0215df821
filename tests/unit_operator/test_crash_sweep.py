"""Crash sweep: the operator dies around its k-th write, for every k, and a new one takes over.

The judge is the undisturbed run: the same final state, and never two Jobs of one (round, step, attempt).
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from prodrl_operator.cluster import port
from prodrl_operator.names import Step
from tests.support.operator_harness import World, blocking

SPEC = {
    "rounds": {"max": 3, "steps": 2, "batchSize": 2},
    "onBlocked": "ContinueLineage",
    "gate": {"canary": {"steps": [{"weight": 10, "minTrajectories": 10}]}},
}
BAD = 2


class CrashError(BaseException):
    """The process is gone; nothing may catch it."""


def world(**spec: Any) -> World:
    made = World(SPEC | spec, blocking(BAD))
    made.users_per_step = 200
    return made


def finish(it: World) -> None:
    it.until(lambda w: w.is_true("Completed"))
    it.steps(15)


def end(it: World) -> dict[str, Any]:
    """Everything that must not depend on crashes: all but times, counts of writes and identities."""
    status = it.run.status
    return {
        "stable": (status.stable.round, status.stable.digest) if status.stable else None,
        "previous": status.previous.round if status.previous else None,
        "lineage": status.lineage_round,
        "weight": status.canary_weight,
        "blocked": status.consecutive_blocked,
        "finished": status.rounds_finished,
        "gate": (status.last_gate.round, status.last_gate.verdict) if status.last_gate else None,
        "history": [(e.number, e.phase, e.verdict, e.digest, e.reason) for e in status.history],
        "conditions": sorted((c.type, c.status, c.reason) for c in status.conditions),
        "rounds": [
            (n, it.round(n).status.step, it.round(n).status.gate.verdict, it.round(n).spec.lineage_round)
            for n in range(4)
        ],
        "jobs": it.names_of(port.JOB),
        "deployments": it.names_of(port.DEPLOYMENT),
        "services": it.names_of(port.SERVICE),
        "config maps": it.names_of(port.CONFIG_MAP),
        "weights": it.weights(),
        "events": sorted(set(it.reasons_of_events())),
    }


def crashing(k: int, when: str) -> tuple[World, bool]:
    """A whole run in which the k-th write of the operator is the last thing that it does, before or after it."""
    it = world()
    count = 0

    def hook(moment: str, _: Any) -> None:
        nonlocal count
        if moment != when:
            return
        count += 1
        if count == k:
            raise CrashError

    it.store.on_mutation = hook
    has_crashed = False
    for _ in range(400):
        try:
            it.step()
        except CrashError:
            has_crashed = True
            it.restart()
        if it.run.status.conditions and it.is_true("Completed"):
            break
    it.store.on_mutation = None
    it.steps(15)
    return it, has_crashed


@pytest.fixture(scope="module")
def undisturbed() -> World:
    it = world()
    finish(it)
    return it


def writes() -> int:
    it, count = world(), 0

    def hook(moment: str, _: Any) -> None:
        nonlocal count
        count += moment == "before"

    it.store.on_mutation = hook
    finish(it)
    return count


def test_the_undisturbed_run_is_two_promoted_rounds_and_a_blocked_one(undisturbed: World) -> None:
    phases = [(item.number, item.phase) for item in undisturbed.run.status.history]
    assert phases == [(0, "Promoted"), (1, "Promoted"), (2, "Blocked"), (3, "Promoted")]
    assert undisturbed.round(3).spec.lineage_round == 2
    assert undisturbed.names_of(port.DEPLOYMENT) == ["chess-gateway", "chess-r0003-serve"]


def check_jobs(it: World) -> None:
    """I2: one Job object for each (round, step, attempt), by UID, over the whole run."""
    assert all(len(uids) == 1 for uids in it.jobs_seen.values()), it.jobs_seen
    attempts = {key[2] for key in it.jobs_seen}
    assert attempts == {"0"}, "a crash of the operator is no failure of a step"


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_crash_around_any_write_converges_to_the_same_end(undisturbed: World, when: str) -> None:
    expected = end(undisturbed)
    total = writes()
    assert total > 100
    crashes = 0
    for k in range(1, total + 1):
        it, has_crashed = crashing(k, when)
        crashes += has_crashed
        got = end(it)
        # An event may be lost with its process; none may be new.
        assert set(got.pop("events")) <= set(expected["events"]), k
        assert got == {name: value for name, value in expected.items() if name != "events"}, f"crash {when} write {k}"
        check_jobs(it)
    assert crashes == total


def test_a_controller_that_dies_after_every_single_write_still_finishes(undisturbed: World) -> None:
    it = world()

    def hook(moment: str, mutation: Any) -> None:
        if moment == "after" and mutation["object"]["kind"] != "Event":
            raise CrashError

    it.store.on_mutation = hook
    for _ in range(2000):
        try:
            it.step(seconds=0.5)
        except CrashError:
            it.restart()
        if it.run.status.conditions and it.is_true("Completed"):
            break
    it.store.on_mutation = None
    it.steps(15)
    expected, got = end(undisturbed), end(it)
    assert {k: v for k, v in got.items() if k != "events"} == {k: v for k, v in expected.items() if k != "events"}
    check_jobs(it)


def test_every_write_that_fails_once_is_made_up_for(undisturbed: World) -> None:
    """The API server answers every third write with a conflict; nothing restarts."""
    from prodrl_operator.errors import ConflictError

    it, count = world(), 0

    def hook(moment: str, _: Any) -> None:
        nonlocal count
        if moment == "before":
            count += 1
            if count % 3 == 0:
                raise ConflictError("made up")

    it.store.on_mutation = hook
    it.until(lambda w: bool(w.run.status.conditions) and w.is_true("Completed"), limit=400)
    it.store.on_mutation = None
    it.steps(15)
    expected, got = end(undisturbed), end(it)
    assert {k: v for k, v in got.items() if k != "events"} == {k: v for k, v in expected.items() if k != "events"}
    check_jobs(it)


def test_names_of_jobs_tell_round_step_and_attempt(undisturbed: World) -> None:
    pattern = re.compile(r"^chess-r\d{4}-(collect|train|export|gate)-a0$")
    assert all(pattern.match(name) for name in undisturbed.names_of(port.JOB))
    assert len(undisturbed.names_of(port.JOB)) == 2 + 3 * 4
    assert {key[1] for key in undisturbed.jobs_seen} == {
        step.value for step in (Step.COLLECTING, Step.TRAINING, Step.EXPORTING, Step.GATING)
    }
