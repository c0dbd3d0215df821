"""Durability of the object store: one SQLite file, one transaction a mutation. Used by ``store``.

Write-ahead log with ``synchronous=FULL``: what a call returned is on disk, so that neither a kill -9 of the
controller nor a power failure takes back a promotion. Without a path nothing is written (tests, the crash sweep).
"""

from __future__ import annotations

import json
import os
import sqlite3
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prodrl_operator.errors import ClusterUnavailableError, InvalidError

_FORMAT = "1"
_TABLES = """
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS objects (
    kind TEXT NOT NULL, namespace TEXT NOT NULL, name TEXT NOT NULL, body TEXT NOT NULL, applied TEXT,
    PRIMARY KEY (kind, namespace, name)
) WITHOUT ROWID;
"""

Key = tuple[str, str, str]
"""Kind, namespace, name."""


@dataclass
class Entry:
    """An object and what was applied to it last (None: never applied)."""

    body: dict[str, Any]
    applied: dict[str, Any] | None = None


class Journal:
    """The file. Not thread-safe: the store's lock guards it."""

    def __init__(self, path: Path | None) -> None:
        self._connection: sqlite3.Connection | None = None
        if path is None:
            return
        path.touch(mode=0o600, exist_ok=True)  # it holds Secrets
        os.chmod(path, 0o600)
        try:
            self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            self._connection.execute("PRAGMA journal_mode=WAL")
            self._connection.execute("PRAGMA synchronous=FULL")
            self._connection.executescript(_TABLES)
            self._connection.execute("INSERT OR IGNORE INTO meta VALUES ('format', ?)", (_FORMAT,))
            found = self._read_meta("format")
        except sqlite3.DatabaseError as error:
            raise InvalidError(f"state file {path}: cannot be read ({error}); choose another data folder") from error
        if found != _FORMAT:
            raise InvalidError(f"state file {path}: unknown format, got {found!r}; choose another data folder")

    def load(self) -> tuple[int, dict[Key, Entry]]:
        """The last resourceVersion and all objects."""
        if self._connection is None:
            return 0, {}
        rows = self._connection.execute("SELECT kind, namespace, name, body, applied FROM objects").fetchall()
        entries = {(k, ns, n): Entry(json.loads(body), json.loads(a) if a else None) for k, ns, n, body, a in rows}
        return int(self._read_meta("version") or 0), entries

    def save(self, version: int, key: Key, entry: Entry | None) -> None:
        """Commit one mutation; ``entry`` None removes the object."""
        if self._connection is None:
            return
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            if entry is None:
                self._connection.execute("DELETE FROM objects WHERE kind=? AND namespace=? AND name=?", key)
            else:
                applied = None if entry.applied is None else json.dumps(entry.applied)
                row = (*key, json.dumps(entry.body), applied)
                self._connection.execute("INSERT OR REPLACE INTO objects VALUES (?, ?, ?, ?, ?)", row)
            self._connection.execute("INSERT OR REPLACE INTO meta VALUES ('version', ?)", (str(version),))
            self._connection.execute("COMMIT")
        except sqlite3.Error as error:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            message = f"state of {'/'.join(key)}: cannot be written ({error}); free space, then it goes on"
            raise ClusterUnavailableError(message) from error

    def close(self) -> None:
        """Close the file."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _read_meta(self, name: str) -> str | None:
        assert self._connection is not None
        row = self._connection.execute("SELECT value FROM meta WHERE name=?", (name,)).fetchone()
        return None if row is None else str(row[0])
