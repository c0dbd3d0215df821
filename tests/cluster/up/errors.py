"""The one error of bringing a cluster up. Raised by every module of this package, caught at its two entries."""

from __future__ import annotations

CANNOT_RUN = 3
"""Exit code: this machine cannot run a cluster, for the reason that was printed."""
REASON_FILE = "reason.txt"
"""In the scratch folder: why no command was run. Absent where the command was run."""


class CannotRunError(Exception):
    """The cluster cannot be brought up here; the message says what is missing."""
