"""What ``kubectl prodrl`` gets through pods: logs, the audit, the report; how it runs a command in one; completion."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import re
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from kubernetes.client import Configuration

from prodrl_operator.cluster import port
from prodrl_operator.cluster.kubernetes import KubernetesCluster
from prodrl_operator.errors import ClusterUnavailableError, ForbiddenError, InvalidError, NotFoundError, OperatorError
from prodrl_operator.names import Step
from prodrl_operator.plugin import access, completing
from prodrl_operator.plugin.access import Finished, KubernetesPods
from tests.support.fake_kubelet import Outcome
from tests.support.operator_harness import World, all_well
from tests.support.plugin import Kubectl

Start = Callable[[World], Kubectl]
FATE = {"recorded": 10, "trained": 4, "waiting": 2, "excluded": {"Aborted": 1}, "expired": 3}
AUDIT = {
    "fate": FATE,
    "equation": "10 recorded = 4 trained + 2 waiting + 1 excluded (Aborted 1) + 3 expired",
    "holds": True,
    "notes": [],
    "faults": [],
}


@pytest.fixture
def kubectl(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Start:
    return lambda world: Kubectl(world, monkeypatch, capsys, "default")


def training_forever(number: int, step: Step, attempt: int) -> Outcome | None:
    if number == 1 and step is Step.TRAINING:
        return Outcome("", exit_code=1) if attempt == 0 else None
    return all_well(number, step, attempt)


def training(attempt: int = 1, **spec: Any) -> World:
    world = World(spec, script=training_forever)
    world.until(lambda w: any(f"r0001-train-a{attempt}" in name for name in w.names_of(port.POD)))
    world.steps(2)
    return world


@functools.cache
def standing() -> World:
    """One world for all tests that only look."""
    return training()


def pods_named(world: World, part: str) -> list[str]:
    return [name for name in world.names_of(port.POD) if part in name]


# logs


def test_logs_of_a_step_are_those_of_its_newest_attempt(kubectl: Start) -> None:
    world = standing()
    call = kubectl(world)
    old, new = pods_named(world, "train-a0")[0], pods_named(world, "train-a1")[0]
    call.pods.texts = {old: ["first try"], new: ["second try", "step 1"]}
    assert call("logs", "chess", "train").out.splitlines() == ["second try", "step 1"]
    assert call("logs", "chess", "train", "--attempt", "0").out.splitlines() == ["first try"]
    assert call("logs", "chess", "train", "--tail", "5", "-f", "-c", "side", "--round", "1").code == 0
    assert call.pods.asked[-1] == (new, "side", True, 5)
    assert call.pods.asked[0] == (new, "step", False, None)
    assert call("logs", "chess", "train", "-p").out == f"{new} step None: before it crashed\n"


def test_logs_of_an_older_round_are_not_taken_for_those_of_the_current_one(kubectl: Start) -> None:
    world = standing()
    call = kubectl(world)
    call.pods.texts = {pods_named(world, "r0000-gate")[0]: ["mean 0.01"]}
    done = call("logs", "chess", "gate")
    assert done.out == "mean 0.01\n"
    assert "these lines are of round 0" in done.err


def test_logs_of_several_pods_say_whose_line_it_is(kubectl: Start) -> None:
    world = training(training={"nodes": 2})
    call = kubectl(world)
    pods = pods_named(world, "train-a1")
    assert len(pods) == 2
    call.pods.texts = {pods[0]: ["a", "b"], pods[1]: ["c"]}
    lines = call("logs", "chess", "train").out.splitlines()
    assert sorted(lines) == sorted([f"[{pods[0]}] a", f"[{pods[0]}] b", f"[{pods[1]}] c"])


def test_one_pod_without_a_log_does_not_hide_the_others(kubectl: Start) -> None:
    world = training(training={"nodes": 2})
    call = kubectl(world)
    pods = pods_named(world, "train-a1")
    call.pods.texts = {pods[0]: ["a"]}
    done = call("logs", "chess", "train")
    assert done.code == 0
    assert "is waiting to start" in done.out
    call.pods.texts = {}
    assert call("logs", "chess", "train").code == 2


@pytest.mark.parametrize(("step", "part"), [("serve", "r0000-serve"), ("gateway", "gateway")])
def test_logs_of_servers_and_of_the_gateway(kubectl: Start, step: str, part: str) -> None:
    world = standing()
    call = kubectl(world)
    call.pods.texts = {pods_named(world, part)[0]: ["ready"]}
    assert call("logs", "chess", step).out == "ready\n"


def test_logs_that_are_not_there_say_what_is(kubectl: Start) -> None:
    call = kubectl(standing())
    done = call("logs", "chess", "gate", "--round", "1")
    assert done.code == 2
    assert "no pod of gate of round 1 is there; round 1 is at Training" in done.err
    assert "no pod of train, attempt 7 is there" in call("logs", "chess", "train", "--attempt", "7").err
    assert "must be one of collect, train" in call("logs", "chess", "trian").err


# audit and report


def figures(pod: str, command: list[str]) -> Finished:
    if command[:1] == ["python"]:
        return Finished(0, json.dumps({"version": "v", "stats": {"sha256:a": {"requests": 3, "answered": 2}}}), "")
    if "curves" in command:
        return Finished(0, json.dumps({"steps": [{"round": 1, "step": 1, "reward_mean": 0.5}]}), "")
    return Finished(0, json.dumps(AUDIT), "INFO noise\n")


def test_audit_asks_a_pod_of_the_gateway_for_this_runs_store(kubectl: Start) -> None:
    storage = {"uri": "s3://data/chess", "endpointUrl": "http://s3:9000", "region": "eu-1", "secretRef": {"name": "k"}}
    open_to_all = {"authentication": "Anonymous"}
    world = training(storage=storage, gateway=open_to_all, recording={"rewardDeadlineSeconds": 77})
    call = kubectl(world)
    call.pods.answers = figures
    done = call("audit")
    assert done.code == 0
    assert done.out.splitlines() == [AUDIT["equation"], "the equation holds"]
    [(pod, container, command)] = call.pods.commands
    assert (pod, container) == (pods_named(world, "gateway")[0], "gateway")
    assert command[:4] == ["prodrl", "data", "audit", "--json"]
    options = dict(zip(command[4::2], command[5::2], strict=True))
    assert options == {
        "--reward-deadline": "77",
        "--store": "s3://data/chess",
        "--endpoint-url": "http://s3:9000",
        "--region": "eu-1",
    }
    assert json.loads(call("audit", "-o", "json").out) == AUDIT


@pytest.mark.parametrize(
    "changes",
    [
        {"holds": False, "faults": ["Round 1: the ledger is damaged"]},
        {"fate": FATE | {"recorded": 11}},
        {"fate": FATE | {"excluded": {}}},
    ],
)
def test_audit_fails_when_the_equation_does_not_hold_whatever_it_claims(
    kubectl: Start, changes: dict[str, Any]
) -> None:
    call = kubectl(standing())
    call.pods.answers = lambda pod, command: Finished(1, json.dumps(AUDIT | changes), "")
    done = call("audit")
    assert done.code == 1
    assert "DOES NOT hold" in done.out
    assert all(fault in done.out for fault in changes.get("faults", []))


def test_audit_without_figures_or_without_a_gateway_is_an_error_not_a_pass(kubectl: Start) -> None:
    call = kubectl(standing())
    call.pods.answers = lambda pod, command: Finished(77, "", "prodrl: CredentialsRejected: renew the Secret")
    done = call("audit")
    assert done.code == 2
    assert "exit code 77: prodrl: CredentialsRejected: renew the Secret" in done.err
    empty = kubectl(World())("audit")
    assert empty.code == 2
    assert "no pod of its gateway runs" in empty.err


def test_report_is_one_file_with_the_figures_of_store_and_gateway(kubectl: Start, tmp_path: Path) -> None:
    call = kubectl(standing())
    call.pods.answers = figures
    target = tmp_path / "r.html"
    done = call("report", "-o", str(target))
    assert (done.code, done.err) == (0, "")
    assert done.out.strip() == str(target)
    text = target.read_text()
    assert AUDIT["equation"] in text
    assert not re.search(r"<(script|link)[^>]*(src|href)=[\"']?http", text), "nothing is loaded from elsewhere"
    assert call("report", "-o", "/proc/nowhere/r.html").code == 2


def test_a_report_with_gaps_is_better_than_none_and_names_them(kubectl: Start, tmp_path: Path) -> None:
    call = kubectl(standing())

    def refused(pod: str, command: list[str]) -> Finished:
        raise ForbiddenError("pods/exec is forbidden")

    call.pods.answers = refused
    done = call("report", "-o", str(tmp_path / "r.html"))
    assert done.code == 0
    assert [line.split(":")[1].strip() for line in done.err.splitlines()] == ["audit", "curves", "counters"]
    assert "Training" in (tmp_path / "r.html").read_text()


# a command in a pod: the API server's WebSocket protocol (v4.channel.k8s.io), played by an independent server


@contextmanager
def exec_server(frames: list[bytes], status: int = 101) -> Iterator[tuple[str, list[Any]]]:
    """Answers every exec with these frames; yields its address and the requests that it saw."""
    seen: list[Any] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        seen.append(request)
        if status != 101:
            return web.json_response({"kind": "Status", "message": "the server says no"}, status=status)
        socket = web.WebSocketResponse(protocols=["v4.channel.k8s.io"])
        await socket.prepare(request)
        for frame in frames:
            await socket.send_bytes(frame)
        await socket.close()
        return socket

    async def log(request: web.Request) -> web.Response:
        seen.append(request)
        if status != 101:
            return web.json_response(
                {"kind": "Status", "message": "previous terminated container not found"}, status=status
            )
        return web.Response(body=b"".join(frames))

    loop, started, address = asyncio.new_event_loop(), threading.Event(), [""]

    async def start() -> web.AppRunner:
        app = web.Application()
        app.router.add_get("/api/v1/namespaces/{namespace}/pods/{pod}/exec", answer)
        app.router.add_get("/api/v1/namespaces/{namespace}/pods/{pod}/log", log)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        address[0] = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return runner

    def work() -> None:
        asyncio.set_event_loop(loop)
        runner = loop.run_until_complete(start())
        started.set()
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=work)
    thread.start()
    started.wait(10)
    try:
        yield address[0], seen
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


def pods_at(address: str) -> KubernetesPods:
    configuration = Configuration()
    configuration.host = address
    return KubernetesPods(KubernetesCluster(configuration))


MISSING = "previous terminated container not found"
SUCCESS = b'\x03{"metadata":{},"status":"Success"}'
FAILURE = (
    b'\x03{"metadata":{},"status":"Failure","reason":"NonZeroExitCode",'
    b'"details":{"causes":[{"reason":"ExitCode","message":"77"}]}}'
)


def test_exec_keeps_output_errors_and_exit_code_apart() -> None:
    letter = "\u00e9".encode()
    # One character split between two frames, as the kubelet's buffers may.
    frames = [b"\x01caf" + letter[:1], b"\x02warning", b"\x01" + letter[1:] + b"\n", SUCCESS]
    with exec_server(frames) as (address, seen):
        done = pods_at(address).exec("ns", "pod-1", ["prodrl", "data"], "gateway")
    assert done == Finished(0, "caf\u00e9\n", "warning")
    (request,) = seen
    assert request.match_info == {"namespace": "ns", "pod": "pod-1"}
    assert request.query.getall("command") == ["prodrl", "data"]
    assert request.query["container"] == "gateway"
    with exec_server([b"\x02no", FAILURE]) as (address, _):
        assert pods_at(address).exec("ns", "p", ["x"]) == Finished(77, "", "no")


@pytest.mark.parametrize(
    ("frames", "status", "error", "text"),
    [
        ([b"\x01{"], 101, ClusterUnavailableError, "broke off"),
        ([b'\x03{"status":"Failure","message":"no such file"}'], 101, ClusterUnavailableError, "no such file"),
        ([], 403, ForbiddenError, "the server says no; it needs the verbs get and create on pods/exec"),
        ([], 404, NotFoundError, "the server says no"),
        ([], 500, ClusterUnavailableError, "the server says no"),
    ],
)
def test_exec_that_did_not_end_is_never_taken_for_an_answer(
    frames: list[bytes], status: int, error: type[OperatorError], text: str
) -> None:
    with exec_server(frames, status) as (address, _), pytest.raises(error, match=text):
        pods_at(address).exec("ns", "pod", ["prodrl"])


def test_the_log_before_a_restart_is_asked_for_and_its_absence_said() -> None:
    with exec_server([b"caf\xc3\xa9\nboom\n"]) as (address, seen):
        assert list(pods_at(address).previous_logs("ns", "p", "step", 5)) == ["caf\u00e9", "boom"]
    asked = dict(seen[0].query)
    assert asked.pop("previous").lower() == "true"
    assert asked == {"container": "step", "tailLines": "5"}
    with (
        exec_server([], 400) as (address, _),
        pytest.raises(InvalidError, match="previous terminated container not found"),
    ):
        list(pods_at(address).previous_logs("ns", "p", None, None))


# completion


def complete(call: Kubectl, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    monkeypatch.setattr("sys.argv", ["kubectl_complete-prodrl", *words])
    capsys.readouterr()
    completing.main()
    *candidates, directive = capsys.readouterr().out.splitlines()
    assert directive == ":4"
    return dict(line.partition("\t")[::2] for line in candidates if line)


@pytest.fixture
def completed(
    kubectl: Start, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Any]:
    call = kubectl(standing())
    monkeypatch.setattr("os.environ", dict(os.environ))
    return lambda *words: complete(call, monkeypatch, capsys, *words)


def test_completion_offers_commands_runs_rounds_steps_and_options(completed: Callable[..., Any]) -> None:
    commands = completed("")
    assert {"status", "rounds", "watch", "approve", "abort", "retry", "suspend", "resume", "logs"} <= set(commands)
    assert commands["status"].startswith("Show a run as a tree")
    assert set(completed("re")) == {"retry", "resume", "report"}
    assert completed("status", "") == {"chess": "round 1 Training"}
    assert completed("status", "go") == {}
    assert completed("abort", "chess", "") == {"1": "Training"}
    assert set(completed("logs", "chess", "")) == {"collect", "train", "export", "serve", "gate", "gateway"}
    assert set(completed("logs", "chess", "g")) == {"gate", "gateway"}
    assert set(completed("status", "-o", "")) == {"table", "json", "yaml"}
    assert "--namespace" in completed("status", "--")


def test_completion_looks_where_the_options_say(completed: Callable[..., Any]) -> None:
    assert completed("status", "-n", "empty", "") == {}
    assert completed("-n", "empty", "status", "") == {}
    assert completed("status", "-n", "default", "ch") == {"chess": "round 1 Training"}


def test_completion_without_a_cluster_offers_nothing_and_no_error(
    completed: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object) -> access.Access:
        raise ClusterUnavailableError("no answer")

    monkeypatch.setattr(access, "connect", away)
    assert completed("status", "") == {}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_are_printed(kubectl: Start, monkeypatch: pytest.MonkeyPatch, shell: str) -> None:
    monkeypatch.setattr("os.environ", dict(os.environ))
    done = kubectl(World())("completion", shell)
    assert done.code == 0
    assert "kubectl-prodrl" in done.out
    if shell == "bash":
        subprocess.run(["bash", "-n"], input=done.out, text=True, check=True)
