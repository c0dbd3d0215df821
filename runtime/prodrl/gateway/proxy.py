"""One request, from a client to a policy and back. Called by ``app`` with a request that is already allowed.

Before the first byte of an answer an attempt may be repeated, and the conversation may be moved, by the rules of
``routing``; after it nothing is hidden: what breaks upstream breaks for the client.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from dataclasses import dataclass, field
from typing import Protocol

from prodrl.config import Route
from prodrl.gateway import identity, stats, wire
from prodrl.gateway.routing import Choice, Router
from prodrl.gateway.upstream import Outgoing, UnreachableError, UpstreamError

logger = logging.getLogger(__name__)

GENERATING = frozenset(
    ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/chat/completions/batch")
)
"""Endpoints whose requests the engine records; only these are counted and named in feedback entries."""
_FIRST_PAUSE_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 1.0
_FAILOVER_SECONDS = 2.0
"""How long the second policy is tried when the first was given up."""


class AnswerPort(Protocol):
    """An answer whose head has arrived."""

    status: int
    headers: wire.Headers

    async def chunk(self) -> bytes: ...  # noqa: D102

    def close(self) -> None: ...  # noqa: D102


class UpstreamPort(Protocol):
    """What the proxy needs of ``upstream.Upstream``."""

    async def open(self, base_url: str, outgoing: Outgoing) -> AnswerPort: ...  # noqa: D102


@dataclass
class Exchange:
    """One request of a user on its way."""

    method: str
    path: str
    target: str
    headers: wire.Headers
    body: bytes
    trajectory: str | None
    """None for a question about the stable policy (``/v1/models``); it belongs to no conversation."""
    started: float = field(default_factory=time.monotonic)
    request_id: str = ""
    route: Route | None = None
    """The policy that has the request now, and whose counters its end goes to."""
    is_started: bool = False
    """The client has the head of the answer."""
    is_done: bool = False
    """The client has all of it."""
    is_client_gone: bool = False
    is_in_engine: bool = False
    """An engine may have taken it. A request that none took is no part of the trajectory."""
    is_recorded: bool = False
    """The engine finished it; a request that it refused (4xx) leaves no record."""

    @property
    def is_generating(self) -> bool:
        """Whether the engine will record it."""
        return self.trajectory is not None and self.method == "POST" and self.path in GENERATING

    def own_headers(self) -> wire.Headers:
        """What the client learns about the answer; its own request id comes back to it."""
        echoed = wire.header(self.headers, wire.REQUEST_ID) or self.request_id.encode()
        own = [(wire.REQUEST_ID, echoed)] if echoed else []
        if self.trajectory is not None:
            own.append((wire.TRAJECTORY, self.trajectory.encode()))
        if self.request_id:
            own.append((b"x-prodrl-request", self.request_id.encode()))
        if self.route is not None:
            own.append((b"x-prodrl-policy", self.route.digest.encode()))
            own.append((b"x-prodrl-round", str(self.route.round).encode()))
        return own


class Proxy:
    """Answers requests by the policies of a router."""

    def __init__(
        self,
        *,
        router: Router,
        upstream: UpstreamPort,
        counters: stats.Stats,
        trails: stats.Trails,
        retry_seconds: float,
    ) -> None:
        self._router = router
        self._upstream = upstream
        self._stats = counters
        self._trails = trails
        self._retry_seconds = retry_seconds

    async def handle(self, exchange: Exchange, receive: wire.Receive, send: wire.Send) -> None:
        """Answer the request; a client that leaves cancels it.

        Raises:
            wire.Refusal: Nothing could be sent, and this is why.
        """
        task = asyncio.current_task()
        assert task is not None
        watcher = asyncio.create_task(_watch(exchange, receive, task))
        outcome = "failed"
        try:
            outcome = await self._answer(exchange, send)
        except asyncio.CancelledError:
            if not exchange.is_client_gone:
                raise
            task.uncancel()
            outcome = "aborted"
        except UpstreamError as exc:
            logger.warning("Request %s: %s", exchange.request_id, exc)
            if not exchange.is_started:
                raise wire.Refusal(exc.status, f"Upstream: {exc}; try again", code="upstream_error") from exc
        finally:
            watcher.cancel()
            self._finish(exchange, outcome)

    async def _answer(self, exchange: Exchange, send: wire.Send) -> str:
        answer = await self._connect(exchange)
        try:
            return await self._relay(exchange, answer, send)
        finally:
            answer.close()

    async def _connect(self, exchange: Exchange) -> AnswerPort:
        """The head of an answer, from whichever policy may give it."""
        router, avoid = self._router, set[str]()
        deadline = exchange.started + self._retry_seconds
        pause = _FIRST_PAUSE_SECONDS
        while True:
            now = time.monotonic()
            choice = router.choose(exchange.trajectory, time.time(), avoid)
            if choice is None and not avoid and now < deadline:
                await asyncio.sleep(min(pause, deadline - now))
                continue
            if choice is None:
                raise self._unavailable(exchange)
            digest = choice.route.digest
            is_skipped = router.health.is_down(digest, now) and self._may_leave(exchange, digest, avoid)
            if is_skipped and not router.health.may_probe(digest, now):
                avoid.add(digest)
                continue
            self._enter(exchange, choice)
            answer = await self._attempt(exchange, choice.route)
            if answer is not None:
                return answer
            now = time.monotonic()
            may_leave = self._may_leave(exchange, digest, avoid)
            if may_leave and (now >= deadline or router.health.is_down(digest, now)):
                avoid.add(digest)
                deadline = now + min(self._retry_seconds, _FAILOVER_SECONDS)
                pause = _FIRST_PAUSE_SECONDS
            elif now >= deadline:
                raise self._unavailable(exchange)
            else:
                jitter = random.uniform(0.5, 1.0)  # noqa: S311 - not a secret
                await asyncio.sleep(min(pause * jitter, deadline - now))
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
            self._stats.of(digest).retried += 1

    def _may_leave(self, exchange: Exchange, digest: str, avoid: set[str]) -> bool:
        return self._router.choose(exchange.trajectory, time.time(), {*avoid, digest}) is not None

    async def _attempt(self, exchange: Exchange, route: Route) -> AnswerPort | None:
        """One attempt; None when another may follow."""
        exchange.request_id = identity.request_id(exchange.trajectory or "gateway")
        headers = wire.upstream_headers(exchange.headers, exchange.request_id)
        outgoing = Outgoing(exchange.method, exchange.target, headers, exchange.body)
        exchange.is_in_engine = True
        try:
            answer = await self._upstream.open(route.url, outgoing)
        except UnreachableError as exc:
            logger.info("Policy %s round %d: %s", route.digest[:19], route.round, exc)
            exchange.is_in_engine = False
            self._router.health.failed(route.digest, time.monotonic())
            return None
        if answer.status == 503:
            answer.close()
            exchange.is_in_engine = False
            self._router.health.failed(route.digest, time.monotonic())
            return None
        self._router.health.succeeded(route.digest)
        return answer

    def _enter(self, exchange: Exchange, choice: Choice) -> None:
        """Move the request, and the counters, to the policy of its next attempt."""
        before, after = exchange.route, choice.route
        exchange.route = after
        if not exchange.is_generating or (before is not None and before.digest == after.digest):
            return
        origin = before.digest if before is not None else choice.left
        if before is None and origin is not None:
            self._stats.entered(origin)
        if origin is not None:
            self._stats.left(origin, "switched")
            logger.warning("Trajectory %s: moved from %s to %s", exchange.trajectory, origin[:19], after.digest[:19])
        self._stats.entered(after.digest)

    async def _relay(self, exchange: Exchange, answer: AnswerPort, send: wire.Send) -> str:
        assert exchange.route is not None
        if exchange.trajectory is not None and answer.status < 500:
            is_new = self._router.commit(exchange.trajectory, exchange.route.digest, time.time())
            if is_new and exchange.is_generating:
                self._stats.of(exchange.route.digest).trajectories += 1
        headers = wire.client_headers(answer.headers, exchange.own_headers())
        if answer.status in (204, 304):
            headers = [(name, value) for name, value in headers if name.lower() != b"content-length"]
        exchange.is_started = True
        exchange.body = b""
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        policy = self._stats.of(exchange.route.digest) if exchange.is_generating else stats.PolicyStats()
        size = 0
        while chunk := await answer.chunk():
            if not size:
                policy.first_byte_seconds += time.monotonic() - exchange.started
                policy.first_bytes += 1
            size += len(chunk)
            policy.output_bytes += len(chunk)
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        exchange.is_done = True
        await send({"type": "http.response.body", "body": b""})
        policy.total_seconds += time.monotonic() - exchange.started
        exchange.is_recorded = answer.status < 400
        return "answered" if answer.status < 500 else "failed"

    def _finish(self, exchange: Exchange, outcome: str) -> None:
        if not exchange.is_generating or exchange.route is None:
            return
        self._stats.left(exchange.route.digest, outcome)
        assert exchange.trajectory is not None
        if outcome == "answered" and exchange.is_recorded:
            self._trails.add(exchange.trajectory, exchange.request_id, is_failed=False)
        elif outcome != "answered" and exchange.is_in_engine:
            self._trails.add(exchange.trajectory, exchange.request_id, is_failed=True)

    def _unavailable(self, exchange: Exchange) -> wire.Refusal:
        if exchange.route is None:
            self._stats.count("unrouted")
            message = "Model: no policy is deployed yet; try again"
        else:
            message = f"Model: round {exchange.route.round} cannot be reached now; try again"
        return wire.Refusal(503, message, code="model_unavailable", retry_after=1)


async def _watch(exchange: Exchange, receive: wire.Receive, task: asyncio.Task[None]) -> None:
    """Cancel the request when its client leaves before the end."""
    while (await receive())["type"] != "http.disconnect":
        pass
    if not exchange.is_done:
        exchange.is_client_gone = True
        task.cancel()
