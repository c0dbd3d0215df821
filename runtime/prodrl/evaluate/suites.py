"""Held-out suites: the contract, and loading one by the name in the configuration. Called by ``run``.

A suite is made by a function that takes the folder of its items and parameters. ``prodrl.lab.suite:chess_puzzles``
is one; users bring theirs in the image as any importable module.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from prodrl.errors import UsageError
from prodrl.evaluate.chat import ChatClient


class Suite(Protocol):
    """A set of items that a policy can be tried on, one session an item."""

    def items(self) -> list[str]:
        """Ids of all items, unique; which of them are played is the evaluation's choice."""
        ...

    async def play(self, item: str, client: ChatClient, seed: int) -> dict[str, float]:
        """Play one session and score it.

        The same item and seed must ask the same of whatever policy answers. Sampling parameters are the suite's.
        Raise when the session cannot be finished: it then counts as 0 for this side.

        Returns:
            Metric name -> value, higher is better.
        """
        ...


def load(spec: str, folder: Path, parameters: Mapping[str, Any]) -> Suite:
    """Make the suite that ``module:function`` names.

    Args:
        spec: ``module:function``.
        folder: The suite's items; an empty folder where it needs none.
        parameters: Free settings of the suite.

    Raises:
        UsageError: There is no such module or function, or what it makes is not a suite.
    """
    module_name, _, function_name = spec.partition(":")
    if not module_name or not function_name:
        raise UsageError(f"Suite {spec!r}: not of the form module:function; correct spec.gate.evaluations[].suite")
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as exc:
        raise UsageError(f"Suite {spec}: cannot be loaded, {exc}; is it installed in the evaluation's image?") from exc
    try:
        suite = function(folder, parameters)
    except TypeError as exc:
        raise UsageError(f"Suite {spec}: does not take (folder, parameters), {exc}; return a Suite from these") from exc
    if not callable(getattr(suite, "items", None)) or not callable(getattr(suite, "play", None)):
        raise UsageError(f"Suite {spec}: made a {type(suite).__name__} without items() and play(); return a Suite")
    made: Suite = suite
    return made
