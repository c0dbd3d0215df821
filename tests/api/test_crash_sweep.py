"""Crash sweep on a real API server: the operator dies right after its k-th write, for every k, and a new one goes on.

The judge is the undisturbed run: the same end, and every Job, round and Deployment made exactly once. The in-memory
sweep compares whole states; here conflicts, defaulting, garbage collection and the real controllers have their say.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import pytest

from prodrl_operator.cluster import port
from prodrl_operator.cluster.kubernetes import KubernetesCluster
from prodrl_operator.cluster.port import Object
from tests.support.api_world import ApiWorld, play
from tests.support.apiserver import ApiServer
from tests.support.operator_harness import NAME, Script, all_well, blocking

pytestmark = pytest.mark.timeout(900)  # all worlds are played while the first test is set up
PERIOD = 8
"""Each world dies after every so-manyth write of the undisturbed run, each from another first one: all, together."""

Write = tuple[str, int]
"""What was written, and for the how-manyth time."""


class CrashError(BaseException):
    """The process is gone; nothing may catch it."""


class Mortal:
    """The client of an operator that dies right after writes were committed.

    Args:
        cluster: The real client.
        is_last: Told each write; whether it is the last thing that this operator does.
    """

    def __init__(self, cluster: KubernetesCluster, is_last: Callable[[Write], bool]) -> None:
        self._cluster, self._is_last = cluster, is_last
        self._count: Counter[str] = Counter()
        self.writes: list[Write] = []
        self.deaths: list[Write] = []
        self.made: dict[str, set[str]] = defaultdict(set)
        """UIDs by kind and name of everything that a write answered with."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cluster, name)

    def create(self, manifest: Object) -> Object:
        if manifest["kind"] == port.EVENT.kind:
            return self._cluster.create(manifest)  # the status write before it was a death already
        return self._committed("create", self._cluster.create(manifest))

    def apply(self, manifest: Object) -> Object:
        return self._committed("apply", self._cluster.apply(manifest))

    def update_status(self, manifest: Object) -> Object:
        status = manifest["status"]
        step = status.get("step") or status.get("currentRound", {}).get("step", "")
        return self._committed(f"status {step}", self._cluster.update_status(manifest))

    def set_finalizers(self, manifest: Object, finalizers: list[str]) -> Object:
        return self._committed("finalizers", self._cluster.set_finalizers(manifest, finalizers))

    def delete(self, kind: port.Kind, namespace: str, name: str, **options: Any) -> None:
        self._cluster.delete(kind, namespace, name, **options)
        self._died_after(f"delete {kind.kind}/{name}")

    def _committed(self, verb: str, written: Object) -> Object:
        what = f"{written['kind']}/{written['metadata']['name']}"
        self.made[what].add(written["metadata"]["uid"])
        self._died_after(f"{verb} {what}")
        return written

    def _died_after(self, what: str) -> None:
        self._count[what] += 1
        write = (what, self._count[what])
        self.writes.append(write)
        if self._is_last(write):
            self.deaths.append(write)
            raise CrashError


class MortalWorld(ApiWorld):
    """A world whose operator is started anew whenever it dies."""

    def __init__(
        self, server: ApiServer, scenario: Scenario, is_last: Callable[[Write], bool] = lambda _: False
    ) -> None:
        self.mortal = Mortal(server.connect(), is_last)
        self.scenario = scenario
        super().__init__(server, scenario.spec, scenario.script, cluster=cast(KubernetesCluster, self.mortal))

    def turn(self, *, passes: int = 60) -> None:
        while True:
            try:
                super().turn(passes=passes)
                return
            except CrashError:
                self.restart()

    def is_over(self) -> bool:
        return self.scenario.is_over(self)

    def end(self) -> Object:
        """Of a run that is gone: what it left."""
        if self.admin.get(port.RUN, self.namespace, NAME) is not None:
            return super().end()
        kinds = (port.DEPLOYMENT, port.SERVICE, port.CONFIG_MAP, port.JOB, port.ROUND)
        left = [item for kind in kinds for item in self.admin.list(kind, self.namespace)]
        owned = [item["metadata"]["name"] for item in left if item["metadata"].get("ownerReferences")]
        return {"left": sorted(f"{item['kind']}/{item['metadata']['name']}" for item in left), "owned": owned}

    def check(self, undisturbed: Object) -> None:
        assert self.end() == undisturbed
        self.check_jobs()
        twice = {what: uids for what, uids in self.mortal.made.items() if len(uids) > 1}
        assert not twice, f"made more than once: {twice}"


@dataclass(frozen=True)
class Scenario:
    """A run, how its steps end, and when it is over."""

    spec: Object
    script: Script
    is_over: Callable[[ApiWorld], bool]


def is_halted(world: ApiWorld) -> bool:
    """Blocked, and the candidate's servers are gone."""
    return world.is_true("Stalled") and len(world.names_of(port.DEPLOYMENT)) == 2


def is_deleted(world: ApiWorld) -> bool:
    """Its user deletes it when it is finished, and its rounds and Jobs went with it."""
    raw = world.admin.get(port.RUN, world.namespace, NAME)
    if raw is None:
        return not world.names_of(port.ROUND) and not world.names_of(port.JOB)
    if "deletionTimestamp" not in raw["metadata"] and world.is_finished():
        world.server.kubectl("delete", f"prun/{NAME}", "-n", world.namespace, "--wait=false")
    return False


CANARY = {"gate": {"canary": {"steps": [{"weight": 10, "minTrajectories": 10}]}}}
SCENARIOS = {
    "promoted": Scenario(CANARY, all_well, ApiWorld.is_finished),
    "blocked": Scenario({"rounds": {"max": 2, "steps": 2, "batchSize": 2}}, blocking(1), is_halted),
    "deleted": Scenario({}, all_well, is_deleted),
}


@dataclass
class Sweep:
    """All worlds of one scenario, at their end."""

    undisturbed: MortalWorld
    swept: list[MortalWorld]
    always_dying: MortalWorld


@pytest.fixture(scope="module")
def sweeps(api_server: ApiServer) -> Iterator[dict[str, Sweep]]:
    """Everything is played at once: what one world waits for, the others use."""
    worlds: list[MortalWorld] = []

    def made(scenario: Scenario, is_last: Callable[[Write], bool] = lambda _: False) -> MortalWorld:
        worlds.append(MortalWorld(api_server, scenario, is_last))
        return worlds[-1]

    def finish(some: list[MortalWorld]) -> None:
        play(some, lambda world: cast(MortalWorld, world).is_over())
        for world in some:
            world.step()  # whatever would still be done is done

    try:
        undisturbed = {name: made(scenario) for name, scenario in SCENARIOS.items()}
        finish(worlds)
        found = {}
        for name, scenario in SCENARIOS.items():
            writes = undisturbed[name].mortal.writes
            parts = [frozenset(writes[first::PERIOD]) for first in range(PERIOD)]
            swept = [made(scenario, part.__contains__) for part in parts]
            found[name] = Sweep(undisturbed[name], swept, made(scenario, lambda _: True))
        finish(worlds[len(SCENARIOS) :])
        yield found
    finally:
        for world in worlds:
            world.close()


@pytest.fixture(params=SCENARIOS)
def sweep(sweeps: dict[str, Sweep], request: pytest.FixtureRequest) -> Sweep:
    return sweeps[request.param]


def test_the_undisturbed_runs_are_a_promoted_and_a_blocked_round(sweeps: dict[str, Sweep]) -> None:
    def outcomes(name: str) -> list[tuple[int, str]]:
        return [(item.number, item.outcome) for item in sweeps[name].undisturbed.run.status.history]

    assert outcomes("promoted") == [(0, "Promoted"), (1, "Promoted")]
    assert outcomes("blocked") == [(0, "Promoted"), (1, "Blocked")]
    assert sweeps["blocked"].undisturbed.condition("Stalled") == ("True", "GateBlocked")
    weights = [write for write in sweeps["promoted"].undisturbed.mortal.writes if "chess-routes" in write[0]]
    assert len(weights) > 2, "users were sent to the candidate, too"


def test_a_deleted_run_leaves_its_users_served(sweeps: dict[str, Sweep]) -> None:
    end = sweeps["deleted"].undisturbed.end()
    assert end["owned"] == []
    assert {"Deployment/chess-gateway", "Deployment/chess-r0001-serve", "Service/chess-gateway"} < set(end["left"])


def test_a_crash_after_any_write_converges_to_the_same_end(sweep: Sweep) -> None:
    end = sweep.undisturbed.end()
    for world in sweep.swept:
        world.check(end)


def test_the_sweep_died_after_every_write(sweep: Sweep) -> None:
    """Only how often a status is written on the way depends on how fast the cluster is."""
    written = set(sweep.undisturbed.mortal.writes)
    died = {write for world in sweep.swept for write in world.mortal.deaths}
    assert {what for what, _ in written} == {what for what, _ in died}
    assert all(what.startswith("status") for what, _ in written - died), written - died
    assert len(died) >= 0.9 * len(written) > 50


def test_an_operator_that_dies_after_each_of_its_writes_still_finishes(sweep: Sweep) -> None:
    world = sweep.always_dying
    assert len(world.mortal.deaths) > 50
    world.check(sweep.undisturbed.end())
