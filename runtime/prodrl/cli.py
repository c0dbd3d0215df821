"""``prodrl``: one command a process. Every failure becomes an exit code and one line that says what to do.

A step reads ``--config`` and leaves its result, or why it failed, in ``--result`` (the pod's termination message);
``prodrl.errors`` has the table of exit codes.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from prodrl import __version__, progress
from prodrl.config import (
    CollectConfig,
    Config,
    EvaluateConfig,
    ExportConfig,
    Failure,
    FetchConfig,
    GatewayConfig,
    StoreConfig,
    TrainConfig,
)
from prodrl.errors import OutOfMemoryError, RuntimeFault, UsageError, from_os_error

MESSAGE_BYTES = 4096
"""A container's termination message is cut there."""

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
data = typer.Typer(no_args_is_help=True, help="Look into a store.")
app.add_typer(data, name="data")

ConfigOption = Annotated[Path, typer.Option("--config", help="Resolved JSON configuration.")]
ResultOption = Annotated[Path | None, typer.Option("--result", help="File for the result (termination message).")]
ListenOption = Annotated[str | None, typer.Option("--listen", help="HOST:PORT that serves /progress and /metrics.")]
StoreOption = Annotated[str, typer.Option("--store", help="file:///folder or s3://bucket/prefix.")]
EndpointOption = Annotated[str | None, typer.Option("--endpoint-url", help="S3 endpoint.")]


@app.callback(invoke_without_command=True)
def version(show: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """One command a process."""
    if show:
        print(f"prodrl {__version__}")
        raise typer.Exit


def write_result(path: Path | None, result: Config) -> None:
    """Leave the result where the operator reads it, within the limit: figures go before structure does."""
    if path is None:
        print(result.model_dump_json(indent=1))
        return
    if os.environ.get("RANK", "0") != "0":
        return
    text = result.model_dump_json()
    if len(text.encode()) > MESSAGE_BYTES:
        content = result.model_dump()
        for field in ("figures", "excluded"):
            if field in content:
                content[field] = {}
        if "message" in content:
            content["message"] = content["message"][:1000]
        text = json.dumps(content)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as exc:
        print(f"prodrl: result {path} cannot be written, {exc.strerror}", file=sys.stderr)


def _fault(exc: BaseException) -> RuntimeFault | None:
    """The kind of an exception; None when it is a bug."""
    if isinstance(exc, RuntimeFault):
        return exc
    if isinstance(exc, MemoryError) or type(exc).__name__ == "OutOfMemoryError":
        return OutOfMemoryError(f"out of memory: {exc}; lower training.microBatchTokens or give the pod more")
    if isinstance(exc, OSError) and exc.errno is not None:
        return from_os_error(exc, str(exc.filename or "a file"))
    return None


def _guarded(result: Path | None, work: Callable[[], Config | None]) -> None:
    """Run ``work``; write its result or its failure; exit with the right code."""
    try:
        made = work()
    except Exception as exc:
        fault = _fault(exc)
        if fault is None:
            traceback.print_exc()
        reason = fault.reason if fault else RuntimeFault.reason
        message = str(fault) if fault else f"{type(exc).__name__}: {exc}"
        print(f"prodrl: {reason}: {message}", file=sys.stderr)
        if result is not None:
            write_result(result, Failure(reason=reason, message=message[:1500]))
        raise typer.Exit(fault.exit_code if fault else RuntimeFault.exit_code) from exc
    if made is not None:
        write_result(result, made)


def _step(kind: type[Any], config: Path, result: Path | None, listen: str | None, run: Callable[..., Config]) -> None:
    state = progress.Progress()
    signal.signal(signal.SIGTERM, lambda *_: progress.stop_requested.set())

    def work() -> Config:
        if listen and os.environ.get("RANK", "0") == "0":
            host, _, port = listen.rpartition(":")
            progress.serve(state, host, int(port))
        return run(kind.read(config), state)

    _guarded(result, work)


@app.command()
def collect(config: ConfigOption, result: ResultOption = None, listen: ListenOption = None) -> None:
    """Join records and rewards into a sealed dataset of exactly S*B trajectories."""
    from prodrl.collect.run import run

    _step(CollectConfig, config, result, listen, run)


@app.command()
def train(config: ConfigOption, result: ResultOption = None, listen: ListenOption = None) -> None:
    """Make the round's S optimizer steps; resumes from its last complete step checkpoint."""
    from prodrl.train.loop import run

    _step(TrainConfig, config, result, listen, run)


@app.command()
def export(config: ConfigOption, result: ResultOption = None, listen: ListenOption = None) -> None:
    """Quantise a copy of the weights, check it, and give it an identity."""
    from prodrl.export.run import run

    _step(ExportConfig, config, result, listen, run)


@app.command()
def evaluate(config: ConfigOption, result: ResultOption = None, listen: ListenOption = None) -> None:
    """Measure the candidate for the gate: agreement and paired evaluations."""
    from prodrl.evaluate.run import run

    _step(EvaluateConfig, config, result, listen, run)


@app.command()
def fetch(config: ConfigOption, to: Annotated[Path, typer.Option("--to", help="Folder of the policy.")]) -> None:
    """Copy a policy from the store, verifying every hash."""
    from prodrl.export.fetch import run

    _guarded(None, lambda: run(FetchConfig.read(config), to))


@app.command()
def gateway(
    config: ConfigOption,
    host: Annotated[str, typer.Option(help="Address of the users' port.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The users' port.")] = 8080,
    admin_host: Annotated[str, typer.Option(help="Address of the operator's port.")] = "127.0.0.1",
    admin_port: Annotated[int, typer.Option(help="The operator's port.")] = 8081,
    routes: Annotated[Path | None, typer.Option(help="JSON RouteTable to start from.")] = None,
) -> None:
    """Serve the durable endpoint in front of the policies."""
    from prodrl.gateway.server import serve

    def work() -> None:
        serve(
            GatewayConfig.read(config),
            host=host,
            port=port,
            admin_host=admin_host,
            admin_port=admin_port,
            routes_path=routes,
        )

    _guarded(None, work)


@data.command()
def audit(
    store: StoreOption,
    endpoint_url: EndpointOption = None,
    reward_deadline: Annotated[
        float, typer.Option(help="Seconds after which an unscored trajectory is expired.")
    ] = 86400,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say, and check, where every recorded trajectory went. Exit 1 when the equation does not hold."""
    from prodrl.collect.audit import audit as look
    from prodrl.store import open_store

    def work() -> None:
        found = look(
            open_store(StoreConfig(uri=store, endpoint_url=endpoint_url)), reward_deadline_seconds=reward_deadline
        )
        print(json.dumps(found.as_json(), indent=1) if as_json else found.as_text())
        if not found.holds:
            raise typer.Exit(1)

    try:
        work()
    except RuntimeFault as exc:
        print(f"prodrl: {exc}", file=sys.stderr)
        raise typer.Exit(exc.exit_code) from exc


@data.command()
def curves(store: StoreOption, endpoint_url: EndpointOption = None) -> None:
    """Print the diagnostics of every optimizer step of every round as JSON."""
    from prodrl.store import layout, open_store

    opened = open_store(StoreConfig(uri=store, endpoint_url=endpoint_url))
    rows: list[dict[str, Any]] = []
    for key in opened.list("rounds/"):
        number = int(key.split("/")[1])
        if key == layout.train_metrics(number):
            rows += [{"round": number, **json.loads(row)} for row in opened.get(key).decode().splitlines()]
    print(json.dumps({"steps": rows}))


def _mount_lab() -> None:
    """The laboratory is an extra; without it ``prodrl lab`` says what to install."""
    try:
        from prodrl.lab.cli import app as lab
    except ImportError as exc:
        missing = str(exc)

        @app.command(name="lab", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
        def absent() -> None:
            """The laboratory (not installed)."""
            raise UsageError(f"prodrl lab: {missing}; install prodrl[lab]")

        return
    app.add_typer(lab, name="lab")


def main() -> None:
    """The console script."""
    if "lab" in sys.argv[1:2] or "--help" in sys.argv[1:2]:
        _mount_lab()
    try:
        app()
    except RuntimeFault as exc:
        print(f"prodrl: {exc}", file=sys.stderr)
        raise SystemExit(exc.exit_code) from exc
