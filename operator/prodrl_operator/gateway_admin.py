"""The gateway's admin port as the controller uses it: read what a replica applied, give it new routes."""

from __future__ import annotations

import logging
from typing import Any, Protocol

import httpx

from prodrl.config.serving import RouteTable

_log = logging.getLogger(__name__)

TIMEOUT_SECONDS = 2.0


class GatewayAdmin(Protocol):
    """Both calls are idempotent, and neither raises: a replica that cannot be reached is an answer too."""

    def status(self, url: str) -> dict[str, Any] | None:
        """What the replica says of itself; None: it does not."""
        ...

    def push(self, url: str, table: RouteTable) -> bool:
        """Give it a table; whether it took it."""
        ...


class HttpGatewayAdmin:
    """Over HTTP, without the proxies of the environment: pods are reached directly."""

    def __init__(self, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        self._client = httpx.Client(timeout=timeout_seconds, trust_env=False)

    def status(self, url: str) -> dict[str, Any] | None:
        """``GET /admin/status``."""
        try:
            answer = self._client.get(f"{url}/admin/status")
            body = answer.raise_for_status().json()
        except (httpx.HTTPError, ValueError) as exc:
            _log.info("Gateway %s: no status, %s", url, exc)
            return None
        return body if isinstance(body, dict) else None

    def push(self, url: str, table: RouteTable) -> bool:
        """``PUT /admin/routes``."""
        try:
            content = table.model_dump_json()
            self._client.put(f"{url}/admin/routes", content=content).raise_for_status()
        except httpx.HTTPError as exc:
            _log.warning("Gateway %s: routes %s were not taken, %s", url, table.version, exc)
            return False
        return True
