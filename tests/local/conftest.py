"""A local cluster with short times, and manifests of small processes."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import pytest

from prodrl_operator.cluster.local import containers
from prodrl_operator.cluster.local.environment import LocalCluster
from tests.support.local_cluster import open_cluster


@pytest.fixture
def cluster(tmp_path: pathlib.Path) -> Iterator[LocalCluster]:
    running = open_cluster(tmp_path / "data")
    running.start()
    yield running
    running.stop(terminate=True)
    assert running.failures == 0
    assert containers.marked(str(tmp_path)) == []
