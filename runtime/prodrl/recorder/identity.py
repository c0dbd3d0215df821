"""Which conversation a request belongs to. Set by ``middleware`` for each HTTP request, read by ``capture``.

The gateway sends ``X-Request-Id: <trajectory id>.<suffix>``. vLLM builds its own request ids from that header on some
routes and not on others (the Responses API makes its own), so the header travels beside the request in a context
variable; without our middleware the engine's id is looked at instead.
"""

from __future__ import annotations

import re
from contextvars import ContextVar

from prodrl.records import TRAFFIC_PREFIX

_ID = re.escape(TRAFFIC_PREFIX) + r"[A-Za-z0-9_-]{1,128}\.[A-Za-z0-9_-]{1,128}"
_HEADER = re.compile(_ID)
_INSIDE = re.compile(rf"(?:^|-)({re.escape(TRAFFIC_PREFIX)}[A-Za-z0-9_-]{{1,128}}\.[A-Za-z0-9_]{{1,128}})")


class HttpRequest:
    """One HTTP request on its way through the server."""

    __slots__ = ("_calls", "request_id")

    def __init__(self, header: str) -> None:
        self.request_id = header if _HEADER.fullmatch(header) else ""
        """Empty when this is not users' traffic."""
        self._calls = 0

    def next_call(self) -> int:
        """How many engine calls it made before; one request may make several (tool loops, many prompts)."""
        self._calls += 1
        return self._calls - 1


current: ContextVar[HttpRequest | None] = ContextVar("prodrl_http_request", default=None)
"""The HTTP request that is being answered; None without our middleware."""


def of_call(engine_request_id: str) -> tuple[str, int] | None:
    """Request id and ordinal of an engine call; None when it is not users' traffic."""
    http_request = current.get()
    if http_request is None:
        found = _INSIDE.search(engine_request_id)
        return (found[1], 0) if found else None
    return (http_request.request_id, http_request.next_call()) if http_request.request_id else None
