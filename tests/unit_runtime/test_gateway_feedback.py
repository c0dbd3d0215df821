"""Rewards: what is refused, what a repeated key gives, and that an acknowledged reward is in the store."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import aiohttp
import pytest

from prodrl.config import GatewayConfig
from prodrl.gateway import feedback, wire
from prodrl.records import FeedbackEntry
from prodrl.store import open_store
from prodrl.store.port import Store
from tests.support.upstream import STREAM, FakeEngine, FakeStore, digest, listen, running, serving, table


def entries(store: FakeStore | Store) -> list[FeedbackEntry]:
    lines = [line for key in store.list("feedback/") for line in store.get(key).splitlines()]
    return [FeedbackEntry.model_validate_json(line) for line in lines]


async def test_a_reward_is_stored_with_the_requests_it_is_about():
    async with serving(FakeEngine()) as engine, running(table(("a", engine, 100))) as gw:
        good = await gw.chat("talk")
        engine.status = 500
        bad = await gw.chat("talk")
        engine.status = 400
        await gw.chat("talk")
        engine.unavailable_first = 1000
        assert (await gw.chat("talk")).status == 503  # no engine took it: no part of the trajectory
        status, receipt = await gw.reward({"trajectory_id": "talk", "reward": 0.5, "metadata": {"who": "me"}})
        assert status == 202
        (entry,) = entries(gw.store)
        assert entry.trajectory_id == receipt["trajectory_id"] == good.headers["x-prodrl-trajectory"]
        assert entry.request_ids == [good.headers["x-prodrl-request"]]
        assert entry.failed_request_ids == [bad.headers["x-prodrl-request"]]
        assert (entry.reward, entry.final, entry.metadata) == (0.5, True, {"who": "me"})
        assert list(gw.store.objects) == ["feedback/gw-0-0000000001.jsonl"]
        policy = await gw.counters("a")
        assert (policy["feedback"], policy["reward_sum"], policy["reward_squares"]) == (1, 0.5, 0.25)
        assert (policy["requests"], policy["answered"], policy["failed"]) == (4, 2, 2)


async def test_a_reward_of_an_unknown_conversation_is_kept():
    async with running() as gw:
        assert (await gw.reward({"trajectory_id": "never seen", "reward": 1}))[0] == 202
        assert (await gw.status())["stats"]["unattributed"]["feedback"] == 1


async def test_a_repeated_key_is_a_duplicate_or_a_conflict():
    post = {"trajectory_id": "talk", "reward": 1, "idempotency_key": "k"}
    store = FakeStore()
    async with running(store=store) as gw:
        _, first = await gw.reward(post)
        assert await gw.reward(post) == (202, {**first, "duplicate": True})
        status, body = await gw.reward({**post, "reward": 2})
        assert status == 409
        assert "'k'" in body["error"]["message"]
        by_header = {"trajectory_id": "talk", "reward": 1}
        assert (await gw.reward(by_header, {"Idempotency-Key": "k"}))[1]["duplicate"] is True
        assert (await gw.reward(by_header))[1].get("duplicate") is None
        assert (await gw.status())["feedback_duplicates"] == 2
    async with running(store=store) as gw:  # the memory is rebuilt from the store, the numbering goes on
        await wait_ready(gw)
        assert (await gw.reward(post))[1] == {**first, "duplicate": True}
        assert (await gw.reward({**post, "reward": 2}))[0] == 409
        assert (await gw.reward({**post, "idempotency_key": "k2"}))[0] == 202
    assert sorted(store.objects)[-1] == "feedback/gw-0-0000000003.jsonl"
    assert len({entry.feedback_id for entry in entries(store)}) == 3


async def wait_ready(gw) -> None:
    while not (await gw.status())["feedback"]["ready"]:
        await asyncio.sleep(0.02)


async def test_a_duplicate_waits_for_the_commit_it_repeats():
    post = {"trajectory_id": "talk", "reward": 1, "idempotency_key": "k"}
    async with running() as gw:
        await wait_ready(gw)
        gw.store.delay_seconds = 0.3
        calls = [asyncio.create_task(gw.reward(post)) for _ in range(5)]
        done = await asyncio.gather(*calls)
        assert [status for status, _ in done] == [202] * 5
        assert sum("duplicate" in body for _, body in done) == 4
        assert len(entries(gw.store)) == 1


async def test_commits_are_shared():
    async with running() as gw:
        await wait_ready(gw)
        gw.store.delay_seconds = 0.1
        posts = [gw.reward({"trajectory_id": f"t{i}", "reward": i}) for i in range(200)]
        assert {status for status, _ in await asyncio.gather(*posts)} == {202}
        assert len(entries(gw.store)) == 200
        assert len(gw.store.objects) <= 100


async def test_a_batch_is_taken_whole_or_not_at_all():
    async with running() as gw:
        good = [{"trajectory_id": f"t{i}", "reward": i, "idempotency_key": f"k{i}"} for i in range(1000)]
        status, body = await gw.reward({"items": good})
        assert (status, len(body["items"]), len(gw.store.objects)) == (202, 1000, 1)
        again = await gw.reward({"items": good[:3]})
        assert [item["duplicate"] for item in again[1]["items"]] == [True] * 3
        status, body = await gw.reward({"items": [{"trajectory_id": "x", "reward": 1}, {"trajectory_id": "y"}]})
        assert status == 400
        assert "items[1].reward" in body["error"]["message"]
        twice = [{"trajectory_id": "x", "reward": reward, "idempotency_key": "same"} for reward in (1, 2)]
        assert (await gw.reward({"items": twice}))[0] == 409
        assert (await gw.reward({"items": [*good, good[0]]}))[0] == 400
        assert len(entries(gw.store)) == 1000


@pytest.mark.parametrize(
    ("body", "names"),
    [
        ('{"trajectory_id": "t", "reward": true}', "reward: must be a finite number, got True"),
        ('{"trajectory_id": "t", "reward": "1"}', "reward: must be a finite number, got '1'"),
        ('{"trajectory_id": "t", "reward": NaN}', "reward: must be a finite number, got nan"),
        ('{"trajectory_id": "t", "reward": 1e999}', "reward: must be a finite number, got inf"),
        ('{"trajectory_id": "t", "reward": 1' + "0" * 400 + "}", "reward: must be a finite number, got 1000"),
        ('{"trajectory_id": "t", "reward": null}', "reward: must be a finite number, got None"),
        ('{"trajectory_id": "t"}', "reward: must be"),
        ('{"trajectory_id": 5, "reward": 1}', "trajectory_id: must be a string, got 5"),
        ('{"trajectory_id": "", "reward": 1}', "trajectory_id"),
        ('{"trajectory_id": "t", "reward": 1, "final": "yes"}', "final: must be true or false, got 'yes'"),
        ('{"trajectory_id": "t", "reward": 1, "finall": true}', "finall: unknown field"),
        ('{"trajectory_id": "t", "reward": 1, "metadata": {"a": 1}}', "metadata"),
        ('{"trajectory_id": "t", "reward": 1, "idempotency_key": ""}', "idempotency_key"),
        ('{"items": []}', "items: must be a list of 1 to 1000 objects, got 0"),
        ('{"items": 5}', "items"),
        ("[1]", "body: must be an object"),
        ("{", "body: not JSON"),
        ('{"trajectory_id": "\\ud800", "reward": 1}', "body: not JSON"),
    ],
)
def test_a_bad_reward_is_refused_by_name(body, names):
    with pytest.raises(wire.Refusal) as caught:
        feedback.parse(body.encode(), "alice", None)
    assert caught.value.status == 400
    assert names in caught.value.message
    assert "; " in caught.value.message


def test_one_key_gives_one_id_on_every_replica_and_two_customers_two():
    post = b'{"trajectory_id": "t", "reward": 1, "idempotency_key": "k"}'
    (one,), (same,), (other,) = (feedback.parse(post, name, None)[0] for name in ("alice", "alice", "bob"))
    assert one.feedback_id == same.feedback_id != other.feedback_id
    assert one.key != other.key


async def test_while_the_store_is_down_nothing_is_acknowledged_and_users_are_served():
    post = {"trajectory_id": "talk", "reward": 1, "idempotency_key": "k"}
    async with serving(FakeEngine()) as engine, running(table(("a", engine, 100))) as gw:
        await wait_ready(gw)
        gw.store.is_down = True
        async with gw.client.post(gw.url + "/v1/feedback", json=post) as response:
            assert response.status == 503
            assert response.headers["retry-after"] == "2"
            assert (await response.json())["error"]["code"] == "feedback_unavailable"
        assert (await gw.chat("talk")).status == 200
        gw.store.is_down = False
        status, body = await gw.reward(post)
        assert (status, body.get("duplicate")) == (202, None)
        assert [entry.reward for entry in entries(gw.store)] == [1.0]
        figures = await gw.status()
        assert (figures["feedback_failed"], figures["feedback"]["store_failures"]) == (1, 1)


async def test_a_store_that_is_down_at_the_start_is_opened_later(monkeypatch):
    monkeypatch.setattr("prodrl.gateway.segments._RETRY_SECONDS", 0.1)
    store = FakeStore()
    store.is_down = True
    async with running(table(), store=store) as gw:
        assert (await gw.reward({"trajectory_id": "t", "reward": 1}))[0] == 503
        async with gw.client.get(gw.url + "/readyz") as response:
            assert response.status == 503
        store.is_down = False
        await asyncio.wait_for(wait_ready(gw), 5)
        assert (await gw.reward({"trajectory_id": "t", "reward": 1}))[0] == 202
        async with gw.client.get(gw.url + "/readyz") as response:
            assert response.status == 200


async def test_the_object_of_another_process_is_never_overwritten():
    async with running() as gw:
        await wait_ready(gw)
        gw.store.objects["feedback/gw-0-0000000001.jsonl"] = b""
        assert (await gw.reward({"trajectory_id": "t", "reward": 1}))[0] == 202
        assert gw.store.objects["feedback/gw-0-0000000001.jsonl"] == b""
        assert "feedback/gw-0-0000000002.jsonl" in gw.store.objects


async def test_a_writer_whose_name_begins_like_ours_is_another_writer():
    store = FakeStore()
    store.objects["feedback/gw-0-x-0000000099.jsonl"] = b""
    async with running(store=store) as gw:
        await wait_ready(gw)
        await gw.reward({"trajectory_id": "t", "reward": 1})
    assert "feedback/gw-0-0000000001.jsonl" in store.objects


MAIN = """
import logging, sys
from prodrl.config import GatewayConfig
from prodrl.gateway.server import serve
logging.basicConfig(level="INFO")
config, port, admin_port, routes = sys.argv[1:]
serve(GatewayConfig.read(config), users=("127.0.0.1", int(port)), operator=("127.0.0.1", int(admin_port)),
      routes_path=routes)
"""


class Process:
    """A gateway in a process of its own."""

    def __init__(self, folder: Path, routes: str) -> None:
        self.folder = folder
        ports = []
        for _ in range(2):
            with listen() as sock:
                ports.append(sock.getsockname()[1])
        self.url, self.admin_url = (f"http://127.0.0.1:{port}" for port in ports)
        (folder / "routes.json").write_text(routes)
        config = {"store": {"uri": f"file://{folder}/store"}, "run": "r", "writer": "gw", "served_name": "m"}
        (folder / "gateway.json").write_text(json.dumps(config))
        (folder / "main.py").write_text(textwrap.dedent(MAIN))
        arguments = [str(folder / "gateway.json"), *map(str, ports), str(folder / "routes.json")]
        self._command = [sys.executable, str(folder / "main.py"), *arguments]
        self.start()

    def store(self) -> Store:
        return open_store(GatewayConfig.read(self.folder / "gateway.json").store)

    def counters(self) -> str:
        """As its spool has them."""
        path = self.folder / "spool" / "stats.json"
        return path.read_text() if path.exists() else ""

    def start(self) -> None:
        import os

        log = (self.folder / "log").open("a")
        env = {**os.environ, "PRODRL_SPOOL_DIR": str(self.folder / "spool")}
        self.popen = subprocess.Popen(self._command, env=env, stdout=log, stderr=log)

    async def ready(self, client: aiohttp.ClientSession) -> None:
        for _ in range(300):
            try:
                async with client.get(self.url + "/readyz") as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            assert self.popen.poll() is None, (self.folder / "log").read_text()
            await asyncio.sleep(0.1)
        raise AssertionError((self.folder / "log").read_text())


@pytest.fixture
async def process(tmp_path):
    async with serving(FakeEngine(chunks=STREAM, pause_seconds=0.2)) as engine:
        made = Process(tmp_path, table(("a", engine, 100)).model_dump_json())
        yield made
        made.popen.kill()
        made.popen.wait()


async def test_every_acknowledged_reward_survives_kill_9(process):
    acknowledged: dict[str, dict[str, object]] = {}
    sent = 0

    async def client_loop(client: aiohttp.ClientSession, who: int) -> None:
        nonlocal sent
        for number in range(100_000):
            post = {"trajectory_id": f"t-{who}-{number}", "reward": number, "idempotency_key": f"{who}/{number}"}
            sent += 1
            async with client.post(process.url + "/v1/feedback", json=post) as response:
                if response.status == 202:
                    acknowledged[(await response.json())["feedback_id"]] = post

    async with aiohttp.ClientSession() as client:
        await process.ready(client)
        loops = [asyncio.create_task(client_loop(client, who)) for who in range(16)]
        async with asyncio.timeout(60):
            while len(acknowledged) <= 50 or "unattributed" not in process.counters():
                await asyncio.sleep(0.05)
        process.popen.kill()
        await asyncio.gather(*loops, return_exceptions=True)
        process.popen.wait()
        stored = entries(process.store())
        assert len(acknowledged) > 50
        assert set(acknowledged) <= {entry.feedback_id for entry in stored}
        process.start()
        await process.ready(client)
        async with client.get(process.admin_url + "/admin/status") as response:
            status = await response.json()
        assert 0 < status["stats"]["unattributed"]["feedback"] <= sent
        last_id, post = list(acknowledged.items())[-1]
        async with client.post(process.url + "/v1/feedback", json=post) as response:
            body = await response.json()
        assert (body["feedback_id"], body.get("duplicate")) == (last_id, True)


async def test_sigterm_finishes_the_stream_keeps_the_rewards_and_exits_0(process):
    async with aiohttp.ClientSession() as client:
        await process.ready(client)
        response = await client.post(process.url + "/v1/completions", json={"session_id": "t"})
        await response.content.readany()
        async with client.post(process.url + "/v1/feedback", json={"trajectory_id": "t", "reward": 1}) as posted:
            assert posted.status == 202
        process.popen.send_signal(signal.SIGTERM)
        rest = await response.read()
        assert rest.endswith(STREAM[-1])
        assert await asyncio.to_thread(process.popen.wait, 10) == 0
    assert len(entries(process.store())) == 1
    saved = json.loads((process.folder / "spool" / "stats.json").read_bytes())
    assert saved["policies"][digest("a")]["answered"] == 1
