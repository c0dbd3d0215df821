"""What the recorder adds to vLLM's HTTP server: identity of requests, readiness, figures.

Loaded by vLLM through ``--middleware prodrl.recorder.middleware.Readiness``. A pure ASGI class, because vLLM gives
functions to a wrapper that buffers streams. ``GET /prodrl/ready`` is 200 only when the files that were loaded are
those of the configured policy and one completion was answered; everything else passes untouched.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

from prodrl.recorder import active, identity

logger = logging.getLogger("prodrl.recorder")

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

READY = "/prodrl/ready"
METRICS = "/prodrl/metrics"
POLICY_FILE = ".prodrl-policy"
"""Written into the model folder by the step that fetched it: ``{"digest": ...}``."""
SMOKE = {"prompt": "ready", "max_tokens": 2}


class Readiness:
    """Wraps vLLM's application."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._has_answered = False
        self._asking = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One ASGI call."""
        if scope["type"] == "lifespan":
            await self._app(scope, _closing(receive), send)
            return
        if scope["type"] == "http" and scope["method"] == "GET" and scope["path"] in (READY, METRICS):
            status, body = await self._ready(scope) if scope["path"] == READY else _metrics()
            await _answer(send, status, body)
            return
        if scope["type"] == "http":
            identity.current.set(identity.HttpRequest(_header(scope, b"x-request-id")))
        await self._app(scope, receive, send)

    async def _ready(self, scope: Scope) -> tuple[int, dict[str, Any]]:
        recorder = active.get()
        if recorder is None:
            return 503, {"ready": False, "reason": "no recorder is configured: PRODRL_RECORDER_CONFIG is not set"}
        wanted, found = recorder.config.policy_digest, _policy_of(os.environ.get("PRODRL_MODEL_DIR", ""))
        if found != wanted:
            return 503, {"ready": False, "reason": f"the model folder holds policy {found or 'unknown'}, not {wanted}"}
        engine = getattr(getattr(scope.get("app"), "state", None), "engine_client", None)
        if getattr(engine, "errored", False):
            return 503, {"ready": False, "reason": "the engine has failed"}
        async with self._asking:
            if not self._has_answered:
                status = await _ask(self._app, scope)
                if status != 200:
                    return 503, {"ready": False, "reason": f"a completion was answered with status {status}"}
                self._has_answered = True
                recorder.sink.start()
        return 200, {"ready": True, "digest": wanted, "round": recorder.config.round}


def _closing(receive: Receive) -> Receive:
    """``receive`` of the lifespan; the last shard is written when the server shuts down."""

    async def wrapped() -> Message:
        message = await receive()
        recorder = active.get()
        if message["type"] == "lifespan.shutdown" and recorder is not None:
            await asyncio.to_thread(recorder.sink.close)
        return message

    return wrapped


def _policy_of(model_dir: str) -> str:
    """Digest that the model folder carries; empty when it has none."""
    try:
        found = json.loads((Path(model_dir) / POLICY_FILE).read_text(encoding="utf-8"))["digest"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return found if isinstance(found, str) else ""


def _metrics() -> tuple[int, dict[str, Any]]:
    recorder = active.get()
    if recorder is None:
        return 404, {"reason": "no recorder is configured: PRODRL_RECORDER_CONFIG is not set"}
    return 200, {"policy_digest": recorder.config.policy_digest, **recorder.counters.as_dict()}


async def _ask(app: App, scope: Scope) -> int:
    """Status with which the server answers a completion of one token, asked without a network."""
    body = json.dumps(SMOKE).encode()
    headers = [
        (b"host", b"localhost"),
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    ]
    keys = getattr(getattr(getattr(scope.get("app"), "state", None), "args", None), "api_key", None)
    if key := (keys[0] if keys else os.environ.get("VLLM_API_KEY")):
        headers.append((b"authorization", b"Bearer " + key.encode()))
    asked = {
        **{name: scope[name] for name in ("asgi", "http_version", "scheme", "app", "state") if name in scope},
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "raw_path": b"/v1/completions",
        "root_path": "",
        "query_string": b"",
        "headers": headers,
        "client": ("127.0.0.1", 0),
        "server": ("127.0.0.1", 0),
    }
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    statuses: list[int] = []

    async def receive() -> Message:
        if messages:
            return messages.pop()
        await asyncio.Event().wait()  # a client that stays: a disconnect would abort the request
        raise AssertionError

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    identity.current.set(identity.HttpRequest(""))
    try:
        await app(asked, receive, send)
    except Exception:  # the edge: whatever the server failed with, it is not ready
        logger.exception("Readiness: the completion failed")
        return 500
    return statuses[0] if statuses else 500


def _header(scope: Scope, name: bytes) -> str:
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), "")


async def _answer(send: Send, status: int, body: dict[str, Any]) -> None:
    data = json.dumps(body).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": data})
