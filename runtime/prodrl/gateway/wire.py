"""Headers and answers as bytes. Pure, apart from ``send_json`` and ``read_body`` which speak ASGI.

Called by ``app``, ``proxy`` and ``admin``.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

BODY_SECONDS = 120.0
"""Longest time that a client may take to send its body."""
TRAJECTORY = b"x-prodrl-trajectory"
REQUEST_ID = b"x-request-id"

_HOP_BY_HOP = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)
_NOT_FORWARDED = frozenset((b"host", b"content-length", b"expect", b"authorization", b"x-api-key", REQUEST_ID))
_OURS = b"x-prodrl-"


class Refusal(Exception):  # noqa: N818 - it is an answer, not a fault
    """The gateway itself answers the request, with this status and message."""

    def __init__(self, status: int, message: str, *, code: str, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.retry_after = retry_after

    def body(self) -> dict[str, Any]:
        """The error as OpenAI's clients expect it."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": None, "code": self.code}}

    def headers(self) -> Headers:
        """Headers that belong to the status."""
        headers: Headers = []
        if self.retry_after is not None:
            headers.append((b"retry-after", str(self.retry_after).encode()))
        if self.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        if self.status in (408, 413):
            headers.append((b"connection", b"close"))
        return headers


class ClientGoneError(Exception):
    """The client closed the connection before its request was complete."""


def header(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> bytes | None:
    """The first value of a header; names are lower case in ASGI."""
    return next((value for key, value in headers if key == name), None)


def _connection_options(headers: Iterable[tuple[bytes, bytes]]) -> set[bytes]:
    listed = (value for name, value in headers if name.lower() == b"connection")
    return {option.strip().lower() for value in listed for option in value.split(b",")}


def upstream_headers(headers: Headers, request_id: str) -> Headers:
    """What the engine gets: the client's headers less those of the connection, the credentials and our own."""
    dropped = _HOP_BY_HOP | _NOT_FORWARDED | _connection_options(headers)
    kept = [(k, v) for k, v in headers if k not in dropped and not k.startswith(_OURS)]
    return [*kept, (REQUEST_ID, request_id.encode())]


def client_headers(headers: Iterable[tuple[bytes, bytes]], own: Headers) -> Headers:
    """What the client gets: the engine's headers less those of the connection, and our own."""
    listed = list(headers)
    dropped = _HOP_BY_HOP | {REQUEST_ID} | _connection_options(listed)
    kept = [(k, v) for k, v in listed if k.lower() not in dropped and not k.lower().startswith(_OURS)]
    return [*kept, *own]


async def read_body(receive: Receive, headers: Headers, max_bytes: int) -> bytes:
    """The whole request body.

    Raises:
        Refusal: 413 when it is longer than ``max_bytes``, 408 when it does not arrive.
        ClientGoneError: The client left.
    """
    declared = header(headers, b"content-length")
    if declared is not None and declared.isdigit() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGoneError
                part = message.get("body", b"")
                size += len(part)
                if size > max_bytes:
                    raise _too_large(max_bytes)
                parts.append(part)
                if not message.get("more_body", False):
                    return parts[0] if len(parts) == 1 else b"".join(parts)
    except TimeoutError:
        raise Refusal(408, f"Request: no complete body within {BODY_SECONDS:.0f} s", code="request_timeout") from None


def _too_large(max_bytes: int) -> Refusal:
    message = f"Request: body is larger than {max_bytes} bytes; shorten it or raise maxBodyBytes of the gateway"
    return Refusal(413, message, code="request_too_large")


async def send_bytes(send: Send, status: int, body: bytes, headers: Headers) -> None:
    """One whole answer."""
    full = [*headers, (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": full})
    await send({"type": "http.response.body", "body": body})


async def send_json(send: Send, status: int, content: Any, headers: Headers | None = None) -> None:
    """One whole JSON answer."""
    body = json.dumps(content).encode()
    await send_bytes(send, status, body, [(b"content-type", b"application/json"), *(headers or [])])


async def send_refusal(send: Send, refusal: Refusal, headers: Headers | None = None) -> None:
    """The gateway's own answer to a request it does not pass on."""
    await send_json(send, refusal.status, refusal.body(), [*refusal.headers(), *(headers or [])])
