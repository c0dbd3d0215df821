"""The operator's whole process, watches included, behind a network and an API server that have a bad day.

Each fault alone and all of them together, in namespaces of their own, all at the same time. The judge is the run that
nothing disturbs: the same end, nothing made twice, no condition left behind by a fault that is over.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import pytest

from prodrl_operator import controller, handlers, names, process
from prodrl_operator.cluster import port
from prodrl_operator.cluster.caching import LISTED, WATCHED
from prodrl_operator.cluster.port import Object
from tests.support.api_world import ApiWorld
from tests.support.apiserver import ApiServer
from tests.support.fault_proxy import (
    ContinueExpired,
    Fault,
    FaultProxy,
    Lost,
    Refused,
    Rule,
    Slow,
    Stale,
    Truncated,
    WatchFault,
    chance,
    kind_of,
    none,
)
from tests.support.supervised import Supervised

pytestmark = pytest.mark.timeout(900)  # all trials are played while the first test is set up
LIMIT_SECONDS = 480.0
RESYNC_SECONDS = 4.0
WRITES = frozenset({"create", "update", "patch", "delete"})

FAULTS: dict[str, list[Fault]] = {
    "conflicts": [Refused(409, "Conflict", on=WRITES), Refused(409, "AlreadyExists", on=frozenset({"create"}))],
    "gone pages and watches": [ContinueExpired(), WatchFault("expired"), WatchFault("expired", after=2)],
    "unprocessable": [Refused(422, "Invalid", on=WRITES)],
    "too many requests": [Refused(429, "TooManyRequests", retry_after=1)],
    "server errors": [
        Refused(500, "InternalError"),
        Refused(503, "ServiceUnavailable"),
        Refused(504, "Timeout"),
    ],
    "time-out before commit": [Lost(is_committed=False, how="silence")],
    "time-out after commit": [Lost(is_committed=True, how="silence", on=WRITES)],
    "reset before commit": [Lost(is_committed=False, how="reset")],
    "reset after commit": [Lost(is_committed=True, how="reset", on=WRITES)],
    "stale reads": [Stale()],
    "silent watches": [WatchFault("silent"), WatchFault("silent", after=3)],
    "shuffled watches": [WatchFault("shuffled")],
    "broken watches": [WatchFault("reset"), WatchFault("reset", after=3)],
    "truncated answers": [Truncated(is_clean=True), Truncated(is_clean=False)],
    "slow answers": [Slow(1.0)],
}
TOGETHER = [fault for faults in FAULTS.values() for fault in faults]
ALWAYS = {"gone pages and watches", "silent watches", "shuffled watches", "broken watches"}
"""Watches are few: nearly all of them go wrong."""
PASSING = ("conflicts", "stale reads", "silent watches", "shuffled watches", "slow answers")
"""What passes by itself: no process ends for it."""
TEN = timedelta(minutes=10)
CLOCKS = {"clock ahead": TEN, "clock behind": -TEN, "clock jumping": TEN}


def rule_of(name: str, seed: int) -> Rule:
    rule = chance(seed, 0.8 if name in ALWAYS else 0.1, *FAULTS[name])
    # Four refused renewals in a row cost an operator its Lease and its process, as they should.
    return rule if name not in PASSING else lambda call: None if call.plural == port.LEASE.plural else rule(call)


@dataclass
class Trial:
    """One operator, one run, and what is between them and the server."""

    name: str
    world: ApiWorld
    proxy: FaultProxy
    operator: Supervised
    made: dict[tuple[str, str], set[str]]
    """UIDs by kind and name of all Jobs, rounds and Deployments that ever were."""
    is_finished: bool = False
    num_looks: int = 0

    def look(self) -> None:
        self.world.around(seconds=1.0)
        if self.name == "clock jumping" and self.num_looks % 10 == 0:
            self.world.skipped += -2 * TEN if self.num_looks % 20 == 0 else 2 * TEN
        self.num_looks += 1
        for kind in (port.JOB, port.ROUND, port.DEPLOYMENT):
            for obj in self.world.admin.list(kind, self.world.namespace):
                self.made[kind.kind, obj["metadata"]["name"]].add(obj["metadata"]["uid"])
        self.is_finished = self.world.is_finished()


@pytest.fixture(scope="module")
def hurried() -> Iterator[None]:
    """The same waits, shorter: what is judged is what comes after them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(handlers, "REQUEST_SECONDS", 3)
        patch.setattr(controller, "HINDERED_SECONDS", 2.0)
        # What comes round every five minutes would fall into some look at an idle run, and not into others.
        patch.setattr(handlers, "SERVER_SECONDS", 3600)
        patch.setattr(handlers, "CLIENT_SECONDS", 3630)
        patch.setattr(process, "EVERY_RUN_SECONDS", 3600.0)
        yield


@pytest.fixture(scope="module")
def trials(api_server: ApiServer, hurried: None) -> Iterator[dict[str, Trial]]:
    rules: dict[str, Rule] = {name: rule_of(name, seed) for seed, name in enumerate(FAULTS)}
    rules |= {f"together, seed {seed}": chance(seed, 0.12, *TOGETHER) for seed in (1, 2)}
    for name in ("undisturbed", *CLOCKS):
        rules[name] = none
    with contextlib.ExitStack() as stack:
        found = {}
        for name, rule in rules.items():
            world = ApiWorld(api_server)
            world.skipped += CLOCKS.get(name, timedelta())
            stack.callback(world.close)
            has_history = name.startswith(("stale", "together"))
            proxy = stack.enter_context(FaultProxy(api_server, rule, has_history=has_history))
            client = api_server.connect(url=proxy.url)
            client.read_seconds, client.page_size = 2.0, 3
            operator = Supervised(world, client, workers=2, resync_seconds=RESYNC_SECONDS)
            found[name] = Trial(name, world, proxy, stack.enter_context(operator), defaultdict(set))
        deadline = time.monotonic() + LIMIT_SECONDS
        while time.monotonic() < deadline and (left := [t for t in found.values() if not t.is_finished]):
            for trial in left:
                trial.look()
            time.sleep(0.5)  # the operators want to do something, too
        yield found
        for trial in found.values():
            trial.proxy.rule = none
            trial.operator.stop()


@pytest.fixture
def undisturbed(trials: dict[str, Trial]) -> Object:
    assert trials["undisturbed"].is_finished
    return trials["undisturbed"].world.end()


def check(trial: Trial, undisturbed: Object) -> None:
    status = trial.world.run.status.model_dump(exclude_none=True)
    assert trial.is_finished, f"{trial.name}: {trial.operator.ends} {trial.proxy.faults} {status}"
    assert trial.world.end() == undisturbed
    trial.world.check_jobs()
    twice = {what: uids for what, uids in trial.made.items() if len(uids) > 1}
    assert not twice, f"{trial.name}: made more than once: {twice}"


@pytest.mark.parametrize("name", FAULTS)
def test_a_round_ends_right_whatever_goes_wrong(trials: dict[str, Trial], undisturbed: Object, name: str) -> None:
    check(trials[name], undisturbed)
    assert set(trials[name].proxy.faults) == {kind_of(fault) for fault in FAULTS[name]}, "each happened"


@pytest.mark.parametrize("seed", [1, 2])
def test_a_round_ends_right_though_everything_goes_wrong(
    trials: dict[str, Trial], undisturbed: Object, seed: int
) -> None:
    trial = trials[f"together, seed {seed}"]
    check(trial, undisturbed)
    assert len(trial.proxy.faults) > 10, trial.proxy.faults


@pytest.mark.parametrize("name", CLOCKS)
def test_a_clock_that_is_off_by_ten_minutes_changes_nothing(
    trials: dict[str, Trial], undisturbed: Object, name: str
) -> None:
    check(trials[name], undisturbed)


def test_only_the_controller_writes(trials: dict[str, Trial]) -> None:
    """kopf has a hand of its own, and must keep it off: our finalizer comes and goes by our patches alone."""
    trial = trials["undisturbed"]
    writes = [call for call in trial.proxy.calls if call.is_write and call.verb != "delete"]
    assert {call.query.get("fieldManager") for call in writes} == {names.FIELD_MANAGER}
    held = [call for call in writes if call.plural == port.RUN.plural and call.verb == "patch"]
    assert len(held) == 4, "for round 0 and round 1: while they had a candidate"
    assert not trial.world.raw["metadata"].get("finalizers")


def test_what_passes_by_itself_ends_no_process(trials: dict[str, Trial]) -> None:
    for name in ("undisturbed", *CLOCKS, *PASSING):
        assert trials[name].operator.ends == [], name


def test_an_idle_run_costs_nothing_but_the_lists_of_a_resync(trials: dict[str, Trial]) -> None:
    trial = trials["undisturbed"]
    assert trial.is_finished
    time.sleep(2 * RESYNC_SECONDS)  # what its end set off is over
    since = time.monotonic()
    time.sleep(3 * RESYNC_SECONDS)
    calls = [call for call in trial.proxy.calls if call.at >= since and call.plural != port.LEASE.plural]
    assert {call.verb for call in calls} == {"list"}
    lists = Counter(call.plural for call in calls if "continue" not in call.query)
    assert set(lists) == {kind.plural for kind in (*WATCHED, *LISTED)}
    assert max(lists.values()) <= 4, lists
