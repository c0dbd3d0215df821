"""Reading what recorder and gateway left, incrementally and verified. Called by ``run``, ``seal`` and ``audit``.

A shard exists once its manifest does, and counts once its bytes are those of the manifest. Only what the join decides
by is kept of a record; the tokens are read again when a trajectory is sealed (:class:`Shards`).
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pydantic import ValidationError

from prodrl.errors import DataError
from prodrl.records import CompletionRecord, FeedbackEntry, Manifest, Reason
from prodrl.store import folders, layout
from prodrl.store.port import Store

logger = logging.getLogger(__name__)

MANIFEST_SUFFIX = ".manifest.json"
_READERS = 8
_LISTING_SHARE = 0.05
"""Share of the time that full listings may take; between two of them only the ends of known writers are asked for."""

_COPIED = (
    "record_id",
    "request_id",
    "trajectory_id",
    "policy_digest",
    "policy_round",
    "started_ms",
    "finished_ms",
)
_MAX_LOGPROB = 1e-4
"""Rounding may lift a log probability above 0 by this much."""
_MASS_TOLERANCE = 2e-3
"""How far the probabilities of a head may be from 1: some hundred float32 roundings."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Line:
    """What the join must know of one completion record."""

    record_id: str
    request_id: str
    trajectory_id: str
    policy_digest: str
    policy_round: int
    started_ms: int
    finished_ms: int
    num_prompt: int
    num_output: int
    reasons: tuple[str, ...]
    """Why it cannot be trained on; empty when it can."""
    shard: str
    """Manifest key of the shard that holds it."""
    row: int


def read_table(store: Store, manifest_key: str) -> pa.Table:
    """All rows of one shard.

    Raises:
        DataError: The shard is missing, is not what its manifest says, or has another schema.
    """
    manifest = _manifest(store, manifest_key)
    folder = manifest_key.rpartition("/")[0]
    tables = []
    for file in manifest.files:
        key = f"{folder}/{file.path}"
        try:
            data = folders.check_bytes(store.get(key), file, key)
            tables.append(pq.read_table(pa.BufferReader(data), columns=list(CompletionRecord.model_fields)))
        except KeyError as exc:
            raise DataError(f"Shard {key}: is missing though its manifest exists; restore it") from exc
        except (pa.ArrowException, OSError, ValueError) as exc:
            raise DataError(f"Shard {key}: cannot be read, {exc}; its writer has another version") from exc
        if missing := set(CompletionRecord.model_fields) - set(tables[-1].column_names):
            raise DataError(
                f"Shard {key}: lacks columns, got none of {sorted(missing)}; its writer has another version"
            )
    if not tables:
        raise DataError(f"Manifest {manifest_key}: names no file; write it again")
    return pa.concat_tables(tables)


def _manifest(store: Store, manifest_key: str) -> Manifest:
    try:
        return folders.parse_manifest(store.get(manifest_key), manifest_key)
    except KeyError as exc:
        raise DataError(f"Manifest {manifest_key}: is gone; restore it") from exc


def read_lines(store: Store, manifest_key: str) -> list[Line]:
    """The records of one shard, checked row by row; a row that contradicts itself gets a reason.

    Raises:
        DataError: See :func:`read_table`.
    """
    table = read_table(store, manifest_key)
    inconsistent, non_finite = _faults(table)
    num_prompt, num_output = _lengths(table, "prompt_ids"), _lengths(table, "output_ids")
    columns = {name: table.column(name).to_pylist() for name in (*_COPIED, "trainable", "reasons")}
    lines = []
    for row in range(table.num_rows):
        found = list(columns["reasons"][row] or ())
        if inconsistent[row] or not (columns["trainable"][row] or found):
            found.append(Reason.INCONSISTENT.value)
        if non_finite[row]:
            found.append(Reason.NON_FINITE.value)
        lines.append(
            Line(
                **{name: columns[name][row] for name in _COPIED},
                num_prompt=int(num_prompt[row]),
                num_output=int(num_output[row]),
                reasons=tuple(found),
                shard=manifest_key,
                row=row,
            )
        )
    return lines


def _lengths(table: pa.Table, column: str) -> NDArray[np.int64]:
    return np.asarray(pc.fill_null(pc.list_value_length(table.column(column)), 0)).astype(np.int64)


def _flat(table: pa.Table, column: str) -> tuple[NDArray[np.generic], NDArray[np.int64]]:
    """All values of a list column, and where each row begins (and the last ends)."""
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(_lengths(table, column))])
    return np.asarray(pc.list_flatten(table.column(column))), ends


def _faults(table: pa.Table) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """[rows] contradicts itself; [rows] holds a log probability that is not finite."""
    num_output, num_head = _lengths(table, "output_ids"), _lengths(table, "head_ids")
    inconsistent = (_lengths(table, "logprobs") != num_output) | (_lengths(table, "head_logprobs") != num_head)
    inconsistent |= _lengths(table, "head_offsets") != num_output + 1
    inconsistent |= (_lengths(table, "prompt_ids") == 0) & (num_output > 0)
    offsets, bounds = _flat(table, "head_offsets")
    head, head_bounds = _flat(table, "head_logprobs")
    is_complete = table.column("support_complete").to_pylist()
    for row in np.flatnonzero(~inconsistent):
        own = offsets[bounds[row] : bounds[row + 1]].astype(np.int64)
        is_broken = own[0] != 0 or own[-1] != num_head[row] or bool((np.diff(own) < 0).any())
        logprobs = head[head_bounds[row] : head_bounds[row + 1]].astype(np.float64)
        inconsistent[row] = is_broken or _has_wrong_mass(logprobs, own, is_complete[row])
    temperature = np.asarray(table.column("temperature")).astype(np.float32)
    inconsistent |= ~(np.isfinite(temperature) & (temperature >= 0))
    non_finite = np.zeros(table.num_rows, np.bool_)
    for column in ("logprobs", "head_logprobs"):
        values, bounds = _flat(table, column)
        logprobs = values.astype(np.float32)
        non_finite |= _any_in_row(~np.isfinite(logprobs), bounds)
        inconsistent |= _any_in_row(logprobs > _MAX_LOGPROB, bounds)
    return inconsistent, non_finite


def _has_wrong_mass(logprobs: NDArray[np.float64], offsets: NDArray[np.int64], is_complete: bool) -> bool:
    """Whether the head of some position holds more than all probability, or a complete one holds less."""
    if not np.isfinite(logprobs).all():
        return False  # has a reason of its own
    total = np.concatenate([np.zeros(1), np.cumsum(np.exp(np.minimum(logprobs, 0.0)))])
    mass = total[offsets[1:]] - total[offsets[:-1]]
    return bool((mass > 1 + _MASS_TOLERANCE).any() or (is_complete and (mass < 1 - _MASS_TOLERANCE).any()))


def _any_in_row(is_bad: NDArray[np.bool_], bounds: NDArray[np.int64]) -> NDArray[np.bool_]:
    count = np.concatenate([np.zeros(1, np.int64), np.cumsum(is_bad)])
    return np.asarray(count[bounds[1:]] > count[bounds[:-1]])


class Shards:
    """Tokens of chosen records; keeps the tables used last, because trajectories lie beside each other in time."""

    def __init__(self, store: Store, capacity: int = 8) -> None:
        self._store = store
        self._capacity = capacity
        self._tables: OrderedDict[str, pa.Table] = OrderedDict()

    def row(self, line: Line) -> pa.Table:
        """The record as a table of one row, verified again.

        Raises:
            DataError: The shard is gone or damaged since it was seen.
        """
        if line.shard not in self._tables:
            self._tables[line.shard] = read_table(self._store, line.shard)
        self._tables.move_to_end(line.shard)
        if len(self._tables) > self._capacity:
            self._tables.popitem(last=False)
        return self._tables[line.shard].slice(line.row, 1)


class _Listing:
    """New keys under a prefix, without listing everything each time."""

    def __init__(self, store: Store, prefix: str, suffix: str) -> None:
        self._store = store
        self._prefix = prefix
        self._suffix = suffix
        self._seen: set[str] = set()
        self._ends: dict[str, str] = {}
        """Writer (a key up to its sequence number) -> last key seen."""
        self._next_full = 0.0

    def new(self) -> list[str]:
        """Keys not yet marked as seen, in order."""
        began = time.monotonic()
        if began >= self._next_full:
            found = self._wanted(self._store.list(self._prefix))
            now = time.monotonic()
            self._next_full = now + (now - began) / _LISTING_SHARE
            return found
        # Keys of one writer ascend; a writer that is new, or a straggler, waits for the next full listing.
        return [key for writer, end in self._ends.items() for key in self._wanted(self._store.list(writer, after=end))]

    def mark(self, key: str) -> None:
        """The key was read."""
        self._seen.add(key)
        writer = key.removesuffix(self._suffix).rpartition("-")[0] + "-"
        self._ends[writer] = max(key, self._ends.get(writer, ""))

    def _wanted(self, keys: Iterator[str]) -> list[str]:
        return [key for key in keys if key.endswith(self._suffix) and key not in self._seen]


class Tail:
    """Remembers what was read; each look gives only what is new.

    Args:
        store: The run's store.
        digest: The policy whose records are wanted; None wants all.
        others_since_ms: Shards of other policies are read only when they end later. They serve to recognise
            conversations that crossed policies, and a store of many rounds holds far too many of them.
    """

    def __init__(self, store: Store, digest: str | None = None, others_since_ms: int = 0) -> None:
        self._store = store
        self._own = layout.RECORDS if digest is None else layout.records(digest) + "/"
        self._others_since_ms = others_since_ms
        self._records = _Listing(store, layout.RECORDS, MANIFEST_SUFFIX)
        self._feedback = _Listing(store, layout.FEEDBACK, ".jsonl")
        self.damaged: dict[str, str] = {}
        """Key -> what is wrong with the shard or segment; each is said once."""

    def records(self) -> Iterator[Line]:
        """New records, of every policy. A damaged shard is set aside, the others go on."""
        yield from self._read(self._records, self._read_shard)

    def feedback(self) -> Iterator[FeedbackEntry]:
        """New rewards."""
        yield from self._read(self._feedback, self._read_segment)

    def _read(self, listing: _Listing, read: Callable[[str], list[_T]]) -> Iterator[_T]:
        keys = listing.new()
        if not keys:
            return
        with ThreadPoolExecutor(min(_READERS, len(keys))) as pool:
            for key, found in zip(keys, pool.map(partial(self._try, read), keys), strict=True):
                yield from found
                listing.mark(key)

    def _try(self, read: Callable[[str], list[_T]], key: str) -> list[_T]:
        try:
            return read(key)
        except DataError as exc:
            self._set_aside(key, str(exc))
            return []

    def _read_shard(self, key: str) -> list[Line]:
        if not key.startswith(self._own):
            last_ms = _manifest(self._store, key).attributes.get("max_ms", "")
            if last_ms.isdigit() and int(last_ms) < self._others_since_ms:
                return []
        return read_lines(self._store, key)

    def _read_segment(self, key: str) -> list[FeedbackEntry]:
        try:
            data = self._store.get(key)
        except KeyError as exc:
            raise DataError(f"Segment {key}: is gone; restore it") from exc
        entries = []
        for number, row in enumerate(data.splitlines(), start=1):
            try:
                entries.append(FeedbackEntry.model_validate_json(row))
            except ValidationError as exc:
                fields = ", ".join(".".join(map(str, fault["loc"])) or "row" for fault in exc.errors())
                self._set_aside(key, f"Segment {key}: line {number} is not a reward ({fields}); restore it")
        return entries

    def _set_aside(self, key: str, message: str) -> None:
        logger.error("Set aside: %s", message)
        self.damaged.setdefault(key, message)
