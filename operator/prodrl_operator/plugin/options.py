"""``-n``, ``--context`` and ``--kubeconfig``: for every command, before or after its name. Called by ``cli``."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import typer

PANEL = "Where"
Namespace = Annotated[
    str | None, typer.Option("--namespace", "-n", help="Namespace; else the context's.", rich_help_panel=PANEL)
]
Context = Annotated[str | None, typer.Option("--context", help="Context of the kubeconfig.", rich_help_panel=PANEL)]
Kubeconfig = Annotated[
    str | None, typer.Option("--kubeconfig", help="Else $KUBECONFIG, else ~/.kube/config.", rich_help_panel=PANEL)
]
TYPES = {"namespace": Namespace, "context": Context, "kubeconfig": Kubeconfig}


@dataclass(frozen=True)
class Where:
    """Which cluster and namespace; None: as the kubeconfig says."""

    namespace: str | None = None
    context: str | None = None
    kubeconfig: str | None = None


def where_of(ctx: typer.Context) -> Where:
    """From the command's own options, then from those before its name."""
    outer = ctx.parent.params if ctx.parent else {}
    return Where(**{name: ctx.params.get(name) or outer.get(name) for name in TYPES})


def placed(function: Callable[..., None]) -> Callable[..., None]:
    """Give a command the three options; its first parameter becomes the :class:`Where` they make."""
    own = list(inspect.signature(function, eval_str=True).parameters.values())[1:]
    extra = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
        for name, kind in TYPES.items()
    ]
    first = inspect.Parameter("ctx", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    keyword = [item.replace(kind=inspect.Parameter.KEYWORD_ONLY) for item in own]

    @functools.wraps(function)
    def command(**given: Any) -> None:
        where = where_of(given.pop("ctx"))
        function(where, **{name: value for name, value in given.items() if name not in TYPES})

    parameters = [first, *keyword, *extra]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {item.name: item.annotation for item in parameters}
    return command
