"""The command line: exit codes, the result file, signals, and the progress server."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
import types
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prodrl import cli, errors, progress
from prodrl.config import CollectResult, StoreConfig, TrainResult
from prodrl.config.results import AgreementFigures, EvaluateResult, PairedFigures
from prodrl.progress import Progress
from prodrl.store import open_store
from tests.support.records import make_config, make_record, world

pytest_plugins = ["tests.support.stores"]
DIGEST = "sha256:" + "0" * 64
RESULT = CollectResult(dataset_key="d", dataset_digest=DIGEST, trajectories=4, tokens=8, reward_mean=0.5)


@pytest.fixture
def run_collect(local_config: StoreConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """``prodrl collect`` with another step in its place; gives the exit code and what the result file holds."""
    config = tmp_path / "config.json"
    config.write_text(make_config(local_config).model_dump_json())

    def act(work: Callable[..., Any], *arguments: str, result: Path = tmp_path / "result.json") -> tuple[int, Any]:
        monkeypatch.setitem(sys.modules, "prodrl.collect.run", types.SimpleNamespace(run=work))
        monkeypatch.setattr(
            sys, "argv", ["prodrl", "collect", "--config", str(config), "--result", str(result), *arguments]
        )
        with pytest.raises(SystemExit) as caught:
            cli.main()
        text = result.read_text() if result.exists() else ""
        assert len(text.encode()) <= 4096
        return int(caught.value.code or 0), json.loads(text) if text else None

    return act


def raising(exc: BaseException) -> Callable[..., Any]:
    def work(*_: object) -> None:
        raise exc

    return work


def test_a_finished_step_leaves_its_result(run_collect: Callable[..., Any]) -> None:
    assert run_collect(lambda *_: RESULT) == (0, RESULT.model_dump())


class TorchOutOfMemoryError(RuntimeError):
    pass


TorchOutOfMemoryError.__name__ = "OutOfMemoryError"


def wrapped(outer: Exception, inner: BaseException) -> Exception:
    outer.__cause__ = inner
    return outer


@pytest.mark.parametrize(
    ("exc", "code", "reason"),
    [
        (errors.UsageError("u"), 64, "InvalidConfiguration"),
        (errors.DataError("d"), 65, "InvalidData"),
        (errors.UnavailableError("u"), 69, "PeerUnavailable"),
        (errors.CredentialsError("c"), 77, "CredentialsRejected"),
        (errors.NumericsError("n"), 79, "Numerics"),
        (errors.PreemptedError("p"), 80, "Preempted"),
        (OSError(errno.ENOSPC, "full", "/x"), 74, "StorageFull"),
        (wrapped(RuntimeError("writer failed"), OSError(errno.ENOSPC, "full")), 74, "StorageFull"),
        (MemoryError(), 78, "OutOfMemory"),
        (TorchOutOfMemoryError("CUDA"), 78, "OutOfMemory"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), 78, "OutOfMemory"),
        (KeyboardInterrupt(), 80, "Preempted"),
        (ValueError("a bug"), 1, "InternalError"),
        (wrapped(ValueError("a bug"), errors.DataError("handled")), 1, "InternalError"),
        (OSError(errno.EACCES, "no"), 1, "InternalError"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_a_failure_becomes_its_exit_code_and_a_reason(
    run_collect: Callable[..., Any], exc: BaseException, code: int, reason: str
) -> None:
    found, failure = run_collect(raising(exc))
    assert (found, failure["reason"]) == (code, reason)


def test_a_bug_leaves_its_class_and_a_traceback(
    run_collect: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    _, failure = run_collect(raising(ZeroDivisionError("division")))
    assert failure["message"] == "ZeroDivisionError: division"
    assert "Traceback" in capsys.readouterr().err


def test_a_long_message_is_cut_and_stays_json(run_collect: Callable[..., Any]) -> None:
    _, failure = run_collect(raising(errors.DataError("\u00e9" * 9000)))
    assert failure["message"].startswith("\u00e9" * 100)


def test_too_many_figures_are_cut_and_every_field_stays() -> None:
    result = TrainResult(
        checkpoint_key="c",
        weights_key="w",
        weights_digest=DIGEST,
        steps=3,
        figures={f"figure_{number}": 0.123456789 for number in range(500)},
    )
    text = cli._fitted(result)
    assert len(text.encode()) <= cli.MESSAGE_BYTES
    found = TrainResult.model_validate_json(text)
    assert found.figures["figure_0"] == 0.123457
    assert found.model_copy(update={"figures": result.figures}) == result


def test_a_result_file_that_cannot_be_replaced_is_written_in_place(tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "termination-log"
    path.write_text("")

    def busy(*_: object) -> None:
        raise OSError(errno.EBUSY, "mounted")

    monkeypatch.setattr(Path, "replace", busy)
    cli.write_result(path, RESULT)
    assert CollectResult.model_validate_json(path.read_text()) == RESULT
    assert [p.name for p in tmp_path.iterdir()] == ["termination-log"]


def test_only_the_first_rank_reports_success(run_collect: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    assert run_collect(lambda *_: RESULT) == (0, None)


def test_the_cause_is_not_overwritten_by_its_echo(
    run_collect: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    run_collect(raising(errors.NumericsError("the cause")))
    monkeypatch.setenv("RANK", "0")
    code, failure = run_collect(raising(errors.PreemptedError("stopped by the launcher")))
    assert (code, failure["message"]) == (80, "the cause")


def test_a_wrong_configuration_names_every_fault(run_collect: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"round": 0, "bogus": 1}')
    code, failure = run_collect(lambda *_: RESULT)
    assert (code, failure["reason"]) == (64, "InvalidConfiguration")
    assert all(name in failure["message"] for name in ("bogus", "round", "store"))


@pytest.mark.parametrize("listen", ["8080", "host:", ":1", "host:99999", "host:x"])
def test_a_wrong_address_is_refused(run_collect: Callable[..., Any], listen: str) -> None:
    code, failure = run_collect(lambda *_: RESULT, "--listen", listen)
    assert code == 64
    assert repr(listen) in failure["message"]


def test_progress_is_served_while_the_step_runs(run_collect: Callable[..., Any], monkeypatch: Any) -> None:
    found: dict[str, str] = {}
    addresses: list[tuple[str, int]] = []
    real = progress.serve

    class Spy:
        def __init__(self, *arguments: Any) -> None:
            self._inner = real(*arguments)

        def __enter__(self) -> tuple[str, int]:
            addresses.append(self._inner.__enter__())
            return addresses[-1]

        def __exit__(self, *exc: Any) -> None:
            self._inner.__exit__(*exc)

    monkeypatch.setattr(progress, "serve", Spy)

    def work(_config: object, state: Progress) -> CollectResult:
        state.set(3, 4, 'said "so"', unit="trajectories")
        url = "http://{}:{}".format(*addresses[0])
        for path in ("/progress", "/metrics", "/healthz"):
            with urllib.request.urlopen(url + path, timeout=5) as answer:
                found[path] = answer.read().decode()
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(url + "/else", timeout=5)
        return RESULT

    assert run_collect(work, "--listen", "127.0.0.1:0")[0] == 0
    seen = json.loads(found["/progress"])
    assert abs(seen.pop("started_ms") / 1000 - time.time()) < 60
    assert seen == {"done": 3, "total": 4, "unit": "trajectories", "message": 'said "so"'}
    assert 'prodrl_step_done{unit="trajectories"} 3\n' in found["/metrics"]
    assert 'prodrl_step_total{unit="trajectories"} 4\n' in found["/metrics"]


def evaluated(count: int, name: str) -> EvaluateResult:
    value = -0.12345678901234567
    figures = PairedFigures(
        name=name,
        metric=name,
        items=1_000_000,
        candidate_mean=value,
        stable_mean=value,
        difference=value,
        low=value,
        high=value,
        candidate_failures=1_000_000,
        stable_failures=1_000_000,
    )
    agreement = AgreementFigures(samples=10**5, tokens=10**9, mean_abs=-value, p99_abs=-value, stable_mean_abs=-value)
    return EvaluateResult(agreement=agreement, evaluations=(figures,) * count)


def test_as_many_evaluations_as_a_run_may_have_fit_and_none_is_ever_left_out() -> None:
    """Ten names and metrics of 63 characters are what the API allows."""
    result = evaluated(10, "n" * 63)
    found = EvaluateResult.model_validate_json(cli._fitted(result))
    assert len(found.evaluations) == 10
    assert found.evaluations[-1].low == pytest.approx(result.evaluations[-1].low, rel=1e-5)
    with pytest.raises(errors.UsageError, match="a pod's termination message holds 4096; shorten evaluations"):
        cli._fitted(evaluated(30, "n" * 63))


def test_an_address_in_use_is_the_users_fault() -> None:
    with progress.serve(Progress(), "127.0.0.1", 0) as (host, port):
        second = progress.serve(Progress(), host, port)
        with pytest.raises(errors.UsageError, match="cannot listen"):
            second.__enter__()


def _prodrl(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "prodrl.cli", *arguments],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_sigterm_ends_a_waiting_step_with_code_80(local_config: StoreConfig, tmp_path: Path) -> None:
    config, result = tmp_path / "config.json", tmp_path / "result.json"
    config.write_text(make_config(local_config, poll_seconds=60).model_dump_json())
    process = _prodrl("collect", "--config", str(config), "--result", str(result), "--listen", "127.0.0.1:0")
    assert process.stderr is not None
    for row in process.stderr:
        if "Progress at" in row:
            break
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 80
    assert json.loads(result.read_text())["reason"] == "Preempted"
    process.communicate()


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["--version"], 0, "prodrl 0.1.0"),
        (["--help"], 0, "PRODRL_CREDENTIALS_DIR"),
        (["collect"], 64, "--config"),
        (["nonsense"], 64, "nonsense"),
        (["data", "audit", "--store", "ftp://x"], 64, "ftp://x"),
    ],
)
def test_the_console_answers(
    arguments: list[str], code: int, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["prodrl", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    shown = capsys.readouterr()
    assert int(caught.value.code or 0) == code
    assert text in shown.out + shown.err


def _data(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["prodrl", "data", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return int(caught.value.code or 0)


def test_the_audit_prints_the_equation_and_fails_when_it_does_not_hold(
    local_config: StoreConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    there = world(local_config)
    shard = there.record(make_record("t-a"))
    arguments = ("audit", "--store", local_config.uri, "--reward-deadline", "1e12")
    assert _data(monkeypatch, *arguments) == 0
    assert "1 recorded = 0 trained + 1 waiting + 0 excluded + 0 expired" in capsys.readouterr().out
    there.store.put(shard, b"damaged")
    assert _data(monkeypatch, *arguments, "--json") == 1
    assert json.loads(capsys.readouterr().out)["holds"] is False


def test_curves_are_the_rounds_metrics_in_order(
    local_config: StoreConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store = open_store(local_config)
    store.put("rounds/0002/metrics.jsonl", b'{"step": 2}\n')
    store.put("rounds/0001/metrics.jsonl", b'{"step": 0}\n{"step": 1}\n')
    assert _data(monkeypatch, "curves", "--store", local_config.uri) == 0
    steps = json.loads(capsys.readouterr().out)["steps"]
    assert steps == [{"round": 1, "step": 0}, {"round": 1, "step": 1}, {"round": 2, "step": 2}]


@pytest.mark.parametrize(("word", "code"), [("--version", 0), ("--nonsense", 64)])
@pytest.mark.parametrize(("world_size", "is_finalised"), [("1", True), ("2", False)])
def test_one_rank_of_several_ends_before_the_interpreter_is_taken_apart(
    word: str, code: int, world_size: str, is_finalised: bool
) -> None:
    program = "import atexit; from prodrl import cli; atexit.register(print, 'finalised'); cli.main()"
    ended = subprocess.run(
        [sys.executable, "-c", program, word],
        check=False, env=os.environ | {"WORLD_SIZE": world_size, "RANK": "0"}, capture_output=True, text=True,
    )  # fmt: skip
    assert ended.returncode == code
    assert ("finalised" in ended.stdout) is is_finalised
    assert "prodrl " in ended.stdout if code == 0 else "--nonsense" in ended.stderr  # what it said is not lost
