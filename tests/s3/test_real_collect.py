"""Collect, claim and audit on a real S3 server."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from prodrl.collect import ledger
from prodrl.collect.audit import audit
from prodrl.collect.run import run
from prodrl.config import CollectResult, StoreConfig
from prodrl.progress import Progress
from prodrl.store import folders, layout, open_store
from tests.support.records import NOW, make_config, make_feedback, make_record, world
from tests.support.s3 import RealServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180, func_only=True)]  # building the server takes longer


def _collect(store: StoreConfig, number: int = 1) -> CollectResult:
    return run(make_config(store, number), Progress(), now_ms=lambda: NOW)


def _ids(store: StoreConfig, result: CollectResult) -> set[str]:
    opened = open_store(store)
    manifest = folders.verify(opened, result.dataset_key, result.dataset_digest)
    (file,) = manifest.files
    table = pq.read_table(pa.BufferReader(opened.get(f"{result.dataset_key}/{file.path}")))
    return set(table.column("trajectory_id").to_pylist())


def _play(store: StoreConfig) -> None:
    """Five scored trajectories, one that waits and one with a record that cannot be trained on."""
    users = world(store)
    users.play("t-1", "t-2", "t-3", reward=1.0)
    users.play("t-4", "t-5", reward=0.0)
    users.record(make_record("t-6"))
    users.record(make_record("t-7", reasons=["Greedy"]))
    users.reward(make_feedback("t-7"))


def test_a_dataset_is_sealed_once_and_every_trajectory_is_accounted_for(real_config: StoreConfig) -> None:
    _play(real_config)
    first = _collect(real_config)
    assert first.trajectories == 4
    written = sorted(open_store(real_config).list(""))
    assert _collect(real_config) == first
    assert sorted(open_store(real_config).list("")) == written
    assert len(_ids(real_config, first)) == 4
    found = audit(open_store(real_config), now_ms=NOW)
    assert found.holds, found.as_text()
    assert (found.recorded, found.trained, found.waiting, found.excluded) == (7, 4, 2, {"Greedy": 1})


def test_the_next_round_takes_none_of_the_claimed(real_config: StoreConfig) -> None:
    _play(real_config)
    first = _ids(real_config, _collect(real_config))
    world(real_config, "engine-1").record(*(make_record(f"t-{n}") for n in (11, 12, 13)))
    open_store(real_config).create(
        layout.feedback_segment("gateway-1", 0),
        "".join(make_feedback(f"t-{n}").model_dump_json() + "\n" for n in (11, 12, 13)).encode(),
    )
    second = _ids(real_config, _collect(real_config, 2))
    assert len(second) == 4
    assert not first & second
    assert audit(open_store(real_config), now_ms=NOW).holds


def test_s3_and_a_folder_hold_the_same_objects(real_config: StoreConfig, tmp_path: Path) -> None:
    folder = StoreConfig(uri=(tmp_path / "store").as_uri())
    results = []
    for config in (real_config, folder):
        _play(config)
        results.append(_collect(config))
    assert results[0] == results[1]
    bucket, local = open_store(real_config), open_store(folder)
    assert list(bucket.list("")) == list(local.list(""))
    assert all(bucket.get(key) == local.get(key) for key in local.list(""))


def test_attempts_at_the_same_time_return_the_same_dataset(real_config: StoreConfig) -> None:
    _play(real_config)
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: _collect(real_config), range(4)))
    assert results == results[:1] * 4
    assert ledger.rounds(open_store(real_config)) == [1]
    assert audit(open_store(real_config), now_ms=NOW).holds


def test_the_command_says_the_same(real_config: StoreConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _play(real_config)
    config = make_config(real_config, reward_deadline_seconds=10**9)
    (tmp_path / "config.json").write_text(config.model_dump_json())
    monkeypatch.setenv("PRODRL_CREDENTIALS_DIR", str(real_config.credentials_dir))
    prodrl = str(Path(sys.executable).with_name("prodrl"))
    command = [prodrl, "collect", "--config", str(tmp_path / "config.json"), "--result"]
    results = []
    for attempt in ("1", "2"):
        done = subprocess.run([*command, str(tmp_path / attempt)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        results.append(json.loads((tmp_path / attempt).read_text()))
    assert results[0] == results[1]
    where = ["--store", real_config.uri, "--endpoint-url", str(real_config.endpoint_url), "--region", "us-east-1"]
    done = subprocess.run([prodrl, "data", "audit", *where, "--json"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["fate"]["trained"] == 4


def _wait_for(what: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_collecting_outlives_a_crash_of_the_storage(own_server: RealServer, tmp_path: Path) -> None:
    store = own_server.config(tmp_path / "credentials")
    world(store, "engine-0").play("t-1", "t-2")
    progress = Progress()
    results: list[CollectResult] = []
    config = make_config(store, poll_seconds=0.1)
    thread = threading.Thread(target=lambda: results.append(run(config, progress, now_ms=lambda: NOW)), daemon=True)
    thread.start()
    _wait_for(lambda: progress.done == 2)
    own_server.kill()
    time.sleep(1)
    assert thread.is_alive()
    own_server.start()
    world(store, "engine-1").record(make_record("t-3"), make_record("t-4"))
    segment = "".join(make_feedback(name).model_dump_json() + "\n" for name in ("t-3", "t-4"))
    assert open_store(store).create(layout.feedback_segment("gateway-1", 0), segment.encode())
    thread.join(60)
    assert _ids(store, results[0]) == {"t-1", "t-2", "t-3", "t-4"}
    assert audit(open_store(store), now_ms=NOW).holds
