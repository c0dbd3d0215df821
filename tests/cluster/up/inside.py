"""Process 1 of the cluster's namespaces: reaps, and has a child bring the node up and run the command.

Started by ``__main__`` in fresh namespaces, never by hand. When it ends the kernel ends everything in them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.cluster.up import isolation, node
from tests.cluster.up.errors import CANNOT_RUN, REASON_FILE, CannotRunError
from tests.cluster.up.programs import Programs
from tests.cluster.up.reporting import say
from tests.cluster.up.settings import Settings

SCRATCH_VARIABLE = "PRODRL_TEST_CLUSTER"
"""Set inside only: the scratch folder."""


def main(arguments: Sequence[str]) -> int:
    """The command's exit code."""
    child = os.fork()
    if child == 0:
        return _run(Path(arguments[0]), list(arguments[1:]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return _reap_until(child)


def _reap_until(child: int) -> int:
    """Orphans of all pods come to process 1."""
    while True:
        pid, status = os.wait()
        if pid == child:
            return os.waitstatus_to_exitcode(status)


def _run(scratch: Path, command: list[str]) -> int:
    settings = Settings.read(scratch)
    # A proxy of the machine's leads out of the cluster, and there is no way out.
    environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    # kubectl keeps what it learnt of a server by its address, which is that of every other such cluster.
    environment["KUBECACHEDIR"] = str(settings.data / "kubectl")
    programs = Programs(settings.logs, environment)
    try:
        settings.etc.mkdir()
        isolation.cover(settings)
        isolation.connect(settings)
        node.bring_up(settings, programs)
    except CannotRunError as exc:
        (scratch / REASON_FILE).write_text(f"{exc}\n", encoding="utf-8")
        say(f"cannot run here: {exc}\nlogs are in {settings.logs}")
        return CANNOT_RUN
    return _command(settings, programs, command, environment)


def _command(settings: Settings, programs: Programs, command: list[str], environment: dict[str, str]) -> int:
    environment |= {"KUBECONFIG": str(settings.kubeconfig), SCRATCH_VARIABLE: str(settings.scratch)}
    try:
        process = subprocess.Popen(command, env=environment)
    except OSError as exc:
        say(f"command {command[0]}: {exc.strerror}")
        return 127
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command has it too; its end is ours
    code = process.wait()
    for name, ended in programs.ended().items():
        say(f"{name} ended with {ended} meanwhile\n{programs.tail(name)}")
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
