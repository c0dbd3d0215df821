"""Completion: names of runs and steps, and the script that kubectl runs for a plugin.

``kubectl_complete-prodrl ARGS... WORD`` is found by kubectl on the PATH and answers as kubectl's own commands do: a
candidate a line, with a description after a tab, then ``:4`` (offer no file names).
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator

import typer

from prodrl_operator.cluster.port import RUN, Object
from prodrl_operator.errors import OperatorError
from prodrl_operator.plugin import access, logs, options

NO_FILES = ":4"
PROGRAM = "kubectl-prodrl"
VARIABLE = "_KUBECTL_PRODRL_COMPLETE"
"""Where typer looks for a request to complete."""


def runs(ctx: typer.Context, incomplete: str) -> Iterator[tuple[str, str]]:
    """Names of runs; nothing where the cluster does not answer."""
    for obj in _runs(options.where_of(ctx)):
        if obj["metadata"]["name"].startswith(incomplete):
            yield obj["metadata"]["name"], _described(obj)


def steps(ctx: typer.Context, incomplete: str) -> Iterator[str]:
    """Steps that have logs."""
    yield from (step for step in logs.STEPS if step.startswith(incomplete))


def rounds(ctx: typer.Context, incomplete: str) -> Iterator[tuple[str, str]]:
    """The current round of the run that was named: the only one that a verb acts on."""
    for obj in _runs(options.where_of(ctx)):
        current = (obj.get("status") or {}).get("currentRound")
        if current and obj["metadata"]["name"] == ctx.params.get("run"):
            yield str(current["number"]), str(current["step"])


def _runs(where: options.Where) -> list[Object]:
    try:
        found = access.connect(where.kubeconfig, where.context)
        return found.store.list(RUN, where.namespace or found.namespace)
    except OperatorError:
        return []  # a shell that completes has no place for an error


def _described(obj: Object) -> str:
    current = (obj.get("status") or {}).get("currentRound")
    return f"round {current['number']} {current['step']}" if current else "no round yet"


def is_asked() -> bool:
    """Whether a shell asks this process to complete; typer then knows the shells."""
    if VARIABLE not in os.environ:
        return False
    from typer.completion import completion_init  # type: ignore[attr-defined]  # noqa: PLC0415  (not re-exported)

    completion_init()
    return True


def script(shell: str) -> None:
    """Print what a shell must read to complete ``kubectl-prodrl``."""
    _ask_typer({VARIABLE: f"source_{shell}"})


def main() -> None:
    """The console script ``kubectl_complete-prodrl``."""
    words = sys.argv[1:] or [""]
    line = shlex.join([PROGRAM, *words[:-1]]) + " " + (shlex.quote(words[-1]) if words[-1] else "")
    # Typer's protocol for fish is the one that gives descriptions after a tab, as kubectl wants them.
    _ask_typer({VARIABLE: "complete_fish", "_TYPER_COMPLETE_ARGS": line, "_TYPER_COMPLETE_FISH_ACTION": "get-args"})
    sys.stdout.write(f"{NO_FILES}\n")


def _ask_typer(request: dict[str, str]) -> None:
    from prodrl_operator.plugin.cli import app  # noqa: PLC0415  (the app names this module's completers)

    os.environ |= request
    is_asked()
    try:
        app(prog_name=PROGRAM)
    except SystemExit as done:
        if done.code:
            raise
