"""The cluster tier. Its tests run inside ``scripts/test-cluster``; outside, ``test_tier.py`` starts them there.

So ``make test`` has them in its one pass, and ``make test-cluster`` runs them directly.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.up import images
from tests.cluster.up.inside import SCRATCH_VARIABLE
from tests.support import tiers
from tests.support.node import PATH, USERLAND, Node

OUTSIDE = frozenset({"test_tier.py", "test_leftovers.py"})


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Outside the starter and what looks at the machine, inside all others."""
    if not collection_path.name.startswith("test_"):
        return None
    is_inside = SCRATCH_VARIABLE in os.environ
    return True if is_inside == (collection_path.name in OUTSIDE) else None


@pytest.fixture(scope="session")
def node() -> Node:
    """The cluster, with the image that needs no building."""
    if SCRATCH_VARIABLE not in os.environ:
        tiers.lack("runs inside a cluster: make test-cluster, or pytest tests/cluster")
    found = Node()
    found.add_image(images.userland(USERLAND, PATH))
    return found


@pytest.fixture
def namespace(node: Node) -> Iterator[str]:
    """A namespace of the test's own, restricted."""
    name = node.make_namespace()
    yield name
    node.kubectl("delete", "namespace", name, "--wait=false")
