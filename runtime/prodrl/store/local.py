"""A store in a folder of this machine (or of a volume that all pods mount). Opened by ``prodrl.store.open_store``.

An object is a file. It is written under a temporary name, flushed to the disk, and then renamed (``put``) or linked
(``create``) to its key, so that neither a crash nor a reader ever meets a part of it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO
from urllib.parse import unquote, urlsplit

from prodrl.errors import RuntimeFault, UsageError, from_os_error
from prodrl.store import keys

_CHUNK_BYTES = 4 * 1024 * 1024
_STALE_SECONDS = 86_400
"""A temporary file this old belongs to a process that crashed."""
_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK})


class LocalStore:
    """The port over a folder."""

    def __init__(self, uri: str) -> None:
        self.uri = uri
        parts = urlsplit(uri)
        if parts.scheme != "file" or parts.netloc or not parts.path.startswith("/") or parts.query or parts.fragment:
            raise UsageError(f"Store {uri}: must be file:///folder; correct storage.uri")
        self.root = Path(unquote(parts.path))

    def get(self, key: str) -> bytes:
        """The object's bytes."""
        try:
            return self._path(key).read_bytes()
        except OSError as exc:
            raise self._fault(exc, key) from exc

    def put(self, key: str, data: bytes) -> None:
        """Write or replace the object."""
        with self._writing(key) as (file, target):
            file.write(data)
            _flush(file)
            Path(file.name).replace(target)

    def create(self, key: str, data: bytes) -> bool:
        """Write the object unless it exists. Hard links: the only call that is atomic and never replaces."""
        if self.exists(key):
            return False
        with self._writing(key) as (file, target):
            file.write(data)
            _flush(file)
            try:
                os.link(file.name, target)
            except FileExistsError:
                return False
            except OSError as exc:
                if exc.errno in _NO_LINKS:
                    raise UsageError(
                        f"Store {self.uri}: its file system has no hard links, {exc.strerror}; use another volume"
                    ) from exc
                raise
        return True

    def exists(self, key: str) -> bool:
        """Whether the object exists."""
        try:
            return self._path(key).is_file()
        except OSError as exc:
            raise from_os_error(exc, self._name(key)) from exc

    def list(self, prefix: str, after: str = "") -> Iterator[str]:
        """Keys in the order of their bytes, like S3."""
        keys.check_prefix(prefix)
        folder = prefix.rpartition("/")[0]
        start = f"{folder}/" if folder else ""
        try:
            yield from (key for key in self._walk(self.root / folder, start, after, prefix) if key > after)
        except OSError as exc:
            raise from_os_error(exc, f"Store {self.uri}") from exc

    def delete(self, key: str) -> None:
        """Remove the object; a missing one is not an error."""
        path = self._path(key)
        try:
            path.unlink(missing_ok=True)
            if path.parent.is_dir():
                _flush_folder(path.parent)
        except NotADirectoryError:
            return
        except OSError as exc:
            raise from_os_error(exc, self._name(key)) from exc

    def put_file(self, key: str, path: Path) -> None:
        """Copy a file in."""
        with self._writing(key) as (file, target):
            with path.open("rb") as source:
                shutil.copyfileobj(source, file, _CHUNK_BYTES)
            _flush(file)
            Path(file.name).replace(target)

    def get_file(self, key: str, path: Path) -> None:
        """Copy the object out."""
        try:
            source = self._path(key).open("rb")
        except OSError as exc:
            raise self._fault(exc, key) from exc
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with (
                source,
                tempfile.NamedTemporaryFile(dir=path.parent, prefix=".partial-", delete=False) as file,
                _removed_at_the_end(file.name),
            ):
                shutil.copyfileobj(source, file, _CHUNK_BYTES)
                file.flush()
                os.fchmod(file.fileno(), 0o644)
                Path(file.name).replace(path)
        except OSError as exc:
            raise from_os_error(exc, f"File {path}") from exc

    def check_writable(self) -> None:
        """Probe, and sweep what crashed writers left."""
        keys.probe(self)
        oldest = time.time() - _STALE_SECONDS
        for entry in (self.root / keys.TEMPORARY).iterdir():
            with contextlib.suppress(FileNotFoundError):
                if entry.stat().st_mtime < oldest:
                    entry.unlink()

    def _walk(self, folder: Path, start: str, after: str, prefix: str) -> Iterator[str]:
        """Keys below ``folder``; folders that cannot hold one after ``after`` or under ``prefix`` are not read."""
        try:
            with os.scandir(folder) as found:
                entries = [(entry.name + "/" if entry.is_dir() else entry.name, entry) for entry in found]
        except (FileNotFoundError, NotADirectoryError):
            return
        for name, entry in sorted(entries, key=lambda item: item[0].encode("utf-8", "surrogateescape")):
            key = start + name
            if not key.endswith("/"):
                if key.startswith(prefix):
                    yield key
            elif key != keys.TEMPORARY + "/" and _may_hold(key, prefix, after):
                yield from self._walk(Path(entry.path), key, after, prefix)

    @contextlib.contextmanager
    def _writing(self, key: str) -> Iterator[tuple[BinaryIO, Path]]:
        """A temporary file to fill and put in place; gone at the end whatever happens."""
        target = self._path(key)
        try:
            self._make_folders(target.parent)
            self._make_folders(self.root / keys.TEMPORARY)
            with tempfile.NamedTemporaryFile(dir=self.root / keys.TEMPORARY, delete=False) as file:
                os.fchmod(file.fileno(), 0o644)
                with _removed_at_the_end(file.name):
                    yield file, target  # type: ignore[misc]  # a BinaryIO in all but name
            _flush_folder(target.parent)
        except RuntimeFault:
            raise
        except OSError as exc:
            raise from_os_error(exc, self._name(key)) from exc

    def _make_folders(self, folder: Path) -> None:
        """Create what is missing of a path, durably: a new folder is an entry of the one above."""
        missing = []
        while not folder.is_dir():
            missing.append(folder)
            folder = folder.parent
        for path in reversed(missing):
            path.mkdir(exist_ok=True)
            _flush_folder(path.parent)

    def _path(self, key: str) -> Path:
        return self.root / keys.check(key)

    def _name(self, key: str) -> str:
        return f"Object {self.uri.rstrip('/')}/{key}"

    def _fault(self, exc: OSError, key: str) -> Exception:
        if isinstance(exc, FileNotFoundError | IsADirectoryError | NotADirectoryError):
            return KeyError(key)
        return from_os_error(exc, self._name(key))


def _may_hold(folder: str, prefix: str, after: str) -> bool:
    """Whether a key below ``folder`` (with its slash) can begin with ``prefix`` and sort after ``after``."""
    is_inside = folder.startswith(prefix) or prefix.startswith(folder)
    return is_inside and (folder >= after or after.startswith(folder))


@contextlib.contextmanager
def _removed_at_the_end(name: str) -> Iterator[None]:
    try:
        yield
    finally:
        Path(name).unlink(missing_ok=True)


def _flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _flush_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
