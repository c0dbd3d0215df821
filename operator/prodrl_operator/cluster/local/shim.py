"""The parent of one container's process: a small program, not imported by the operator (it runs as a script).

Started by ``runner`` as ``python -S -E -s shim.py FOLDER``; reads FOLDER/spec.json and writes FOLDER/pid.json when
the container runs and FOLDER/exit.json when nothing of it is left. It holds a lock on FOLDER/lock while it lives,
so that a controller that comes back knows whether it does, and so that two shims never start one container. It
outlives the controller. SIGTERM is passed to the container's first process, SIGUSR1 kills all of it.

Standard library only, and little of it: it must start in a few milliseconds.
"""

import contextlib
import ctypes
import fcntl
import json
import os
import signal
import sys
import time

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_CANNOT_EXECUTE = 126
_NOT_FOUND = 127


def main(folder: str) -> int:
    """Run the container of ``folder`` to its end."""
    os.chdir(folder)
    lock = os.open("lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return 0  # another shim has it
    if os.path.exists("pid.json") or os.path.exists("exit.json"):
        return 0  # it was started before: starting twice is what must never happen
    with open("spec.json", encoding="utf-8") as file:
        spec = json.load(file)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # orphans of the container become our children
    signals = {signal.SIGTERM, signal.SIGUSR1, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    started = time.time()
    num_ooms = count_ooms()
    child = os.fork()
    if child == 0:
        _become(spec, libc)
    _write("pid.json", {"pid": child, "start": start_ticks(child), "shim": os.getpid(), "started": started})
    status, is_ours = _wait(child, signals)
    _kill_rest(child)
    code = os.waitstatus_to_exitcode(status)
    end = {"code": code if code >= 0 else 128 - code, "signal": max(0, -code), "started": started}
    end["oom"] = code == -signal.SIGKILL and not is_ours and count_ooms() > num_ooms
    _write("exit.json", end | {"finished": time.time()})
    return 0


def count_ooms() -> int:
    """Processes that the kernel has killed for want of memory, on the whole machine: a hint, not a proof."""
    try:
        with open("/proc/vmstat", encoding="utf-8") as file:
            return sum(int(line.split()[1]) for line in file if line.startswith("oom_kill "))
    except OSError:
        return 0


def start_ticks(pid: int) -> int:
    """When the process started, in clock ticks since boot: with the pid, its identity."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return int(file.read().rpartition(")")[2].split()[19])
    except (OSError, IndexError):
        return 0


def _become(spec: dict, libc: ctypes.CDLL) -> None:  # type: ignore[type-arg]
    """In the child: turn into the container's process; never returns."""
    try:
        parent = os.getppid()
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(137)
        os.setsid()
        log = os.open(spec["log"], os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        for number in (signal.SIGPIPE, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        os.nice(spec.get("nice", 0))
        os.chdir(spec["cwd"])
        os.environ["PATH"] = spec["env"].get("PATH", os.defpath)  # execvpe looks there
        os.execvpe(spec["argv"][0], spec["argv"], spec["env"])  # noqa: S606  (no shell is wanted)
    except BaseException as error:
        os.write(2, f"cannot start {spec['argv'][0]!r}: {error}\n".encode())
        os._exit(_NOT_FOUND if isinstance(error, FileNotFoundError) else _CANNOT_EXECUTE)


def _wait(child: int, signals: set) -> tuple:  # type: ignore[type-arg]
    """Pass signals on and reap until the first process has ended; its wait status, and whether we killed it."""
    is_ours = False
    while True:
        number = signal.sigwait(signals)
        if number == signal.SIGTERM:
            _signal(child, signal.SIGTERM)
        elif number == signal.SIGUSR1:
            is_ours = True
            _signal(child, signal.SIGKILL)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == child:
                return status, is_ours
            if pid == 0:
                break


def _kill_rest(child: int) -> None:
    """Kill what the container left behind: its process group, then every orphan that came to us."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    while True:
        for pid in _children():
            _signal(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _children() -> list:  # type: ignore[type-arg]
    mine = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                    parent = int(file.read().rpartition(")")[2].split()[1])
            except (OSError, IndexError):
                continue
            if parent == os.getpid():
                mine.append(int(name))
    return mine


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _write(name: str, data: dict) -> None:  # type: ignore[type-arg]
    """Durably and at once: a reader sees nothing or all of it."""
    with open(name + ".new", "w", encoding="utf-8") as file:
        json.dump(data, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(name + ".new", name)
    folder = os.open(".", os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
