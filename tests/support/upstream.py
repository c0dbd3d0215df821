"""A fake OpenAI engine on a real uvicorn server on loopback, scripted by the test, and a gateway in front of it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import uvicorn

from prodrl.config import GatewayConfig, Route, RouteTable, StoreConfig
from prodrl.errors import UnavailableError
from prodrl.gateway import server

STREAM = (
    b'data: {"choices":[{"delta":{"content":"gr',
    b"\xc3",
    b'\xbc\xc3\x9f"}}]}\n',
    b"\n: keep-alive\n\n",
    b'data: {"choices":[{"delta":{"content":"\\u00e4"}}]}\n\ndata: [DO',
    b"NE]\n\n",
)
"""Server-sent events cut at odd places: inside a character, inside an event, between the two line feeds; a comment."""


@dataclass
class Seen:
    """One request as the engine got it."""

    method: str
    target: str
    headers: list[tuple[bytes, bytes]]
    body: bytes
    is_aborted: bool = False

    def header(self, name: str) -> str | None:
        """First value of a header."""
        return next((v.decode("latin-1") for k, v in self.headers if k == name.encode()), None)


@dataclass
class FakeEngine:
    """What the engine does with the next requests; change it between them."""

    status: int = 200
    chunks: tuple[bytes, ...] = (b'{"object":"chat.completion"}',)
    content_type: bytes = b"application/json"
    extra_headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    pause_seconds: float = 0.0
    """Before every chunk but the first."""
    first_pause_seconds: float = 0.0
    break_after: int | None = None
    """Hang up after so many chunks."""
    hang_up_first: int = 0
    """Hang up without a byte on so many requests."""
    unavailable_first: int = 0
    """Answer 503 to so many requests."""
    gate: asyncio.Event | None = None
    """Wait for it before the second chunk."""
    seen: list[Seen] = field(default_factory=list)
    url: str = ""

    async def __call__(self, scope: Any, receive: Callable[[], Any], send: Callable[[Any], Any]) -> None:
        """Answer one request."""
        assert scope["type"] == "http"
        target = scope["raw_path"].decode() + ("?" + scope["query_string"].decode() if scope["query_string"] else "")
        seen = Seen(scope["method"], target, list(scope["headers"]), b"")
        more = True
        while more:
            message = await receive()
            seen.body += message.get("body", b"")
            more = message.get("more_body", False)
        self.seen.append(seen)
        if self.hang_up_first > 0:
            self.hang_up_first -= 1
            receive.__self__.transport.abort()  # type: ignore[attr-defined]
            return
        status = self.status
        if self.unavailable_first > 0:
            self.unavailable_first -= 1
            status = 503
        watcher = asyncio.create_task(_watch(receive, seen))
        try:
            await self._answer(status, send, seen, receive)
        finally:
            watcher.cancel()

    async def _answer(self, status: int, send: Callable[[Any], Any], seen: Seen, receive: Callable[[], Any]) -> None:
        await asyncio.sleep(self.first_pause_seconds)
        headers = [(b"content-type", self.content_type), *self.extra_headers]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        for index, chunk in enumerate(self.chunks):
            if index == self.break_after:
                receive.__self__.transport.abort()  # type: ignore[attr-defined]
                return
            if index:
                await asyncio.sleep(self.pause_seconds)
                if self.gate is not None:
                    await self.gate.wait()
            if seen.is_aborted:
                return
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


async def _watch(receive: Callable[[], Any], seen: Seen) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    seen.is_aborted = True


class QuietServer(uvicorn.Server):
    """A server that leaves signals alone."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """No handlers."""
        yield


def listen(port: int = 0) -> socket.socket:
    """A bound loopback socket."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("127.0.0.1", port))
    return sock


@contextlib.asynccontextmanager
async def serving(engine: FakeEngine, sock: socket.socket | None = None) -> AsyncIterator[FakeEngine]:
    """Run the engine on loopback, on the given bound socket or on one of its own; ``engine.url`` is where."""
    sock = sock or listen()
    engine.url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    config = uvicorn.Config(
        engine,
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        timeout_graceful_shutdown=1,
        date_header=True,
    )
    server = QuietServer(config)
    task = asyncio.create_task(server.serve(sockets=[sock]))
    while not server.started:
        await asyncio.sleep(0.005)
    try:
        yield engine
    finally:
        server.should_exit = True
        await task


@contextlib.asynccontextmanager
async def engines(count: int) -> AsyncIterator[list[FakeEngine]]:
    """Several engines at once."""
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(serving(FakeEngine())) for _ in range(count)]


class FakeStore:
    """A store in memory that can be slow or down."""

    uri = "memory"

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.is_down = False
        self.delay_seconds = 0.0
        self._lock = threading.Lock()

    def get(self, key: str) -> bytes:
        """The object."""
        self._check()
        return self.objects[key]

    def create(self, key: str, data: bytes) -> bool:
        """Write once."""
        time.sleep(self.delay_seconds)
        self._check()
        with self._lock:
            return self.objects.setdefault(key, data) is data

    def list(self, prefix: str, after: str = "") -> Iterator[str]:
        """Keys in order."""
        self._check()
        return iter(sorted(key for key in self.objects if key.startswith(prefix) and key > after))

    def check_writable(self) -> None:
        """Raise when down."""
        self._check()

    def _check(self) -> None:
        if self.is_down:
            raise UnavailableError("Store memory: cannot be reached; try again")


def digest(letter: str) -> str:
    """A policy digest that is easy to read."""
    return "sha256:" + letter * 64


def table(*routes: tuple[str, FakeEngine | str, int], version: str = "v1") -> RouteTable:
    """A route table of (letter, engine, weight); rounds count up from 1."""
    return RouteTable(
        version=version,
        routes=tuple(
            Route(
                digest=digest(letter),
                round=number,
                url=target if isinstance(target, str) else target.url,
                weight=weight,
            )
            for number, (letter, target, weight) in enumerate(routes, 1)
        ),
    )


@dataclass
class Running:
    """A gateway that runs, and a client of it."""

    gateway: server.Gateway
    client: aiohttp.ClientSession
    url: str
    admin_url: str
    metrics_url: str
    store: FakeStore

    async def chat(self, trajectory: str | None = None, **kwargs: Any) -> aiohttp.ClientResponse:
        """One chat request, answered and read whole."""
        headers = {"X-ProdRL-Trajectory": trajectory} if trajectory else {}
        headers |= kwargs.pop("headers", {})
        body = kwargs.pop("json", {"model": "m", "messages": []})
        async with self.client.post(self.url + "/v1/chat/completions", json=body, headers=headers) as response:
            await response.read()
            return response

    async def reward(self, body: Any, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        """One feedback request."""
        async with self.client.post(self.url + "/v1/feedback", json=body, headers=headers) as response:
            return response.status, await response.json()

    async def push(self, routes: RouteTable) -> Any:
        """Push routes to the admin port."""
        async with self.client.put(self.admin_url + "/admin/routes", data=routes.model_dump_json()) as response:
            assert response.status == 200
            return await response.json()

    async def status(self) -> Any:
        """The admin status."""
        async with self.client.get(self.admin_url + "/admin/status") as response:
            return await response.json()

    async def counters(self, letter: str) -> dict[str, Any]:
        """One policy's counters."""
        return (await self.status())["stats"].get(digest(letter), {})


def config(**changes: Any) -> GatewayConfig:
    """A gateway's configuration with short times."""
    values: dict[str, Any] = {
        "connect_retry_seconds": 0.5,
        "drain_seconds": 3,
        "upstream_timeout_seconds": 5,
        **changes,
    }
    return GatewayConfig(store=StoreConfig(uri="file:///nowhere"), run="r", served_name="m", **values)


@contextlib.asynccontextmanager
async def running(
    routes: RouteTable | None = None,
    *,
    store: FakeStore | None = None,
    api_keys_dir: Path | None = None,
    spool_dir: Path | None = None,
    routes_path: Path | None = None,
    **changes: Any,
) -> AsyncIterator[Running]:
    """Run a gateway on loopback in this event loop."""
    store = store or FakeStore()
    settings = server.Settings("gw-0", api_keys_dir, spool_dir, routes_path)
    sockets = listen(), listen(), listen()
    gateway = server.Gateway(config(**changes), settings, store)  # type: ignore[arg-type]
    await gateway.start(*sockets)
    if routes is not None:
        gateway.router.apply(routes)
    urls = [f"http://127.0.0.1:{sock.getsockname()[1]}" for sock in sockets]
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), auto_decompress=False) as client:
        try:
            yield Running(gateway, client, *urls, store)
        finally:
            await client.close()
            await gateway.stop()
