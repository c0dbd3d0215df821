"""The gateway's admin port as the controller uses it: read what a replica applied, give it new routes.

A pass over one run must not wait for the dead gateways of another. So requests are made by a thread of their own, any
number at the same time, and a pass waits only briefly for an answer; for a replica that let it wait in vain before,
not at all: what that one has answered since is what the next look gets.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import httpx

from prodrl.config.serving import RouteTable

_log = logging.getLogger(__name__)

TIMEOUT_SECONDS = 2.0
PATIENCE_SECONDS = 0.5
"""So long a pass waits for an answer."""
HURRY_SECONDS = 0.05
"""The same while many replicas let passes wait."""
MANY_SILENT = 8
FRESH_SECONDS = 10.0
"""An answer that came after its pass went on is good for the next look if it is no older."""
CONNECTIONS = 2048
"""At the same time: those to silent replicas are held until they time out."""
SILENT_SECONDS = 60.0
"""A replica that nobody has asked since is not counted among the silent ones: it may be gone."""
MOST_BYTES = 1024 * 1024
"""Of an answer; ours have a few thousand."""
REPLICAS = 20_000
"""Remembered at most."""

Answer = dict[str, Any]
_T = TypeVar("_T")


class GatewayAdmin(Protocol):
    """Both calls are idempotent, and neither raises: a replica that cannot be reached is an answer too."""

    def status(self, url: str) -> Answer | None:
        """What the replica says of itself; None: it does not."""
        ...

    def push(self, url: str, table: RouteTable) -> bool:
        """Give it a table; whether it took it."""
        ...


@dataclass
class _Replica:
    """What is known of one admin port; one thread at a time looks at it."""

    asked: Future[tuple[float, Answer | None]] | None = None
    """The look under way, or one that nobody has read yet: when it was answered, and how."""
    is_silent: bool = False
    """The last look was not answered in time."""


class HttpGatewayAdmin:
    """Over HTTP, without the proxies of the environment: pods are reached directly.

    Args:
        timeout_seconds: After which a request is given up.
        patience_seconds: How long a caller waits for a status.
    """

    def __init__(self, timeout_seconds: float = TIMEOUT_SECONDS, patience_seconds: float = PATIENCE_SECONDS) -> None:
        self._patience_seconds = patience_seconds
        # The client's time-out is for each part of an exchange: one whose answer trickles in would never end by it.
        self._limit_seconds = 2 * timeout_seconds
        # Looks at one replica are minutes apart, and every request searches all connections that are kept.
        limits = httpx.Limits(max_connections=CONNECTIONS, max_keepalive_connections=0)
        self._client = httpx.AsyncClient(timeout=timeout_seconds, limits=limits, trust_env=False)
        self._replicas: OrderedDict[str, _Replica] = OrderedDict()
        self._silent: dict[str, float] = {}
        """When each was last found so."""
        self._lock = threading.Lock()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="gateway-admin", daemon=True).start()

    def status(self, url: str) -> Answer | None:
        """``GET /admin/status``, or what was answered to the last look."""
        replica = self._replica(url)
        if replica.asked is not None and _is_stale(replica.asked):
            if replica.asked.result()[1] is not None:
                self._set_silent(url, replica, is_silent=False)  # too late for its pass, but it speaks: wait for it
            replica.asked = None
        if replica.asked is None:
            replica.asked = self._submit(self._get(url))
        try:
            _, answer = replica.asked.result(self._patience_of(replica))
        except TimeoutError:
            self._set_silent(url, replica, is_silent=True)
            return None
        replica.asked = None
        self._set_silent(url, replica, is_silent=False)
        return answer

    def push(self, url: str, table: RouteTable) -> bool:
        """``PUT /admin/routes``."""
        self._replica(url).asked = None  # an answer from before says nothing any more
        return self._submit(self._put(url, table)).result()

    def _replica(self, url: str) -> _Replica:
        with self._lock:
            found = self._replicas.setdefault(url, _Replica())
            self._replicas.move_to_end(url)
            if len(self._replicas) > REPLICAS:
                gone, _ = self._replicas.popitem(last=False)
                self._silent.pop(gone, None)
            return found

    def _patience_of(self, replica: _Replica) -> float:
        if replica.is_silent:
            return 0.0
        with self._lock:
            recently = sum(time.monotonic() - found < SILENT_SECONDS for found in self._silent.values())
        return self._patience_seconds if recently < MANY_SILENT else HURRY_SECONDS

    def _set_silent(self, url: str, replica: _Replica, *, is_silent: bool) -> None:
        replica.is_silent = is_silent
        with self._lock:
            if is_silent:
                self._silent[url] = time.monotonic()
            else:
                self._silent.pop(url, None)

    # In the thread of the loop.

    def _submit(self, work: Coroutine[Any, Any, _T]) -> Future[_T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _get(self, url: str) -> tuple[float, Answer | None]:
        content = bytearray()
        try:
            look = self._client.stream("GET", f"{url}/admin/status")
            async with asyncio.timeout(self._limit_seconds), look as answer:
                answer.raise_for_status()
                async for part in answer.aiter_bytes():
                    content += part
                    if len(content) > MOST_BYTES:
                        raise ValueError(f"more than {MOST_BYTES} bytes")
            body = json.loads(content)
        except Exception as exc:  # whatever answers there: one run's pods must not stop the others' passes
            _log.info("Gateway %s: no status, %r", url, exc)
            return time.monotonic(), None
        return time.monotonic(), body if isinstance(body, dict) else None

    async def _put(self, url: str, table: RouteTable) -> bool:
        try:
            content = table.model_dump_json()
            async with asyncio.timeout(self._limit_seconds):
                async with self._client.stream("PUT", f"{url}/admin/routes", content=content) as answer:
                    answer.raise_for_status()  # what it says beyond is not read
        except Exception as exc:  # as above
            _log.warning("Gateway %s: routes %s were not taken, %r", url, table.version, exc)
            return False
        return True


def _is_stale(asked: Future[tuple[float, Answer | None]]) -> bool:
    """Answered, and too long ago."""
    return asked.done() and time.monotonic() - asked.result()[0] > FRESH_SECONDS
