"""The gateway's traffic against real servers on loopback: bytes, disconnects, retries, stickiness, limits."""

from __future__ import annotations

import asyncio
import json
import socket

import aiohttp
import pytest

from tests.support.upstream import STREAM, FakeEngine, digest, engines, listen, running, serving, table

CHAT = "/v1/chat/completions"


async def eventually(condition, seconds: float = 3.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_stream_arrives_byte_for_byte_and_chunk_by_chunk():
    async with serving(FakeEngine(chunks=STREAM, content_type=b"text/event-stream")) as engine:
        engine.gate = asyncio.Event()
        async with running(table(("a", engine, 100))) as gw, gw.client.post(gw.url + CHAT, data=b"{}") as response:
            first = await asyncio.wait_for(response.content.readany(), 2)
            assert first == STREAM[0]  # while the engine still waits to send the second
            engine.gate.set()
            assert first + await response.read() == b"".join(STREAM)
            assert response.headers["content-type"] == "text/event-stream"
            figures = await gw.counters("a")
    assert figures["answered"] == figures["requests"] == 1
    assert figures["output_bytes"] == len(b"".join(STREAM))


async def test_the_request_reaches_the_engine_unchanged():
    body = b'{"model": "m",  "messages":[ ] , "x": 1e400}\r\n'
    async with serving(FakeEngine()) as engine, running(table(("a", engine, 100))) as gw:
        headers = {
            "Content-Type": "application/json",
            "X-Custom": "caf\u00e9",
            "Connection": "keep-alive, X-Private",
            "X-Private": "1",
            "Authorization": "Bearer secret",
            "X-Request-Id": "mine",
            "Accept-Encoding": "br",
        }
        url = aiohttp.client.URL(gw.url + CHAT + "?a=%2Fb&c=d+e&c=", encoded=True)
        async with gw.client.post(url, data=body, headers=headers) as response:
            assert response.headers["x-request-id"] == "mine"
            trajectory, request = response.headers["x-prodrl-trajectory"], response.headers["x-prodrl-request"]
            assert response.headers["x-prodrl-policy"] == digest("a")
            assert response.headers["x-prodrl-round"] == "1"
    seen = engine.seen[0]
    assert (seen.method, seen.target, seen.body) == ("POST", CHAT + "?a=%2Fb&c=d+e&c=", body)
    assert seen.header("x-request-id") == request
    assert request.rpartition(".")[0] == trajectory
    assert len(request.rpartition(".")[2]) == 12
    assert seen.header("x-custom").encode("latin-1").decode() == "caf\u00e9"
    assert seen.header("accept-encoding") == "br"
    assert {"authorization", "x-private", "x-prodrl-trajectory"}.isdisjoint(k.decode() for k, _ in seen.headers)


async def test_compressed_and_error_answers_pass_unchanged():
    import gzip

    packed = gzip.compress(b"hello" * 100)
    async with serving(FakeEngine(chunks=(packed,), status=422)) as engine:
        engine.extra_headers = [(b"content-encoding", b"gzip"), (b"set-cookie", b"a=1"), (b"set-cookie", b"b=2")]
        async with running(table(("a", engine, 100))) as gw:
            async with gw.client.post(gw.url + CHAT, data=b"{}") as response:
                assert response.status == 422
                assert await response.read() == packed
                assert response.headers.getall("set-cookie") == ["a=1", "b=2"]
            assert (await gw.counters("a"))["answered"] == 1


async def test_a_client_that_leaves_aborts_the_generation():
    engine = FakeEngine(chunks=(b"a",) * 1000, pause_seconds=0.02)
    async with serving(engine), running(table(("a", engine, 100))) as gw:
        response = await gw.client.post(gw.url + CHAT, data=b"{}")
        await response.content.readany()
        response.close()
        await eventually(lambda: engine.seen[0].is_aborted)
        figures = await gw.counters("a")
    assert (figures["aborted"], figures["answered"], figures["failed"]) == (1, 0, 0)


async def test_a_client_that_leaves_before_the_first_byte_aborts_too():
    async with serving(FakeEngine(first_pause_seconds=20)) as engine, running(table(("a", engine, 100))) as gw:
        call = asyncio.create_task(gw.client.post(gw.url + CHAT, data=b"{}"))
        await eventually(lambda: engine.seen)
        call.cancel()
        await eventually(lambda: engine.seen[0].is_aborted)
        status = await gw.status()
        assert status["stats"][digest("a")]["aborted"] == 1
        assert status["inflight"] == {}


@pytest.mark.parametrize("fault", ["hang_up_first", "unavailable_first"])
async def test_a_fault_before_the_first_byte_is_retried(fault):
    async with serving(FakeEngine()) as engine, running(table(("a", engine, 100)), connect_retry_seconds=30) as gw:
        setattr(engine, fault, 2)
        assert (await gw.chat("x")).status == 200
        figures = await gw.counters("a")
    assert (figures["requests"], figures["answered"], figures["retried"], figures["failed"]) == (1, 1, 2, 0)
    ids = [seen.header("x-request-id") for seen in engine.seen]
    assert len(set(ids)) == 3  # the engine never meets one id twice


async def test_a_server_that_comes_back_in_time_is_not_noticed():
    sock = listen()  # bound, not listening: whoever connects is refused, and the port stays ours
    async with running(table(("a", f"http://127.0.0.1:{sock.getsockname()[1]}", 100)), connect_retry_seconds=30) as gw:
        call = asyncio.create_task(gw.chat("x"))
        await asyncio.sleep(0.3)
        async with serving(FakeEngine(), sock):
            assert (await call).status == 200


@pytest.mark.parametrize("length", [None, 9])
async def test_an_answer_that_breaks_midway_breaks_for_the_client(length):
    async with serving(FakeEngine(chunks=(b"abc",) * 3, break_after=2, pause_seconds=0.05)) as engine:
        engine.extra_headers = [(b"content-length", b"9")] if length else []
        async with running(table(("a", engine, 100))) as gw:
            async with gw.client.post(gw.url + CHAT, data=b"{}") as response:
                assert response.status == 200
                with pytest.raises(aiohttp.ClientPayloadError):
                    await response.read()
            figures = await gw.counters("a")
    assert (figures["failed"], figures["answered"], figures["retried"]) == (1, 0, 0)


async def test_a_silent_engine_is_a_504_and_is_not_asked_twice():
    async with serving(FakeEngine(first_pause_seconds=20)) as engine:
        async with running(table(("a", engine, 100)), upstream_timeout_seconds=1.5) as gw:
            response = await gw.chat("x")
            assert response.status == 504
            assert response.headers["x-prodrl-trajectory"].startswith("t-")
            assert (await gw.counters("a"))["failed"] == 1
        assert len(engine.seen) == 1


async def test_a_conversation_stays_with_its_policy_whatever_the_weights_become():
    async with engines(2) as (one, two), running(table(("a", one, 100), ("b", two, 0))) as gw:
        names = [f"talk-{i}" for i in range(20)]
        for name in names:
            assert (await gw.chat(name)).headers["x-prodrl-policy"] == digest("a")
        await gw.push(table(("a", one, 0), ("b", two, 100), version="v2"))
        for name in names:
            assert (await gw.chat(name)).headers["x-prodrl-policy"] == digest("a")
        assert (await gw.chat("new")).headers["x-prodrl-policy"] == digest("b")
        status = await gw.status()
        assert status["version"] == "v2"
        assert status["conversations"] == {digest("a"): 20, digest("b"): 1}
        assert status["stats"][digest("a")]["trajectories"] == 20
        await gw.push(table(("b", two, 100), version="v3"))
        assert (await gw.chat("talk-0")).headers["x-prodrl-policy"] == digest("b")
        assert (await gw.counters("a"))["switched"] == 1


async def test_seats_and_counters_survive_a_restart(tmp_path):
    async with engines(2) as (one, two):
        async with running(table(("a", one, 100)), spool_dir=tmp_path) as gw:
            await gw.chat("talk")
        async with running(table(("a", one, 0), ("b", two, 100)), spool_dir=tmp_path) as gw:
            assert (await gw.chat("talk")).headers["x-prodrl-policy"] == digest("a")
            assert (await gw.chat("other")).headers["x-prodrl-policy"] == digest("b")
            assert (await gw.counters("a"))["answered"] == 2


async def test_a_dead_candidate_costs_new_conversations_the_window_once():
    dead = "http://127.0.0.1:9"
    async with serving(FakeEngine()) as engine, running(table(("a", engine, 1), ("b", dead, 99))) as gw:
        first = await gw.chat("new-1")
        assert (first.status, first.headers["x-prodrl-policy"]) == (200, digest("a"))
        waited = (await gw.counters("b"))["retried"]
        assert waited >= 2, "the first one retried for the whole window"
        for index in range(2, 12):
            assert (await gw.chat(f"new-{index}")).status == 200
        status = await gw.status()
        # At most a look each, to see whether it is back; ten more windows would be ten times what the first one waited.
        assert status["stats"][digest("b")]["retried"] - waited <= 10
        assert status["stats"][digest("b")]["switched"] >= 1
        assert status["down"] == [digest("b")]
        for policy in status["stats"].values():
            assert policy["requests"] == policy["answered"] + policy["failed"] + policy["aborted"] + policy["switched"]


async def test_a_running_conversation_moves_to_stable_only_after_the_whole_window():
    async with engines(2) as (stable, candidate), running(table(("a", stable, 1), ("b", candidate, 99))) as gw:
        names = [f"c-{i}" for i in range(5)]
        held = {name: (await gw.chat(name)).headers["x-prodrl-policy"] for name in names}
        name = next(name for name, policy in held.items() if policy == digest("b"))
        candidate.unavailable_first = 3
        assert (await gw.chat(name)).headers["x-prodrl-policy"] == digest("b")
        candidate.unavailable_first = 1000
        assert (await gw.chat(name)).headers["x-prodrl-policy"] == digest("a")
        assert (await gw.counters("b"))["switched"] == 1


async def test_a_dead_stable_does_not_move_its_conversations_to_the_candidate():
    async with engines(2) as (stable, candidate), running(table(("a", stable, 99), ("b", candidate, 1))) as gw:
        assert (await gw.chat("talk")).headers["x-prodrl-policy"] == digest("a")
        stable.unavailable_first = 1000
        response = await gw.chat("talk")
        assert response.status == 503
        assert response.headers["retry-after"] == "1"
        assert candidate.seen == []


async def test_without_routes_a_request_waits_for_them_then_503():
    async with serving(FakeEngine()) as engine, running() as gw:
        response = await gw.chat("x")
        assert response.status == 503
        assert response.headers["retry-after"] == "1"
        call = asyncio.create_task(gw.chat("x"))
        await asyncio.sleep(0.1)
        await gw.push(table(("a", engine, 100)))
        assert (await call).status == 200


async def test_models_are_the_stable_policys_and_belong_to_no_conversation():
    async with engines(2) as (one, two), running(table(("a", one, 5), ("b", two, 95))) as gw:
        for _ in range(5):
            async with gw.client.get(gw.url + "/v1/models") as response:
                assert response.status == 200
                assert "x-prodrl-trajectory" not in response.headers
        assert len(one.seen) == 5
        assert (await gw.status())["stats"] == {}


@pytest.mark.parametrize(
    ("headers", "body", "same"),
    [
        ({"X-ProdRL-Trajectory": "talk"}, {"session_id": "other"}, True),
        ({}, {"metadata": {"trajectory_id": "talk"}, "prompt_cache_key": "other"}, True),
        ({}, {"prompt_cache_key": "talk", "session_id": "other"}, True),
        ({}, {"session_id": "talk"}, True),
        ({}, {"session_id": 5}, False),
        ({}, {}, False),
    ],
)
async def test_where_a_conversation_is_named(headers, body, same):
    async with serving(FakeEngine()) as engine, running(table(("a", engine, 100))) as gw:
        reference = (await gw.chat("talk")).headers["x-prodrl-trajectory"]
        found = (await gw.chat(headers=headers, json=body)).headers["x-prodrl-trajectory"]
        assert (found == reference) is same
        assert (await gw.chat(reference)).headers["x-prodrl-trajectory"] == reference


async def test_two_keys_with_the_same_name_never_share_a_conversation(tmp_path):
    (tmp_path / "alice").write_text("key-a\n")
    (tmp_path / "bob").write_text("key-b")
    async with serving(FakeEngine()) as engine, running(table(("a", engine, 100)), api_keys_dir=tmp_path) as gw:
        alice = await gw.chat("talk", headers={"Authorization": "Bearer key-a"})
        bob = await gw.chat("talk", headers={"x-api-key": "key-b"})
        assert alice.status == bob.status == 200
        internal = alice.headers["x-prodrl-trajectory"]
        assert internal != bob.headers["x-prodrl-trajectory"]
        stolen = await gw.chat(internal, headers={"x-api-key": "key-b"})
        assert stolen.status == 400
        post = {"trajectory_id": internal, "reward": 1}
        assert (await gw.reward(post, {"x-api-key": "key-b"}))[0] == 400
        assert (await gw.reward(post, {"x-api-key": "key-a"}))[0] == 202
        assert all(seen.header("x-api-key") is None for seen in engine.seen)


async def test_keys_are_checked_and_read_again(tmp_path):
    (tmp_path / "alice").write_text("key-a")
    async with serving(FakeEngine()) as engine, running(table(("a", engine, 100)), api_keys_dir=tmp_path) as gw:
        refused = await gw.chat("x", headers={"Authorization": "Bearer wrong"})
        assert refused.status == 401
        assert refused.headers["www-authenticate"] == "Bearer"
        assert (await gw.chat("x")).status == 401
        (tmp_path / "bob").write_text("key-b")
        refusals = 2
        async with asyncio.timeout(20):
            while (await gw.chat("x", headers={"Authorization": "bearer key-b"})).status != 200:
                refusals += 1
                await asyncio.sleep(0.1)
        assert (await gw.status())["unauthorised"] == refusals
        async with gw.client.get(gw.url + "/healthz") as response:
            assert response.status == 200


async def test_limits(tmp_path):
    async with serving(FakeEngine()) as engine:
        async with running(table(("a", engine, 100)), max_body_bytes=2000, max_header_bytes=2000) as gw:
            async with gw.client.post(gw.url + CHAT, data=b"x" * 2001) as response:
                assert response.status == 413
                assert (await response.json())["error"]["code"] == "request_too_large"

            async def parts():
                for _ in range(5):
                    yield b"x" * 500

            async with gw.client.post(gw.url + CHAT, data=parts()) as response:
                assert response.status == 413
            async with gw.client.post(gw.url + CHAT, data=b"", headers={"X-Long": "x" * 3000}) as response:
                assert response.status == 431
            gw.gateway.deps.max_running = 0
            async with gw.client.post(gw.url + CHAT, data=b"") as response:
                assert response.status == 503
                assert response.headers["retry-after"] == "1"
        assert engine.seen == []


async def test_an_endless_header_is_cut():
    async with running(max_header_bytes=2000) as gw:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(gw.url.rpartition(":")[2]))
        writer.write(b"POST /v1/x HTTP/1.1\r\nHost: h\r\nX-Long: ")
        for _ in range(2):
            writer.write(b"x" * 1000)
            await asyncio.sleep(0.02)
        assert (await reader.readline()).startswith(b"HTTP/1.1 431 ")
        writer.close()


@pytest.mark.parametrize(
    "path", ["/", "/metrics", "/admin/status", "/v1/../metrics", "/v1/%2e%2e/metrics", "/v1/load_lora_adapter"]
)
async def test_nothing_else_is_served_on_the_traffic_port(path):
    async with serving(FakeEngine()) as engine, running(table(("a", engine, 100))) as gw:
        async with gw.client.post(aiohttp.client.URL(gw.url + path, encoded=True)) as response:
            assert response.status == 404
            assert set((await response.json())["error"]) == {"message", "type", "param", "code"}
        assert engine.seen == []


async def test_readiness_needs_a_table_and_the_store(tmp_path):
    path = tmp_path / "routes.json"
    async with running(routes_path=path) as gw:

        async def ready() -> int:
            async with gw.client.get(gw.url + "/readyz") as response:
                return response.status

        assert await ready() == 503
        path.write_text(table().model_dump_json())
        async with asyncio.timeout(20):
            while await ready() != 200:
                await asyncio.sleep(0.1)


async def test_pushed_routes_win_over_the_file(tmp_path):
    path = tmp_path / "routes.json"
    path.write_text(table(("a", "http://127.0.0.1:9", 100), version="file").model_dump_json())
    async with running(routes_path=path) as gw:
        assert (await gw.status())["version"] == "file"
        pushed = table(("b", "http://127.0.0.1:9", 100), version="pushed")
        assert await gw.push(pushed) == {"version": "pushed"}
        assert await gw.push(pushed) == {"version": "pushed"}
        path.write_text(table(("a", "http://127.0.0.1:9", 100), version="old file").model_dump_json())
        await asyncio.sleep(2.5)  # two looks of its housekeeping
        assert (await gw.status())["version"] == "pushed"
        async with gw.client.put(gw.admin_url + "/admin/routes", data=b'{"version": "x", "routes": [{}]}') as response:
            assert response.status == 400
            assert "routes.0.digest" in (await response.json())["error"]["message"]
        assert (await gw.status())["version"] == "pushed"


async def test_a_stop_lets_running_requests_finish_and_takes_no_new_ones():
    async with serving(FakeEngine(chunks=(b"a", b"b"))) as engine:
        engine.gate = asyncio.Event()
        async with running(table(("a", engine, 100))) as gw:
            response = await gw.client.post(gw.url + CHAT, data=b"{}")
            await response.content.readany()
            gw.gateway.is_draining = True
            gw.gateway._traffic_server.should_exit = True
            await asyncio.sleep(0.4)
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", int(gw.url.rpartition(":")[2])), timeout=1)
            engine.gate.set()
            assert await response.read() == b"b"
            assert (await gw.counters("a"))["answered"] == 1


async def test_a_stop_cuts_what_does_not_finish_and_counts_it():
    async with serving(FakeEngine(chunks=(b"a", b"b"))) as engine:
        engine.gate = asyncio.Event()
        async with running(table(("a", engine, 100)), drain_seconds=0.2) as gw:
            response = await gw.client.post(gw.url + CHAT, data=b"{}")
            await response.content.readany()
            gw.gateway._traffic_server.should_exit = True
            with pytest.raises(aiohttp.ClientPayloadError):
                await response.read()
            assert (await gw.counters("a"))["failed"] == 1
        engine.gate.set()


async def test_a_large_body_and_prompts_stay_out_of_logs(caplog):
    caplog.set_level("DEBUG", logger="prodrl")
    body = json.dumps({"messages": [{"role": "user", "content": "sesame " * 300_000}]}).encode()
    async with serving(FakeEngine()) as engine, running(table(("a", engine, 100))) as gw:
        engine.hang_up_first = 1
        async with gw.client.post(gw.url + CHAT, data=body) as response:
            assert response.status == 200
        assert engine.seen[-1].body == body
    assert "sesame" not in caplog.text


async def test_metrics_are_prometheus_text():
    from prometheus_client.parser import text_string_to_metric_families

    async with serving(FakeEngine()) as engine, running(table(("a", engine, 100))) as gw:
        await gw.chat("x")
        for url in (gw.admin_url, gw.metrics_url):
            async with gw.client.get(url + "/metrics") as response:
                families = {f.name: f for f in text_string_to_metric_families(await response.text())}
            samples = families["prodrl_gateway_answered"].samples
            assert [(s.labels, s.value) for s in samples] == [({"policy": digest("a")}, 1.0)]


async def test_who_scrapes_figures_cannot_touch_the_routes():
    async with serving(FakeEngine()) as engine, running(table(("a", engine, 100))) as gw:
        for method, path in (("PUT", "/admin/routes"), ("GET", "/admin/status"), ("POST", "/metrics"), ("GET", "/v1")):
            async with gw.client.request(method, gw.metrics_url + path, data=b"{}") as response:
                assert response.status == 404
                assert f"Metrics: no {method} {path}; ask for GET /metrics" in await response.text()
        assert (await gw.chat("x")).status == 200


async def test_openais_own_client_streams_and_understands_our_errors(tmp_path):
    openai = pytest.importorskip("openai")
    (tmp_path / "alice").write_text("key-a")
    engine = FakeEngine(chunks=STREAM, content_type=b"text/event-stream")
    options = {"api_keys_dir": tmp_path, "connect_retry_seconds": 0}
    async with serving(engine), running(table(("a", engine, 100)), **options) as gw:
        client = openai.AsyncOpenAI(base_url=gw.url + "/v1", api_key="key-a", max_retries=0)
        asked = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
        parts = [
            part.choices[0].delta.content async for part in await client.chat.completions.create(**asked, stream=True)
        ]
        assert "".join(parts) == "gr\u00fc\u00df\u00e4"
        with pytest.raises(openai.AuthenticationError) as caught:
            await client.with_options(api_key="wrong").chat.completions.create(**asked)
        assert caught.value.code == "invalid_api_key"
        engine.unavailable_first = 5
        with pytest.raises(openai.InternalServerError) as caught:
            await client.chat.completions.create(**asked)
        assert (caught.value.status_code, caught.value.code) == (503, "model_unavailable")
        assert caught.value.request_id.startswith("t-")
        await client.close()


async def test_a_slow_reader_slows_the_engine_and_not_the_memory():
    engine = FakeEngine(chunks=(b"x" * 65536,) * 400)
    async with serving(engine), running(table(("a", engine, 100))) as gw:
        response = await gw.client.post(gw.url + CHAT, data=b"{}")
        await asyncio.sleep(0.5)
        held = (await gw.counters("a"))["output_bytes"]
        assert held < 200 * 65536, "the sockets' buffers, and not half of it"
        assert len(await response.read()) == 400 * 65536


async def test_a_store_that_hangs_keeps_nobody_from_the_model():
    async with serving(FakeEngine()) as engine, running(table(("a", engine, 100))) as gw:
        while not gw.gateway.deps.feedback.is_ready:
            await asyncio.sleep(0.01)
        gw.gateway.deps.max_running = 3
        gw.store.delay_seconds = 1.0
        posts = [asyncio.create_task(gw.reward({"trajectory_id": "t", "reward": 1})) for _ in range(5)]
        await asyncio.sleep(0.2)
        assert (await gw.chat("x")).status == 200
        assert sorted(status for status, _ in await asyncio.gather(*posts)) == [202, 202, 202, 503, 503]
