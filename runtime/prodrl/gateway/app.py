"""The traffic application: what a request may be, and who answers it. Built by ``server``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from prodrl.gateway import feedback, identity, segments, wire
from prodrl.gateway.proxy import Exchange
from prodrl.gateway.routing import Router
from prodrl.gateway.stats import Stats, Trails
from prodrl.records import FeedbackEntry

MAX_RUNNING = 1024
"""Requests in progress of each kind (model, feedback); past it new ones are answered 503."""
_MANAGEMENT = frozenset(("/v1/load_lora_adapter", "/v1/unload_lora_adapter"))
"""Endpoints of the engine that change it: not for users."""


class KeysPort(Protocol):
    """Who a credential belongs to."""

    def identify(self, presented: bytes | None) -> str | None: ...  # noqa: D102


class ProxyPort(Protocol):
    """Answers one allowed request."""

    async def handle(self, exchange: Exchange, receive: wire.Receive, send: wire.Send) -> None: ...  # noqa: D102


class FeedbackPort(Protocol):
    """Makes rewards durable."""

    is_ready: bool

    async def accept(  # noqa: D102
        self, drafts: list[feedback.Draft], entries: list[FeedbackEntry]
    ) -> list[segments.Receipt]: ...


@dataclass
class Deps:
    """What the application needs of the world."""

    keys: KeysPort
    proxy: ProxyPort
    feedback: FeedbackPort
    router: Router
    stats: Stats
    trails: Trails
    max_body_bytes: int
    max_header_bytes: int
    is_draining: Callable[[], bool] = lambda: False
    max_running: int = MAX_RUNNING


def is_ready(deps: Deps) -> bool:
    """A table was applied (it may be empty: round 0), the feedback log was opened, and no stop was asked for."""
    return deps.router.table is not None and deps.feedback.is_ready and not deps.is_draining()


def make_app(deps: Deps) -> wire.App:
    """The ASGI application of the traffic port."""
    return _Traffic(deps)


class _Traffic:
    def __init__(self, deps: Deps) -> None:
        self._deps = deps
        self._running = {"feedback": 0, "model": 0}
        """Requests in progress; apart, so that a store that hangs cannot keep users from the model."""

    async def __call__(self, scope: wire.Scope, receive: wire.Receive, send: wire.Send) -> None:
        if scope["type"] != "http":
            return
        headers: wire.Headers = scope["headers"]
        echo = wire.header(headers, wire.REQUEST_ID)
        exchange: Exchange | None = None
        try:
            if scope["path"] in ("/healthz", "/readyz"):
                await self._health(scope["path"], send)
                return
            kind = "feedback" if scope["path"] == "/v1/feedback" else "model"
            customer = self._admit(scope, kind)
            self._running[kind] += 1
            try:
                body = await wire.read_body(receive, headers, self._deps.max_body_bytes)
                if kind == "feedback":
                    await self._feedback(customer, headers, body, send)
                    return
                exchange = _exchange(scope, customer, body)
                del body  # the exchange lets go of it when the answer begins
                await self._deps.proxy.handle(exchange, receive, send)
            finally:
                self._running[kind] -= 1
        except wire.ClientGoneError:
            return
        except wire.Refusal as refusal:
            if refusal.status < 500:
                self._deps.stats.count("refused")
            own = exchange.own_headers() if exchange else [(wire.REQUEST_ID, echo)] if echo else []
            await wire.send_refusal(send, refusal, own)

    async def _health(self, path: str, send: wire.Send) -> None:
        if path == "/healthz" or is_ready(self._deps):
            await wire.send_bytes(send, 200, b"ok\n", [(b"content-type", b"text/plain")])
            return
        content = {"routes": self._deps.router.table is not None, "feedback": self._deps.feedback.is_ready}
        await wire.send_json(send, 503, content)

    def _admit(self, scope: wire.Scope, kind: str) -> str:
        """The name of the customer, for a request that may go on."""
        deps, headers, path = self._deps, scope["headers"], scope["path"]
        if sum(len(name) + len(value) + 4 for name, value in headers) > deps.max_header_bytes:
            message = f"Request: headers are larger than {deps.max_header_bytes} bytes; send fewer"
            raise wire.Refusal(431, message, code="headers_too_large")
        customer = deps.keys.identify(_credential(headers))
        if customer is None:
            deps.stats.count("unauthorised")
            raise wire.Refusal(
                401, "API key: missing or unknown; send Authorization: Bearer KEY", code="invalid_api_key"
            )
        if not path.startswith("/v1/") or path in _MANAGEMENT or {".", ".."} & set(path.split("/")):
            raise wire.Refusal(404, "Path: not served here; use /v1/...", code="not_found")
        if kind == "feedback" and scope["method"] != "POST":
            raise wire.Refusal(405, f"Feedback: POST only, got {scope['method']}", code="method_not_allowed")
        if self._running[kind] >= deps.max_running:
            deps.stats.count("overloaded")
            raise wire.Refusal(
                503, "Gateway: too many requests are running; try again", code="overloaded", retry_after=1
            )
        return customer

    async def _feedback(self, customer: str, headers: wire.Headers, body: bytes, send: wire.Send) -> None:
        deps = self._deps
        header_key = wire.header(headers, b"idempotency-key")
        try:
            drafts, is_batch = feedback.parse(
                body, customer, identity.name_in_header(header_key) if header_key else None
            )
            entries = [draft.entry(segments.now_ms(), *deps.trails.of(draft.trajectory_id)) for draft in drafts]
            receipts = await deps.feedback.accept(drafts, entries)
        except wire.Refusal:
            deps.stats.count("feedback_refused")
            raise
        except segments.ConflictError as exc:
            deps.stats.count("feedback_refused")
            raise wire.Refusal(409, str(exc), code="idempotency_conflict") from exc
        except segments.NotDurableError as exc:
            deps.stats.count("feedback_failed")
            message = "Feedback: not stored, the store is not available; post it again with the same idempotency key"
            raise wire.Refusal(503, message, code="feedback_unavailable", retry_after=2) from exc
        for receipt in receipts:
            self._count(receipt)
        shown = [_receipt(receipt) for receipt in receipts]
        await wire.send_json(send, 202, {"items": shown} if is_batch else shown[0])

    def _count(self, receipt: segments.Receipt) -> None:
        if receipt.is_duplicate:
            self._deps.stats.count("feedback_duplicates")
            return
        draft = receipt.draft
        holder = self._deps.router.conversations.peek(draft.trajectory_id)
        self._deps.stats.rewarded(holder, draft.reward)


def _receipt(receipt: segments.Receipt) -> dict[str, str | bool]:
    draft = receipt.draft
    shown: dict[str, str | bool] = {"feedback_id": draft.feedback_id, "trajectory_id": draft.trajectory_id}
    return {**shown, "duplicate": True} if receipt.is_duplicate else shown


def _credential(headers: wire.Headers) -> bytes | None:
    kind, _, credential = (wire.header(headers, b"authorization") or b"").partition(b" ")
    return credential.strip() if kind.lower() == b"bearer" else wire.header(headers, b"x-api-key")


def _exchange(scope: wire.Scope, customer: str, body: bytes) -> Exchange:
    """The request with the conversation it belongs to."""
    headers: wire.Headers = scope["headers"]
    raw_path, query = scope["raw_path"], scope["query_string"]
    target = (raw_path + (b"?" + query if query else b"")).decode("latin-1")
    is_about_models = scope["method"] in ("GET", "HEAD") and scope["path"] == "/v1/models"
    trajectory = None if is_about_models else _trajectory(headers, customer, body)
    return Exchange(scope["method"], scope["path"], target, headers, body, trajectory)


def _trajectory(headers: wire.Headers, customer: str, body: bytes) -> str:
    named = wire.header(headers, wire.TRAJECTORY)
    if named:
        name: str | None = identity.name_in_header(named)
    else:
        name = identity.name_in_body(wire.header(headers, b"content-type") or b"", body)
    if not name:
        return identity.fresh_trajectory_id(customer)
    try:
        return identity.trajectory_id(customer, name)
    except identity.IdentityError as exc:
        raise wire.Refusal(400, str(exc), code="invalid_trajectory") from exc
