"""Simulated users against a gateway that is a function: what they send, count, report and leave alone."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from prodrl.gateway import feedback
from prodrl.lab import text
from prodrl.lab.puzzles import Puzzle
from prodrl.lab.tally import Tally, read_tally
from prodrl.lab.users import Behaviour, Crowd, watch

TWO = Puzzle("two", "8/8/8/8/8/1R6/2K4k/3R4 b - - 0 1", ("h2g2", "d1d2", "g2f1", "b3b1"))
MOVES = {"Kc2 Rb3 Rd1 kg2": "d1d2", "g2f1 Kc2 Rb3 Rd2 kf1": "b3b1"}
A, B = "sha256:" + "a" * 64, "sha256:" + "b" * 64


class Gateway:
    """Answers like the real one; ``solves`` says whether the n-th conversation is played well."""

    def __init__(self, solves=lambda number: True, digest=lambda number: A, fault=None) -> None:
        self.solves, self.digest, self.fault = solves, digest, fault
        self.conversations: dict[str, list[dict]] = {}
        self.feedback: list[dict] = []
        self.feedback_statuses: list[int] = []
        self.down_for = 0
        self.delay = 0.0
        self.running = self.most_running = 0

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            self.down_for -= 1
            return httpx.Response(503 if self.down_for >= 0 else 200, json={"data": []})
        body = json.loads(request.content)
        if request.url.path == "/v1/feedback":
            feedback.parse(request.content, "", None)  # the real gateway's own parser must take it
            status = self.feedback_statuses.pop(0) if self.feedback_statuses else 202
            self.feedback += [body] if status == 202 else []
            return httpx.Response(status, json={})
        return await self._chat(request, body)

    async def _chat(self, request: httpx.Request, body: dict) -> httpx.Response:
        name = request.headers["X-ProdRL-Trajectory"]
        self.conversations.setdefault(name, []).append(body)
        number = list(self.conversations).index(name)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await asyncio.sleep(self.delay)
        finally:
            self.running -= 1
        if self.fault is not None:
            return self.fault(number)
        move = MOVES[body["messages"][-1]["content"]] if self.solves(number) else "c2c1"
        answer = {"choices": [{"message": text.call_message(move), "finish_reason": "tool_calls"}]}
        return httpx.Response(200, json=answer, headers={"X-ProdRL-Policy": self.digest(number)})


async def live(gateway: Gateway, behaviour: Behaviour, *, conversations: int, report=None) -> Tally:
    tally = Tally()
    async with httpx.AsyncClient(transport=httpx.MockTransport(gateway), base_url="http://gateway") as http:
        crowd = Crowd(http, "chess", [TWO], behaviour, tally)
        watcher = asyncio.create_task(watch_for(crowd, lambda: len(gateway.conversations) >= conversations))
        async with asyncio.timeout(30):
            await crowd.run(report)
        watcher.cancel()
    return tally


async def watch_for(crowd: Crowd, is_over) -> None:
    while not is_over():
        await asyncio.sleep(0.005)
    crowd.stop()


FAST = Behaviour(rate=500.0)


async def test_users_play_and_post_rewards(tmp_path) -> None:
    gateway = Gateway(solves=lambda n: n % 2 == 0, digest=lambda n: A if n < 10 else B)
    report = tmp_path / "clients" / "users.json"
    tally = await live(gateway, FAST, conversations=20, report=report)
    solved = sum(len(requests) == 2 for requests in gateway.conversations.values())
    assert tally.sent == tally.answered == sum(map(len, gateway.conversations.values()))
    assert (tally.failed, tally.aborted) == (0, 0)
    assert tally.by_digest[A].trajectories == 10
    assert tally.by_digest[A].solved + tally.by_digest[B].solved == solved
    assert sorted(item["trajectory_id"] for item in gateway.feedback) == sorted(gateway.conversations)
    assert sum(item["reward"] for item in gateway.feedback) == solved
    assert len({item["idempotency_key"] for item in gateway.feedback}) == len(gateway.feedback)
    assert set(gateway.feedback[0]) == {"trajectory_id", "reward", "idempotency_key"}
    written = json.loads(report.read_text())
    assert {"sent", "answered", "failed", "byDigest", "updatedMs", "errors"} <= set(written)
    assert written["byDigest"][A] == {"answered": 15, "solved": 5, "trajectories": 10}
    assert [path.name for path in report.parent.iterdir()] == ["users.json"]
    assert read_tally(report) == tally


async def test_a_request_is_what_an_application_would_send() -> None:
    gateway = Gateway()
    await live(gateway, FAST, conversations=1)
    first, second = next(iter(gateway.conversations.values()))
    assert first["model"] == "chess"
    assert first["tools"] == text.TOOLS
    assert (first["temperature"], first["top_p"], first["max_tokens"]) == (1.0, 1.0, 24)
    assert "seed" not in first
    assert second["messages"][:1] == first["messages"]
    assert [message["role"] for message in second["messages"]] == ["user", "assistant", "tool"]


async def test_an_error_is_counted_and_not_tried_again() -> None:
    gateway = Gateway(fault=lambda number: httpx.Response(502 if number % 2 else 500, text="no"))
    tally = await live(gateway, FAST, conversations=10)
    assert tally.sent == tally.failed == len(gateway.conversations)
    assert all(len(requests) == 1 for requests in gateway.conversations.values())
    assert set(tally.errors) == {"status 500", "status 502"}
    assert gateway.feedback == []


@pytest.mark.parametrize("answer", [b"not json", b"[]", b'{"choices": []}', b'{"choices": [{"message": 3}]}'])
async def test_an_answer_without_a_message_is_an_error(answer) -> None:
    tally = await live(Gateway(fault=lambda _: httpx.Response(200, content=answer)), FAST, conversations=2)
    assert tally.failed == tally.sent > 0


async def test_a_broken_connection_is_an_error() -> None:
    def broken(_):
        raise httpx.ReadError("gone")

    tally = await live(Gateway(fault=broken), FAST, conversations=3)
    assert tally.errors["ReadError"] == tally.failed == tally.sent


async def test_only_a_503_of_feedback_is_posted_again(monkeypatch) -> None:
    monkeypatch.setattr("prodrl.lab.users._REWARD_PAUSES", (0.0, 0.0))
    gateway = Gateway()
    gateway.feedback_statuses = [503, 503, 202, 400]
    tally = await live(gateway, Behaviour(rate=500, concurrency=1), conversations=2)
    assert (tally.rewards, tally.rewards_failed) == (len(gateway.conversations) - 1, 1)
    assert tally.errors == {"feedback status 400": 1}


async def test_shares_of_behaviour() -> None:
    gateway = Gateway()
    behaviour = Behaviour(rate=5000, concurrency=50, unscored=0.3, duplicate=0.5, late=0.2, late_seconds=0.01)
    tally = await live(gateway, behaviour, conversations=200)
    total = len(gateway.conversations)
    assert tally.unscored + tally.rewards == total
    assert 0.15 < tally.unscored / total < 0.45
    assert 0.3 < tally.duplicates / tally.rewards < 0.7
    assert len(gateway.feedback) == tally.rewards + tally.duplicates
    assert len({item["idempotency_key"] for item in gateway.feedback}) == tally.rewards


async def test_users_who_hang_up_are_no_failures_and_post_nothing() -> None:
    gateway = Gateway()
    gateway.delay = 0.5
    tally = await live(gateway, Behaviour(rate=500, concurrency=8, abort=1.0), conversations=8)
    assert tally.aborted == tally.sent >= 8
    assert (tally.failed, tally.answered, gateway.feedback) == (0, 0, [])


async def test_users_wait_for_the_gateway(monkeypatch) -> None:
    monkeypatch.setattr("prodrl.lab.users._UP_SECONDS", 0.01)
    gateway = Gateway()
    gateway.down_for = 5
    tally = await live(gateway, FAST, conversations=1)
    assert tally.failed == 0
    assert gateway.down_for < 0


async def test_concurrency_is_bounded() -> None:
    gateway = Gateway()
    gateway.delay = 0.02
    await live(gateway, Behaviour(rate=5000, concurrency=3), conversations=12)
    assert gateway.most_running == 3


async def test_late_rewards_are_posted_when_users_are_told_to_stop() -> None:
    gateway = Gateway()
    tally = await live(gateway, Behaviour(rate=500, late=1.0, late_seconds=3600), conversations=5)
    assert tally.rewards == len(gateway.conversations)


async def test_running_conversations_end_before_users_leave() -> None:
    gateway = Gateway()
    gateway.delay = 0.1
    tally = await live(gateway, FAST, conversations=5)
    assert tally.sent == tally.answered
    assert tally.rewards == len(gateway.conversations)


async def test_users_leave_when_what_they_watch_is_gone(monkeypatch) -> None:
    monkeypatch.setattr("prodrl.lab.users._UP_SECONDS", 0.01)
    gateway = Gateway()
    gateway.down_for = 10**9
    async with httpx.AsyncClient(transport=httpx.MockTransport(gateway), base_url="http://gateway") as http:
        crowd = Crowd(http, "chess", [TWO], FAST, Tally())
        looks = iter([False, False, True])
        async with asyncio.timeout(10):
            await asyncio.gather(crowd.run(), watch(crowd, lambda: next(looks)))


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"sent": "x"}'])
def test_an_unreadable_report_starts_from_nothing(tmp_path, content) -> None:
    (tmp_path / "users.json").write_text(content)
    assert read_tally(tmp_path / "users.json") == Tally()
