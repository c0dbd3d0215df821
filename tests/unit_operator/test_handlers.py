"""The watches' life: what kopf cannot go on with, and what it is begun anew after."""

from __future__ import annotations

import asyncio
import threading
from typing import Any, cast

import kopf
import pytest
from kubernetes.client import Configuration

from prodrl_operator import handlers, names
from prodrl_operator.builders import Platform
from prodrl_operator.cluster import port
from prodrl_operator.cluster.caching import WATCHED, CachedCluster
from prodrl_operator.cluster.kubernetes import KubernetesCluster
from prodrl_operator.errors import InvalidError
from prodrl_operator.process import Options, Process


class AnsweredError(Exception):
    """As kopf raises what an API server answered."""

    def __init__(self, status: int) -> None:
        super().__init__(f"answered {status}")
        self.status = status


def watched(monkeypatch: pytest.MonkeyPatch, *answers: Exception | None) -> int:
    """How often kopf was begun; it ends as ``answers`` say."""
    begun = 0

    async def operator(**_: Any) -> None:
        nonlocal begun
        begun += 1
        answer = answers[begun - 1]
        if answer is not None:
            raise answer

    monkeypatch.setattr(kopf, "operator", operator)
    cached = CachedCluster(cast(KubernetesCluster, None))
    asyncio.run(handlers.watch(cached, Configuration(), None, threading.Event()))
    return begun


def test_a_list_whose_next_page_is_forgotten_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    assert watched(monkeypatch, AnsweredError(410), AnsweredError(410), None) == 3


def test_what_kopf_cannot_go_on_with_ends_the_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    for fault in (AnsweredError(403), RuntimeError("anything")):
        with pytest.raises(type(fault)):
            watched(monkeypatch, fault)


def test_children_are_selected_by_the_server_and_runs_are_not() -> None:
    made = handlers.settings()
    assert made.watching.chunk_size
    for kind in WATCHED:
        group, _, version = kind.api_version.rpartition("/")
        resource = kopf.Resource(
            group, version, kind.plural, kind.kind, kind.kind.lower(), frozenset(), frozenset(), namespaced=True
        )
        selected = made.watching.label_selectors.collect(resource)
        told = [] if kind is port.RUN else [f"{names.LABEL_MANAGED_BY}={names.MANAGED_BY}"]
        assert selected == told, kind


def test_the_watches_go_through_the_proxy_that_all_other_requests_go_through() -> None:
    def way(**changes: Any) -> str | None:
        return handlers.connection_info(Configuration(host="https://api.example:6443", **changes)).proxy_url

    proxy = "http://proxy.example:3128"
    assert way(proxy=proxy, no_proxy="") == proxy
    assert way(proxy=proxy, no_proxy="other.example,.example") is None
    assert way(proxy="", no_proxy="") is None


def test_a_server_name_that_the_watches_cannot_ask_for_is_refused_before_anything_begins() -> None:
    cluster = KubernetesCluster(Configuration(host="https://api.example:6443", tls_server_name="other.example"))
    with pytest.raises(InvalidError, match=r"tls-server-name.*other\.example"):
        Process(cluster, Options(platform=Platform(), listen="127.0.0.1:0"))


def test_a_socks_proxy_is_named_whoever_is_asked_to_use_it() -> None:
    configuration = Configuration(host="https://api.example:6443", proxy="socks5://proxy.example:1080", no_proxy="")
    for use in (handlers.connection_info, KubernetesCluster):
        with pytest.raises(InvalidError, match=r"proxy-url.*socks5://proxy\.example:1080"):
            use(configuration)
