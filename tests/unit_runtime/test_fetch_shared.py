"""A policy in a cache that several pods share: fetched once, and those never served again are removed."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from prodrl import progress
from prodrl.config import FetchConfig, PolicyRef, StoreConfig
from prodrl.errors import PreemptedError
from prodrl.export import fetch, identity
from prodrl.store import folders, layout, open_store
from prodrl.store.folders import read_manifest, write_folder

SECONDS = 20.0


@pytest.fixture
def store_config(tmp_path: Path) -> StoreConfig:
    return StoreConfig(uri=f"file://{tmp_path}/store")


def publish(config: StoreConfig, number: int, tmp_path: Path, oldest_round: int = 0) -> tuple[FetchConfig, Path]:
    """A stored policy of one file, and where a server would keep it."""
    source = tmp_path / f"made{number}"
    source.mkdir()
    (source / "model.safetensors").write_bytes(bytes([number]) * 1000)
    store, key = open_store(config), layout.policy(number)
    write_folder(store, key, source, kind=identity.KIND, attributes={identity.ENGINE_ARGS: json.dumps([])})
    digest = identity.of_manifest(read_manifest(store, key), key)
    policy = PolicyRef(round=number, digest=digest, key=key)
    return FetchConfig(store=config, policy=policy, oldest_round=oldest_round), tmp_path / f"cache/run/{digest[-16:]}"


def test_pods_that_start_together_fetch_once(store_config, tmp_path, monkeypatch):
    config, dest = publish(store_config, 1, tmp_path)
    begun, go_on, fetched = threading.Event(), threading.Event(), []

    def slowly(*args, **kwargs):
        fetched.append(args[1])
        begun.set()
        assert go_on.wait(SECONDS)
        return folders.fetch_folder(*args, **kwargs)

    monkeypatch.setattr(fetch, "fetch_folder", slowly)
    monkeypatch.setattr(fetch, "LOCK_SECONDS", 0.01)
    pods = [threading.Thread(target=fetch.run, args=(config, dest)) for _ in range(3)]
    for pod in pods:
        pod.start()
    assert begun.wait(SECONDS)
    assert not (dest / fetch.MARKER).exists()
    go_on.set()
    for pod in pods:
        pod.join(SECONDS)
        assert not pod.is_alive()
    assert fetched == [config.policy.key]
    assert fetch.read_marker(dest)["digest"] == config.policy.digest


def test_a_pod_that_is_told_to_stop_waits_no_longer(store_config, tmp_path, monkeypatch):
    config, dest = publish(store_config, 1, tmp_path)
    monkeypatch.setattr(fetch, "LOCK_SECONDS", 0.01)
    with fetch._locked(dest):
        progress.stop_requested.set()
        try:
            with pytest.raises(PreemptedError, match="another pod"):
                fetch.run(config, dest)
        finally:
            progress.stop_requested.clear()
    assert not (dest / fetch.MARKER).exists()


def test_policies_that_are_never_served_again_leave_the_cache(store_config, tmp_path):
    places = {number: publish(store_config, number, tmp_path) for number in (3, 5, 7)}
    for config, dest in places.values():
        fetch.run(config, dest)
    stranger = tmp_path / "cache/run/somebody"
    stranger.mkdir()
    (stranger / "file").touch()
    config, dest = publish(store_config, 9, tmp_path, oldest_round=5)
    fetch.run(config, dest)
    assert not places[3][1].exists()
    assert all(fetch.read_marker(places[number][1]) for number in (5, 7))
    assert (stranger / "file").exists(), "what has no marker of ours is not ours"
    assert fetch.read_marker(dest) == {"digest": config.policy.digest, "round": 9}
