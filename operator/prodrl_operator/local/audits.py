"""Fates and curves for the views, asked of the runtime's own commands in a thread of their own.

The operator does not read the store; ``prodrl data`` does, and prints JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from prodrl_operator.api.run import Run


def ask(arguments: list[str]) -> dict[str, Any] | None:
    """Run ``prodrl data ...`` and parse what it prints; None when it cannot say (yet)."""
    command = [str(Path(sys.executable).with_name("prodrl")), "data", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        return dict(json.loads(done.stdout))
    except (OSError, subprocess.TimeoutExpired, ValueError):
        return None


def store_arguments(run: Run) -> list[str]:
    """How the commands find the store."""
    arguments = ["--store", run.spec.storage.uri]
    if run.spec.storage.endpoint_url:
        arguments += ["--endpoint-url", run.spec.storage.endpoint_url]
    return arguments


class Audits:
    """Keeps the newest audit and curves; ``renew`` returns at once unless told to wait."""

    def __init__(self, run: Run) -> None:
        self._arguments = store_arguments(run)
        self._deadline = str(run.spec.recording.reward_deadline_seconds)
        self._thread: threading.Thread | None = None
        self.audit: dict[str, Any] | None = None
        self.curves: list[dict[str, Any]] = []

    def _look(self) -> None:
        found = ask(["audit", "--json", "--reward-deadline", self._deadline, *self._arguments])
        self.audit = found or self.audit
        curves = ask(["curves", *self._arguments])
        self.curves = curves["steps"] if curves else self.curves

    def renew(self, *, wait: bool = False) -> None:
        """Look again, unless a look is under way."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._look, name="audit", daemon=True)
            self._thread.start()
        if wait:
            self._thread.join()
