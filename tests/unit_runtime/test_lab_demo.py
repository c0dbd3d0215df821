"""What the demo writes and starts: its run is one the operator takes, its folder resumes or makes room."""

from __future__ import annotations

import fcntl
import json
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import yaml
from typer.testing import CliRunner

import prodrl
from prodrl.config import StoreConfig
from prodrl.errors import DataError, UsageError
from prodrl.lab import demo as demos
from prodrl.lab import generate, prepare, runspec, suite
from prodrl.lab.cli import app
from prodrl.lab.display import Display
from prodrl.lab.prepare import Prepared, Request
from prodrl.lab.puzzles import write_puzzles
from prodrl.lab.tally import Tally
from prodrl.lab.users import Behaviour
from prodrl.store import open_store
from prodrl.store.folders import fetch_folder
from prodrl_operator.api import crd
from prodrl_operator.cluster.local.store import ObjectStore
from prodrl_operator.local import manifests


@pytest.fixture
def prepared(tmp_path) -> Prepared:
    folder = tmp_path / "cache"
    (folder / "model").mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (folder / "model" / name).write_text("{}")
    rows = list(generate.generate(60, seed=1))
    write_puzzles(folder / "users.csv", rows[:30])
    write_puzzles(folder / "held_out.csv", rows[30:])
    (folder / "lab.json").write_text('{"solve_rate": 0.3}')
    return Prepared(folder)


@pytest.fixture
def demo(tmp_path) -> demos.Demo:
    return demos.Demo(runspec.Options(data=tmp_path / "data"), Request(), Behaviour())


@pytest.mark.parametrize("harmful", [False, True])
def test_the_operator_takes_the_run(tmp_path, harmful) -> None:
    options = runspec.Options(data=tmp_path / "data", is_harmful=harmful, on_blocked="ContinueLineage")
    document = runspec.run_document(options)
    run = manifests.parse_run(yaml.safe_load(yaml.safe_dump(document)))
    assert run.spec.training.optimizer.maximise is not harmful
    assert run.spec.rounds.steps * run.spec.rounds.batch_size == 8 * 32
    assert run.spec.gate.evaluations[0].min_items <= run.spec.gate.evaluations[0].max_items
    document["metadata"]["namespace"] = "default"
    store = ObjectStore(tmp_path / "state.db", crds=list(crd.crds().values()))
    try:
        store.create(document)  # schema and CEL rules
    finally:
        store.close()


def test_the_example_is_a_run_the_operator_takes() -> None:
    path = pathlib.Path(__file__).parents[2] / "examples" / "01-chess" / "run.yaml"
    _, document = manifests.read(path)
    assert manifests.parse_run(document).metadata["name"] == "chess"


def test_the_folder_has_model_puzzles_suite_and_run(demo, prepared, tmp_path) -> None:
    path = demos.lay_out(demo, prepared)
    assert yaml.safe_load(path.read_text())["spec"]["model"]["uri"] == f"file://{demo.data}/model"
    assert (demo.data / "model" / "model.safetensors").is_file()
    store = open_store(StoreConfig(uri=f"file://{demo.data}/store"))
    manifest = fetch_folder(store, runspec.SUITE_KEY, tmp_path / "fetched")
    assert manifest.kind == "suite"
    assert len(suite.chess_puzzles(tmp_path / "fetched", {}).items()) >= 25
    before = {p: p.stat().st_mtime_ns for p in (demo.data / "model").iterdir()}
    demos.lay_out(demo, prepared)
    assert before == {p: p.stat().st_mtime_ns for p in (demo.data / "model").iterdir()}


@pytest.mark.parametrize("state", ["Completed", "Stalled"])
def test_a_finished_run_makes_room(demo, prepared, state) -> None:
    demos.lay_out(demo, prepared)
    (demo.data / "summary.json").write_text(json.dumps({"state": state}))
    aside = demo.data.with_name("data.previous")
    (aside / "older").mkdir(parents=True)
    demos.make_room(demo, Display())
    assert not demo.data.exists()
    assert (aside / "run.yaml").is_file()
    assert not (aside / "older").exists()


@pytest.mark.parametrize(("state", "keep"), [("Interrupted", False), ("Running", False), ("Completed", True)])
def test_an_unfinished_or_kept_run_stays(demo, prepared, state, keep) -> None:
    demos.lay_out(demo, prepared)
    (demo.data / "summary.json").write_text(json.dumps({"state": state}))
    demos.make_room(demos.Demo(demo.spec, demo.request, demo.behaviour, keep=keep), Display())
    assert (demo.data / "run.yaml").is_file()


def test_a_folder_in_use_is_refused(demo) -> None:
    demo.data.mkdir()
    demos.refuse_if_used(demo.data)
    (demo.data / "lock").touch()
    demos.refuse_if_used(demo.data)
    (demo.data / "owner.json").write_text('{"pid": 4711}')
    with (demo.data / "lock").open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(UsageError, match="4711"):
            demos.refuse_if_used(demo.data)


OPERATOR = """
    #!{python}
    import json, os, pathlib, signal, sys, time
    data = pathlib.Path(sys.argv[sys.argv.index("--data") + 1])
    assert sys.argv[1] == "local" and "--keep" in sys.argv, sys.argv
    (data / "endpoint.json").write_text(json.dumps({{"endpoint": "http://127.0.0.1:9", "pid": os.getpid()}}))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit({code}))
    deadline = time.time() + 20
    while not (data / "users-started").exists() and time.time() < deadline:
        time.sleep(0.02)
    (data / "report.html").write_text("")
    if {state!r}:
        (data / "summary.json").write_text(json.dumps({{"state": {state!r}}}))
        time.sleep(30)
    sys.exit(5)
"""
USERS = """
    #!{python}
    import json, pathlib, signal, sys, time
    sys.path.insert(0, {runtime!r})
    from prodrl.lab.tally import Tally
    report = pathlib.Path(sys.argv[sys.argv.index("--report") + 1])
    assert sys.argv[1:3] == ["lab", "users"] and "--until-exit" in sys.argv, sys.argv
    tally = Tally()
    def leave(*_):
        tally.sent = 3
        tally.answered = 3
        tally.answer("sha256:abc"); tally.answered = 3
        tally.write(report)
        sys.exit(0)
    signal.signal(signal.SIGTERM, leave)
    (report.parents[1] / "users-started").touch()
    time.sleep(30)
    sys.exit(1)
"""


def script(path, text, **values) -> None:
    path.write_text(textwrap.dedent(text).lstrip().format(python=sys.executable, **values))
    path.chmod(0o755)


@pytest.fixture
def scripts(tmp_path, monkeypatch) -> pathlib.Path:
    """Where the demo finds the console scripts."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setattr(demos, "_beside", lambda name: str(folder / name))
    return folder


@pytest.mark.parametrize(("state", "code"), [("Completed", 0), ("Stalled", 3), ("", 5)])
def test_users_leave_before_the_operator_and_its_code_is_ours(  # noqa: PLR0917  (fixtures)
    demo, prepared, scripts, monkeypatch, capfd, state, code
) -> None:
    script(scripts / "prodrl-operator", OPERATOR, state=state, code=code)
    script(scripts / "prodrl", USERS, runtime=str(pathlib.Path(prodrl.__file__).parents[1]))
    monkeypatch.setattr(demos, "prepare", lambda *_: prepared)
    assert demos.run(demo, Display()) == code
    said = capfd.readouterr().out
    assert "3 requests sent, 3 answered, 0 failed" in said
    assert str(demo.data / "report.html") in said


def test_the_users_command_takes_every_flag_of_the_demo() -> None:
    flags = demos.behaviour_flags(Behaviour(rate=2.5, unscored=0.1, late=0.2, duplicate=0.3, abort=0.4))
    result = CliRunner().invoke(app, ["users", "--help"], env={"COLUMNS": "200", "TERM": "dumb"})
    assert result.exit_code == 0
    for flag in flags[::2]:
        assert flag in result.output
    assert flags[flags.index("--late") + 1] == "0.2"


def test_shares_that_exceed_one_are_refused(tmp_path) -> None:
    write_puzzles(tmp_path / "p.csv", list(generate.generate(20, seed=1)))
    arguments = ["users", "--gateway", "http://127.0.0.1:9", "--puzzles", str(tmp_path / "p.csv")]
    result = CliRunner().invoke(app, [*arguments, "--unscored", "0.7", "--late", "0.7"])
    assert isinstance(result.exception, UsageError)


def test_the_users_process_stops_on_sigterm_and_leaves_its_report(tmp_path) -> None:
    write_puzzles(tmp_path / "p.csv", list(generate.generate(20, seed=1)))
    report = tmp_path / "users.json"
    command = [sys.executable, "-c", "from prodrl.cli import main; main()", "lab", "users"]
    command += ["--gateway", "http://127.0.0.1:9", "--puzzles", str(tmp_path / "p.csv"), "--report", str(report)]
    process = subprocess.Popen(command)
    try:
        deadline = time.monotonic() + 60
        while not report.is_file() and time.monotonic() < deadline:
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
    assert json.loads(report.read_text())["failed"] == 0  # nobody there is no failed request


def test_play_shows_a_board_and_the_solution(tmp_path) -> None:
    write_puzzles(tmp_path / "p.csv", [p for p in generate.generate(20, seed=1) if p.num_turns == 1])
    result = CliRunner().invoke(app, ["play", "--puzzles", str(tmp_path / "p.csv"), "--pause", "0"])
    assert result.exit_code == 0, result.output
    assert "solved" in result.output
    assert result.output.count("a  b  c  d  e  f  g  h") == 2
    wrong = CliRunner().invoke(app, ["play", "--puzzles", str(tmp_path / "p.csv"), "--me"], input="zz\n")
    assert wrong.exit_code == 1
    assert "no move at all" in wrong.output


def test_the_cache_is_named_by_what_decides_the_result(tmp_path) -> None:
    same, other = Request(seed=1).digest(), Request(seed=2).digest()
    assert Request(seed=1).digest() == same != other
    (tmp_path / "p.csv").write_text("a")
    first = Request(puzzles=tmp_path / "p.csv").digest()
    (tmp_path / "p.csv").write_text("b")
    assert Request(puzzles=tmp_path / "p.csv").digest() != first


def test_the_cache_appears_whole_or_not_at_all(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PRODRL_CACHE", str(tmp_path))

    def fails(_request, folder, _display):
        (folder / "warm.csv").write_text("half")
        raise DataError("no")

    made = []

    def works(_request, folder, _display):
        made.append(folder)
        (folder / "lab.json").write_text('{"solve_rate": 0.5}')

    monkeypatch.setattr(prepare, "_make", fails)
    with pytest.raises(DataError):
        prepare.prepare(Request(), Display())
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(prepare, "_make", works)
    assert prepare.prepare(Request(), Display()).figures["solve_rate"] == 0.5
    prepare.prepare(Request(), Display())
    assert len(made) == 1
    assert len(list(tmp_path.iterdir())) == 1


def test_too_few_puzzles_are_refused(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PRODRL_CACHE", str(tmp_path / "cache"))
    write_puzzles(tmp_path / "few.csv", list(generate.generate(30, seed=1)))
    with pytest.raises(DataError, match="give more puzzles"):
        prepare.prepare(Request(puzzles=tmp_path / "few.csv"), Display())


def test_an_empty_tally_can_be_shown() -> None:
    assert demos.tally_lines(Tally()) == ["users: 0 requests sent, 0 answered, 0 failed, 0 aborted"]


def test_a_prepare_that_is_told_to_stop_leaves_nothing_behind(tmp_path) -> None:
    command = [sys.executable, "-c", "from prodrl.cli import main; main()", "lab", "prepare", "--count", "500"]
    process = subprocess.Popen(command, env={**os.environ, "PRODRL_CACHE": str(tmp_path)}, stdout=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 120
        while not list(tmp_path.glob(".lab-*/users.csv")) and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode != 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("phases", "stable", "code"),
    [
        (["Promoted", "Blocked"], 0, 0),
        (["Promoted", "Promoted"], 1, 1),
        (["Promoted", "Failed"], 0, 1),
        (["Promoted"], 0, 1),
    ],
    ids=["blocked", "a harmful round went live", "failed for another reason", "no round was trained"],
)
def test_a_rehearsal_succeeds_only_when_every_harmful_round_was_blocked(phases, stable, code) -> None:
    rounds = [{"number": number, "phase": phase} for number, phase in enumerate(phases)]
    assert demos.judge_rehearsal({"rounds": rounds, "stable": {"round": stable}}, Display()) == code
