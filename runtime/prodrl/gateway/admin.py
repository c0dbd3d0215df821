"""The admin application: routes in, status and metrics out. For the operator only; another port, no API keys.

Figures alone are there a second time, for whoever scrapes them and must not reach the routes.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

import pydantic

from prodrl.config import RouteTable
from prodrl.gateway import app as traffic
from prodrl.gateway import stats as counters
from prodrl.gateway import wire

MAX_TABLE_BYTES = 1024 * 1024


class RoutesPort(Protocol):
    """Takes a pushed table."""

    def push(self, table: RouteTable) -> None: ...  # noqa: D102


@dataclass
class AdminDeps:
    """What the application needs of the world."""

    traffic: traffic.Deps
    routes: RoutesPort
    started_ms: int
    writer: str
    feedback_failures: Callable[[], int] = lambda: 0


def make_admin_app(deps: AdminDeps) -> wire.App:
    """The ASGI application of the admin port."""
    return _app(deps, _dispatch)


def make_metrics_app(deps: AdminDeps) -> wire.App:
    """The ASGI application that answers ``GET /metrics`` and nothing else."""
    return _app(deps, _dispatch_metrics)


_Dispatch = Callable[[AdminDeps, wire.Scope, wire.Receive, wire.Send], Awaitable[None]]


def _app(deps: AdminDeps, dispatch: _Dispatch) -> wire.App:
    async def app(scope: wire.Scope, receive: wire.Receive, send: wire.Send) -> None:
        if scope["type"] != "http":
            return
        try:
            await dispatch(deps, scope, receive, send)
        except wire.ClientGoneError:
            return
        except wire.Refusal as refusal:
            await wire.send_refusal(send, refusal)

    return app


async def _dispatch(deps: AdminDeps, scope: wire.Scope, receive: wire.Receive, send: wire.Send) -> None:
    call = (scope["method"], scope["path"])
    if call == ("PUT", "/admin/routes"):
        body = await wire.read_body(receive, scope["headers"], MAX_TABLE_BYTES)
        try:
            table = RouteTable.model_validate_json(body)
        except pydantic.ValidationError as exc:
            faults = "; ".join(f"{'.'.join(map(str, e['loc'])) or '(root)'}: {e['msg']}" for e in exc.errors())
            raise wire.Refusal(400, f"Routes: not a route table, {faults}", code="invalid_routes") from exc
        deps.routes.push(table)
        await wire.send_json(send, 200, {"version": table.version})
    elif call == ("GET", "/admin/status"):
        await wire.send_json(send, 200, status(deps))
    elif call == ("GET", "/metrics"):
        await _send_metrics(deps, send)
    elif call == ("GET", "/healthz"):
        await wire.send_bytes(send, 200, b"ok\n", [(b"content-type", b"text/plain")])
    else:
        raise wire.Refusal(404, f"Admin: no {call[0]} {call[1]}; see docs", code="not_found")


async def _dispatch_metrics(deps: AdminDeps, scope: wire.Scope, _: wire.Receive, send: wire.Send) -> None:
    if (scope["method"], scope["path"]) != ("GET", "/metrics"):
        text = f"Metrics: no {scope['method']} {scope['path']}; ask for GET /metrics"
        raise wire.Refusal(404, text, code="not_found")
    await _send_metrics(deps, send)


async def _send_metrics(deps: AdminDeps, send: wire.Send) -> None:
    text = counters.render_metrics(deps.traffic.stats, deps.traffic.router.conversations.active(time.time()))
    await wire.send_bytes(send, 200, text.encode(), [(b"content-type", b"text/plain; version=0.0.4")])


def status(deps: AdminDeps) -> dict[str, Any]:
    """What the operator reads back from this replica."""
    router, figures = deps.traffic.router, deps.traffic.stats
    now = time.time()
    snapshot = figures.snapshot()
    policies = snapshot.pop("policies")
    return {
        "writer": deps.writer,
        "started_ms": deps.started_ms,
        "now_ms": int(now * 1000),
        "ready": traffic.is_ready(deps.traffic),
        "version": router.table.version if router.table else None,
        "routes": [route.model_dump() for route in router.routes],
        "stats": policies,
        "inflight": dict(figures.inflight),
        "conversations": router.conversations.active(now),
        "down": [r.digest for r in router.routes if router.health.is_down(r.digest, time.monotonic())],
        "feedback": {"ready": deps.traffic.feedback.is_ready, "store_failures": deps.feedback_failures()},
        **snapshot,
    }
