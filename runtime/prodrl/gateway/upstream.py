"""The client side: one attempt at one engine server. Called by ``proxy``; knows nothing of policies or retries.

aiohttp, because it hands on the raw chunks of a stream as they arrive, at a fraction of the cost per request of the
other clients (docs/adr/0004).
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass

import aiohttp
import multidict
import yarl

from prodrl.gateway import wire

_CONNECT_SECONDS = 5.0
_NO_DEFAULTS = frozenset(("Accept", "Accept-Encoding", "User-Agent", "Content-Type"))


class UnreachableError(Exception):
    """No byte of an answer, and none will come: safe to try again."""


class UpstreamError(Exception):
    """The server failed in a way that a second attempt does not cure; ``status`` is for the client."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Outgoing:
    """A request as the engine gets it."""

    method: str
    target: str
    """Path and query, exactly as the client sent them."""
    headers: wire.Headers
    body: bytes


class Answer:
    """An engine's answer whose head has arrived."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.status = response.status
        self.headers: wire.Headers = list(response.raw_headers)

    async def chunk(self) -> bytes:
        """The bytes that have arrived, at least one; empty at the end.

        Raises:
            UpstreamError: The answer broke before its end.
        """
        try:
            return await self._response.content.readany()
        except TimeoutError as exc:
            raise UpstreamError(504, "no further byte in time") from exc
        except aiohttp.ClientError as exc:
            raise UpstreamError(502, f"the answer broke off, {type(exc).__name__}") from exc

    def close(self) -> None:
        """Give the connection back when the answer was complete, else cut it (which aborts the generation)."""
        if self._response.content.at_eof() and self._response.content.exception() is None:
            self._response.release()
        else:
            self._response.close()


class Upstream:
    """A pool of connections to the engine servers."""

    def __init__(self, timeout_seconds: float) -> None:
        timeout = aiohttp.ClientTimeout(
            total=None, connect=None, sock_connect=min(_CONNECT_SECONDS, timeout_seconds), sock_read=timeout_seconds
        )
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=4.0),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=timeout,
            auto_decompress=False,
            skip_auto_headers=_NO_DEFAULTS,
            max_line_size=65536,
            max_field_size=65536,
        )

    async def open(self, base_url: str, outgoing: Outgoing) -> Answer:
        """Send the request and wait for the head of the answer.

        Raises:
            UnreachableError: The server could not be reached or hung up before its first byte.
            UpstreamError: It did not answer in time, or not in HTTP.
        """
        url = yarl.URL(base_url.rstrip("/") + outgoing.target, encoded=True)
        try:
            response = await self._session.request(
                outgoing.method,
                url,
                headers=_as_mapping(outgoing.headers),
                data=io.BytesIO(outgoing.body) if outgoing.body else None,
                allow_redirects=False,
            )
        except aiohttp.ConnectionTimeoutError as exc:
            raise UnreachableError("no connection in time") from exc
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as exc:
            raise UnreachableError(type(exc).__name__) from exc
        except TimeoutError as exc:
            raise UpstreamError(504, "no answer in time") from exc
        except (aiohttp.ClientError, ValueError) as exc:
            raise UpstreamError(502, f"no valid answer, {type(exc).__name__}") from exc
        return Answer(response)

    async def close(self) -> None:
        """Close every connection."""
        await self._session.close()


def _as_mapping(headers: wire.Headers) -> Mapping[str, str]:
    pairs = [(name.decode("latin-1"), value.decode("utf-8", "surrogateescape")) for name, value in headers]
    return multidict.CIMultiDict(pairs)
