"""The object store port. Implemented by ``local`` (a folder) and ``s3`` (boto3); opened by ``open_store``.

Contract, the same for both:

- objects are immutable: :meth:`put` replaces whole objects atomically, a reader sees the old bytes or the new ones,
  never a part; :meth:`create` never replaces;
- a put that returned is durable (fsync of file and folder; S3's own promise);
- errors are the classes of ``prodrl.errors``: missing key -> :class:`KeyError`, refused credentials ->
  CredentialsError, no space -> StorageFullError, unreachable -> UnavailableError;
- listings are used for sets (all shards of a policy), never to guess the newest of something.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol


class Store(Protocol):
    """Immutable objects under one root."""

    uri: str

    def get(self, key: str) -> bytes:
        """The object's bytes. Raises KeyError when it does not exist."""
        ...

    def put(self, key: str, data: bytes) -> None:
        """Write or replace the whole object, durably."""
        ...

    def create(self, key: str, data: bytes) -> bool:
        """Write the object only if it does not exist. Returns False, and changes nothing, when it does."""
        ...

    def exists(self, key: str) -> bool:
        """Whether the object exists."""
        ...

    def list(self, prefix: str, after: str = "") -> Iterator[str]:
        """Keys that start with ``prefix`` and sort after ``after``, in order."""
        ...

    def delete(self, key: str) -> None:
        """Remove the object; a missing one is not an error."""
        ...

    def put_file(self, key: str, path: Path) -> None:
        """Upload a file (multipart where large)."""
        ...

    def get_file(self, key: str, path: Path) -> None:
        """Download to ``path`` (written beside and renamed)."""
        ...

    def check_writable(self) -> None:
        """Write, read and delete a probe object; raises with the thing, the value and the remedy."""
        ...
