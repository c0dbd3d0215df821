"""The demo: the whole loop on this machine, with simulated users in front of it. Called by ``prodrl lab demo``.

It writes what a user would write (a model folder, a suite's folder in the store, ``run.yaml``), starts the operator on
it as a user would, and sets the users going. Everything lies in one data folder, so that a second start resumes.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from prodrl.config import StoreConfig
from prodrl.errors import UsageError
from prodrl.lab import runspec
from prodrl.lab.display import Display
from prodrl.lab.prepare import Prepared, Request, prepare
from prodrl.lab.suite import FILE
from prodrl.lab.tally import Tally, read_tally
from prodrl.lab.users import Behaviour
from prodrl.store import open_store
from prodrl.store.folders import write_folder

_ENDED = ("Completed", "Stalled")
_STALLED = 3
"""The operator's exit code for a run that waits for a person."""
_LOOK_SECONDS = 0.5
_OPERATOR_STOP_SECONDS = 90.0
_USERS_STOP_SECONDS = 30.0


@dataclass(frozen=True)
class Demo:
    """What is to be shown."""

    spec: runspec.Options
    request: Request
    behaviour: Behaviour
    keep: bool = False
    """Go on with a run that has ended (with more rounds, say) instead of starting afresh."""
    port: int = 0
    """The gateway's; 0: any free one."""

    @property
    def data(self) -> Path:
        """The data folder."""
        return self.spec.data


def ended_state(data: Path) -> str | None:
    """Completed or Stalled where the folder's run came to its end, else None."""
    state = _read(data / "summary.json").get("state")
    return state if state in _ENDED else None


def _read(path: Path) -> dict[str, Any]:
    """A JSON object, empty where there is none (yet)."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def refuse_if_used(data: Path) -> None:
    """Raise while an operator works in the folder: it must not be moved away, nor its files be replaced.

    Raises:
        UsageError: The operator's lock is held.
    """
    try:
        with (data / "lock").open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return
    except BlockingIOError as exc:
        owner = _read(data / "owner.json").get("pid", "unknown")
        raise UsageError(
            f"Demo {data}: the folder is in use by process {owner}; wait for it, stop it, or choose another --data"
        ) from exc


def make_room(demo: Demo, display: Display) -> None:
    """Put a finished run aside; leave an unfinished one to be resumed."""
    data = demo.data
    state = ended_state(data)
    if state is None or demo.keep:
        if (data / "run.yaml").is_file():
            display.say(f"going on with the run in {data}")
        return
    aside = data.with_name(f"{data.name}.previous")
    if aside.exists():
        shutil.rmtree(aside)
    data.rename(aside)
    display.say(f"the {state.lower()} run was moved to {aside}")


def lay_out(demo: Demo, prepared: Prepared) -> Path:
    """Write the data folder; what is there already stays. Returns the path of ``run.yaml``."""
    data = demo.data
    data.mkdir(parents=True, exist_ok=True)
    if not (data / "model").is_dir():
        making = data / ".model"
        shutil.rmtree(making, ignore_errors=True)
        shutil.copytree(prepared.model, making)
        making.rename(data / "model")
    for name, source in (("users.csv", prepared.users), (f"suite/{FILE}", prepared.held_out)):
        target = data / "puzzles" / name
        if not target.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target.with_suffix(".part"))
            target.with_suffix(".part").replace(target)
    store = open_store(StoreConfig(uri=f"file://{data / 'store'}"))
    write_folder(store, runspec.SUITE_KEY, data / "puzzles" / "suite", "suite", {"suite": "chess-puzzles"})
    path = data / "run.yaml"
    path.write_text(yaml.safe_dump(runspec.run_document(demo.spec), sort_keys=False), encoding="utf-8")
    return path


def run(demo: Demo, display: Display) -> int:
    """Prepare, run to the end, report. Returns the operator's exit code; of a rehearsed harm, 0 when it was blocked."""
    refuse_if_used(demo.data)
    prepared = prepare(demo.request, display)
    figures = prepared.figures
    display.say(f"base model solves {figures['solve_rate']:.1%} of held-out puzzles (before quantisation)")
    make_room(demo, display)
    path = lay_out(demo, prepared)
    with _Processes(demo, path) as processes:
        code = processes.follow()
    _conclude(demo, processes.tally, display)
    if demo.spec.is_harmful and code == _STALLED:
        return judge_rehearsal(_read(demo.data / "summary.json"), display)
    return code


def judge_rehearsal(summary: dict[str, Any], display: Display) -> int:
    """Whether the gate did what a rehearsal is for: every training round Blocked, the base policy still stable."""
    rounds = [item for item in summary.get("rounds", []) if item["number"] > 0]
    blocked = [item for item in rounds if item["phase"] == "Blocked"]
    if rounds and blocked == rounds and (summary.get("stable") or {}).get("round") == 0:
        display.say(f"as it should be: {len(blocked)} harmful rounds blocked, users stayed on the policy of round 0")
        return 0
    display.say("this is not what the rehearsal was to show: read the report")
    return 1


class _Processes:
    """The operator, which has the terminal, and the users, which have a log file."""

    def __init__(self, demo: Demo, run_yaml: Path) -> None:
        self._demo = demo
        self._yaml = run_yaml
        self._report = demo.data / "clients" / "users.json"
        self._operator: subprocess.Popen[bytes] | None = None
        self._users: subprocess.Popen[bytes] | None = None

    @property
    def tally(self) -> Tally:
        """What the users counted."""
        return read_tally(self._report)

    def __enter__(self) -> _Processes:
        command = [_beside("prodrl-operator"), "local", str(self._yaml), "--data", str(self._demo.data)]
        # --keep: the gateway stays up until the users have left; then the demo stops the operator.
        command += ["--keep", "--port", str(self._demo.port)]
        self._started = time.time()
        self._operator = subprocess.Popen(command)
        return self

    def follow(self) -> int:
        """Until the operator ends, or the run does."""
        assert self._operator is not None, "entered"
        try:
            while self._operator.poll() is None:
                self._start_users()
                if self._has_ended():
                    self._stop_users()
                    self._operator.terminate()
                    self._operator.wait(_OPERATOR_STOP_SECONDS)
                    break
                time.sleep(_LOOK_SECONDS)
        except KeyboardInterrupt:
            # Ctrl-C reaches the operator as well, SIGTERM is passed on below; it takes either twice.
            self._stop_users()
        return _end(self._operator, signal.SIGTERM, _OPERATOR_STOP_SECONDS)

    def __exit__(self, *_: object) -> None:
        self._stop_users()
        if self._operator is not None:
            _end(self._operator, signal.SIGTERM, _OPERATOR_STOP_SECONDS)

    def _has_ended(self) -> bool:
        path = self._demo.data / "summary.json"
        return path.is_file() and path.stat().st_mtime >= self._started and ended_state(self._demo.data) is not None

    def _start_users(self) -> None:
        """Once the operator has said where the gateway listens; users themselves wait until it answers."""
        assert self._operator is not None, "entered"
        facts = _read(self._demo.data / "endpoint.json")
        if self._users is not None or facts.get("pid") != self._operator.pid:
            return
        logs = self._demo.data / "logs"
        logs.mkdir(exist_ok=True)
        puzzles = self._demo.data / "puzzles" / "users.csv"
        command = [_beside("prodrl"), "lab", "users", "--gateway", str(facts["endpoint"]), "--puzzles", str(puzzles)]
        command += ["--model", runspec.NAME, "--report", str(self._report), "--until-exit", str(os.getpid())]
        command += behaviour_flags(self._demo.behaviour)
        with (logs / "users.log").open("ab") as log:
            # A session of its own: on Ctrl-C they are stopped by us, after having been let finish.
            self._users = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def _stop_users(self) -> None:
        if self._users is not None:
            _end(self._users, signal.SIGTERM, _USERS_STOP_SECONDS)


def _end(process: subprocess.Popen[bytes], number: int, seconds: float) -> int:
    """Stop a child if it runs still, harder if need be. A second Ctrl-C skips the waiting."""
    if process.poll() is None:
        process.send_signal(number)
        try:
            process.wait(seconds)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            process.kill()
    return process.wait()


def _beside(script: str) -> str:
    """A console script of the environment that runs this."""
    return str(Path(sys.executable).with_name(script))


def behaviour_flags(behaviour: Behaviour) -> list[str]:
    """The users' command line."""
    values = {
        "--rate": behaviour.rate,
        "--concurrency": behaviour.concurrency,
        "--unscored": behaviour.unscored,
        "--late": behaviour.late,
        "--late-seconds": behaviour.late_seconds,
        "--duplicate": behaviour.duplicate,
        "--abort": behaviour.abort,
        "--seed": behaviour.seed,
    }
    return [part for flag, value in values.items() for part in (flag, str(value))]


def tally_lines(tally: Tally) -> Sequence[str]:
    """What the users saw, for people."""
    lines = [
        f"users: {tally.sent} requests sent, {tally.answered} answered, {tally.failed} failed, {tally.aborted} aborted"
    ]
    for digest, one in tally.by_digest.items():
        rate = "no puzzle finished" if one.rate is None else f"{one.rate:.1%} of {one.trajectories} puzzles solved"
        lines.append(f"  {digest[:19]}: {one.answered} answers, {rate}")
    lines += [f"  {count} x {error}" for error, count in tally.errors.most_common()]
    return lines


def _conclude(demo: Demo, tally: Tally, display: Display) -> None:
    for line in tally_lines(tally):
        display.say(line)
    report = demo.data / "report.html"
    if report.is_file():
        display.say(f"report: {report}")
