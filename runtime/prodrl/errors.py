"""The errors of the runtime and the exit codes they become.

Every process of the runtime ends through :func:`prodrl.cli.main`, which turns one of these classes into its
exit code and a one-line message in the result file. The operator decides from the code whether to retry
(``prodrl_operator.names.EXIT_CODES`` holds the same table; a test keeps the two equal).

To add a kind: subclass :class:`RuntimeFault`, take the next free code, extend the operator's table.
Messages follow ``<thing> <id>: <what is wrong>, got <value!r>; <what to do>``.
"""

from __future__ import annotations

import errno
from typing import ClassVar


class RuntimeFault(Exception):  # noqa: N818  (RuntimeError is taken)
    """Base of every error that a process of the runtime reports."""

    exit_code: ClassVar[int] = 1
    reason: ClassVar[str] = "InternalError"


class UsageError(RuntimeFault):
    """The configuration or a flag is wrong; trying again cannot help."""

    exit_code = 64
    reason = "InvalidConfiguration"


class DataError(RuntimeFault):
    """An input is missing, damaged or inconsistent; trying again cannot help."""

    exit_code = 65
    reason = "InvalidData"


class UnavailableError(RuntimeFault):
    """A peer (store, engine, gateway) cannot be reached now; try again."""

    exit_code = 69
    reason = "PeerUnavailable"


class StorageFullError(RuntimeFault):
    """No space is left where an output must go; trying again fills it again."""

    exit_code = 74
    reason = "StorageFull"


class CredentialsError(RuntimeFault):
    """The store refused the credentials."""

    exit_code = 77
    reason = "CredentialsRejected"


class OutOfMemoryError(RuntimeFault):
    """The process ran out of host or device memory."""

    exit_code = 78
    reason = "OutOfMemory"


class NumericsError(RuntimeFault):
    """Losses, gradients or scales are not finite beyond what may be skipped."""

    exit_code = 79
    reason = "Numerics"


class PreemptedError(RuntimeFault):
    """The process was told to stop (SIGTERM) before it had finished; a new attempt resumes."""

    exit_code = 80
    reason = "Preempted"


def from_os_error(exc: OSError, thing: str) -> RuntimeFault:
    """Name the kind of an :class:`OSError` met while writing or reading ``thing``."""
    if exc.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageFullError(f"{thing}: no space left on the device; free space or choose another storage.uri")
    if exc.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return UsageError(f"{thing}: not writable, {exc.strerror}; check the permissions of storage.uri")
    return DataError(f"{thing}: {exc.strerror or exc}")
