"""The operator's errors. Edges translate them: the controller into conditions and delays, the CLI into one line.

To add a kind: it must be one that a caller acts on differently; a message alone is no kind.
"""

from __future__ import annotations


class OperatorError(Exception):
    """Base of the operator's errors."""


class InvalidError(OperatorError):
    """The user's fault: a manifest or a flag. The message names the field, the value and the remedy."""


class NotFoundError(OperatorError):
    """The object does not exist."""


class AlreadyExistsError(OperatorError):
    """An object of that name exists."""


class ConflictError(OperatorError):
    """The resourceVersion or the UID is not the present one: read again, decide again."""


class ForbiddenError(OperatorError):
    """The API server refuses (RBAC, quota, a terminating namespace)."""


class ClusterUnavailableError(OperatorError):
    """The API server cannot be reached, is overloaded or timed out; whether a write happened is unknown."""


class UnsupportedError(OperatorError):
    """The local environment does not implement this; it says what and never pretends."""


class UnreadableError(OperatorError):
    """An object of ours holds what this version does not know."""
