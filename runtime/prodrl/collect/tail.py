"""Reading what recorder and gateway left, incrementally. A shard without a verified manifest does not exist."""

from __future__ import annotations

import hashlib
import io
import logging
from collections.abc import Iterator

import pyarrow.parquet as pq
from pydantic import ValidationError

from prodrl.errors import DataError
from prodrl.records import CompletionRecord, FeedbackEntry, Manifest
from prodrl.store import layout
from prodrl.store.port import Store

log = logging.getLogger(__name__)
MANIFEST_SUFFIX = ".manifest.json"


def read_shard(store: Store, manifest_key: str) -> list[CompletionRecord]:
    """The records of one shard.

    Raises:
        DataError: The shard is missing, or is not what its manifest says.
    """
    manifest = Manifest.model_validate_json(store.get(manifest_key))
    folder = manifest_key.rpartition("/")[0]
    rows: list[CompletionRecord] = []
    for file in manifest.files:
        key = f"{folder}/{file.path}"
        try:
            content = store.get(key)
        except KeyError as exc:
            raise DataError(f"Shard {key}: missing though its manifest exists; restore it") from exc
        found = hashlib.sha256(content).hexdigest()
        if len(content) != file.size or found != file.sha256:
            raise DataError(f"Shard {key}: sha256 {found}, its manifest says {file.sha256}; the copy is damaged")
        rows += [CompletionRecord.model_construct(**row) for row in pq.read_table(io.BytesIO(content)).to_pylist()]
    return rows


class Tail:
    """Remembers what was read; each call gives only what is new."""

    def __init__(self, store: Store, folders: list[str]) -> None:
        self._store = store
        self._folders = folders
        self._seen: set[str] = set()
        self.damaged: list[str] = []
        """Messages of shards and segments that could not be used; each is said once."""

    def records(self) -> Iterator[CompletionRecord]:
        """New records of the folders. A damaged shard is set aside and counted, the rest goes on."""
        for folder in self._folders:
            for key in self._store.list(f"{folder}/"):
                if not key.endswith(MANIFEST_SUFFIX) or key in self._seen:
                    continue
                self._seen.add(key)
                try:
                    yield from read_shard(self._store, key)
                except (DataError, ValidationError, OSError) as exc:
                    self._set_aside(f"{key}: {exc}")

    def feedback(self) -> Iterator[FeedbackEntry]:
        """New feedback entries."""
        for key in self._store.list(layout.FEEDBACK):
            if key in self._seen:
                continue
            self._seen.add(key)
            for row in self._store.get(key).splitlines():
                try:
                    yield FeedbackEntry.model_validate_json(row)
                except ValidationError as exc:
                    self._set_aside(f"{key}: {exc.error_count()} faults in a feedback entry")

    def _set_aside(self, message: str) -> None:
        log.error("set aside: %s", message)
        self.damaged.append(message)
