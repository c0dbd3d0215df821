"""What a tier of tests needs and this machine lacks: a failure where every tier is required (CI), else a skip."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest

VARIABLE = "PRODRL_REQUIRE_TIERS"


def are_required() -> bool:
    """Whether everything must run here; fetching and building, however long, is then in order too."""
    return bool(os.environ.get(VARIABLE))


def lack(reason: str) -> NoReturn:
    """End the test: without ``reason``'s remedy it cannot run."""
    if are_required():
        pytest.fail(f"{reason} ({VARIABLE} is set)")
    pytest.skip(reason)
