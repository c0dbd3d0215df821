"""The operator's own HTTP server: which addresses it takes, and what it says of those that it cannot."""

from __future__ import annotations

import socket

import httpx
import pytest
from prometheus_client import CollectorRegistry

from prodrl_operator import serve
from prodrl_operator.errors import InvalidError
from prodrl_operator.serve import Server


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as tried:
            tried.bind(("::1", 0))
    except OSError:
        return False
    return True


def answers(listen: str, *hosts: str) -> None:
    server = Server(listen, CollectorRegistry(), {"/healthz": lambda: ""})
    server.start()
    try:
        for host in hosts:
            assert httpx.get(f"http://{host}:{server.port}/healthz", trust_env=False).status_code == 200
    finally:
        server.stop()


def test_an_address_of_one_family() -> None:
    answers("127.0.0.1:0", "127.0.0.1")


@pytest.mark.parametrize("listen", ["[::]:0", ":0"])
def test_the_default_hears_both_families_or_the_one_that_there_is(listen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answers(listen, "127.0.0.1", *(["[::1]"] if has_ipv6() else []))
    monkeypatch.setattr(serve, "_has_ipv6", lambda: False)
    answers(listen, "127.0.0.1")


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
def test_an_address_of_ipv6() -> None:
    answers("[::1]:0", "[::1]")


@pytest.mark.parametrize("listen", ["", "127.0.0.1:many", "127.0.0.1:70000", "192.0.2.1:0"])
def test_an_address_that_cannot_be_taken_is_named(listen: str) -> None:
    with pytest.raises(InvalidError, match=f"--listen: cannot be taken, got '{listen}'"):
        Server(listen, CollectorRegistry(), {})
