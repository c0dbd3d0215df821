"""The stage on which a file's tests are played at the same time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.stage import Stage, playing
from tests.support.apiserver import ApiServer


@pytest.fixture(scope="module")
def stage(api_server: ApiServer, request: pytest.FixtureRequest) -> Iterator[Stage]:
    with playing(api_server, request) as made:
        yield made
