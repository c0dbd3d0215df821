"""Agreement and paired evaluations against servers on the loopback whose answers the tests choose."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import transformers

from prodrl import progress as progress_module
from prodrl.config import EvaluateConfig, EvaluationConfig, PolicyRef, StoreConfig
from prodrl.errors import DataError, PreemptedError, UnavailableError, UsageError
from prodrl.evaluate import agreement, play, suites
from prodrl.evaluate.chat import ChatClient
from prodrl.evaluate.run import run
from prodrl.progress import Progress
from prodrl.records import Sample, arrow_schema
from prodrl.store import layout, open_store
from prodrl.store.folders import write_folder
from tests.support.tiny_qwen import save_tiny_qwen


class FakeEngine:
    """An OpenAI server: scores prompts with ``score(ids)`` and answers chats with ``chat(body)``."""

    def __init__(self, score: Callable | None = None, chat: Callable | None = None, max_model_len: int = 512) -> None:
        self.score, self.chat, self.max_model_len = score, chat, max_model_len
        self.requests: list[tuple[str, dict, dict]] = []
        self.refuse_first = 0
        self.in_flight = self.most_in_flight = 0
        self._lock = threading.Lock()
        engine = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                self.answer(200, {"data": [{"id": "chess", "max_model_len": engine.max_model_len}]})

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with engine._lock:
                    engine.requests.append((self.path, body, dict(self.headers)))
                    engine.in_flight += 1
                    engine.most_in_flight = max(engine.most_in_flight, engine.in_flight)
                    refuse, engine.refuse_first = engine.refuse_first > 0, max(0, engine.refuse_first - 1)
                try:
                    if refuse:
                        self.close_connection = True  # no byte of an answer
                    else:
                        self.answer(*engine.reply(self.path, body))
                finally:
                    with engine._lock:
                        engine.in_flight -= 1

            def answer(self, status, content):
                data = content if isinstance(content, bytes) else json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def reply(self, path, body):
        if path == "/v1/chat/completions":
            return self.chat(body)
        choice = {"text": "x", "finish_reason": "length"}
        if "prompt_logprobs" in body:
            ids = body["prompt"]
            scores = self.score(ids)
            # As vLLM writes it: null first, then the prompt's own token, and the likeliest one beside it.
            choice["prompt_logprobs"] = [None] + [
                {str(token): {"logprob": value, "rank": 9}, str(token + 1000): {"logprob": -0.1, "rank": 1}}
                for token, value in zip(ids[1:], scores, strict=True)
            ]
        return 200, {"choices": [choice]}


@pytest.fixture
def engines():
    made = []

    def make(**arguments) -> FakeEngine:
        made.append(FakeEngine(**arguments))
        return made[-1]

    yield make
    for engine in made:
        engine.server.shutdown()
        engine.server.server_close()


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A store with two sets of weights, and a scorer of each made without the code under test."""
    root = tmp_path_factory.mktemp("world")
    store = StoreConfig(uri=f"file://{root}/store")
    scorers = {}
    for number in (0, 1):
        folder = save_tiny_qwen(root / f"model{number}", seed=number)
        write_folder(open_store(store), layout.weights(number), folder, "weights", {})
        scorers[number] = oracle(folder)
    (root / "dataset").mkdir()
    rows = [sample(number) for number in range(6)]
    pq.write_table(pa.Table.from_pylist(rows, schema=arrow_schema(Sample)), root / "dataset" / "part-0.parquet")
    write_folder(open_store(store), layout.dataset(1), root / "dataset", "dataset", {})
    return store, scorers


def oracle(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def score(ids: list[int], offset: float = 0.0) -> list[float]:
        with torch.no_grad():
            loss = torch.nn.functional.cross_entropy(
                model(torch.tensor([ids])).logits[0, :-1], torch.tensor(ids[1:]), reduction="none"
            )
        return [-value + offset for value in loss.tolist()]

    return score


def sample(number: int) -> dict:
    ids = [(number * 37 + place * 11) % 256 for place in range(24)]
    positions = [10, 11, 12, 20, 21]
    return {
        "trajectory_id": f"t-{number}", "index": 0, "num_samples": 1, "order": number, "reward": 1.0,
        "trajectory_tokens": 5, "policy_digest": "", "ids": ids, "loss_positions": positions,
        "logprobs": [-1.0] * 5, "head_ids": [], "head_logprobs": [], "head_offsets": [0] * 6,
        "support_complete": False, "temperatures": [1.0] * 5, "record_ids": [f"t-{number}.a:0"],
    }  # fmt: skip


def policy(number: int) -> PolicyRef:
    return PolicyRef(round=number, digest="sha256:" + f"{number}" * 64, key=layout.policy(number))


def config_of(world, candidate: str, stable: str | None = None, **changes) -> EvaluateConfig:
    values = {
        "store": world[0], "run": "chess", "round": 1, "candidate": policy(1), "candidate_url": candidate,
        "weights_key": layout.weights(1), "served_name": "chess", "dataset_key": layout.dataset(1),
        "agreement_samples": 4, "concurrency": 4,
    }  # fmt: skip
    if stable is not None:
        values |= {"stable": policy(0), "stable_url": stable, "stable_weights_key": layout.weights(0)}
    return EvaluateConfig(**{**values, **changes})


def test_agreement_is_the_mean_gap_over_sampled_tokens(world, engines):
    candidate = engines(score=lambda ids: world[1][1](ids, offset=-0.25))
    stable = engines(score=lambda ids: world[1][0](ids, offset=0.125))
    found = run(config_of(world, candidate.url, stable.url), Progress()).agreement
    assert (found.samples, found.tokens) == (4, 4 * 5)
    assert found.mean_abs == pytest.approx(0.25, abs=1e-5)
    assert found.p99_abs == pytest.approx(0.25, abs=1e-5)
    assert found.stable_mean_abs == pytest.approx(0.125, abs=1e-5)


def test_engine_is_asked_for_the_recorded_tokens_and_not_recorded_itself(world, engines):
    candidate = engines(score=world[1][1])
    run(config_of(world, candidate.url, agreement_samples=6), Progress())
    asked = [body for _, body, _ in candidate.requests if "prompt_logprobs" in body]
    assert sorted(body["prompt"] for body in asked) == sorted(sample(number)["ids"] for number in range(6))
    assert all(body["max_tokens"] == 1 and body["model"] == "chess" for body in asked)
    assert all(headers["X-Request-Id"].startswith("e-") for _, _, headers in candidate.requests)


def test_tail_shows_a_few_broken_tokens(world, engines):
    def one_bad_token(ids):
        scores = world[1][1](ids)
        scores[19] -= 5.0  # predicts token 20, which is a sampled one
        return scores

    found = run(config_of(world, engines(score=one_bad_token).url), Progress()).agreement
    assert found.mean_abs == pytest.approx(1.0, abs=1e-4)
    assert found.p99_abs == pytest.approx(5.0, abs=1e-3)


def test_gap_on_tokens_of_the_prompt_does_not_count(world, engines):
    def bad_prompt(ids):
        return [value - 3.0 if place + 1 < 10 else value for place, value in enumerate(world[1][1](ids))]

    assert run(config_of(world, engines(score=bad_prompt).url), Progress()).agreement.mean_abs < 1e-5


def test_round_0_scores_generated_tokens_and_compares_with_nobody(world, engines):
    candidate = engines(score=world[1][1])
    config = config_of(world, candidate.url, dataset_key=None, round=0)
    result = run(config, Progress())
    assert result.evaluations == ()
    assert result.agreement.stable_mean_abs is None
    assert result.agreement.tokens == 4 * 63
    assert result.agreement.mean_abs < 1e-5
    prompts = [body["prompt"] for _, body, _ in candidate.requests if "prompt_logprobs" in body]
    again = engines(score=world[1][1])
    run(config.model_copy(update={"candidate_url": again.url}), Progress())
    assert sorted(body["prompt"] for _, body, _ in again.requests if "prompt_logprobs" in body) == sorted(prompts)


def test_samples_are_cut_to_what_the_engine_takes(world, engines):
    candidate = engines(score=world[1][1], max_model_len=13)
    found = run(config_of(world, candidate.url), Progress()).agreement
    assert all(len(body["prompt"]) <= 12 for _, body, _ in candidate.requests)
    assert found.tokens == 4 * 2
    with pytest.raises(DataError, match="within 9 tokens"):
        run(config_of(world, engines(score=world[1][1], max_model_len=10).url), Progress())


@pytest.mark.parametrize("broken", [None, float("nan"), -9999.0, "missing"])
def test_logprob_that_is_missing_or_not_finite_is_an_error(world, engines, broken):
    def score(ids):
        scores = world[1][1](ids)
        scores[10] = broken
        return scores

    candidate = engines(score=score)
    if broken == "missing":
        candidate.reply = lambda _path, _body: (200, {"choices": [{"text": "x", "finish_reason": "length"}]})
    with pytest.raises(DataError, match="logprob"):
        run(config_of(world, candidate.url), Progress())


class Coin:
    """A suite whose items ask for one word; solved when the answer is ``yes``."""

    def __init__(self, folder, parameters, num_items=20):
        self.folder, self.num_items = folder, num_items

    def items(self):
        return [f"item-{number:03d}" for number in range(self.num_items)]

    async def play(self, item, client, seed):
        reply = await client.chat([{"role": "user", "content": item}], seed=seed, max_tokens=4)
        return {"solved": float(reply.text == "yes"), "length": float(len(reply.text))}


def says(rule: Callable[[str], str]) -> Callable:
    def chat(body):
        text = rule(body["messages"][0]["content"])
        return 200, {"choices": [{"message": {"content": text}, "finish_reason": "stop"}]}

    return chat


def evaluation(**changes) -> EvaluationConfig:
    values = {"name": "coin", "suite": f"{__name__}:Coin", "metric": "solved", "min_items": 10, "max_items": 50}
    return EvaluationConfig(**{**values, **changes})


def even(item: str) -> str:
    return "yes" if int(item[-1]) % 2 == 0 else "no"


def test_both_sides_play_the_same_items_with_the_same_seeds(world, engines):
    candidate = engines(score=world[1][1], chat=says(lambda _: "yes"))
    stable = engines(score=world[1][0], chat=says(even))
    progress = Progress()
    (found,) = run(config_of(world, candidate.url, stable.url, evaluations=(evaluation(),)), progress).evaluations
    assert (found.items, found.candidate_mean, found.stable_mean, found.difference) == (20, 1.0, 0.5, 0.5)
    assert 0 < found.low < found.high
    assert (found.candidate_failures, found.stable_failures) == (0, 0)
    asked = [
        sorted(
            (b["messages"][0]["content"], b["seed"])
            for path, b, _ in engine.requests
            if path.endswith("chat/completions")
        )
        for engine in (candidate, stable)
    ]
    assert asked[0] == asked[1]
    assert len({seed for _, seed in asked[0]}) == 20
    stored = json.loads(open_store(world[0]).get(layout.evaluation(1)))
    assert len(stored["items"]["coin"]) == 20
    assert stored["candidate"] == policy(1).digest
    assert stored["result"]["evaluations"][0]["difference"] == 0.5
    assert progress.snapshot()["done"] == progress.snapshot()["total"]


def test_at_most_max_items_are_drawn_and_load_is_bounded(world, engines):
    candidate = engines(score=world[1][1], chat=says(even))
    stable = engines(score=world[1][0], chat=says(even))
    config = config_of(world, candidate.url, stable.url, evaluations=(evaluation(max_items=7),), concurrency=4)
    (found,) = run(config, Progress()).evaluations
    assert found.items == 7
    assert candidate.most_in_flight <= 4
    chosen = play.choose_items(Coin(None, {}), "coin", 7, seed=0)
    assert (
        chosen
        == play.choose_items(Coin(None, {}), "coin", 7, seed=0)
        != play.choose_items(Coin(None, {}), "coin", 7, 1)
    )


def test_failed_sessions_count_as_zero(world, engines):
    """A candidate that fails where it would have lost must not look better for it."""

    def fails_on_odd(body):
        if int(body["messages"][0]["content"][-1]) % 2:
            return 500, {"error": "boom"}
        return says(lambda _: "yes")(body)

    candidate = engines(score=world[1][1], chat=fails_on_odd)
    stable = engines(score=world[1][0], chat=says(lambda _: "yes"))
    (found,) = run(config_of(world, candidate.url, stable.url, evaluations=(evaluation(),)), Progress()).evaluations
    assert (found.items, found.candidate_failures, found.stable_failures) == (20, 10, 0)
    assert (found.candidate_mean, found.stable_mean, found.difference) == (0.5, 1.0, -0.5)
    items = json.loads(open_store(world[0]).get(layout.evaluation(1)))["items"]["coin"]
    assert "500" in items[1]["candidate"]["error"]


def test_item_that_fails_on_both_sides_is_kept(world, engines):
    def fails_on_first(body):
        return (500, {}) if body["messages"][0]["content"].endswith("0") else says(lambda _: "yes")(body)

    both = [engines(score=world[1][number], chat=fails_on_first) for number in (1, 0)]
    (found,) = run(config_of(world, both[0].url, both[1].url, evaluations=(evaluation(),)), Progress()).evaluations
    assert (found.items, found.candidate_failures, found.stable_failures) == (20, 2, 2)
    assert (found.candidate_mean, found.difference) == (0.9, 0.0)


def test_evaluation_that_stable_fails_says_nothing_about_the_candidate(world, engines):
    candidate = engines(score=world[1][1], chat=lambda _: (500, {}))
    stable = engines(score=world[1][0], chat=lambda _: (500, {}))
    with pytest.raises(UnavailableError, match="20 of 20 sessions of stable failed"):
        run(config_of(world, candidate.url, stable.url, evaluations=(evaluation(),)), Progress())


@pytest.mark.parametrize("metric", ["mate", "length"])
def test_unknown_metric_is_an_error_that_names_the_reported_ones(world, engines, metric):
    servers = [engines(score=world[1][number], chat=says(even)) for number in (1, 0)]
    config = config_of(world, servers[0].url, servers[1].url, evaluations=(evaluation(metric=metric),))
    if metric == "length":
        assert run(config, Progress()).evaluations[0].candidate_mean == 2.5
        return
    with pytest.raises(DataError, match="'mate' was not reported, got length, solved"):
        run(config, Progress())


def test_nan_metric_is_an_error():
    pairs = [play.Pair("a", 1, play.Session({"solved": float("nan")}), play.Session({"solved": 1.0}))]
    with pytest.raises(DataError, match="must be finite, got nan"):
        play.outcomes(pairs, "coin", "solved")


def test_suite_gets_its_folder_from_the_store(world, engines, tmp_path):
    (tmp_path / "items").mkdir()
    (tmp_path / "items" / "list.txt").write_text("a\nb\n")
    write_folder(open_store(world[0]), "suites/listed", tmp_path / "items", "model", {})
    servers = [engines(score=world[1][number], chat=says(lambda _: "yes")) for number in (1, 0)]
    listed = evaluation(suite=f"{__name__}:Listed", suite_key="suites/listed")
    (found,) = run(config_of(world, servers[0].url, servers[1].url, evaluations=(listed,)), Progress()).evaluations
    assert found.items == 2


class Listed(Coin):
    def items(self):
        return (self.folder / "list.txt").read_text().split()


def not_a_suite(folder, parameters):
    return object()


@pytest.mark.parametrize(
    "spec", ["nothing", "no.such.module:f", "json:absent", "json:dumps", f"{__name__}:not_a_suite"]
)
def test_suite_that_cannot_be_loaded_is_the_users_fault(spec, tmp_path):
    with pytest.raises(UsageError, match="Suite"):
        suites.load(spec, tmp_path, {})


def test_half_a_stable_policy_is_refused(world):
    with pytest.raises(UsageError, match="belong together"):
        run(config_of(world, "http://127.0.0.1:9", stable_url="http://127.0.0.1:9"), Progress())


def client_of(http: httpx.AsyncClient, url: str, delays=(0.01, 0.01)) -> ChatClient:
    return ChatClient(http=http, base_url=url, model="chess", retry_delays=delays)


async def test_client_tries_again_before_the_first_byte(engines):
    engine = engines(chat=says(even))
    engine.refuse_first = 2
    async with httpx.AsyncClient() as http:
        reply = await client_of(http, engine.url + "/v1").chat([{"role": "user", "content": "2"}])
    assert reply.text == "yes"
    assert len({headers["X-Request-Id"] for _, _, headers in engine.requests}) == 3


async def test_client_gives_up_where_nobody_listens():
    async with httpx.AsyncClient() as http:
        with pytest.raises(UnavailableError, match="no answer in 3 attempts"):
            await client_of(http, "http://127.0.0.1:9").chat([])


@pytest.mark.parametrize(("status", "body"), [(400, {"error": "too long"}), (200, b"<html>"), (200, {"choices": []})])
async def test_client_does_not_repeat_what_was_answered(engines, status, body):
    engine = engines(chat=lambda _: (status, body))
    async with httpx.AsyncClient() as http:
        with pytest.raises(DataError):
            await client_of(http, engine.url).chat([])
    assert len(engine.requests) == 1


async def test_stop_request_ends_the_evaluation(engines, monkeypatch):
    stop = threading.Event()
    stop.set()
    monkeypatch.setattr(progress_module, "stop_requested", stop)
    engine = engines(chat=says(even))
    async with httpx.AsyncClient() as http:
        client = client_of(http, engine.url)
        with pytest.raises(PreemptedError):
            await play.play_pairs(
                Coin(None, {}), [("1", 1)], candidate=client, stable=client, concurrency=2, on_pair=lambda: None
            )


async def test_hung_session_fails_in_time(monkeypatch):
    class Hangs(Coin):
        async def play(self, item, client, seed):
            await asyncio.sleep(60)

    monkeypatch.setattr(play, "SESSION_SECONDS", 0.05)
    client = ChatClient(http=httpx.AsyncClient(), base_url="http://127.0.0.1:9", model="chess")
    (pair,) = await play.play_pairs(
        Hangs(None, {}), [("1", 1)], candidate=client, stable=client, concurrency=2, on_pair=lambda: None
    )
    assert "TimeoutError" in pair.candidate.error
    await client.http.aclose()


def test_reader_takes_the_prompts_own_token():
    probe = agreement.Probe(ids=[5, 6], positions=[1])
    entry = {"6": {"logprob": -2.0}, "7": {"logprob": -0.1}}
    assert agreement.prompt_logprobs({"choices": [{"prompt_logprobs": [None, entry]}]}, probe, "x") == [-2.0]
    with pytest.raises(DataError):
        agreement.prompt_logprobs({"choices": [{"prompt_logprobs": [None, {"7": {"logprob": -0.1}}]}]}, probe, "x")
