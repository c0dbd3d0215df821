"""Faults are mostly waited for: the tests of a file that ask for a real API server are played at the same time.

A test decorated with ``together`` takes ``make`` (a maker of worlds); all those of its file that were selected run in
a few threads when the first of them is asked for, each in namespaces of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.faults.world import FaultWorld
from tests.support.apiserver import ApiServer

THREADS = 8
Body = Callable[["Maker"], None]


@dataclass(frozen=True)
class SharedServer(ApiServer):
    """The same server for several threads: a kubeconfig is written once, never while a kubectl reads it."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    written: dict[tuple[str, str, str | None], Path] = field(default_factory=dict)

    def kubeconfig_of(self, token: str, namespace: str = "default", url: str | None = None) -> Path:
        with self.lock:
            key = (token, namespace, url)
            if key not in self.written:
                self.written[key] = super().kubeconfig_of(token, namespace, url)
            return self.written[key]


class Maker:
    """Makes the worlds of one test, and lets them go."""

    def __init__(self, server: ApiServer) -> None:
        self.server = server
        self._made: list[FaultWorld] = []

    def __call__(self, *arguments: Any, **options: Any) -> FaultWorld:
        self._made.append(FaultWorld(self.server, *arguments, **options))
        return self._made[-1]

    def close(self) -> None:
        for world in self._made:
            world.close()


def together(body: Body) -> Callable[[Stage], None]:
    """The test: what its body, played together with its neighbours', came to."""

    def test(stage: Stage) -> None:
        stage.result(test)

    test.__name__, test.__qualname__, test.__doc__ = body.__name__, body.__qualname__, body.__doc__
    test.__module__ = body.__module__
    test.body = body  # type: ignore[attr-defined]
    return test


class Stage:
    """What the tests of one file came to."""

    def __init__(self, futures: dict[str, Future[None]]) -> None:
        self._futures = futures

    def result(self, test: Callable[..., None]) -> None:
        self._futures[test.__name__].result(280)


def _play(server: ApiServer, body: Body) -> None:
    make = Maker(server)
    try:
        body(make)
    finally:
        make.close()


@contextmanager
def playing(server: ApiServer, request: pytest.FixtureRequest) -> Iterator[Stage]:
    """Play the selected tests of the requesting file."""
    shared = SharedServer(server.folder, server.url, server.kubeconfig, server.has_controllers, server.programs)
    selected = [item.function for item in request.session.items if getattr(item, "module", None) is request.module]
    bodies = {test.__name__: test.body for test in selected if hasattr(test, "body")}
    with ThreadPoolExecutor(THREADS, "stage") as pool:
        yield Stage({name: pool.submit(_play, shared, body) for name, body in bodies.items()})
