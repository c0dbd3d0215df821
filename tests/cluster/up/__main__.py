"""Outside the namespaces: check the machine, start ``inside`` in namespaces of its own, clean up. The entry.

Whatever ends first, nothing stays: process 1 of the namespaces dies with ``unshare``, that with this process, and all
processes, mounts, links and rules of the namespaces die with their process 1. Cgroups and the bulk of the scratch
folder are removed here, or by the next run where this process was killed.
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
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

from tests.cluster.up import cgroups, preflight
from tests.cluster.up.errors import CANNOT_RUN, REASON_FILE, CannotRunError
from tests.cluster.up.reporting import say

USAGE = "usage: scripts/test-cluster SCRATCH COMMAND..."
BULK = "data"
"""Folder in the scratch folder for what is of no use afterwards: images, etcd, volumes."""
NAMESPACES = ["--net", "--pid", "--mount", "--ipc", "--uts", "--fork", "--mount-proc", "--kill-child"]


def main(arguments: Sequence[str]) -> int:
    """Run a command inside a cluster; returns its exit code, or 3 where no cluster can be had."""
    if len(arguments) < 2:
        say(USAGE)
        return 2
    scratch, command = Path(arguments[0]).resolve(), list(arguments[1:])
    signal.signal(signal.SIGTERM, _end)
    try:
        with _scratch(scratch):
            return _run(scratch, command)
    except CannotRunError as exc:
        say(f"cannot run here: {exc}")
        return CANNOT_RUN


def _end(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _run(scratch: Path, command: list[str]) -> int:
    found = preflight.check(build=True)
    cgroups.remove_stale()
    name = cgroups.create()
    settings = {**found.to_json(), "cgroup": name}
    (scratch / "settings.json").write_text(json.dumps(settings), encoding="utf-8")
    inside = [sys.executable, "-m", "tests.cluster.up.inside", str(scratch), *command]
    # A killed parent is no reason to go on: setpriv makes unshare die with this process.
    whole = ["setpriv", "--pdeathsig", "KILL", "unshare", *NAMESPACES, "env", f"--chdir={os.getcwd()}", *inside]
    environment = {**os.environ, "PYTHONPATH": str(preflight.ROOT)}
    process = subprocess.Popen(whole, env={**environment, "PATH": found.path})
    try:
        return _wait(process)
    finally:
        process.kill()
        process.wait()
        if not cgroups.remove(name):
            say(f"cgroups {name} are still in use; the next run removes them")


def _wait(process: subprocess.Popen[bytes]) -> int:
    """The exit code. Ctrl-C reaches the command by itself; how it ends is its answer."""
    while True:
        try:
            code = process.wait()
        except KeyboardInterrupt:
            continue
        return 128 - code if code < 0 else code


@contextlib.contextmanager
def _scratch(folder: Path) -> Iterator[None]:
    """The scratch folder, for one run at a time, without what an earlier run left."""
    if not sys.platform.startswith("linux"):
        raise CannotRunError(f"Linux is needed, got {sys.platform}")
    if folder.parts[1:2] in {("run",), ("proc",), ("sys",), ("dev",)} or folder.parts[:3] == ("/", "var", "lib"):
        raise CannotRunError(f"scratch folder {folder}: the cluster has its own of this folder; choose another")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            raise CannotRunError(f"scratch folder {folder}: another cluster runs in it; choose another") from exc
        try:
            _clear(folder)
            (folder / "logs").mkdir()
            (folder / BULK).mkdir()
            yield
        finally:
            shutil.rmtree(folder / BULK, ignore_errors=True)


def _clear(folder: Path) -> None:
    for name in (BULK, "logs", "etc"):
        shutil.rmtree(folder / name, ignore_errors=True)
    (folder / REASON_FILE).unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
