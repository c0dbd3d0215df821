"""Simulated users: they play puzzles through the gateway and post rewards, as an application would.

Called by ``prodrl lab users``. They know the gateway's URL and nothing else of prodrl. No request is repeated: an error
that reaches a user counts as one. Only a reward that the gateway cannot store now (503) is posted again, which is what
the API asks of its users.
"""

from __future__ import annotations

import asyncio
import logging
import random
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from prodrl.lab import session, text
from prodrl.lab.puzzles import Puzzle
from prodrl.lab.tally import Tally

log = logging.getLogger(__name__)

POLICY_HEADER = "X-ProdRL-Policy"
TRAJECTORY_HEADER = "X-ProdRL-Trajectory"
_REPORT_SECONDS = 1.0
_UP_SECONDS = 1.0
_PLACE_SECONDS = 0.05
_FAREWELL_SECONDS = 15.0
"""How long running conversations may finish after the stop."""
_ABORT_SECONDS = (0.02, 0.3)
_REWARD_PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0)
REQUEST_SECONDS = 300.0


@dataclass(frozen=True)
class Behaviour:
    """How users behave; shares are of conversations."""

    rate: float = 4.0
    """New puzzles a second."""
    concurrency: int = 12
    """Most conversations at once."""
    unscored: float = 0.0
    """Never posts a reward."""
    late: float = 0.0
    """Posts its reward ``late_seconds`` later."""
    late_seconds: float = 15.0
    duplicate: float = 0.0
    """Posts its reward twice, under one idempotency key."""
    abort: float = 0.0
    """Hangs up in the middle of its first request."""
    seed: int = 0


class RequestFailedError(Exception):
    """A user got an error instead of an answer; the conversation ends."""


class HungUpError(Exception):
    """The user hung up; the conversation ends."""


class Crowd:
    """Users of one gateway.

    Args:
        http: Client whose base URL is the gateway's, with the API key if there is one.
        model: The served name.
        puzzles: Played in a random order, over and over.
        behaviour: Rates and shares.
        tally: Counted into.
    """

    def __init__(
        self, http: httpx.AsyncClient, model: str, puzzles: Sequence[Puzzle], behaviour: Behaviour, tally: Tally
    ) -> None:
        self._http = http
        self._model = model
        self._puzzles = puzzles
        self._behaviour = behaviour
        self._tally = tally
        self._random = random.Random(behaviour.seed)  # noqa: S311  (not for secrecy)
        self._stop = asyncio.Event()
        self._talking = 0

    def stop(self) -> None:
        """Begin no new conversation; ``run`` returns soon."""
        self._stop.set()

    async def run(self, report: Path | None = None) -> None:
        """Wait for the gateway, then play until ``stop``."""
        reporter = asyncio.create_task(self._report(report)) if report else None
        running: set[asyncio.Task[None]] = set()
        try:
            await self._wait_until_up()
            await self._play_on(running)
            if running:
                await asyncio.wait(running, timeout=_FAREWELL_SECONDS)
        finally:
            for task in [*running, *([reporter] if reporter else [])]:
                task.cancel()
            await asyncio.gather(*running, *([reporter] if reporter else []), return_exceptions=True)
            if report:
                self._tally.write(report)

    async def _sleep(self, seconds: float) -> None:
        """Sleep, or wake up when users are told to stop."""
        try:
            async with asyncio.timeout(seconds):
                await self._stop.wait()
        except TimeoutError:
            return

    async def _wait_until_up(self) -> None:
        while not self._stop.is_set():
            try:
                response = await self._http.get("/v1/models", timeout=5.0)
                if response.status_code == 200:
                    return
            except httpx.HTTPError as exc:
                log.debug("gateway is not up: %s", exc)
            await self._sleep(_UP_SECONDS)

    async def _play_on(self, running: set[asyncio.Task[None]]) -> None:
        order: list[Puzzle] = []
        while not self._stop.is_set():
            if self._talking >= self._behaviour.concurrency:
                await self._sleep(_PLACE_SECONDS)
                continue
            order = order or self._random.sample(self._puzzles, len(self._puzzles))
            self._talking += 1
            task = asyncio.create_task(self._user(order.pop()))
            running.add(task)
            task.add_done_callback(running.discard)
            await self._sleep(self._random.expovariate(self._behaviour.rate))

    async def _user(self, puzzle: Puzzle) -> None:
        """One user's whole life; its place is free before its reward is posted."""
        name, digest = f"user-{uuid.uuid4().hex}", ""
        has_patience = self._random.random() >= self._behaviour.abort

        async def ask(messages: list[session.Message]) -> session.Message:
            nonlocal digest
            patience = None if has_patience or digest else self._random.uniform(*_ABORT_SECONDS)
            message, digest = await self._ask(name, messages, patience)
            return message

        try:
            played = await session.play(puzzle, ask)
        except (RequestFailedError, HungUpError):
            return
        except Exception:  # the loop's edge: one user's fault must not end the others
            log.exception("user %s failed on puzzle %s", name, puzzle.id)
            self._tally.errors["internal"] += 1
            return
        finally:
            self._talking -= 1
        self._tally.finish(digest, played.reward)
        await self._score(name, played.reward)

    async def _ask(
        self, name: str, messages: list[session.Message], patience: float | None
    ) -> tuple[session.Message, str]:
        """The policy's message and its digest."""
        body = {"model": self._model, "messages": messages, "tools": text.TOOLS, **session.SAMPLING}
        self._tally.sent += 1
        try:
            async with asyncio.timeout(patience):
                response = await self._http.post(
                    "/v1/chat/completions", json=body, headers={TRAJECTORY_HEADER: name}, timeout=REQUEST_SECONDS
                )
        except TimeoutError:
            self._tally.aborted += 1
            raise HungUpError from None
        except httpx.HTTPError as exc:
            self._tally.fail(type(exc).__name__)
            raise RequestFailedError from exc
        except asyncio.CancelledError:  # told to stop while waiting
            self._tally.aborted += 1
            raise
        message = _message(response)
        if message is None:
            log.warning("request of %s: status %d, %.300s", name, response.status_code, response.text)
            self._tally.fail(f"status {response.status_code}")
            raise RequestFailedError
        digest = response.headers.get(POLICY_HEADER, "unknown")
        self._tally.answer(digest)
        return message, digest

    async def _score(self, name: str, reward: float) -> None:
        drawn, behaviour = self._random.random(), self._behaviour
        if drawn < behaviour.unscored:
            self._tally.unscored += 1
            return
        if drawn < behaviour.unscored + behaviour.late:
            await self._sleep(behaviour.late_seconds)
        body = {"trajectory_id": name, "reward": reward, "idempotency_key": f"{name}-reward"}
        posted = await self._post_reward(body)
        self._tally.rewards += int(posted)
        self._tally.rewards_failed += int(not posted)
        if posted and self._random.random() < behaviour.duplicate:
            self._tally.duplicates += int(await self._post_reward(body))

    async def _post_reward(self, body: dict[str, Any]) -> bool:
        """Whether the gateway took it."""
        error = ""
        for pause in (*_REWARD_PAUSES, None):
            try:
                response = await self._http.post("/v1/feedback", json=body, timeout=30.0)
            except httpx.HTTPError as exc:
                error = f"feedback {type(exc).__name__}"
                break
            if response.status_code == 202:
                return True
            error = f"feedback status {response.status_code}"
            if response.status_code != 503 or pause is None:
                break
            await asyncio.sleep(pause)
        self._tally.errors[error] += 1
        return False

    async def _report(self, path: Path) -> None:
        while True:
            self._tally.write(path)
            await asyncio.sleep(_REPORT_SECONDS)


def _message(response: httpx.Response) -> session.Message | None:
    """The assistant's message of a good answer, else None."""
    if response.status_code != 200:
        return None
    try:
        message = response.json()["choices"][0]["message"]
    except (ValueError, KeyError, IndexError, TypeError):
        return None
    return message if isinstance(message, dict) else None


async def watch(crowd: Crowd, is_over: Callable[[], bool]) -> None:
    """Stop the users once ``is_over`` says so."""
    while not is_over():
        await asyncio.sleep(_UP_SECONDS)
    crowd.stop()
