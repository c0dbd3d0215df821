"""Looks at gateways' admin ports: a real server that answers, stays silent, comes back, or was never there."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from prodrl.config.serving import Route, RouteTable
from prodrl_operator import gateway_admin
from prodrl_operator.gateway_admin import HttpGatewayAdmin

DIGEST = "sha256:" + "f" * 64


class Replica:
    """An admin port."""

    def __init__(self) -> None:
        self.speaks = threading.Event()
        self.speaks.set()
        self.body = b'{"version": "one"}'
        self.looks = 0
        self.seconds_a_byte = 0.0
        self.ended = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                outer.looks += 1
                outer.speaks.wait(10)
                self.answer(outer.body)

            def do_PUT(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                outer.body = b'{"version": "two"}'
                self.answer(b"{}")

            def answer(self, body: bytes) -> None:
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if not outer.seconds_a_byte:
                    self.wfile.write(body)
                    return
                for byte in body:
                    self.wfile.write(bytes([byte]))
                    outer.ended.wait(outer.seconds_a_byte)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.speaks.set()
        self.ended.set()
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def replica() -> Iterator[Replica]:
    made = Replica()
    yield made
    made.close()


def eventually(is_so, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_what_a_replica_says_is_returned_at_once(replica):
    admin = HttpGatewayAdmin(patience_seconds=20.0)
    assert admin.status(replica.url) == {"version": "one"}
    replica.body = b'{"version": "later"}'
    assert admin.status(replica.url) == {"version": "later"}


def test_a_port_that_nobody_listens_on_is_no_answer(replica):
    replica.close()
    assert HttpGatewayAdmin(patience_seconds=20.0).status(replica.url) is None


def test_an_answer_that_is_no_object_is_no_answer(replica):
    replica.body = b"[]"
    assert HttpGatewayAdmin(patience_seconds=20.0).status(replica.url) is None


def test_a_silent_replica_is_waited_for_once(replica):
    admin = HttpGatewayAdmin(timeout_seconds=60.0, patience_seconds=0.2)
    replica.speaks.clear()
    assert admin.status(replica.url) is None
    assert admin._patience_of(admin._replicas[replica.url]) == 0.0
    eventually(lambda: replica.looks == 1)
    looks = [admin.status(replica.url) for _ in range(50)]
    assert looks == [None] * 50
    assert replica.looks == 1, "no request is made while one is under way"


def test_a_silent_replica_that_speaks_again_is_heard_by_a_later_look(replica):
    admin = HttpGatewayAdmin(timeout_seconds=60.0, patience_seconds=0.2)
    replica.speaks.clear()
    assert admin.status(replica.url) is None
    replica.speaks.set()
    eventually(lambda: admin.status(replica.url) == {"version": "one"})


def test_a_silent_replica_that_speaks_again_is_heard_though_looks_are_far_apart(replica, monkeypatch):
    admin = HttpGatewayAdmin(timeout_seconds=60.0, patience_seconds=30.0)
    known = admin._replica(replica.url)
    admin._set_silent(replica.url, known, is_silent=True)
    monkeypatch.setattr(gateway_admin, "FRESH_SECONDS", -1.0)  # every answer is too old for the next look
    assert admin.status(replica.url) is None
    eventually(known.asked.done)
    assert admin.status(replica.url) == {"version": "one"}


def test_an_old_answer_is_not_taken_for_a_new_one(replica, monkeypatch):
    admin = HttpGatewayAdmin(timeout_seconds=60.0, patience_seconds=0.2)
    replica.speaks.clear()
    assert admin.status(replica.url) is None
    replica.speaks.set()
    eventually(admin._replicas[replica.url].asked.done)
    replica.body = b'{"version": "new"}'
    replica.speaks.clear()
    with monkeypatch.context() as later:
        later.setattr(gateway_admin, "FRESH_SECONDS", -1.0)
        assert admin.status(replica.url) is None
    replica.speaks.set()
    eventually(lambda: admin.status(replica.url) == {"version": "new"})


def test_an_answer_that_trickles_in_ends_by_the_limit(replica):
    """Each byte comes well within the client's own time-out; all of them never would."""
    replica.seconds_a_byte, replica.body = 0.05, b" " * 100_000
    admin = HttpGatewayAdmin(timeout_seconds=1.0, patience_seconds=600.0)
    assert admin.status(replica.url) is None
    replica.seconds_a_byte, replica.body = 0.0, b'{"version": "one"}'
    assert admin.status(replica.url) == {"version": "one"}


@pytest.mark.parametrize("body", [b"[" * 200_000, b" " * (gateway_admin.MOST_BYTES + 1), b"\xff", b'{"version": '])
def test_an_answer_that_harms_is_no_answer_and_forgotten(replica, body):
    admin = HttpGatewayAdmin(timeout_seconds=30.0, patience_seconds=60.0)
    replica.body = body
    assert admin.status(replica.url) is None
    replica.body = b'{"version": "well"}'
    assert admin.status(replica.url) == {"version": "well"}


def test_replicas_that_are_gone_do_not_make_the_others_hurry(replica, monkeypatch):
    admin = HttpGatewayAdmin(timeout_seconds=60.0, patience_seconds=0.1)
    replica.speaks.clear()
    for number in range(gateway_admin.MANY_SILENT):
        assert admin.status(f"{replica.url}/{number}") is None
    stranger = gateway_admin._Replica()
    assert admin._patience_of(stranger) == gateway_admin.HURRY_SECONDS
    monkeypatch.setattr(gateway_admin, "SILENT_SECONDS", 0.0)
    assert admin._patience_of(stranger) == 0.1


def test_routes_are_given_and_the_next_look_sees_them(replica):
    admin = HttpGatewayAdmin(timeout_seconds=20.0, patience_seconds=20.0)
    routes = (Route(digest=DIGEST, round=0, url="http://127.0.0.1:1", weight=100),)
    assert admin.push(replica.url, RouteTable(version="two", routes=routes))
    assert admin.status(replica.url) == {"version": "two"}
    replica.close()
    admin_of_nobody = HttpGatewayAdmin(timeout_seconds=20.0)
    assert not admin_of_nobody.push(replica.url, RouteTable(version="two", routes=routes))


def test_many_silent_replicas_do_not_hold_up_those_never_asked(replica):
    admin = HttpGatewayAdmin(timeout_seconds=60.0, patience_seconds=0.3)
    replica.speaks.clear()
    urls = [f"{replica.url}/{number}" for number in range(60)]
    begin = time.monotonic()
    assert [admin.status(url) for url in urls] == [None] * 60
    assert time.monotonic() - begin < 0.3 * 60 / 2
