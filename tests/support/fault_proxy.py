"""A reverse proxy between an operator and the API server that does what networks and API servers do on bad days.

Plain HTTP on loopback towards the operator, HTTPS with the same bearer token towards the server, in a thread and an
event loop of its own. Every call is counted and shown to ``rule``, which may answer with a fault. Stale answers are
real old ones: the server is asked for the state at an older resourceVersion.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import ssl
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Literal

import aiohttp
from aiohttp import web
from yarl import URL

from tests.support.apiserver import ApiServer

POLL_SECONDS = 0.1
HISTORY_SECONDS = 3.0
SHUFFLE_SECONDS = 0.4
_PATH = re.compile(
    r"^/apis?/(?:[^/]+/)?v[^/]+/(?:namespaces/[^/]+/)?(?P<plural>[a-z]+)(?:/(?P<name>[^/]+))?(?P<sub>/.+)?$"
)
_VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
_HOP_BY_HOP = frozenset({"host", "connection", "transfer-encoding", "content-length", "accept-encoding"})


@dataclass(frozen=True)
class Call:
    """One request of the operator."""

    method: str
    path: str
    query: Mapping[str, str]
    plural: str
    name: str | None
    at: float

    @property
    def verb(self) -> str:
        """As RBAC names it."""
        if self.method != "GET":
            return _VERBS[self.method]
        if self.query.get("watch") == "true":
            return "watch"
        return "list" if self.name is None else "get"

    @property
    def is_write(self) -> bool:
        return self.method != "GET"

    @property
    def is_watch(self) -> bool:
        return self.verb == "watch"


@dataclass(frozen=True)
class Fault:
    """What happens to a call; see the kinds below."""

    on: frozenset[str] = field(default=frozenset(), kw_only=True)
    """Verbs that it happens to; none: all that it can happen to."""

    def fits(self, call: Call) -> bool:
        return not call.is_watch and (not self.on or call.verb in self.on)


@dataclass(frozen=True)
class Refused(Fault):
    """An error from the API server, or from what stands before it; nothing happened."""

    code: int
    reason: str
    retry_after: int | None = None

    def fits(self, call: Call) -> bool:
        return not self.on or call.verb in self.on


@dataclass(frozen=True)
class ContinueExpired(Fault):
    """The next page of a list is gone."""

    def fits(self, call: Call) -> bool:
        return "continue" in call.query


@dataclass(frozen=True)
class Lost(Fault):
    """No answer comes: the connection is reset, or nothing is ever said on it."""

    is_committed: bool
    """Whether the server has done it."""
    how: Literal["reset", "silence"]


@dataclass(frozen=True)
class Stale(Fault):
    """What was true ``HISTORY_SECONDS`` ago."""

    def fits(self, call: Call) -> bool:
        return call.verb in ("get", "list") and "continue" not in call.query and call.plural != "events"


@dataclass(frozen=True)
class Slow(Fault):
    """The answer takes its time."""

    seconds: float


@dataclass(frozen=True)
class Truncated(Fault):
    """Half of the answer; ``is_clean``: as if it were the whole."""

    is_clean: bool


@dataclass(frozen=True)
class WatchFault(Fault):
    """Something with the stream of a watch after its first ``after`` lines.

    ``expired``: an ERROR event says 410. ``silent``: nothing comes any more, and nothing ends. ``shuffled``: events
    come late, twice and in another order. ``reset``: the connection breaks within a line.
    """

    how: Literal["expired", "silent", "shuffled", "reset"]
    after: int = 0

    def fits(self, call: Call) -> bool:
        return call.is_watch


Rule = Callable[[Call], Fault | None]


def none(_: Call) -> Fault | None:
    """Nothing goes wrong."""
    return None


def chance(seed: int, share: float, *faults: Fault) -> Rule:
    """One of the faults that fit, for a share of the calls; the same calls in the same order, the same faults."""
    source = random.Random(seed)

    def rule(call: Call) -> Fault | None:
        fitting = [fault for fault in faults if fault.fits(call)]
        return source.choice(fitting) if fitting and source.random() < share else None

    return rule


def kind_of(fault: Fault) -> str:
    """A short name for what happened, to be counted."""
    shown = replace(fault, on=frozenset())
    parts = [str(value) for name, value in vars(shown).items() if name not in ("on", "after", "reason", "retry_after")]
    return " ".join([type(fault).__name__, *parts])


class FaultProxy:
    """Use as a context manager.

    Args:
        server: What stands behind it.
        rule: Asked for every call; may be replaced at any time.
        has_history: Whether answers can be stale.
    """

    def __init__(self, server: ApiServer, rule: Rule = none, *, has_history: bool = False) -> None:
        self._server, self.rule, self._has_history = server, rule, has_history
        self.is_cut_off = False
        """Every packet is dropped, those of open watches too."""
        self.calls: list[Call] = []
        self.faults: Counter[str] = Counter()
        self._history: deque[tuple[float, str]] = deque()
        self._random = random.Random(1)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fault-proxy", daemon=True)

    def __enter__(self) -> FaultProxy:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(30)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()

    def counts(self, since: float = 0.0) -> Counter[tuple[str, str]]:
        """Calls by verb and plural since a moment of the monotonic clock."""
        return Counter((call.verb, call.plural) for call in tuple(self.calls) if call.at >= since)

    async def _start(self) -> None:
        context = ssl.create_default_context(cafile=str(self._server.folder / "certs/apiserver.crt"))
        connector = aiohttp.TCPConnector(ssl=context, limit=0)
        self._session = aiohttp.ClientSession(
            connector=connector, timeout=aiohttp.ClientTimeout(total=None), read_bufsize=2**22
        )
        app = web.Application(client_max_size=2**24)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        self._remembering = asyncio.create_task(self._remember()) if self._has_history else None

    async def _stop(self) -> None:
        if self._remembering is not None:
            self._remembering.cancel()
        await self._runner.cleanup()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        await self._session.close()

    # One call.

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        call = _call_of(request)
        body = await request.read()
        self.calls.append(call)
        fault = Lost(is_committed=False, how="silence") if self.is_cut_off else self.rule(call)
        if fault is not None:
            self.faults[kind_of(fault)] += 1
        if isinstance(fault, Refused):
            return _status(fault.code, fault.reason, fault.retry_after)
        if isinstance(fault, ContinueExpired):
            return _status(410, "Expired")
        if isinstance(fault, Lost) and not fault.is_committed:
            return await self._lose(request, fault)
        if call.is_watch:
            return await self._watch(request, fault if isinstance(fault, WatchFault) else None)
        if isinstance(fault, Stale) and (old := await self._stale(request, call)) is not None:
            return old
        async with self._forward(request, body) as answer:
            content = await answer.read()
            return await self._answer(request, answer, content, fault)

    async def _answer(
        self, request: web.Request, answer: aiohttp.ClientResponse, content: bytes, fault: Fault | None
    ) -> web.StreamResponse:
        if isinstance(fault, Lost):
            return await self._lose(request, fault)
        if isinstance(fault, Slow):
            await asyncio.sleep(fault.seconds)
        half = content[: len(content) // 2]
        if isinstance(fault, Truncated) and not fault.is_clean:
            response = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.content_type})
            response.content_length = len(content)
            await response.prepare(request)
            await response.write(half)
            _abort(request)
            return response
        kept = half if isinstance(fault, Truncated) else content
        return web.Response(status=answer.status, body=kept, headers=_headers(answer.headers))

    def _forward(self, request: web.Request, body: bytes, raw_path: str | None = None) -> Any:
        url = URL(self._server.url + (raw_path or request.raw_path), encoded=True)
        return self._session.request(
            request.method,
            url,
            data=body or None,
            headers=_headers(request.headers),
            skip_auto_headers=("Accept-Encoding", "User-Agent", "Content-Type"),
        )

    async def _lose(self, request: web.Request, fault: Lost) -> web.StreamResponse:
        while fault.how == "silence" and _is_open(request):
            await asyncio.sleep(POLL_SECONDS)
        _abort(request)
        return web.Response(status=500)

    # Old answers.

    async def _remember(self) -> None:
        """Which resourceVersion was in force when."""
        headers = {"Authorization": "Bearer admin"}
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with self._session.get(
                    f"{self._server.url}/api/v1/namespaces?limit=1", headers=headers
                ) as answer:
                    version = (await answer.json())["metadata"]["resourceVersion"]
                now = time.monotonic()
                self._history.append((now, version))
                while self._history[0][0] < now - HISTORY_SECONDS:
                    self._history.popleft()
            await asyncio.sleep(3 * POLL_SECONDS)

    async def _stale(self, request: web.Request, call: Call) -> web.StreamResponse | None:
        if not self._history:
            return None
        query = dict(call.query) | {"resourceVersion": self._history[0][1], "resourceVersionMatch": "Exact"}
        path = call.path
        if call.name is not None:
            path = path.rpartition("/")[0]
            query["fieldSelector"] = f"metadata.name={call.name}"
        raw_path = str(URL.build(path=path, query=query))
        async with self._forward(request, b"", raw_path) as answer:
            content = await answer.read()
            if answer.status != 200:
                return None  # its history does not reach so far
            if call.name is None:
                return web.Response(body=content, headers=_headers(answer.headers))
        found = json.loads(content)
        if not found["items"]:
            return _status(404, "NotFound", details={"name": call.name, "kind": call.plural})
        kind = found["kind"].removesuffix("List")
        return web.json_response({"apiVersion": found["apiVersion"], "kind": kind, **found["items"][0]})

    # Watches.

    async def _watch(self, request: web.Request, fault: WatchFault | None) -> web.StreamResponse:
        async with self._forward(request, b"") as answer:
            response = web.StreamResponse(status=answer.status, headers=_headers(answer.headers))
            response.enable_chunked_encoding()
            await response.prepare(request)
            lines: asyncio.Queue[bytes | None] = asyncio.Queue()
            reader = asyncio.create_task(_read(answer.content, lines))
            try:
                await self._pass_on(_Stream(request, response, lines), fault)
            except ConnectionError:
                _abort(request)
            finally:
                reader.cancel()
            return response

    async def _pass_on(self, stream: _Stream, fault: WatchFault | None) -> None:
        num_passed = 0
        while _is_open(stream.request):
            if fault is not None and num_passed >= fault.after and await self._disturb(stream, fault):
                return
            with contextlib.suppress(TimeoutError):
                line = await asyncio.wait_for(stream.lines.get(), timeout=POLL_SECONDS)
                if self.is_cut_off:
                    continue
                if line is None:
                    return
                await stream.response.write(line)
                num_passed += 1

    async def _disturb(self, stream: _Stream, fault: WatchFault) -> bool:
        """Do what the fault says; whether the watch is over with that."""
        if fault.how == "silent":
            while _is_open(stream.request):
                await asyncio.sleep(POLL_SECONDS)
        elif fault.how == "expired":
            gone = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "Expired", "code": 410}
            await stream.response.write(json.dumps({"type": "ERROR", "object": gone}).encode() + b"\n")
        elif fault.how == "reset":
            line = await stream.lines.get()
            if line is not None:
                await stream.response.write(line[: len(line) // 2])
            _abort(stream.request)
        else:
            return await self._shuffle(stream)
        return True

    async def _shuffle(self, stream: _Stream) -> bool:
        await asyncio.sleep(SHUFFLE_SECONDS)
        waiting = [stream.lines.get_nowait() for _ in range(stream.lines.qsize())]
        lines = [line for line in waiting if line is not None]
        twice = [line for line in lines if self._random.random() < 0.5]
        lines += twice
        self._random.shuffle(lines)
        for line in lines:
            await stream.response.write(line)
        return None in waiting


@dataclass(frozen=True)
class _Stream:
    request: web.Request
    response: web.StreamResponse
    lines: asyncio.Queue[bytes | None]
    """As they come from the server; None: it ended the watch."""


async def _read(content: aiohttp.StreamReader, lines: asyncio.Queue[bytes | None]) -> None:
    with contextlib.suppress(aiohttp.ClientError):
        while line := await content.readline():
            lines.put_nowait(line)
    lines.put_nowait(None)


def _call_of(request: web.Request) -> Call:
    found = _PATH.match(request.path)
    plural, name = (found["plural"], found["name"]) if found else ("", None)
    return Call(request.method, request.path, dict(request.query), plural, name, time.monotonic())


def _headers(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() not in _HOP_BY_HOP}


def _status(
    code: int, reason: str, retry_after: int | None = None, details: Mapping[str, str] | None = None
) -> web.Response:
    body = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": "made up", "reason": reason}
    headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
    return web.json_response(body | {"code": code, "details": dict(details or {})}, status=code, headers=headers)


def _is_open(request: web.Request) -> bool:
    return request.transport is not None and not request.transport.is_closing()


def _abort(request: web.Request) -> None:
    """A reset, not a polite end."""
    if request.transport is not None:
        request.transport.abort()
