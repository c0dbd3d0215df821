"""Sink and spool: nothing of it may delay a request, and what was written survives a crash."""

from __future__ import annotations

import hashlib
import os
import pathlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from prodrl.errors import UnavailableError
from prodrl.recorder import record, spool
from prodrl.recorder.counters import Counters
from prodrl.recorder.sink import ShardSink
from prodrl.records import Manifest
from prodrl.store import open_store
from tests.support.engine import recorder_config, stored_records
from tests.unit_runtime.test_recorder_record import as_engine, entries, seen


class Flaky:
    """A store that refuses for a while."""

    def __init__(self, inner: Any, failures: int) -> None:
        self._inner = inner
        self.left = failures

    def __getattr__(self, name: str) -> Any:
        if self.left > 0 and name in ("put", "put_file"):
            self.left -= 1
            raise UnavailableError("Store: down")
        return getattr(self._inner, name)


class World:
    def __init__(self, folder: pathlib.Path) -> None:
        self.store_dir, self.spool_dir = folder / "store", folder / "spool"
        self.store_dir.mkdir()
        self.store = open_store(recorder_config(self.store_dir).store)
        self.counters = Counters()
        self.sinks: list[ShardSink] = []

    def sink(self, store: Any = None, **changes: Any) -> ShardSink:
        config = recorder_config(self.store_dir, **changes)
        made = ShardSink(config, self.counters, self.spool_dir, "w", lambda: store or self.store)
        self.sinks.append(made)
        return made

    def rows(self) -> list[str]:
        return [row.record_id for row in stored_records(self.store_dir)]


@pytest.fixture
def world(tmp_path: pathlib.Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    for sink in made.sinks:
        sink.close()


def observation(number: int) -> Any:
    return seen([1], entries(as_engine([0.4, 0.3, 0.2, 0.1], 1)), request_id=f"t-{number}.x", index=0)


def wait(condition: Callable[[], bool], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_an_idle_shard_closes_by_age_and_its_manifest_verifies(world: World) -> None:
    world.sink(flush_seconds=0.2).offer(observation(1))
    wait(lambda: world.counters.shards == 1)  # the last that happens; its rows were there before
    assert world.rows() == ["t-1.x:0"]
    [path] = world.store_dir.glob("records/*/*.manifest.json")
    manifest = Manifest.model_validate_json(path.read_bytes())
    data = path.with_name(manifest.files[0].path).read_bytes()
    assert manifest.kind == "records"
    assert manifest.files[0].sha256 == hashlib.sha256(data).hexdigest()
    assert manifest.attributes == {"rows": "1", "min_ms": "2", "max_ms": "2"}
    assert world.counters.shards == world.counters.recorded == world.counters.trainable == 1
    assert list(world.spool_dir.rglob("*.parquet")) == []


def test_a_shard_closes_when_it_is_full(world: World) -> None:
    sink = world.sink(flush_seconds=3600, flush_rows=4)
    for number in range(9):
        sink.offer(observation(number))
    wait(lambda: world.counters.shards == 2)
    assert len(world.rows()) == 8


def test_the_end_of_the_process_writes_what_is_waiting(world: World) -> None:
    sink = world.sink(flush_seconds=3600)
    for number in range(50):
        sink.offer(observation(number))
    sink.close()
    assert len(world.rows()) == 50
    assert list(world.spool_dir.iterdir()) == []
    sink.offer(observation(50))  # too late, but not lost silently
    assert world.counters.dropped_queue_full == 1


def test_a_store_that_fails_is_tried_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prodrl.recorder.sink.RETRY_SECONDS", (0.05,))
    world.sink(Flaky(world.store, 3), flush_seconds=0.1).offer(observation(1))
    wait(lambda: world.rows() == ["t-1.x:0"])
    assert world.counters.upload_failures == 3
    assert world.counters.dropped_disk == world.counters.dropped_queue_full == 0


def test_a_full_queue_drops_counts_and_never_waits(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = threading.Event()

    def fail(*_: Any) -> None:
        blocked.wait()
        raise ValueError("a fault of ours")

    monkeypatch.setattr("prodrl.recorder.record.build", fail)
    sink = world.sink(queue_rows=4)
    for number in range(100):
        sink.offer(observation(number))  # one that waited would wait for ever: the writer is blocked
    assert world.counters.dropped_queue_full >= 95
    blocked.set()
    wait(lambda: world.counters.dropped_faults + world.counters.dropped_queue_full == 100)


def test_a_disk_that_refuses_costs_records_not_the_writer(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = world.sink(flush_seconds=0.05)
    write = spool.Spool.write

    def refuse(*_: Any) -> pathlib.Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(spool.Spool, "write", refuse)
    sink.offer(observation(1))
    wait(lambda: world.counters.dropped_disk == 1)
    monkeypatch.setattr(spool.Spool, "write", write)
    sink.offer(observation(2))
    wait(lambda: world.rows() == ["t-2.x:0"])


def test_what_a_killed_process_left_is_uploaded_once_and_what_it_tore_is_counted(world: World) -> None:
    killed = f"""
import os, pathlib, sys
sys.path.insert(0, {os.getcwd()!r})
from tests.unit_runtime.test_recorder_sink import World, observation
from tests.support.engine import recorder_config
from prodrl.recorder import record, spool
from prodrl.store import layout
config = recorder_config(pathlib.Path({str(world.store_dir)!r}))
left = spool.Spool(pathlib.Path({str(world.spool_dir)!r}), "w-0000000000001")
rows = [record.build(observation(7), config)]
left.write(layout.record_shard(config.policy_digest, "w-0000000000001", 0), rows)
(left.folder / "torn.part").write_bytes(b"PAR1")
os._exit(9)
"""
    assert subprocess.run([sys.executable, "-c", killed], check=False).returncode == 9
    sink = world.sink(flush_seconds=0.1)
    sink.start()
    wait(lambda: world.rows() == ["t-7.x:0"])
    assert world.counters.recovered_shards == world.counters.torn_shards == 1
    sink.close()
    assert list(world.spool_dir.iterdir()) == []


def test_a_crash_between_upload_and_manifest_repeats_without_a_second_shard(world: World) -> None:
    left = spool.Spool(world.spool_dir, "w-1")
    key = "records/abababababababab/w-1-00000000.parquet"
    path = left.write(key, [record.build(observation(3), recorder_config(world.store_dir))])
    world.store.put_file(key, path)  # died here: no manifest
    assert world.rows() == []
    spool.upload(world.store, path)
    left.close()
    assert world.rows() == ["t-3.x:0"]


def test_the_folder_of_a_living_process_is_left_alone(world: World) -> None:
    living = spool.Spool(world.spool_dir, "other")
    (living.folder / "x.part").write_bytes(b"half")
    other = spool.Spool(world.spool_dir, "mine")
    assert other.take_over() == ([], 0)
    assert (living.folder / "x.part").exists()
    other.close()
    living.close()


def test_keys_of_a_restarted_writer_do_not_repeat(world: World) -> None:
    for number in range(2):
        sink = world.sink(flush_seconds=3600)
        sink.offer(observation(number))
        sink.close()
        time.sleep(0.002)
    assert sorted(world.rows()) == ["t-0.x:0", "t-1.x:0"]
