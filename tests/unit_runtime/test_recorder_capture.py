"""The wrapper around ``AsyncLLM.generate`` against a small engine with vLLM's output rules, and its middleware."""

from __future__ import annotations

import asyncio
import enum
import json
import math
import pathlib
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from prodrl.errors import UsageError
from prodrl.recorder import active, capture, identity, middleware, plugin, record
from prodrl.recorder.counters import Counters
from prodrl.recorder.record import Observation
from tests.support.engine import DIGEST, recorder_config

VOCAB = 6
PROBABILITIES = [0.4, 0.25, 0.15, 0.1, 0.06, 0.04]


class Kind(enum.Enum):
    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass
class Logprob:
    logprob: float
    rank: int
    decoded_token: str | None = None


class Flat:
    """As vLLM's FlatLogprobs: lists of numbers, but a sequence of dicts to a reader."""

    def __init__(self) -> None:
        self.start_indices: list[int] = []
        self.end_indices: list[int] = []
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.ranks: list[int] = []

    def add(self, entries: list[tuple[int, float, int]]) -> None:
        self.start_indices.append(len(self.token_ids))
        for token, logprob, rank in entries:
            self.token_ids.append(token)
            self.logprobs.append(logprob)
            self.ranks.append(rank)
        self.end_indices.append(len(self.token_ids))

    def __iter__(self) -> Iterator[dict[int, Logprob]]:
        for start, end in zip(self.start_indices, self.end_indices, strict=True):
            yield {self.token_ids[i]: Logprob(self.logprobs[i], self.ranks[i]) for i in range(start, end)}


@dataclass
class Params:
    """The fields of SamplingParams that are read."""

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Any = None
    bad_words: Any = None
    allowed_token_ids: Any = None
    structured_outputs: Any = None
    min_tokens: int = 0
    thinking_token_budget: Any = None
    trace_decode_token_ids: Any = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    flat_logprobs: bool = False
    output_kind: Kind = Kind.DELTA
    __struct_fields__ = ("n", "temperature", "top_p", "top_k")

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs if self.logprobs is not None else len(self.logprob_token_ids or []) or None


@dataclass
class Engine:
    """Samples ids 0, 1, 2, ... from one fixed distribution."""

    tokens: list[int] = field(default_factory=lambda: [0, 1, 2])
    fails_after: int | None = None
    error: type[Exception] = RuntimeError
    aborted: int = 0
    model_config: Any = field(
        default_factory=lambda: SimpleNamespace(
            get_vocab_size=lambda: VOCAB, max_logprobs=20, logprobs_mode=record.PROCESSED, logits_processors=None
        )
    )
    vllm_config: Any = field(default_factory=lambda: SimpleNamespace(speculative_config=None))

    async def generate(
        self, prompt: Any, sampling_params: Params, request_id: str, **_: Any
    ) -> AsyncGenerator[SimpleNamespace, None]:
        try:
            for choice in range(sampling_params.n):
                for at in range(len(self.tokens)):
                    if self.fails_after == at:
                        raise self.error("no")
                    await asyncio.sleep(0)
                    is_last = at == len(self.tokens) - 1
                    if sampling_params.output_kind is Kind.FINAL_ONLY and not is_last:
                        continue
                    yield self._output(sampling_params, choice, at, is_last=is_last)
        except (GeneratorExit, asyncio.CancelledError):
            self.aborted += 1
            raise

    def _output(self, params: Params, choice: int, at: int, *, is_last: bool) -> SimpleNamespace:
        first = at if params.output_kind is Kind.DELTA else 0
        tokens = self.tokens[first : at + 1]
        noted: Any = None
        if params.num_logprobs is not None:
            noted = Flat()
            for token in tokens:
                noted.add(listed(token, params.num_logprobs))
            noted = noted if params.flat_logprobs else list(noted)
        completion = SimpleNamespace(
            index=choice,
            token_ids=tokens,
            text="x" * len(tokens),
            logprobs=noted,
            cumulative_logprob=None if noted is None else -1.0,
            finish_reason="stop" if is_last else None,
            stop_reason=None,
        )
        return SimpleNamespace(
            prompt_token_ids=[7, 8], prompt_logprobs=None, num_cached_tokens=1, outputs=[completion], finished=is_last
        )


def listed(token: int, count: int) -> list[tuple[int, float, int]]:
    head = [(other, math.log(PROBABILITIES[other]), other + 1) for other in range(VOCAB if count == -1 else count)]
    return [(token, math.log(PROBABILITIES[token]), token + 1), *head]


class Processor:
    """In place of LogprobsProcessor."""

    @classmethod
    def from_new_request(cls, tokenizer: Any, request: Any) -> Any:
        return tokenizer, request


class Collected:
    """In place of the sink."""

    def __init__(self) -> None:
        self.seen: list[Observation] = []
        self.is_started = self.is_closed = False

    def start(self) -> None:
        self.is_started = True

    def offer(self, seen: Observation) -> None:
        self.seen.append(seen)

    def close(self) -> None:
        self.is_closed = True


class World:
    def __init__(self, head_size: int = 4) -> None:
        self.sink = Collected()
        self.config = recorder_config(pathlib.Path("/store"), top_logprobs=head_size)
        self.recorder = active.Recorder(
            self.config, Counters(), self.sink, lambda engine: capture.engine_facts(engine, head_size, "vllm 0")
        )
        # Own classes for each world: what is wrapped stays wrapped.
        self.engine_class = type("Engine", (Engine,), {"generate": Engine.generate})
        processor = type(
            "P", (), {"from_new_request": classmethod(lambda cls, tokenizer, request: (tokenizer, request))}
        )
        self.processor: Any = processor
        capture.install(self.engine_class, processor, self.recorder, (KeyError,))

    def engine(self, **changes: Any) -> Any:
        return self.engine_class(**changes)

    def records(self) -> list[Any]:
        return [record.build(seen, self.config) for seen in self.sink.seen]


PROMPT = {"type": "token", "prompt_token_ids": [7, 8]}


async def collect(stream: Any) -> list[str]:
    """What a client would be told, as text."""
    return [
        json.dumps(
            [
                (c.index, c.token_ids, c.text, c.cumulative_logprob, c.finish_reason, repr(c.logprobs))
                for c in out.outputs
            ]
        )
        async for out in stream
    ]


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("logprobs", [None, 0, 2, 4, 6, -1])
@pytest.mark.parametrize("n", [1, 2])
async def test_a_client_is_told_the_same_with_and_without_the_recorder(
    kind: Kind, logprobs: int | None, n: int
) -> None:
    world = World()
    asked = Params(output_kind=kind, logprobs=logprobs, n=n)
    plain = await collect(Engine().generate(PROMPT, asked, "cmpl-t-1.a"))
    recorded = await collect(world.engine().generate(PROMPT, asked, "cmpl-t-1.a"))
    assert recorded == plain
    assert asked == Params(output_kind=kind, logprobs=logprobs, n=n)
    rows = world.records()
    assert [row.output_ids for row in rows] == [[0, 1, 2]] * n
    assert all(row.head_ids == [0, 1, 2, 3] * 3 for row in rows)
    assert rows[0].logprobs == pytest.approx([math.log(p) for p in PROBABILITIES[:3]])
    assert [row.record_id for row in rows] == [f"t-1.a:{index}" for index in range(n)]
    assert all(row.trainable == (n == 1) for row in rows)


async def test_chosen_token_ids_replace_the_head_and_the_record_says_so() -> None:
    world = World()
    asked = Params(logprob_token_ids=[0, 1])
    assert await collect(world.engine().generate(PROMPT, asked, "t-1.a")) == await collect(
        Engine().generate(PROMPT, asked, "t-1.a")
    )


async def test_a_client_that_leaves_is_recorded_and_the_engine_is_told_at_once() -> None:
    world = World()
    engine = world.engine()
    stream = engine.generate(PROMPT, Params(), "t-1.a")
    await anext(stream)
    await stream.aclose()
    assert engine.aborted == 1
    [row] = world.records()
    assert (row.status, row.output_ids, row.reasons) == ("aborted", [0], ["Aborted"])


async def test_a_cancelled_request_is_recorded_even_before_its_first_output() -> None:
    world = World()
    engine = world.engine(tokens=[0] * 1000)

    async def serve() -> None:
        async for _ in engine.generate(PROMPT, Params(output_kind=Kind.FINAL_ONLY), "t-1.a"):
            pass

    task = asyncio.create_task(serve())
    await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    [row] = world.records()
    assert (row.status, row.prompt_ids, row.reasons) == ("aborted", [7, 8], ["Aborted", "EmptyCompletion"])


async def test_an_engine_fault_reaches_the_client_and_is_recorded() -> None:
    world = World()
    with pytest.raises(RuntimeError):
        await collect(world.engine(fails_after=2).generate(PROMPT, Params(), "t-1.a"))
    [row] = world.records()
    assert (row.status, row.output_ids, row.reasons) == ("error", [0, 1], ["EngineError"])


async def test_a_request_that_the_engine_refuses_is_counted_only() -> None:
    world = World()
    with pytest.raises(KeyError):
        await collect(world.engine(fails_after=0, error=KeyError).generate(PROMPT, Params(), "t-1.a"))
    assert world.records() == []
    assert world.recorder.counters.refused == 1


async def test_a_fault_of_ours_costs_the_record_not_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("prodrl.recorder.sampling.describe", "prodrl.recorder.capture._extend"):
        world = World()
        with monkeypatch.context() as patch:
            patch.setattr(place, lambda *_: 1 / 0)
            assert len(await collect(world.engine().generate(PROMPT, Params(), "t-1.a"))) == 3
        assert world.sink.seen == []
        assert world.recorder.counters.dropped_faults == 1


@pytest.mark.parametrize("request_id", ["chatcmpl-5f", "eval-7.a", "cmpl-x-0", "t-1", "t-"])
async def test_what_is_not_traffic_is_not_recorded(request_id: str) -> None:
    world = World()
    await collect(world.engine().generate(PROMPT, Params(), request_id))
    assert world.sink.seen == []
    assert world.recorder.counters.not_traffic == 1


async def test_beams_and_streamed_prompts_are_no_samples() -> None:
    world = World()
    await collect(world.engine().generate(PROMPT, Params(), "t-1.a-beam-0"))
    await collect(world.engine().generate("raw text", Params(), "t-1.a"))
    assert world.sink.seen == []
    assert world.recorder.counters.unsupported == 2


async def test_adapters_and_images_are_named() -> None:
    world = World()
    await collect(world.engine().generate({**PROMPT, "type": "multimodal"}, Params(), "t-1.a", lora_request=object()))
    assert world.records()[0].reasons == ["Multimodal", "LoraAdapter"]


async def test_the_head_is_never_larger_than_the_engine_allows() -> None:
    world = World(head_size=64)
    engine = world.engine()
    engine.model_config.max_logprobs = 5
    await collect(engine.generate(PROMPT, Params(), "t-1.a"))
    assert world.records()[0].head_ids == [0, 1, 2, 3, 4] * 3


async def test_text_of_logprobs_is_made_only_for_who_asked() -> None:
    world = World()
    made: list[Any] = []

    async def generate(self: Any, prompt: Any, sampling_params: Any, request_id: str, **_: Any) -> Any:
        made.append(world.processor.from_new_request(tokenizer="tokenizer", request=1)[0])
        yield Engine()._output(sampling_params, 0, 2, is_last=True)

    other = type("Other", (Engine,), {"generate": generate})
    capture.install(other, world.processor, world.recorder, ())
    await collect(other().generate(PROMPT, Params(), "t-1.a"))
    await collect(other().generate(PROMPT, Params(logprobs=1), "t-1.b"))
    await collect(other().generate(PROMPT, Params(), "probe"))
    assert made == [None, "tokenizer", "tokenizer"]


def test_installing_twice_wraps_once() -> None:
    world = World()
    wrapped = world.engine_class.generate
    capture.install(world.engine_class, world.processor, world.recorder, ())
    assert world.engine_class.generate is wrapped


async def test_the_header_names_the_request_whatever_the_engine_calls_it() -> None:
    world = World()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        for number in range(2):
            await collect(world.engine().generate(PROMPT, Params(), f"resp_{number}"))

    await call(middleware.Readiness(app), "POST", "/v1/responses", [(b"x-request-id", b"t-9.z")])
    await call(middleware.Readiness(app), "POST", "/v1/responses", [(b"x-request-id", b"../t-9.z")])
    assert [row.record_id for row in world.records()] == ["t-9.z:0", "t-9.z:1.0"]
    assert world.records()[0].trajectory_id == "t-9"
    assert world.recorder.counters.not_traffic == 2


async def call(server: Any, method: str, path: str, headers: list[Any] | None = None, **scope: Any) -> tuple[int, Any]:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    token = identity.current.set(None)
    values = {"type": "http", "method": method, "path": path, "headers": headers or [], **scope}
    await server(values, None, send)
    identity.current.reset(token)
    return (sent[0]["status"], json.loads(sent[1]["body"])) if sent else (0, None)


@pytest.fixture
def model(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    monkeypatch.setenv("PRODRL_MODEL_DIR", str(tmp_path))
    return tmp_path


async def test_ready_means_this_policy_and_an_answered_completion(
    model: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, status, asked = World(), 500, []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        asked.append((scope["path"], json.loads((await receive())["body"]), dict(scope["headers"])))
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    ready = middleware.Readiness(app)
    monkeypatch.setattr(active, "_active", None)
    assert (await call(ready, "GET", "/prodrl/ready"))[0] == 503
    monkeypatch.setattr(active, "_active", world.recorder)
    for content in (None, "", "[]", json.dumps({"digest": "sha256:" + "0" * 64})):
        if content is not None:
            (model / middleware.POLICY_FILE).write_text(content)
        assert (await call(ready, "GET", "/prodrl/ready"))[0] == 503
    assert asked == []
    (model / middleware.POLICY_FILE).write_text(json.dumps({"digest": DIGEST}))
    state = SimpleNamespace(engine_client=SimpleNamespace(errored=False), args=SimpleNamespace(api_key=["secret"]))
    assert (await call(ready, "GET", "/prodrl/ready", app=SimpleNamespace(state=state)))[0] == 503
    assert not world.sink.is_started
    status = 200
    for _ in range(3):
        assert await call(ready, "GET", "/prodrl/ready", app=SimpleNamespace(state=state)) == (
            200,
            {"ready": True, "digest": DIGEST, "round": 3},
        )
    assert len(asked) == 2
    assert asked[0][0] == "/v1/completions"
    assert asked[0][2][b"authorization"] == b"Bearer secret"
    assert world.sink.is_started
    state.engine_client.errored = True
    assert (await call(ready, "GET", "/prodrl/ready", app=SimpleNamespace(state=state)))[0] == 503


async def test_figures_and_everything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    passed: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        passed.append(scope.get("path", scope["type"]))

    wrapped = middleware.Readiness(app)
    monkeypatch.setattr(active, "_active", world.recorder)
    world.recorder.counters.untrainable["Aborted"] += 2
    status, body = await call(wrapped, "GET", "/prodrl/metrics")
    assert (status, body["untrainable"], body["policy_digest"]) == (200, {"Aborted": 2}, DIGEST)
    await call(wrapped, "GET", "/health")
    await call(wrapped, "POST", "/prodrl/ready")
    assert passed == ["/health", "/prodrl/ready"]


async def test_the_last_shard_is_written_when_the_server_shuts_down(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    monkeypatch.setattr(active, "_active", world.recorder)
    messages = [{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}]

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        assert not world.sink.is_closed
        await receive()

    async def receive() -> Any:
        return messages.pop(0)

    await middleware.Readiness(app)({"type": "lifespan"}, receive, None)  # type: ignore[arg-type]
    assert world.sink.is_closed


@pytest.mark.parametrize("version", ["0.31.9", "0.34.0", "1.0", "0.3"])
def test_an_engine_that_was_not_tested_is_refused(version: str) -> None:
    with pytest.raises(UsageError, match="must be one of"):
        plugin.check_version(version)
    for tested in ("0.32.0", "0.33.1+cu129"):
        plugin.check_version(tested)
