"""One real control plane for the session, for every tier that asks for it; nothing starts where nobody does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings

from prodrl_operator.cluster.kubernetes import KubernetesCluster
from tests.support.apiserver import ApiServer, running
from tests.support.namespaces import emptied

# How long an example takes says something of the machine, not of the code.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.fixture(scope="session")
def api_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with running(tmp_path_factory.mktemp("control-plane")) as server:
        yield server


@pytest.fixture
def api(api_server: ApiServer) -> Iterator[KubernetesCluster]:
    """The port, onto a namespace without objects of ours."""
    cluster = api_server.connect()
    emptied(cluster, "default")
    yield cluster
    emptied(cluster, "default")
