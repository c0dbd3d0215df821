"""Who acts: the Lease on a real API server, alone with a clock that tests move, and between whole processes."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest

from prodrl_operator import controller, handlers, leading
from prodrl_operator.cluster import port
from prodrl_operator.cluster.kubernetes import READ_SECONDS, KubernetesCluster
from prodrl_operator.cluster.port import Object
from prodrl_operator.leading import DEADLINE_SECONDS, DURATION_SECONDS, Elector
from tests.api.test_fault_proxy import TOGETHER
from tests.support.api_world import ApiWorld
from tests.support.apiserver import ApiServer
from tests.support.fault_proxy import Call, Fault, FaultProxy, Lost, Refused, chance, none
from tests.support.local_cluster import eventually
from tests.support.supervised import Supervised

_numbers = itertools.count(1)
TEN = timedelta(minutes=10)
SKEWS = pytest.mark.parametrize("skew", [timedelta(), TEN, -TEN], ids=["same clock", "ahead", "behind"])


class Place:
    """One Lease, electors for it, and the only time that they know."""

    def __init__(self, cluster: KubernetesCluster) -> None:
        self.cluster = cluster
        self.name = f"lease-{next(_numbers)}"
        self.now = 1000.0

    def elector(
        self, identity: str, cluster: KubernetesCluster | None = None, skew: timedelta = timedelta()
    ) -> Elector:
        return Elector(
            cluster or self.cluster,
            "default",
            self.name,
            identity,
            monotonic=lambda: self.now,
            clock=lambda: datetime.now(UTC) + skew,
        )

    def looks(self, elector: Elector, after: float = 0.0) -> bool:
        self.now += after
        elector.look()
        return elector.is_leading

    @property
    def spec(self) -> Object:
        found = self.cluster.get(port.LEASE, "default", self.name)
        assert found is not None
        return dict(found["spec"])


@pytest.fixture
def place(api_server: ApiServer) -> Iterator[Place]:
    made = Place(api_server.connect())
    yield made
    made.cluster.delete(port.LEASE, "default", made.name)


# One Lease.


def test_the_first_takes_it_and_the_second_waits(place: Place) -> None:
    first, second = place.elector("a"), place.elector("b")
    assert place.looks(first)
    assert not place.looks(second)
    assert place.spec["holderIdentity"] == "a"
    assert place.spec["leaseDurationSeconds"] == DURATION_SECONDS
    assert place.spec["leaseTransitions"] == 0


@SKEWS
def test_it_is_free_when_its_record_did_not_change_for_its_duration(place: Place, skew: timedelta) -> None:
    """Whatever the holder's clock says: counted from when the other first saw the record, by the other's clock."""
    first, second = place.elector("a", skew=skew), place.elector("b")
    assert place.looks(first)
    assert not place.looks(second)
    assert not place.looks(second, after=DURATION_SECONDS)
    assert place.looks(second, after=0.1)
    assert place.spec["holderIdentity"] == "b"
    assert place.spec["leaseTransitions"] == 1
    assert not place.looks(first), "the old holder sees whose it is"


@SKEWS
def test_a_holder_that_renews_keeps_it_for_ever(place: Place, skew: timedelta) -> None:
    first, second = place.elector("a", skew=skew), place.elector("b")
    for _ in range(4):
        assert place.looks(first, after=DEADLINE_SECONDS)
        assert not place.looks(second)
    assert place.spec["leaseTransitions"] == 0


def test_one_who_comes_late_counts_from_its_own_first_look(place: Place) -> None:
    assert place.looks(place.elector("a"))
    second = place.elector("b")
    assert not place.looks(second, after=3600)
    assert place.looks(second, after=DURATION_SECONDS + 0.1)


def test_the_duration_is_the_holders(place: Place) -> None:
    """A newer version may have another one."""
    assert place.looks(place.elector("a"))
    place.cluster.merge_patch(port.LEASE, "default", place.name, {"spec": {"leaseDurationSeconds": 60}})
    second = place.elector("b")
    assert not place.looks(second)
    assert not place.looks(second, after=60)
    assert place.looks(second, after=0.1)


def test_an_answer_that_was_long_on_its_way_counts_from_its_arrival(place: Place) -> None:
    class Late:
        def __getattr__(self, name: str) -> Any:
            return getattr(place.cluster, name)

        def get(self, *arguments: Any) -> Object | None:
            place.now += 9
            return place.cluster.get(*arguments)

    assert place.looks(place.elector("a"))
    second = place.elector("b", cast(KubernetesCluster, Late()))
    assert not place.looks(second)
    assert not place.looks(second, after=DURATION_SECONDS - 5)
    assert place.looks(second, after=DURATION_SECONDS)


def test_a_holder_that_cannot_renew_stops_before_others_begin(api_server: ApiServer, place: Place) -> None:
    with FaultProxy(api_server) as proxy:
        first, second = place.elector("a", api_server.connect(url=proxy.url)), place.elector("b")
        assert place.looks(first)
        assert not place.looks(second)
        proxy.rule = lambda _: Refused(503, "ServiceUnavailable")
        assert place.looks(first, after=DEADLINE_SECONDS), "not lost by one refusal"
        assert not place.looks(first, after=0.1)
        assert not place.looks(second), "and for a while nobody acts"
        proxy.rule = lambda _: None
        assert place.looks(first), "it is still its own when the server is back"


def test_a_lost_answer_to_a_renewal_does_not_lose_the_lease(api_server: ApiServer, place: Place) -> None:
    with FaultProxy(api_server) as proxy:
        first = place.elector("a", api_server.connect(url=proxy.url))
        assert place.looks(first)
        proxy.rule = lambda call: Lost(is_committed=True, how="reset") if call.is_write else None
        assert place.looks(first, after=2)
        assert not place.looks(first, after=DEADLINE_SECONDS), "it cannot know that it renewed"
        proxy.rule = lambda _: None
        assert place.looks(first)
        assert place.spec["leaseTransitions"] == 0


def test_it_is_given_back_and_free_at_once(place: Place) -> None:
    first, second = place.elector("a"), place.elector("b")
    assert place.looks(first)
    assert not place.looks(second)
    second.give_back()
    assert place.spec["holderIdentity"] == "a", "only by its holder"
    first.give_back()
    assert not first.is_leading
    assert place.looks(second)


@pytest.mark.parametrize("is_expired", [False, True], ids=["new", "expired"])
def test_of_two_that_see_it_free_at_the_same_time_one_gets_it(place: Place, is_expired: bool) -> None:
    meeting = threading.Barrier(2)

    class Meeting:
        """Both have read before either writes."""

        def __getattr__(self, name: str) -> Any:
            return getattr(place.cluster, name)

        def get(self, *arguments: Any) -> Object | None:
            found = place.cluster.get(*arguments)
            meeting.wait(30)
            return found

    both = [place.elector(name, cast(KubernetesCluster, Meeting())) for name in ("b", "c")]

    def look() -> int:
        threads = [threading.Thread(target=elector.look) for elector in both]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        return sum(elector.is_leading for elector in both)

    if is_expired:
        assert place.looks(place.elector("a"))
        assert look() == 0
        place.now += DURATION_SECONDS + 0.1
    assert look() == 1
    assert place.spec["leaseTransitions"] == int(is_expired)


# Whole processes.


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leading, "DURATION_SECONDS", 12)
    monkeypatch.setattr(leading, "DEADLINE_SECONDS", 8.0)
    monkeypatch.setattr(leading, "RETRY_SECONDS", 0.5)


def test_a_request_that_hangs_does_not_keep_a_leader_from_stopping(
    api_server: ApiServer, place: Place, quick: None
) -> None:
    with FaultProxy(api_server) as proxy:
        elector = Elector(api_server.connect(url=proxy.url), "default", place.name, "a")
        stop, elected = threading.Event(), threading.Event()
        thread = threading.Thread(target=elector.run, args=(stop, elected.set), daemon=True)
        thread.start()
        assert elected.wait(30)
        since = time.monotonic()
        proxy.rule = lambda _: Lost(is_committed=False, how="silence")
        thread.join(20)
        assert not thread.is_alive(), "it waits for an answer that never comes"
        assert not elector.is_leading
        assert time.monotonic() - since < READ_SECONDS


@pytest.fixture
def make_world(api_server: ApiServer) -> Iterator[Callable[[], ApiWorld]]:
    made: list[ApiWorld] = []

    def make() -> ApiWorld:
        made.append(ApiWorld(api_server))
        return made[-1]

    yield make
    for world in made:
        world.close()


def around_until(world: ApiWorld, is_so: Callable[[ApiWorld], bool], seconds: float = 180.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_so(world):
        assert time.monotonic() < deadline, world.run.status.model_dump(exclude_none=True)
        world.around()
        time.sleep(0.1)


def num_writes(proxy: FaultProxy) -> int:
    """Other than to the Lease."""
    return sum(call.is_write and call.plural != port.LEASE.plural for call in tuple(proxy.calls))


@pytest.fixture(scope="module")
def undisturbed(api_server: ApiServer) -> Iterator[Object]:
    world = ApiWorld(api_server)
    world.until(ApiWorld.is_finished)
    yield world.end()
    world.close()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("share", [0.0, 0.1], ids=["undisturbed", "through faults"])
def test_two_that_both_act_make_nothing_twice(
    api_server: ApiServer,
    make_world: Callable[[], ApiWorld],
    undisturbed: Object,
    share: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As if the Lease did not exist, and with clocks twenty minutes apart."""
    monkeypatch.setattr(handlers, "REQUEST_SECONDS", 3)
    monkeypatch.setattr(controller, "HINDERED_SECONDS", 2.0)
    world = make_world()
    with contextlib.ExitStack() as stack:
        rules = [chance(seed, share, *TOGETHER) for seed in range(2)]
        proxies = [stack.enter_context(FaultProxy(api_server, rule, has_history=True)) for rule in rules]
        for number, (proxy, skew) in enumerate(zip(proxies, (TEN, -TEN), strict=True)):
            client = api_server.connect(url=proxy.url)
            client.read_seconds, client.page_size = 2.0, 3
            lease = f"operator-{number}"
            stack.enter_context(Supervised(world, client, skew=skew, lease_name=lease, resync_seconds=4.0))
        around_until(world, ApiWorld.is_finished, seconds=400.0)
        if share:
            # Who of the two acts more is chance, and so is how many of the faults each meets.
            assert sum(len(proxy.faults) for proxy in proxies) > 10
            assert all(proxy.faults for proxy in proxies)
        for proxy in proxies:
            proxy.rule = none
        assert all(num_writes(proxy) > 0 for proxy in proxies)
    assert world.end() == undisturbed
    world.check_jobs()


@pytest.mark.parametrize("skew", [TEN, -TEN], ids=["ahead", "behind"])
def test_one_acts_and_the_other_takes_over_when_it_is_cut_off(
    api_server: ApiServer, make_world: Callable[[], ApiWorld], undisturbed: Object, quick: None, skew: timedelta
) -> None:
    world = make_world()
    both_led: list[float] = []
    with FaultProxy(api_server) as one, FaultProxy(api_server) as two, contextlib.ExitStack() as stack:
        client = api_server.connect(url=one.url)
        client.read_seconds = 3.0  # it says sooner that nothing can be reached
        first = stack.enter_context(Supervised(world, client, skew=skew))
        eventually(lambda: first.process.elector.is_leading, seconds=60)
        second = stack.enter_context(Supervised(world, api_server.connect(url=two.url)))

        def is_round_one(at: ApiWorld) -> bool:
            if first.process.elector.is_leading and second.process.elector.is_leading:
                both_led.append(time.monotonic())
            return at.round(1) is not None

        around_until(world, is_round_one)
        eventually(second.process.cached.is_synced.is_set, seconds=60)
        assert num_writes(two) == 0, "only the holder acts"
        one.is_cut_off = True
        since = time.monotonic()
        while not second.process.elector.is_leading:
            assert time.monotonic() - since < 60
            time.sleep(0.02)
        assert not first.process.elector.is_leading
        assert second.ends == [], "a standby is none the worse for waiting"
        around_until(world, ApiWorld.is_finished)
        assert num_writes(two) > 0
        eventually(lambda: first.ends, seconds=60)
        assert first.ends[0] == "1", "it ends by itself, to start again"
        one.is_cut_off = False
    assert both_led == []
    assert world.end() == undisturbed
    world.check_jobs()


def test_a_lease_that_only_one_may_reach_is_no_licence_for_two(
    api_server: ApiServer, make_world: Callable[[], ApiWorld], quick: None
) -> None:
    """Only the requests about the Lease hang; everything else of the old leader's works. It must stop all the same."""
    world = make_world()

    def lease_hangs(call: Call) -> Fault | None:
        return Lost(is_committed=False, how="silence") if call.plural == port.LEASE.plural else None

    with FaultProxy(api_server) as one, FaultProxy(api_server) as two, contextlib.ExitStack() as stack:
        first = stack.enter_context(Supervised(world, api_server.connect(url=one.url)))
        eventually(lambda: first.process.elector.is_leading, seconds=60)
        second = stack.enter_context(Supervised(world, api_server.connect(url=two.url)))
        eventually(lambda: world.round(0) is not None, seconds=60)
        one.rule = lease_hangs
        eventually(lambda: second.process.elector.is_leading, seconds=60)
        taken = time.monotonic()
        around_until(world, ApiWorld.is_finished)
        late = [c for c in one.calls if c.is_write and c.plural != port.LEASE.plural and c.at > taken + 1]
        assert late == []
        one.rule = lambda _: None
    world.check_jobs()
