"""One command a process. Every failure becomes an exit code and one line that says what to do.

A step reads --config (resolved JSON), and leaves its result, or why it failed, in --result: JSON of at most 4096
bytes, the pod's termination message. With --listen HOST:PORT it serves /progress (JSON), /metrics (Prometheus) and
/healthz while it runs. SIGTERM ends a step at its next safe point.

Exit codes: 0 done, 1 internal error, 64 wrong configuration or flags, 65 invalid data, 69 a peer is unavailable,
74 storage full, 77 credentials refused, 78 out of memory, 79 numerics, 80 stopped by SIGTERM.

Environment: PRODRL_CREDENTIALS_DIR (folder with accessKeyId and secretAccessKey), PRODRL_LOG_LEVEL (default INFO).
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

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
from prodrl.errors import OutOfMemoryError, PreemptedError, RuntimeFault, StorageFullError, UsageError

logger = logging.getLogger(__name__)

MESSAGE_BYTES = 4096
"""A container's termination message is cut there."""
_MEMORY_PHRASES = ("out of memory", "can't allocate memory", "not enough memory")

_C = TypeVar("_C", bound=Config)

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
data = typer.Typer(no_args_is_help=True, help="Look into a run's store.")
app.add_typer(data, name="data")

ConfigOption = Annotated[Path, typer.Option("--config", help="Resolved JSON configuration.")]
ResultOption = Annotated[Path | None, typer.Option("--result", help="Where the result or failure goes; else stdout.")]
ListenOption = Annotated[str | None, typer.Option("--listen", help="HOST:PORT that serves /progress and /metrics.")]
StoreOption = Annotated[str, typer.Option("--store", help="file:///folder or s3://bucket/prefix.")]
EndpointOption = Annotated[str | None, typer.Option("--endpoint-url", help="S3 endpoint; AWS without it.")]
RegionOption = Annotated[str | None, typer.Option("--region", help="S3 region.")]


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        print(f"prodrl {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Set up logging to stderr."""
    level = os.environ.get("PRODRL_LOG_LEVEL", "INFO").upper()
    if level not in logging.getLevelNamesMapping():
        raise UsageError(f"PRODRL_LOG_LEVEL: must be a level such as INFO, got {level!r}; correct the environment")
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for chatty in ("botocore", "httpx"):  # a line a request
        logging.getLogger(chatty).setLevel(max(logging.WARNING, logging.getLogger().level))


@app.command()
def collect(config: ConfigOption, result: ResultOption = None, listen: ListenOption = None) -> None:
    """Join records and rewards into a sealed dataset of exactly S*B trajectories."""

    def work(read: CollectConfig, state: progress.Progress) -> Config:
        from prodrl.collect.run import run

        return run(read, state)

    _step(CollectConfig, config, result, listen, work)


@app.command()
def train(config: ConfigOption, result: ResultOption = None, listen: ListenOption = None) -> None:
    """Make the round's S optimizer steps; resumes from its last complete step checkpoint."""

    def work(read: TrainConfig, state: progress.Progress) -> Config:
        from prodrl.train.loop import run

        return run(read, state)

    _step(TrainConfig, config, result, listen, work)


@app.command()
def export(config: ConfigOption, result: ResultOption = None, listen: ListenOption = None) -> None:
    """Quantise a copy of the weights, check it, and give it an identity."""

    def work(read: ExportConfig, state: progress.Progress) -> Config:
        from prodrl.export.run import run

        return run(read, state)

    _step(ExportConfig, config, result, listen, work)


@app.command()
def evaluate(config: ConfigOption, result: ResultOption = None, listen: ListenOption = None) -> None:
    """Measure the candidate for the gate: agreement and paired evaluations."""

    def work(read: EvaluateConfig, state: progress.Progress) -> Config:
        from prodrl.evaluate.run import run

        return run(read, state)

    _step(EvaluateConfig, config, result, listen, work)


@app.command()
def fetch(
    config: ConfigOption,
    to: Annotated[Path, typer.Option("--to", help="Folder that will hold exactly the policy.")],
    result: ResultOption = None,
) -> None:
    """Copy a policy from the store, verifying every hash (a server's init container)."""

    def work() -> None:
        from prodrl.export.fetch import run

        run(FetchConfig.read(config), to)

    with _reported(result), _stoppable():
        work()


@app.command()
def gateway(
    config: ConfigOption,
    host: Annotated[str, typer.Option(help="Address of the users' port.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The users' port.")] = 8080,
    admin_host: Annotated[str, typer.Option(help="Address of the operator's port.")] = "127.0.0.1",
    admin_port: Annotated[int, typer.Option(help="The operator's port.")] = 8081,
    metrics_port: Annotated[
        int, typer.Option(help="Where GET /metrics alone answers, at --host; 0: only at the operator's port.")
    ] = 0,
    routes: Annotated[Path | None, typer.Option(help="JSON RouteTable to start from.")] = None,
) -> None:
    """Serve the durable endpoint in front of the policies, until SIGTERM."""
    with _reported(None):
        from prodrl.gateway.server import serve

        read = GatewayConfig.read(config)
        serve(
            read,
            users=(host, port),
            operator=(admin_host, admin_port),
            metrics=(host, metrics_port) if metrics_port else None,
            routes_path=routes,
        )


@data.command()
def audit(
    store: StoreOption,
    endpoint_url: EndpointOption = None,
    region: RegionOption = None,
    reward_deadline: Annotated[
        float | None,
        typer.Option(help="Seconds after which an unscored trajectory is expired; else each round's own, else a day."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say, and check, where every recorded trajectory went. Exit code 1 when the equation does not hold."""
    with _reported(None):
        from prodrl.collect.audit import audit as look
        from prodrl.store import open_store

        opened = open_store(_store_config(store, endpoint_url, region))
        found = look(opened, reward_deadline_seconds=reward_deadline)
        print(json.dumps(found.as_json(), indent=1) if as_json else found.as_text())
        if not found.holds:
            raise typer.Exit(1)


@data.command()
def abandon(
    store: StoreOption,
    number: Annotated[int, typer.Option("--round", min=1, help="The round whose data was not trained on.")],
    endpoint_url: EndpointOption = None,
    region: RegionOption = None,
) -> None:
    """Account a round's trajectories as RoundAbandoned. They stay claimed: no other round trains on them."""
    with _reported(None):
        from prodrl.collect import ledger
        from prodrl.store import open_store

        ledger.abandon(open_store(_store_config(store, endpoint_url, region)), number)


@data.command()
def curves(store: StoreOption, endpoint_url: EndpointOption = None, region: RegionOption = None) -> None:
    """Print the diagnostics of every optimizer step of every round as JSON."""
    with _reported(None):
        from prodrl.store import layout, open_store

        opened = open_store(_store_config(store, endpoint_url, region))
        rows: list[dict[str, Any]] = []
        for key in opened.list("rounds/"):
            name = key.split("/")[1]
            if name.isdigit() and key == layout.train_metrics(int(name)):
                rows += [{"round": int(name), **json.loads(row)} for row in opened.get(key).splitlines()]
        print(json.dumps({"steps": rows}))


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    add_help_option=False,
)
def lab(context: typer.Context) -> None:
    """The laboratory: a small world that plays the users. `prodrl lab --help` lists its commands."""
    with _reported(None):
        try:
            from prodrl.lab.cli import app as commands
        except ModuleNotFoundError as exc:
            raise UsageError(
                f"Command lab: module {exc.name} is not installed; install prodrl[lab] where it is needed"
            ) from exc
        code = commands(args=list(context.args), prog_name="prodrl lab", standalone_mode=False)
        raise typer.Exit(code if isinstance(code, int) else 0)


def main() -> None:
    """The console script."""
    leave(_run())


def _run() -> int:
    try:
        code = app(standalone_mode=False)
    except RuntimeFault as exc:
        print(f"prodrl: {exc.reason}: {exc}", file=sys.stderr)
        return exc.exit_code
    except typer.Abort:
        return PreemptedError.exit_code
    except Exception as exc:
        # Typer's own errors (an unknown flag, a missing option) show themselves, and mean wrong usage here.
        if not hasattr(exc, "show"):
            raise
        exc.show()
        return UsageError.exit_code
    return code if isinstance(code, int) else 0


def leave(code: int) -> NoReturn:
    """End the process; one rank of several does so without taking the interpreter apart.

    Gloo's threads outlive ``destroy_process_group`` while anything still refers to the group, and one that wants the
    interpreter's lock during finalisation ends the process with SIGABRT (pytorch issue 190489): a step that was done
    would count as a failed attempt.
    """
    if os.environ.get("WORLD_SIZE", "1") != "1":
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
                stream.flush()
        os._exit(code)
    raise SystemExit(code)


def write_result(path: Path | None, result: Config) -> None:
    """Leave the result where the operator reads it, within the limit."""
    text = _fitted(result)
    if path is None:
        print(text)
        return
    try:
        with tempfile.NamedTemporaryFile(
            "w", dir=path.parent, prefix=".result-", encoding="utf-8", delete=False
        ) as file:
            file.write(text)
        Path(file.name).replace(path)
    except OSError:
        # A pod's termination message is a mount: its folder takes no new file, and it cannot be renamed over.
        with contextlib.suppress(OSError, UnboundLocalError):
            Path(file.name).unlink(missing_ok=True)
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as exc:
            raise UsageError(f"Result {path}: cannot be written, {exc.strerror}; check --result") from exc


def _fitted(result: Config) -> str:
    """JSON of at most MESSAGE_BYTES: numbers lose digits, messages and tables their ends; every field and figure stays.

    Raises:
        UsageError: That is not enough: figures that are judged are never left out.
    """
    content = result.model_dump(mode="json")
    text = json.dumps(content)
    if len(text.encode()) > MESSAGE_BYTES:
        content = _rounded(content)
        text = json.dumps(content, separators=(",", ":"))
    while len(text.encode()) > MESSAGE_BYTES:
        name = max(content, key=lambda field: len(json.dumps(content[field])) * isinstance(content[field], str | dict))
        value = content[name]
        if not isinstance(value, str | dict) or not value:
            largest = max(content, key=lambda field: len(json.dumps(content[field])))
            size = len(text.encode())
            raise UsageError(
                f"Result: {size} bytes, a pod's termination message holds {MESSAGE_BYTES}; shorten {largest}"
            )
        kept = len(value) // 2
        content[name] = dict(list(value.items())[:kept]) if isinstance(value, dict) else value[:kept]
        text = json.dumps(content, separators=(",", ":"))
    return text


def _rounded(value: Any) -> Any:
    """Six digits: more than any figure is good for."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value


def _fault(exc: BaseException) -> RuntimeFault | None:
    """The kind of an exception; None when it is a bug.

    Libraries wrap what they met: a full disk or a lack of memory counts wherever it is in the chain.
    """
    if isinstance(exc, RuntimeFault):
        return exc
    if isinstance(exc, KeyboardInterrupt):
        return PreemptedError("Process: interrupted from the keyboard; start it again")
    seen: BaseException | None = exc
    while seen is not None:
        if isinstance(seen, MemoryError) or type(seen).__name__ == "OutOfMemoryError" or _tells_of_memory(seen):
            return OutOfMemoryError(f"Process {os.getpid()}: out of memory, {seen}; lower the batch or add memory")
        if isinstance(seen, OSError) and seen.errno in (errno.ENOSPC, errno.EDQUOT):
            return StorageFullError(f"File {seen.filename or '(unnamed)'}: no space left on the device; free space")
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
    return None


def _tells_of_memory(exc: BaseException) -> bool:
    """Torch's CPU allocator raises a plain RuntimeError."""
    return type(exc) is RuntimeError and any(phrase in str(exc).lower() for phrase in _MEMORY_PHRASES)


def _is_first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"


@contextlib.contextmanager
def _reported(result: Path | None) -> Iterator[None]:
    """Turn whatever the block raises into a line, a Failure in ``result``, and an exit code."""
    try:
        yield
    except typer.Exit:
        raise
    except (Exception, KeyboardInterrupt) as exc:
        fault = _fault(exc)
        if hasattr(exc, "show") and fault is None:
            raise  # a wrong flag of a mounted command line
        if fault is not exc and not isinstance(exc, KeyboardInterrupt):
            traceback.print_exc()
        failure = Failure(
            reason=fault.reason if fault else RuntimeFault.reason,
            message=(str(fault) if fault else f"{type(exc).__name__}: {exc}")[:2000],
        )
        print(f"prodrl: {failure.reason}: {failure.message}", file=sys.stderr)
        if result is not None:
            _write_failure(result, failure)
        raise typer.Exit(fault.exit_code if fault else RuntimeFault.exit_code) from exc


def _write_failure(path: Path, failure: Failure) -> None:
    """The cause, not its echo: when one rank fails, the launcher stops the others with SIGTERM."""
    is_echo = failure.reason == PreemptedError.reason or not _is_first_rank()
    try:
        if is_echo and path.is_file() and path.stat().st_size:
            return
        write_result(path, failure)
    except (OSError, UsageError) as exc:
        print(f"prodrl: {exc}", file=sys.stderr)


@contextlib.contextmanager
def _stoppable() -> Iterator[None]:
    """SIGTERM and the first Ctrl-C ask the step to stop; a second Ctrl-C ends the process."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    progress.stop_requested.clear()
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def ask(number: int, _frame: object) -> None:
        progress.stop_requested.set()
        if number == signal.SIGINT:  # SIGTERM may come twice, from the kubelet and from torchrun
            signal.signal(number, signal.default_int_handler)

    for number in before:
        signal.signal(number, ask)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _step(
    kind: type[_C],
    config: Path,
    result: Path | None,
    listen: str | None,
    work: Callable[[_C, progress.Progress], Config],
) -> None:
    """Read, serve, work, report."""
    with _reported(result), _stoppable(), contextlib.ExitStack() as stack:
        read = kind.read(config)
        state = progress.Progress()
        if listen is not None and _is_first_rank():
            bound = stack.enter_context(progress.serve(state, *_address(listen)))
            logger.info("Progress at http://%s:%d/progress", *bound)
        made = work(read, state)
        if _is_first_rank():
            write_result(result, made)


def _address(listen: str) -> tuple[str, int]:
    host, _, port = listen.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise UsageError(f"Option --listen: must be HOST:PORT, got {listen!r}; give for example 127.0.0.1:8090")
    return host.strip("[]"), int(port)


def _store_config(uri: str, endpoint_url: str | None, region: str | None) -> StoreConfig:
    try:
        return StoreConfig(uri=uri, endpoint_url=endpoint_url, region=region)
    except ValueError as exc:
        raise UsageError(
            f"Option --store: must be file:///folder or s3://bucket/prefix, got {uri!r}; correct it"
        ) from exc


if __name__ == "__main__":
    main()
