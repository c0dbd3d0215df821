"""What the builders make is what this environment can run: nothing of it is refused."""

from __future__ import annotations

import pytest

from prodrl_operator.cluster.local import podspec
from prodrl_operator.cluster.local.store import ObjectStore
from tests.support.local_cluster import CRDS
from tests.unit_operator.test_builders import RUNS, everything


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS.keys())
def test_every_manifest_is_accepted(run):
    store = ObjectStore(crds=CRDS, admit=podspec.check, collect=False)  # their owners are not here
    for manifest in everything(run):
        made = store.apply(manifest)
        assert store.apply(manifest)["metadata"]["resourceVersion"] == made["metadata"]["resourceVersion"]
