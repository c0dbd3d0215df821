"""Turns the loop of ProdRLRuns: on a cluster (run), on this machine (local); prints the API (crds)."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from prodrl_operator.builders import Platform
from prodrl_operator.errors import OperatorError


class LogFormat(StrEnum):
    """How lines of the log are written."""

    TEXT = "text"
    JSON = "json"


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
def run(
    namespace: Annotated[
        list[str] | None,
        typer.Option(envvar="PRODRL_NAMESPACE", help="Turn the runs of this namespace only; repeatable. Absent: all."),
    ] = None,
    runtime_image: Annotated[
        str, typer.Option(envvar="PRODRL_RUNTIME_IMAGE", help="Default image of steps and gateway.")
    ] = Platform.runtime_image,
    serving_image: Annotated[
        str, typer.Option(envvar="PRODRL_SERVING_IMAGE", help="Default image of the engines.")
    ] = Platform.serving_image,
    workers: Annotated[int, typer.Option(envvar="PRODRL_WORKERS", min=1, help="Runs worked on at once.")] = 8,
    resync_seconds: Annotated[
        float, typer.Option(envvar="PRODRL_RESYNC_SECONDS", min=1, help="How often missed changes are looked for.")
    ] = 60.0,
    listen: Annotated[
        str, typer.Option(envvar="PRODRL_LISTEN", help="HOST:PORT of /metrics, /healthz and /readyz.")
    ] = "[::]:8080",
    lease_namespace: Annotated[
        str | None, typer.Option(envvar="PRODRL_LEASE_NAMESPACE", help="Absent: the operator's own namespace.")
    ] = None,
    lease_name: Annotated[
        str, typer.Option(envvar="PRODRL_LEASE_NAME", help="Operators with one name take turns.")
    ] = "prodrl-operator",
    log_format: Annotated[LogFormat, typer.Option(envvar="PRODRL_LOG_FORMAT")] = LogFormat.TEXT,
    kubeconfig: Annotated[str | None, typer.Option(help="Absent: as a pod, else KUBECONFIG.")] = None,
    context: Annotated[str | None, typer.Option(help="Context of the kubeconfig.")] = None,
) -> None:
    """Turn the loop of all runs on a cluster, until a signal.

    Exit codes: 0 stopped, 1 lost the Lease or a watch for good (start again), 2 refused.
    """
    from prodrl_operator.cluster.kubernetes import connect, own_namespace
    from prodrl_operator.logs import configure
    from prodrl_operator.process import Options, Process

    configure(log_format is LogFormat.JSON)
    cluster = connect(kubeconfig, context)
    options = Options(
        platform=Platform(runtime_image, serving_image, operator_namespace=own_namespace()),
        namespaces=tuple(dict.fromkeys(namespace)) if namespace else None,
        workers=workers,
        resync_seconds=resync_seconds,
        listen=listen,
        lease_namespace=lease_namespace or cluster.default_namespace,
        lease_name=lease_name,
    )
    raise typer.Exit(Process(cluster, options).run())


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
