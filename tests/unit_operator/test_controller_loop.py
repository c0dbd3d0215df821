"""The controller's loop, its queue, and the gateway's admin port."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from prodrl.config.serving import RouteTable
from prodrl_operator import names
from prodrl_operator.builders import Platform
from prodrl_operator.cluster import port
from prodrl_operator.controller import Controller
from prodrl_operator.errors import ConflictError, ForbiddenError
from prodrl_operator.gateway_admin import HttpGatewayAdmin
from prodrl_operator.names import Step
from prodrl_operator.observing import Observer, service_url
from prodrl_operator.queueing import WorkQueue
from tests.support.operator_harness import NAME, World

KEY, OTHER = ("default", "a"), ("default", "b")


# The queue.


@dataclasses.dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_key_is_given_out_once_however_often_it_was_added() -> None:
    queue = WorkQueue(Clock())
    for _ in range(5):
        queue.add(KEY)
    assert queue.get(0) == KEY
    queue.done(KEY)
    assert queue.get(0) is None


def test_a_key_in_work_waits_for_its_worker_and_others_do_not() -> None:
    queue = WorkQueue(Clock())
    queue.add(KEY)
    assert queue.get(0) == KEY
    queue.add(KEY)
    queue.add(OTHER)
    assert queue.get(0) == OTHER
    assert queue.get(0) is None
    queue.done(KEY)
    assert queue.get(0) == KEY


def test_a_delay_holds_and_an_earlier_time_wins() -> None:
    clock = Clock()
    queue = WorkQueue(clock)
    queue.add(KEY, 60)
    assert queue.get(0) is None
    queue.add(KEY, 5)
    queue.add(KEY, 600)
    clock.now = 5
    assert queue.get(0) == KEY
    queue.done(KEY)
    clock.now = 1000
    assert queue.get(0) is None, "the later times were replaced"


def test_a_key_that_waits_for_its_worker_does_not_hold_up_a_later_one() -> None:
    queue = WorkQueue()
    queue.add(KEY)
    assert queue.get(0) == KEY
    queue.add(KEY)
    queue.add(OTHER, 0.05)
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(queue.get()))
    thread.start()
    thread.join(timeout=5)
    queue.close()
    assert found == [OTHER]


def given(queue: WorkQueue) -> str:
    key = queue.get(0)
    assert key is not None
    queue.done(key)
    return key[1]


def test_news_goes_before_routine_and_neither_starves() -> None:
    clock = Clock()
    queue = WorkQueue(clock)
    for number in range(1000):
        queue.add(("default", f"routine-{number}"), is_routine=True)
        queue.add(("default", f"timer-{number}"), 5.0)
    clock.now = 10.0
    queue.add(KEY)
    assert given(queue) == "a"
    found = []
    for number in range(40):
        queue.add(("default", f"news-{number}"))
        found.append(given(queue))
    routine = [name for name in found if not name.startswith("news")]
    assert len(routine) == 10, "every fourth, though there was news each time"
    assert routine[0] == "routine-0"
    assert len(queue) == 2000


def test_one_look_answers_news_and_routine() -> None:
    queue = WorkQueue(Clock())
    queue.add(KEY, is_routine=True)
    queue.add(KEY)
    assert given(queue) == "a"
    assert queue.get(0) is None
    assert len(queue) == 0


def test_routine_looks_are_spread_after_the_first() -> None:
    it = World()
    now = Clock()
    it.controller = Controller(
        it.store, Platform(), clock=lambda: it.now, gateway_admin=it.gateway, namespace="default", resync_seconds=300.0
    )
    it.controller.queue = WorkQueue(now)
    raw = it.store.get(port.RUN, "default", NAME)
    assert raw is not None
    for number in range(2):
        it.store.create({**raw, "metadata": {"name": f"more-{number}", "namespace": "default"}})
    it.controller.resync()
    assert sorted(given(it.controller.queue) for _ in range(3)) == [NAME, "more-0", "more-1"]
    it.controller.resync()
    for seconds in (0.0, 100.0, 200.0):
        now.now = seconds
        assert given(it.controller.queue)
        assert it.controller.queue.get(0) is None


def test_what_may_not_be_listed_somewhere_does_not_end_the_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    it = World()
    while it.controller.queue.get(0):
        pass

    def refused() -> None:
        raise ForbiddenError("no list of poddisruptionbudgets in namespace other")

    monkeypatch.setattr(it.store, "renew", refused)
    with pytest.raises(ForbiddenError):
        it.controller.resync()
    assert given(it.controller.queue) == NAME


def test_times_that_were_overtaken_do_not_pile_up() -> None:
    """A run with a day's deadline and an event a minute."""
    clock = Clock()
    queue = WorkQueue(clock)
    for _ in range(5000):
        queue.add(KEY, 86_400.0)
        queue.add(KEY)
        assert queue.get(0) == KEY
        queue.done(KEY)
        clock.now += 60.0
    queue.add(KEY, 100.0)
    queue.add(OTHER, 50.0)
    assert len(queue._heap) < 200
    assert queue.get(0) is None
    clock.now += 60.0
    assert queue.get(0) == OTHER
    clock.now += 60.0
    assert queue.get(0) == KEY


def test_closing_wakes_whoever_waits() -> None:
    queue = WorkQueue()
    thread = threading.Thread(target=queue.get)
    thread.start()
    queue.close()
    thread.join(timeout=5)
    assert not thread.is_alive()


# The loop.


def test_a_run_that_is_gone_is_counted_no_more() -> None:
    it = World({"rounds": {"max": 1, "steps": 2, "batchSize": 2}})
    it.until(lambda w: w.is_true("Completed"))
    assert it.controller.verdicts == {("default", NAME, "Pass"): 2}
    it.store.delete(port.RUN, "default", NAME)
    it.steps(5)
    assert it.controller.verdicts == {}


@pytest.mark.parametrize(("address", "host"), [("10.0.0.7", "10.0.0.7"), ("fd00::7", "[fd00::7]")])
def test_addresses_of_either_family_make_urls(address: str, host: str) -> None:
    it = World()
    observer = Observer(it.store, it.gateway)
    assert observer._replica({"status": {"podIP": address}}).url == f"http://{host}:{names.GATEWAY_ADMIN_PORT}"
    service = {"metadata": {"name": "s", "namespace": "n"}, "spec": {"clusterIP": address, "ports": [{"port": 80}]}}
    assert service_url(service) == f"http://{host}:80"


def test_a_pass_that_hangs_shows() -> None:
    it = World()
    assert it.controller.longest_seconds() == 0.0
    seen: list[float] = []

    class Slow(HttpGatewayAdmin):
        def status(self, url: str) -> None:
            time.sleep(0.05)
            seen.append(it.controller.longest_seconds())

    it.controller = Controller(it.store, Platform(), clock=lambda: it.now, gateway_admin=Slow(), namespace="default")
    for _ in range(60):
        it.controller.work(("default", NAME))
        it.kubelet.tick()
        if seen:
            break
    assert seen[0] >= 0.05
    assert it.controller.longest_seconds() == 0.0


def loop(it: World, controller: Controller, is_over: Callable[[], bool], seconds: float = 60.0) -> None:
    stop = threading.Event()
    worker = threading.Thread(target=controller.run_forever, args=(stop,))
    worker.start()
    try:
        deadline = time.monotonic() + seconds
        while not is_over():
            assert time.monotonic() < deadline, it.run.status
            it.kubelet.tick()
            it.now += timedelta(seconds=1)
            time.sleep(0.02)
    finally:
        stop.set()
        worker.join(timeout=10)
    assert not worker.is_alive()


def test_a_watch_that_says_nothing_does_not_stop_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    it = World({"rounds": {"max": 1, "steps": 1, "batchSize": 2}})
    monkeypatch.setattr(it.store, "watch", lambda notify: lambda: None)
    silent = Controller(it.store, Platform(), clock=lambda: it.now, gateway_admin=it.gateway, resync_seconds=0.05)
    loop(it, silent, lambda: it.run.status.stable is not None)
    assert silent.last_success is not None


def test_the_watch_makes_the_loop_quick() -> None:
    it = World({"rounds": {"max": 1, "steps": 1, "batchSize": 2}})
    watching = Controller(it.store, Platform(), clock=lambda: it.now, gateway_admin=it.gateway, resync_seconds=3600)
    loop(it, watching, lambda: it.run.status.stable is not None)


def test_two_operators_with_clocks_apart_make_no_second_job_and_reach_the_end() -> None:
    it = World({"rounds": {"max": 2, "steps": 1, "batchSize": 2}})
    skewed = Controller(it.store, Platform(), clock=lambda: it.now + timedelta(minutes=10), gateway_admin=it.gateway)
    conflicts = 0
    for _ in range(80):
        it.step()
        for _ in range(3):
            try:
                skewed.reconcile("default", NAME)
            except ConflictError:
                conflicts += 1
        if it.is_true("Completed"):
            break
    assert it.is_true("Completed")
    assert all(len(uids) == 1 for uids in it.jobs_seen.values())
    assert [item.number for item in it.run.status.history] == [0, 1, 2]


def test_a_write_on_what_somebody_else_changed_meanwhile_is_refused_and_made_up_for() -> None:
    it = World()
    it.until(lambda w: w.at(1, Step.COLLECTING))
    other = Controller(it.store, Platform(), clock=lambda: it.now, gateway_admin=it.gateway)
    fresh, is_racing = it.store.update_status, [True]

    def racing(manifest: dict[str, Any]) -> dict[str, Any]:
        if is_racing[0]:
            is_racing[0] = False
            other.reconcile("default", NAME)
        return fresh(manifest)

    it.store.update_status = racing  # type: ignore[method-assign]
    it.until(lambda w: w.is_true("Completed"))
    assert [item.number for item in it.run.status.history] == [0, 1, 2]


def test_a_pass_that_fails_is_counted_and_tried_again() -> None:
    it = World()

    def broken(*_: Any) -> None:
        raise RuntimeError("a fault of ours")

    it.controller.reconcile = broken  # type: ignore[assignment,method-assign]
    it.controller.queue.add(("default", NAME))
    key = it.controller.queue.get(0)
    assert key is not None
    it.controller.work(key)
    assert it.controller.results == {"error": 1}
    assert len(it.controller.queue) == 1


def test_a_run_that_is_gone_is_no_error() -> None:
    it = World()
    assert it.controller.reconcile("default", "nobody") is None


# The admin port.


class _Replica(BaseHTTPRequestHandler):
    routes: bytes = b""

    def do_GET(self) -> None:
        body = b'{"version": "v7"}' if self.path == "/admin/status" else b"[]"
        self._answer(200, body)

    def do_PUT(self) -> None:
        type(self).routes = self.rfile.read(int(self.headers["content-length"]))
        self._answer(200 if self.path == "/admin/routes" else 404, b"{}")

    def _answer(self, code: int, body: bytes) -> None:
        self.send_response(code)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


def test_the_admin_port_is_asked_and_told_and_its_absence_is_an_answer() -> None:
    server = HTTPServer(("127.0.0.1", 0), _Replica)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}"
    admin = HttpGatewayAdmin(patience_seconds=20.0)
    try:
        assert admin.status(url) == {"version": "v7"}
        assert admin.push(url, RouteTable(version="v8"))
        assert RouteTable.model_validate_json(_Replica.routes) == RouteTable(version="v8")
        assert admin.status(f"{url}/elsewhere") is None, "a list is no status"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert admin.status(url) is None
    assert not admin.push(url, RouteTable(version="v9"))
