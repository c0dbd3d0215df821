"""What a key may look like, and the probe that both stores answer. Called by ``local``, ``s3`` and ``folders``."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from prodrl.errors import UsageError

if TYPE_CHECKING:
    from prodrl.store.port import Store

TEMPORARY = ".prodrl-tmp"
"""Folder under the root for files that are being written; no key may begin with it."""
MAX_KEY_BYTES = 900
"""S3 allows 1024 with the root's prefix."""


def is_valid(key: str) -> bool:
    """Whether the key stays below the root on every implementation."""
    parts = key.split("/")
    return (
        0 < len(key.encode()) <= MAX_KEY_BYTES
        and all(part not in ("", ".", "..") and len(part.encode()) <= 255 for part in parts)
        and key.isprintable()
        and "\\" not in key
        and parts[0] != TEMPORARY
    )


def check(key: str) -> str:
    """The key itself.

    Raises:
        UsageError: It is empty, absolute, climbs out of the root or has characters that a store may not keep.
    """
    if not is_valid(key):
        raise UsageError(f"Store key: must be a relative path without '..', got {key[:200]!r}; correct the key")
    return key


def check_prefix(prefix: str) -> str:
    """The prefix of a listing: empty, a key, or the beginning of one."""
    if prefix:
        check(prefix.removesuffix("/"))
    return prefix


def probe(store: Store) -> None:
    """Write, read, refuse to replace, and delete one object.

    Raises:
        UsageError: The store does not answer as the port demands; a claim that overwrites would train data twice.
    """
    key = f"probes/{secrets.token_hex(8)}"
    try:
        if not store.create(key, b"probe"):
            raise UsageError(f"Store {store.uri}: creating a new object was refused; use another storage.uri")
        if store.get(key) != b"probe":
            raise UsageError(f"Store {store.uri}: a new object reads back differently; use another storage.uri")
        if store.create(key, b"again"):
            raise UsageError(
                f"Store {store.uri}: If-None-Match is ignored, so claims could be overwritten; "
                "use a storage that supports conditional writes"
            )
    except KeyError as exc:
        raise UsageError(f"Store {store.uri}: a new object cannot be read; use another storage.uri") from exc
    finally:
        store.delete(key)
