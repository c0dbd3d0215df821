"""Folders of the store that exist once their manifest does: written data first, read only after verification.

Used by every step for datasets, checkpoints, weights and policies. Nothing here looks into the files.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from pydantic import ValidationError

from prodrl.errors import DataError, StorageFullError, from_os_error
from prodrl.progress import check_stop
from prodrl.records import Manifest, ManifestFile
from prodrl.store import keys, layout
from prodrl.store.port import Store

__all__ = ["exists", "fetch_folder", "file_entry", "read_manifest", "verify", "write_folder"]


def write_folder(
    store: Store,
    key: str,
    local_dir: Path,
    kind: str,
    attributes: Mapping[str, str] | None = None,
    *,
    replace: bool = False,
) -> Manifest:
    """Upload every file below ``local_dir``, then the manifest.

    A folder that is there already with the same content is left as it is, so a step may be repeated; so may two
    writers of equal bytes run at once.

    Args:
        store: Where to.
        key: Folder of the store.
        local_dir: Folder of this machine; links are not followed, a file ``manifest.json`` at its top is left out.
        kind: See :class:`~prodrl.records.Manifest`.
        attributes: Part of the manifest, and so of its digest.
        replace: Take the place of another content. Only for folders that nobody refers to by digest yet.

    Raises:
        DataError: Another content has the key.
    """
    files = [file_entry(local_dir, path) for path in _files(local_dir)]
    manifest = Manifest(kind=kind, files=files, attributes=dict(attributes or {}))
    for file in files:
        if not keys.is_valid(f"{key}/{file.path}"):
            raise DataError(f"Folder {key}: cannot hold a file of this name, got {file.path!r}; rename it")
    if replace and _stored(store, key) not in (None, manifest.canonical()):
        store.delete(layout.manifest_of(key))
    for file in files:
        check_stop(f"Folder {key}")
        # Looked up before each file, not once: another writer may finish meanwhile, and must not be overwritten.
        if _is_finished(store, key, manifest):
            return manifest
        store.put_file(f"{key}/{file.path}", local_dir / file.path)
    if not _is_finished(store, key, manifest) and not store.create(layout.manifest_of(key), manifest.canonical()):
        _is_finished(store, key, manifest)
    return manifest


def read_manifest(store: Store, key: str, expect_digest: str | None = None) -> Manifest:
    """The manifest of a folder.

    Raises:
        DataError: There is none, it cannot be read, or its digest is not the expected one.
    """
    where = layout.manifest_of(key)
    try:
        data = store.get(where)
    except KeyError as exc:
        raise DataError(
            f"Folder {key}: has no manifest in {store.uri}; the step that writes it is not finished, or the key is "
            "wrong"
        ) from exc
    manifest = parse_manifest(data, where)
    if expect_digest is not None and manifest.digest() != expect_digest:
        raise DataError(
            f"Folder {key}: expected manifest digest {expect_digest}, got {manifest.digest()!r}; "
            "it was written again or damaged since"
        )
    return manifest


def parse_manifest(data: bytes, name: str) -> Manifest:
    """Bytes of the store -> manifest whose paths are safe to join to a folder.

    Raises:
        DataError: The bytes are no manifest, or a path leads out of the folder.
    """
    try:
        manifest = Manifest.model_validate_json(data)
    except ValidationError as exc:
        raise DataError(f"Manifest {name}: cannot be read, got {data[:80]!r}; the object is damaged") from exc
    paths = [file.path for file in manifest.files]
    if not all(map(keys.is_valid, paths)) or len(set(paths)) != len(paths):
        raise DataError(
            f"Manifest {name}: paths must be relative and unique, got {sorted(paths)[:8]!r}; write it again"
        )
    return manifest


def fetch_folder(store: Store, key: str, dest: Path, expect_digest: str | None = None) -> Manifest:
    """Download a folder and verify every file, then put all in place: files first, ``manifest.json`` last.

    ``dest`` may exist (a mount point, for example); files of the same name are replaced, others are left alone.

    Raises:
        DataError: The folder does not exist, or a file is missing or has another size or hash.
        StorageFullError: ``dest`` has less space than the files need.
    """
    manifest = read_manifest(store, key, expect_digest)
    try:
        dest.mkdir(parents=True, exist_ok=True)
        _check_space(manifest, key, dest)
        staged = Path(tempfile.mkdtemp(dir=dest, prefix=".fetching-"))
        try:
            for file in manifest.files:
                check_stop(f"Folder {key}")
                _fetch_file(store, key, file, staged / file.path)
            for file in manifest.files:
                (dest / file.path).parent.mkdir(parents=True, exist_ok=True)
                (staged / file.path).replace(dest / file.path)
            (staged / layout.MANIFEST).write_bytes(manifest.canonical())
            (staged / layout.MANIFEST).replace(dest / layout.MANIFEST)
        finally:
            shutil.rmtree(staged, ignore_errors=True)
    except OSError as exc:
        raise from_os_error(exc, f"Folder {dest}") from exc
    return manifest


def verify(store: Store, key: str, expect_digest: str | None = None) -> Manifest:
    """Read every file of a folder and compare size and hash.

    Raises:
        DataError: See :func:`fetch_folder`.
    """
    manifest = read_manifest(store, key, expect_digest)
    with tempfile.TemporaryDirectory(prefix="prodrl-verify-") as folder:
        for file in manifest.files:
            check_stop(f"Folder {key}")
            path = Path(folder) / "file"
            _fetch_file(store, key, file, path)
            path.unlink()
    return manifest


def exists(store: Store, key: str) -> bool:
    """Whether the folder is complete; says nothing of its content."""
    return store.exists(layout.manifest_of(key))


def file_entry(folder: Path, path: Path) -> ManifestFile:
    """Size and hash of a file of this machine, relative to ``folder``."""
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            size = os.fstat(file.fileno()).st_size
    except OSError as exc:
        raise from_os_error(exc, f"File {path}") from exc
    return ManifestFile(path=path.relative_to(folder).as_posix(), size=size, sha256=digest)


def check_bytes(data: bytes, file: ManifestFile, name: str) -> bytes:
    """The bytes themselves.

    Raises:
        DataError: They are not those of the manifest.
    """
    _compare(name, file, len(data), hashlib.sha256(data).hexdigest())
    return data


def _files(folder: Path) -> list[Path]:
    """Every regular file, in the order of the manifest."""
    found = [
        path
        for path in folder.rglob("*")
        if path.is_file() and not path.is_symlink() and path != folder / layout.MANIFEST
    ]
    return sorted(found, key=lambda path: path.relative_to(folder).as_posix())


def _stored(store: Store, key: str) -> bytes | None:
    try:
        return store.get(layout.manifest_of(key))
    except KeyError:
        return None


def _is_finished(store: Store, key: str, manifest: Manifest) -> bool:
    """Whether the folder is there with this content; False where it has no manifest yet."""
    data = _stored(store, key)
    if data is None:
        return False
    found = parse_manifest(data, layout.manifest_of(key))
    if found.digest() != manifest.digest():
        raise DataError(
            f"Folder {key}: is complete with another content, expected {manifest.digest()}, got {found.digest()!r}; "
            "another attempt finished first: use what it wrote"
        )
    return True


def _check_space(manifest: Manifest, key: str, dest: Path) -> None:
    needed, free = sum(file.size for file in manifest.files), shutil.disk_usage(dest).free
    if needed > free:
        raise StorageFullError(
            f"Folder {dest}: {key} needs {needed} bytes, got {free} free; give the volume more space"
        )


def _fetch_file(store: Store, key: str, file: ManifestFile, path: Path) -> None:
    name = f"{key}/{file.path}"
    try:
        store.get_file(name, path)
    except KeyError as exc:
        raise DataError(f"File {name}: is in the manifest and not in {store.uri}; restore it or make it again") from exc
    got = file_entry(path.parent, path)
    _compare(name, file, got.size, got.sha256)


def _compare(name: str, expected: ManifestFile, size: int, sha256: str) -> None:
    if size != expected.size:
        raise DataError(f"File {name}: expected {expected.size} bytes, got {size}; restore it or make it again")
    if sha256 != expected.sha256:
        raise DataError(f"File {name}: expected sha256 {expected.sha256}, got {sha256!r}; restore it or make it again")
