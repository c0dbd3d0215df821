"""Crash sweep: the operator dies right after its k-th write, for every k, and a new one takes over.

The judge is the undisturbed run. The store is deterministic and the new controller knows nothing, so it is enough to
replay the turn in which the write happened: when the whole state of the cluster at the end of that turn is the same,
times included, everything after it is the same too. Dying before the first write of a turn is its beginning.
"""

from __future__ import annotations

import json
import pickle
import re
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest

from prodrl_operator.cluster import port
from prodrl_operator.errors import ClusterUnavailableError, ConflictError
from prodrl_operator.names import Step
from tests.support.operator_harness import World, blocking

SPEC = {
    "rounds": {"max": 3, "steps": 2, "batchSize": 2},
    "onBlocked": "ContinueLineage",
    "gate": {"canary": {"steps": [{"weight": 10, "minTrajectories": 10}]}},
}
BAD = 2
VOLATILE = ("uid", "resourceVersion", "annotations")


class CrashError(BaseException):
    """The process is gone; nothing may catch it."""


@dataclass(frozen=True)
class Turn:
    """One turn of the undisturbed run."""

    before: bytes
    num_writes: int
    after: dict[str, Any]


def world() -> World:
    made = World(SPEC, blocking(BAD))
    made.users_per_step = 200
    return made


def freeze(it: World) -> bytes:
    # The store is in memory: its entries are all there is.
    return pickle.dumps((it.store._entries, it.store._version, it.gateway, it.now))


def thaw(frozen: bytes) -> World:
    it = world()
    it.store._entries, it.store._version, it.gateway, it.now = pickle.loads(frozen)
    it.restart()
    return it


def state(it: World) -> dict[str, Any]:
    """Everything but identities: objects of all kinds with their statuses, and what the gateway applied."""
    found: dict[str, Any] = {}
    for (kind, _, name), entry in it.store._entries.items():
        if kind == "Event":
            continue
        body = json.loads(json.dumps(entry.body))
        for field in VOLATILE:
            body["metadata"].pop(field, None)
        for owner in body["metadata"].get("ownerReferences", []):
            owner.pop("uid")
        found[f"{kind}/{name}"] = body
    found["weights"] = it.weights()
    return found


def uids(it: World) -> dict[str, str]:
    return {obj["metadata"]["name"]: obj["metadata"]["uid"] for obj in it.store.list(port.JOB)}


class Writes:
    """Counts the operator's writes and ends the process after one of them."""

    def __init__(self, it: World, last: int | None = None) -> None:
        self.count = 0
        self._last = last
        it.store.on_mutation = self._hook

    def _hook(self, moment: str, mutation: Any) -> None:
        if moment == "after" and mutation["object"]["kind"] != "Event":
            self.count += 1
            if self.count == self._last:
                raise CrashError


@pytest.fixture(scope="module")
def undisturbed() -> tuple[World, list[Turn]]:
    it, turns = world(), []
    for _ in range(100):
        before, writes = freeze(it), Writes(it)
        it.turn()
        it.store.on_mutation = None
        turns.append(Turn(before, writes.count, state(it)))
        if it.is_true("Completed") and len(it.names_of(port.DEPLOYMENT)) == 2:
            return it, turns
        it.kubelet.tick()
        it.gateway.users(it.users_per_step)
        it.now += timedelta(seconds=5)
    raise AssertionError("never completed")


def test_the_undisturbed_run_is_two_promoted_rounds_and_a_blocked_one(undisturbed: tuple[World, list[Turn]]) -> None:
    it, turns = undisturbed
    outcomes = [(item.number, item.outcome) for item in it.run.status.history]
    assert outcomes == [(0, "Promoted"), (1, "Promoted"), (2, "Blocked"), (3, "Promoted")]
    assert it.round(3).spec.lineage_round == BAD
    assert it.names_of(port.DEPLOYMENT) == ["chess-gateway", "chess-r0003-serve"]
    assert sum(turn.num_writes for turn in turns) > 100


def replay(turn: Turn, k: int) -> None:
    """Die after the k-th write of the turn; the next controller must bring it to the same end."""
    it = thaw(turn.before)
    writes = Writes(it, last=k)
    with pytest.raises(CrashError):
        it.turn()
    assert writes.count == k
    at_crash = uids(it)
    it.store.on_mutation = None
    it.restart()
    it.turn()
    assert state(it) == turn.after
    assert at_crash.items() <= uids(it).items(), "I2: a Job is never made twice"


@pytest.mark.slow
def test_a_crash_after_any_write_converges_to_the_same_end(undisturbed: tuple[World, list[Turn]]) -> None:
    for turn in undisturbed[1]:
        for k in range(1, turn.num_writes + 1):
            replay(turn, k)


def test_a_crash_after_every_seventh_write_converges_to_the_same_end(undisturbed: tuple[World, list[Turn]]) -> None:
    places = [(turn, k) for turn in undisturbed[1] for k in range(1, turn.num_writes + 1)]
    for turn, k in places[::7]:
        replay(turn, k)


def end(it: World) -> dict[str, Any]:
    """What must not depend on when things happened."""
    status = it.run.status
    return {
        "stable": (status.stable.round, status.stable.digest) if status.stable else None,
        "previous": status.previous.round if status.previous else None,
        "lineage": status.lineage_round,
        "weight": status.canary_weight,
        "finished": status.rounds_finished,
        "history": [(e.number, e.outcome, e.verdict, e.digest, e.reason) for e in status.history],
        "conditions": sorted((c.type, c.status, c.reason) for c in status.conditions),
        "objects": sorted(name for name in state(it) if not name.startswith("Pod/")),
        "weights": it.weights(),
    }


def complete(it: World) -> None:
    """To the end, whatever is thrown on the way."""
    for _ in range(600):
        try:
            it.step(seconds=0.5 if it.store.on_mutation else 5)
        except CrashError:
            it.restart()
        except ClusterUnavailableError:
            continue
        if it.run.status.conditions and it.is_true("Completed"):
            break
    it.store.on_mutation = None
    it.until(lambda w: len(w.names_of(port.DEPLOYMENT)) == 2)
    it.steps(2)


def check_jobs(it: World) -> None:
    """I2, over a whole run: one Job object for each (round, step, attempt), and no attempt spent on a crash."""
    assert all(len(found) == 1 for found in it.jobs_seen.values()), it.jobs_seen
    assert {key[2] for key in it.jobs_seen} == {"0"}


def test_an_operator_that_dies_after_each_of_its_writes_still_finishes(undisturbed: tuple[World, list[Turn]]) -> None:
    it = world()

    def hook(moment: str, mutation: Any) -> None:
        if moment == "after" and mutation["object"]["kind"] != "Event":
            raise CrashError

    it.store.on_mutation = hook
    complete(it)
    assert end(it) == end(undisturbed[0])
    check_jobs(it)


@pytest.mark.parametrize("error", [ConflictError, ClusterUnavailableError])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_an_api_server_that_fails_every_third_write_changes_nothing(
    undisturbed: tuple[World, list[Turn]], error: type[Exception], moment: str
) -> None:
    """``after``: the write happened and the answer was lost."""
    it, count = world(), 0

    def hook(when: str, _: Any) -> None:
        nonlocal count
        count += when == moment
        if when == moment and count % 3 == 0:
            raise error("made up")

    it.store.on_mutation = hook
    complete(it)
    assert end(it) == end(undisturbed[0])
    check_jobs(it)


def test_names_of_jobs_tell_round_step_and_attempt(undisturbed: tuple[World, list[Turn]]) -> None:
    found = undisturbed[0].names_of(port.JOB)
    pattern = re.compile(r"^chess-r\d{4}-(collect|train|export|gate)-a0$")
    assert all(pattern.match(name) for name in found)
    assert len(found) == 2 + 3 * len((Step.COLLECTING, Step.TRAINING, Step.EXPORTING, Step.GATING))
