"""The client that suites and the agreement check speak to a policy's server with.

Requests carry an id that starts with ``e-``, so that the recorder leaves them alone. A request is repeated only while
no byte of an answer has come: after that, a repetition could hide a fault of the policy.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from prodrl.errors import DataError, UnavailableError

REQUEST_ID_PREFIX = "e-"
RETRY_DELAYS = (0.5, 1.0, 2.0, 4.0)
"""Seconds before each repetition."""
_BUSY = frozenset({429, 502, 503, 504})
_BEFORE_FIRST_BYTE = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.RemoteProtocolError)
"""RemoteProtocolError: the server closed a kept-alive connection; responses are not streamed, so no byte was used."""


@dataclass(frozen=True)
class ChatReply:
    """One answer of the policy."""

    text: str
    finish_reason: str
    body: dict[str, Any] = field(repr=False)
    """The whole response."""


@dataclass(frozen=True)
class ChatClient:
    """One policy's server. Shared by all sessions of that side.

    Example:
        ``ChatClient(http=httpx.AsyncClient(), base_url="http://candidate:8000", model="chess")``
    """

    http: httpx.AsyncClient
    base_url: str
    """With or without a trailing ``/v1``."""
    model: str
    retry_delays: Sequence[float] = RETRY_DELAYS

    async def chat(self, messages: Sequence[Mapping[str, Any]], **parameters: Any) -> ChatReply:
        """One chat completion; ``parameters`` are those of the API (``seed``, ``max_tokens``, ``temperature``)."""
        body = await self.post("/v1/chat/completions", {"messages": list(messages), **parameters})
        choice = _choice(body, self.base_url)
        content = (choice.get("message") or {}).get("content")
        return ChatReply(text=content or "", finish_reason=str(choice.get("finish_reason")), body=body)

    async def complete(self, prompt: str | Sequence[int], **parameters: Any) -> ChatReply:
        """One plain completion of a text or of token ids."""
        prompt = prompt if isinstance(prompt, str) else list(prompt)
        body = await self.post("/v1/completions", {"prompt": prompt, **parameters})
        choice = _choice(body, self.base_url)
        return ChatReply(text=choice.get("text") or "", finish_reason=str(choice.get("finish_reason")), body=body)

    async def post(self, path: str, payload: Mapping[str, Any]) -> dict[str, Any]:
        """Send JSON, with the served model's name added, and return the JSON object that comes back.

        Raises:
            UnavailableError: Nobody answers, or the server stays busy.
            DataError: The server refuses the request, or answers with something else.
        """
        return await self._send("POST", path, {"model": self.model, **payload})

    async def max_model_len(self) -> int | None:
        """The longest sequence the server takes, prompt and completion; None when it does not say."""
        body = await self._send("GET", "/v1/models", None)
        lengths = [m.get("max_model_len") for m in body.get("data", []) if m.get("id") == self.model]
        return next((length for length in lengths if isinstance(length, int)), None)

    async def _send(self, method: str, path: str, payload: dict[str, Any] | None) -> dict[str, Any]:
        url = self.base_url.rstrip("/").removesuffix("/v1") + path
        for delay in (*self.retry_delays, None):
            headers = {"X-Request-Id": f"{REQUEST_ID_PREFIX}{uuid.uuid4().hex}"}
            try:
                response = await self.http.request(method, url, json=payload, headers=headers)
            except _BEFORE_FIRST_BYTE as exc:
                fault = f"{type(exc).__name__} {exc}".strip()
            except httpx.HTTPError as exc:
                raise UnavailableError(f"Server {url}: no whole answer, {type(exc).__name__} {exc}; try again") from exc
            else:
                if response.status_code not in _BUSY:
                    return _json_object(response, url)
                fault = f"status {response.status_code}"
            if delay is not None:
                await asyncio.sleep(delay)
        attempts = len(self.retry_delays) + 1
        raise UnavailableError(
            f"Server {url}: no answer in {attempts} attempts, last {fault}; look at the server's log"
        )


def _json_object(response: httpx.Response, url: str) -> dict[str, Any]:
    if response.status_code >= 500:
        raise UnavailableError(f"Server {url}: internal error, got status {response.status_code}; look at its log")
    if response.status_code >= 400:
        raise DataError(f"Server {url}: refused the request, got {response.status_code} {response.text[:300]!r}")
    try:
        body = response.json()
    except ValueError as exc:
        raise DataError(
            f"Server {url}: answer is not JSON, got {response.text[:100]!r}; is it an OpenAI server?"
        ) from exc
    if not isinstance(body, dict):
        raise DataError(f"Server {url}: answer is not a JSON object, got {body!r:.100}; is it an OpenAI server?")
    return body


def _choice(body: dict[str, Any], base_url: str) -> dict[str, Any]:
    choices = body.get("choices")
    if not choices or not isinstance(choices[0], dict):
        raise DataError(f"Server {base_url}: answer has no choice, got keys {sorted(body)!r}; is it an OpenAI server?")
    choice: dict[str, Any] = choices[0]
    return choice
