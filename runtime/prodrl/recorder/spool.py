"""Shards on this machine's disk, until they are in the store. Called by ``sink`` in the writer thread.

One folder a process, held by a lock for as long as the process lives. A shard is written under a temporary name,
flushed and renamed, so a file with its final name is whole. The name says the shard's key, and so a later process can
upload what an earlier one left; it deletes what was torn.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from prodrl.records import CompletionRecord, Manifest, ManifestFile, arrow_schema
from prodrl.store import layout
from prodrl.store.port import Store

_LOCK = ".lock"
_TORN = ".part"
_SEPARATOR = "%2F"
"""Stands for ``/`` in a file's name; no key contains it."""


class Spool:
    """The folder of one process below the spool directory."""

    def __init__(self, root: Path, name: str) -> None:
        self._root = root
        self.folder = root / name
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(self.folder)

    def write(self, key: str, rows: list[CompletionRecord]) -> Path:
        """Write one shard, durably. Raises OSError when the disk does not take it."""
        path = self.folder / key.replace("/", _SEPARATOR)
        part = path.with_suffix(_TORN)
        table = pa.Table.from_pylist([row.model_dump() for row in rows], schema=arrow_schema(CompletionRecord))
        finished = [row.finished_ms for row in rows]
        figures = {"rows": len(rows), "min_ms": min(finished), "max_ms": max(finished)}
        table = table.replace_schema_metadata(
            {**(table.schema.metadata or {}), **{f"prodrl.{name}": str(value) for name, value in figures.items()}}
        )
        try:
            with part.open("wb") as file:
                pq.write_table(table, file, compression="zstd")
                file.flush()
                os.fsync(file.fileno())
            part.rename(path)
            _sync_folder(self.folder)
        except OSError:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
            raise
        return path

    def size(self) -> int:
        """Bytes that wait in this process' folder."""
        return sum(path.stat().st_size for path in self.folder.glob("*.parquet"))

    def take_over(self) -> tuple[list[Path], int]:
        """Shards that processes left which do not live any more, and how many files of theirs were torn."""
        found: list[Path] = []
        torn = 0
        for folder in sorted(path for path in self._root.iterdir() if path.is_dir() and path != self.folder):
            lock = _try_lock(folder)
            if lock is None:
                continue
            for path in folder.glob(f"*{_TORN}"):
                path.unlink(missing_ok=True)
                torn += 1
            for path in sorted(folder.glob("*.parquet")):
                ours = self.folder / path.name
                path.rename(ours)
                found.append(ours)
            (folder / _LOCK).unlink(missing_ok=True)
            os.close(lock)
            with contextlib.suppress(OSError):
                folder.rmdir()
        return found, torn

    def close(self) -> None:
        """Let go of the folder; remove it where nothing is left in it."""
        if not any(self.folder.glob("*.parquet")):
            (self.folder / _LOCK).unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                self.folder.rmdir()
        os.close(self._lock)


def upload(store: Store, path: Path) -> int:
    """Shard first, then its manifest, then it leaves the spool. May be repeated. Returns the shard's size."""
    key = path.name.replace(_SEPARATOR, "/")
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    described = pq.read_schema(path).metadata or {}
    manifest = Manifest(
        kind="records",
        files=[ManifestFile(path=key.rpartition("/")[2], size=size, sha256=sha256)],
        attributes={name: described[f"prodrl.{name}".encode()].decode() for name in ("rows", "min_ms", "max_ms")},
    )
    store.put_file(key, path)
    store.put(layout.shard_manifest(key), manifest.canonical())
    path.unlink(missing_ok=True)
    return size


def _lock(folder: Path) -> int:
    """Hold the folder until the process ends; the kernel lets go of it however that happens."""
    descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


def _try_lock(folder: Path) -> int | None:
    try:
        return _lock(folder)
    except BlockingIOError:
        return None


def _sync_folder(folder: Path) -> None:
    with _opened(folder) as descriptor:
        os.fsync(descriptor)


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[int]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
