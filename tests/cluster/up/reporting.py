"""What is said to whoever started a cluster: on standard error, so that the command's own output stays clean."""

from __future__ import annotations

import sys


def say(text: str) -> None:
    """One line (or a log's end)."""
    sys.stderr.write(f"test-cluster: {text}\n")
    sys.stderr.flush()
