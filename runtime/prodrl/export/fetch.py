"""The command ``prodrl fetch``: one policy into a server's folder, verified, with the marker of its identity last.

The init container of a server. The marker is what the recorder's readiness check reads: without it, or with another
digest than the server was told, the server does not become ready.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from prodrl import progress
from prodrl.config import FetchConfig, PolicyRef
from prodrl.errors import DataError, PreemptedError, UsageError, from_os_error
from prodrl.export import identity
from prodrl.records import Manifest
from prodrl.store import layout, open_store
from prodrl.store.folders import fetch_folder, file_entry, read_manifest

logger = logging.getLogger(__name__)

MARKER = ".prodrl-policy"
STARTED = ".prodrl-fetching"
"""Says that the folder is ours while it is incomplete, so that a new attempt may clear it."""
LOCK = ".prodrl-lock"
LOCK_SECONDS = 0.5
_NOT_OURS = frozenset({"lost+found", LOCK})
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS})
"""A file system that cannot lock; it is then used without."""


def run(config: FetchConfig, dest: Path) -> None:
    """Make ``dest`` hold exactly the policy; does nothing where it does already.

    Several pods may share ``dest``: one of them fetches while the others wait, and then only verify.

    Raises:
        DataError: The stored files or the digest are not those that the configuration names.
        UsageError: ``dest`` holds files that did not come from here.
        PreemptedError: SIGTERM came while another pod was fetching.
    """
    key = config.policy.key
    store = open_store(config.store)
    manifest = read_manifest(store, key)
    digest = identity.of_manifest(manifest, key)
    if digest != config.policy.digest:
        raise DataError(f"Policy {key}: expected digest {config.policy.digest}, got {digest!r}; export the round again")
    try:
        with _locked(dest):
            _forget(dest, config.oldest_round)
            if _holds(dest, manifest, config.policy):
                return
            _clear(dest)
            fetch_folder(store, key, dest, expect_digest=manifest.digest())
            _write_marker(dest, config.policy)
    except OSError as exc:
        raise from_os_error(exc, f"Folder {dest}") from exc


def read_marker(dest: Path) -> dict[str, object]:
    """The marker's content; empty when there is none or it is damaged."""
    try:
        content = json.loads((dest / MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


@contextlib.contextmanager
def _locked(dest: Path) -> Iterator[None]:
    """Hold the folder against the fetches of other pods."""
    dest.mkdir(parents=True, exist_ok=True)
    with (dest / LOCK).open("w", encoding="utf-8") as file:
        while not _lock(file.fileno()):
            if progress.stop_requested.wait(LOCK_SECONDS):
                raise PreemptedError(f"Folder {dest}: stopped while another pod was fetching; start it again")
        yield


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as exc:
        if exc.errno not in _NO_LOCKS:
            raise
        logger.warning("Folder is used without a lock: %s", exc)
    return True


def _forget(dest: Path, oldest_round: int) -> None:
    """Remove the policies beside ``dest`` that no server will ask for again; a cache would fill up."""
    for folder in dest.parent.iterdir() if oldest_round else ():
        number = read_marker(folder).get("round")
        if folder != dest and isinstance(number, int) and number < oldest_round:
            logger.info("Folder %s: round %d is not served any more; removed", folder, number)
            (folder / MARKER).unlink(missing_ok=True)
            shutil.rmtree(folder, ignore_errors=True)


def _marker(policy: PolicyRef) -> dict[str, object]:
    return {"digest": policy.digest, "round": policy.round}


def _holds(dest: Path, manifest: Manifest, policy: PolicyRef) -> bool:
    """Whether every file is there with its size and hash, and nothing else."""
    if read_marker(dest) != _marker(policy):
        return False
    wanted = {file.path for file in manifest.files} | {MARKER, STARTED, LOCK, layout.MANIFEST}
    present = {path.relative_to(dest).as_posix() for path in dest.rglob("*") if path.is_file()}
    if not present <= wanted:
        return False
    return all((dest / file.path).is_file() and file_entry(dest, dest / file.path) == file for file in manifest.files)


def _clear(dest: Path) -> None:
    """Empty the folder of what an earlier fetch left; an engine loads every shard it finds.

    The folder itself stays: it may be a mount point.
    """
    dest.mkdir(parents=True, exist_ok=True)
    present = [path for path in dest.iterdir() if path.name not in _NOT_OURS]
    if present and not ((dest / MARKER).exists() or (dest / STARTED).exists()):
        names = ", ".join(sorted(path.name for path in present)[:4])
        raise UsageError(f"Folder {dest}: holds files of someone else, got {names}; give an empty folder to --to")
    (dest / STARTED).touch()
    (dest / MARKER).unlink(missing_ok=True)
    for path in present:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name not in (STARTED, MARKER):
            path.unlink()


def _write_marker(dest: Path, policy: PolicyRef) -> None:
    """Last of all, and atomically: whoever sees the marker sees the whole policy."""
    partial = dest / (MARKER + ".partial")
    with partial.open("w", encoding="utf-8") as file:
        json.dump(_marker(policy), file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(dest / MARKER)
    (dest / STARTED).unlink(missing_ok=True)
