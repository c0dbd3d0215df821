"""One container on disk: its attempts, their shims, what became of them. Used by ``runner`` and ``environment``.

Everything here is read back from the attempt's folder, so that a restarted controller sees what the last one saw:
``spec.json`` (meant to start), a held ``lock`` (its shim lives), ``pid.json`` (it ran), ``exit.json`` (it ended).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from prodrl_operator.cluster.local import shim

MARK = "PRODRL_LOCAL_CONTAINER"
"""Variable in every container's environment; its value is the attempt's folder. Finds processes that fled."""

_KEPT_ATTEMPTS = 8
_LOST = 137
_MESSAGE_BYTES = 4096
_children: dict[Path, subprocess.Popen[bytes]] = {}


@dataclass(frozen=True)
class State:
    """What the last attempt is doing. Times are seconds since the epoch."""

    phase: Literal["new", "starting", "running", "ended"]
    attempt: int = 0
    started: float = 0.0
    finished: float = 0.0
    code: int = 0
    signal: int = 0
    is_out_of_memory: bool = False
    message: str = ""
    pid: int = 0


@dataclass(frozen=True)
class Container:
    """The folder of one container; attempts are numbered folders below."""

    folder: Path

    def state(self) -> State:
        """The present state; a container whose shim is gone is cleaned up and counted as killed."""
        number = self.last_attempt()
        if number is None:
            return State("new")
        folder = self.folder / str(number)
        ended = read_json(folder / "exit.json")
        if ended is None and not is_locked(folder / "lock"):
            ended = read_json(folder / "exit.json")  # it may have ended between the two looks
            if ended is None:
                if not (folder / "pid.json").exists():
                    return State("starting", number, started=(folder / "spec.json").stat().st_mtime)
                ended = self._bury(folder)
        ran = read_json(folder / "pid.json")
        if ended is None:
            if ran is None:
                return State("starting", number, started=(folder / "spec.json").stat().st_mtime)
            return State("running", number, started=ran["started"], pid=ran["pid"])
        return _ended(number, folder, ended)

    def last_attempt(self) -> int | None:
        """Number of the newest attempt."""
        numbers = self._numbers()
        return numbers[-1] if numbers else None

    def history(self) -> list[State]:
        """Ended attempts that are still remembered, oldest first."""
        folders = [(number, self.folder / str(number)) for number in self._numbers()]
        ends = [(number, folder, read_json(folder / "exit.json")) for number, folder in folders]
        return [_ended(number, folder, end) for number, folder, end in ends if end]

    def prepare(self, number: int, spec: dict[str, Any]) -> None:
        """Write down that attempt ``number`` is to run; forget very old ones."""
        folder = self.folder / str(number)
        folder.mkdir(parents=True, exist_ok=True)
        spec["env"][MARK] = str(folder)
        (folder / "termination-log").touch()
        temporary = folder / "spec.json.new"
        temporary.touch(mode=0o600)  # it holds secrets
        temporary.write_text(json.dumps(spec))
        os.replace(temporary, folder / "spec.json")
        for old in self._numbers()[:-_KEPT_ATTEMPTS]:
            shutil.rmtree(self.folder / str(old), ignore_errors=True)

    def launch(self, number: int) -> None:
        """Start the shim of a prepared attempt. Harmless when one runs already."""
        folder = self.folder / str(number)
        os.utime(folder / "spec.json")  # when the last try began
        command = [sys.executable, "-S", "-E", "-s", shim.__file__, str(folder)]
        with (folder / "shim.log").open("ab") as log:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={},
                close_fds=True,
            )
        reap()
        _children[folder] = child

    def terminate(self) -> None:
        """SIGTERM to the first process."""
        self._signal_shim(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL to all of it."""
        self._signal_shim(signal.SIGUSR1)

    def _signal_shim(self, number: int) -> None:
        attempt = self.last_attempt()
        if attempt is None:
            return
        folder = self.folder / str(attempt)
        ran = read_json(folder / "pid.json")
        if ran is not None and is_locked(folder / "lock"):  # the lock proves that the pid is still the shim's
            with contextlib.suppress(ProcessLookupError):
                os.kill(ran["shim"], number)

    def _bury(self, folder: Path) -> dict[str, Any]:
        """The shim was killed: kill what it left behind and write the exit it could not write."""
        kill_marked(str(folder))
        ran = read_json(folder / "pid.json") or {}
        end = {"code": _LOST, "signal": 9, "started": ran.get("started", time.time()), "finished": time.time()}
        temporary = folder / "exit.json.new"
        temporary.write_text(json.dumps(end))
        os.replace(temporary, folder / "exit.json")
        return end

    def _numbers(self) -> list[int]:
        if not self.folder.is_dir():
            return []
        found = (entry.name for entry in os.scandir(self.folder) if entry.name.isdigit())
        return sorted(int(name) for name in found if (self.folder / name / "spec.json").exists())


def _ended(number: int, folder: Path, end: dict[str, Any]) -> State:
    return State(
        "ended",
        number,
        started=end["started"],
        finished=end["finished"],
        code=end["code"],
        signal=end["signal"],
        is_out_of_memory=end.get("oom", False),
        message=_message(folder, end["code"]),
    )


def reap() -> None:
    """Collect the shims of this controller that have ended."""
    for folder in [folder for folder, child in _children.items() if child.poll() is not None]:
        del _children[folder]


def has_children(prefix: Path) -> bool:
    """Whether a shim of this controller below ``prefix`` has not ended, or has not even begun."""
    return any(folder.is_relative_to(prefix) for folder in _children)


def is_locked(path: Path) -> bool:
    """Whether a live process holds the lock file."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False


def marked(prefix: str) -> list[int]:
    """Processes whose container's folder begins with ``prefix``, found by their environment."""
    needle = f"{MARK}={prefix}".encode()
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                variables = Path(f"/proc/{name}/environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if any(item == needle or item.startswith(needle + b"/") for item in variables):
                found.append(int(name))
    return found


def kill_marked(prefix: str) -> None:
    """Kill those processes until none is left (they may be forking)."""
    for _ in range(50):
        found = marked(prefix)
        if not found:
            return
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def back_off_seconds(history: list[State], *, base: float, limit: float) -> float:
    """How long to wait after the last exit: doubles with every short run, starts over after a long one."""
    short = 0
    for state in reversed(history):
        if state.finished - state.started >= 2 * limit:
            break
        short += 1
    return 0.0 if short == 0 else float(min(limit, base * 2.0 ** min(short - 1, 30)))


def read_spec(folder: Path) -> dict[str, Any]:
    """What the attempt in ``folder`` was started with."""
    return dict(json.loads((folder / "spec.json").read_text()))


def _message(folder: Path, code: int) -> str:
    try:
        with (folder / "termination-log").open("rb") as file:
            message = file.read(_MESSAGE_BYTES).decode(errors="replace")
        spec = read_spec(folder)
        if message or not code or not spec.get("message_from_log"):
            return message
        with open(spec["log"], "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _MESSAGE_BYTES // 2))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def read_json_list(path: Path) -> list[Any]:
    """The list in a file; empty when there is no file."""
    try:
        return list(json.loads(path.read_text()))
    except FileNotFoundError:
        return []


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a file, or None when there is no file."""
    try:
        return dict(json.loads(path.read_text()))
    except (FileNotFoundError, NotADirectoryError):
        return None
