"""The long-running programs of a cluster: started with a log each, watched while others are waited for."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.cluster.up.errors import CannotRunError
from tests.cluster.up.reporting import say

_LOOK_SECONDS = 0.2
_TAIL = 1500


class Programs:
    """Started in order; killed with the namespaces.

    Args:
        logs: Folder of their logs.
        environment: Of all of them.
    """

    def __init__(self, logs: Path, environment: Mapping[str, str]) -> None:
        self._logs = logs
        self._environment = dict(environment)
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._began = time.monotonic()

    def start(self, name: str, *command: str) -> None:
        """Start one; a session of its own keeps the terminal's Ctrl-C from it."""
        with (self._logs / f"{name}.log").open("ab") as log:
            self._running[name] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,
            )

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run one to its end, whatever that is."""
        return subprocess.run(command, capture_output=True, text=True, check=False, env=self._environment)

    def ended(self) -> dict[str, int]:
        """Those that ended, which none should."""
        codes = {name: process.poll() for name, process in self._running.items()}
        return {name: code for name, code in codes.items() if code is not None}

    def wait(self, what: str, is_so: Callable[[], bool], seconds: float) -> None:
        """Wait for a truth and say how long the cluster is up.

        Raises:
            CannotRunError: A program ended, or the time is over.
        """
        deadline = time.monotonic() + seconds
        while not is_so():
            for name, code in self.ended().items():
                raise CannotRunError(f"{name} ended with {code} before {what}\n{self.tail(name)}")
            if time.monotonic() > deadline:
                tails = "\n".join(f"{name}: {self.tail(name)}" for name in self._running)
                raise CannotRunError(f"{what}: not within {seconds:.0f} s\n{tails}")
            time.sleep(_LOOK_SECONDS)
        say(f"{time.monotonic() - self._began:5.1f} s {what}")

    def tail(self, name: str) -> str:
        """The end of a log."""
        return (self._logs / f"{name}.log").read_text(encoding="utf-8", errors="replace")[-_TAIL:]
