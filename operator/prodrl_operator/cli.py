"""Turns the loop of a ProdRLRun: on this machine (local); prints the API (crds)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from prodrl_operator.errors import OperatorError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)


@app.command()
def local(
    path: Annotated[Path, typer.Argument(help="YAML: one ProdRLRun, and the Secrets and ConfigMaps it names.")],
    data: Annotated[Path, typer.Option(help="Folder of the run's state, logs, report and summary.")] = Path(".prodrl"),
    port: Annotated[int, typer.Option(help="The gateway's port on 127.0.0.1; 0: any free one.")] = 0,
    page_port: Annotated[int, typer.Option(help="The live page's port on 127.0.0.1; 0: any free one.")] = 0,
    keep: Annotated[bool, typer.Option("--keep", help="Go on serving after the run ended, until Ctrl-C.")] = False,
) -> None:
    """Run the loop on this machine until the run completes; resumes what it finds in --data.

    Exit codes: 0 completed, 3 stalled (a person must decide), 2 refused, 130 interrupted.
    """
    from prodrl_operator.local.session import Options, Session

    options = Options(path=path, data=data.resolve(), port=port, page_port=page_port, keep=keep)
    raise typer.Exit(Session(options).turn(Console()))


@app.command()
def crds(
    write: Annotated[Path | None, typer.Option(help="Write the files into this folder instead of printing.")] = None,
) -> None:
    """Print the CustomResourceDefinitions, generated from the API models."""
    from prodrl_operator.api import crd

    texts = {name: crd.render(found) for name, found in crd.crds().items()}
    if write is None:
        print("---\n".join(texts.values()), end="")
        return
    for name, text in texts.items():
        (write / name).write_text(text, encoding="utf-8")


def main() -> None:
    """The console script: errors become one line and exit code 2."""
    try:
        app()
    except OperatorError as exc:
        Console(stderr=True).print(f"prodrl-operator: {exc}", highlight=False, markup=False, soft_wrap=True)
        raise SystemExit(2) from exc
