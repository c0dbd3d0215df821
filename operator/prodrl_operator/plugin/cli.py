"""Look at the loop of a ProdRLRun, and ask it for what Git could ask it for."""

from __future__ import annotations

import json
import sys
import time
import webbrowser
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console

from prodrl_operator.errors import InvalidError, OperatorError
from prodrl_operator.plugin import access, auditing, completing, health, listing, logs, tree, verbs, watching, writing
from prodrl_operator.plugin.looking import Look, choose, look
from prodrl_operator.plugin.options import Context, Kubeconfig, Namespace, Where, placed

EXIT_UNWELL, EXIT_REFUSED = 1, 2
WIDE = 10_000
"""Without a terminal nothing is wrapped."""

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)


class Output(StrEnum):
    """Forms of output."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"


class Shell(StrEnum):
    """Shells that can complete."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


RUN_HELP = "Name of the run; may be left out where the namespace has exactly one."
RunArgument = Annotated[str | None, typer.Argument(metavar="RUN", help=RUN_HELP, autocompletion=completing.runs)]
NamedRun = Annotated[str, typer.Argument(metavar="RUN", help="Name of the run.", autocompletion=completing.runs)]
RoundArgument = Annotated[
    int | None,
    typer.Argument(metavar="ROUND", help="The round you mean; else the current.", autocompletion=completing.rounds),
]
OutputOption = Annotated[Output, typer.Option("--output", "-o", help="Form of the output.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only print the YAML, for Git; write nothing.")]


@app.callback()
def options(namespace: Namespace = None, context: Context = None, kubeconfig: Kubeconfig = None) -> None:
    """Look at the loop of a ProdRLRun, and ask it for what Git could ask it for."""


def _console(*, stderr: bool = False) -> Console:
    is_terminal = (sys.stderr if stderr else sys.stdout).isatty()
    return Console(stderr=stderr, markup=False, highlight=False, emoji=False, width=None if is_terminal else WIDE)


def _now() -> datetime:
    return datetime.now(UTC)


def _open(where: Where) -> tuple[access.Access, str]:
    found = access.connect(where.kubeconfig, where.context)
    return found, where.namespace or found.namespace


def _seen(where: Where, run: str | None) -> tuple[access.Access, Look]:
    found, namespace = _open(where)
    return found, look(found, namespace, choose(found, namespace, run))


def _print(document: Any, output: Output) -> None:
    text = json.dumps(document, indent=2) if output is Output.JSON else yaml.safe_dump(document, sort_keys=False)
    print(text.rstrip("\n"))


@app.command()
@placed
def status(
    where: Where,
    run: RunArgument = None,
    output: OutputOption = Output.TABLE,
    exit_code: Annotated[bool, typer.Option("--exit-code", help="Exit with 1 unless the run is well.")] = False,
) -> None:
    """Show a run as a tree: conditions, stable policy, current round, gate, history, and what to do."""
    _, seen = _seen(where, run)
    judged = health.judge(seen)
    if output is Output.TABLE:
        _console().print(tree.draw(seen, judged, _now()))
    else:
        _print(listing.document(seen, judged, _now()), output)
    if exit_code and not judged.is_well:
        raise typer.Exit(EXIT_UNWELL)


@app.command()
@placed
def rounds(where: Where, run: RunArgument = None, output: OutputOption = Output.TABLE) -> None:
    """List the rounds of a run."""
    _, seen = _seen(where, run)
    found = listing.rows(seen, _now())
    if output is not Output.TABLE:
        _print([row.document() for row in found], output)
    elif found:
        _console().print(listing.table(found))
    else:
        _console(stderr=True).print(f"{seen.name} has no rounds yet")


@app.command()
@placed
def watch(
    where: Where,
    run: RunArgument = None,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between looks.")] = 2.0,
) -> None:
    """Follow a run: a live tree on a terminal, else a line for each change. Ends when the run completes."""
    found, namespace = _open(where)
    name = choose(found, namespace, run)
    watching.Watch(
        look=lambda: look(found, namespace, name), pause=lambda: time.sleep(interval), now=_now, console=_console()
    ).turn()


def _write(where: Where, run: str, verb: verbs.Verb, *, dry_run: bool) -> None:
    found, seen = _seen(where, run)
    notes, keeper = _console(stderr=True), writing.keeper(seen.raw)
    warning = f"warning: {keeper} keeps this object and may take the change back; put the YAML into its source"
    if dry_run:
        print(writing.fragment(seen, verb(seen)), end="")
        if keeper:
            notes.print(f"{keeper} keeps this object; put the YAML into its source")
        return
    seen, change = writing.write(found, seen, verb)
    if change.is_in_force:
        print(f"prodrlrun/{seen.name} unchanged: its spec says so already ({change.effect})")
        return
    print(f"prodrlrun/{seen.name} patched: {change.effect}")
    print(f"# The same for Git:\n{writing.fragment(seen, change)}", end="")
    if keeper:
        notes.print(warning)


@app.command()
@placed
def approve(where: Where, run: NamedRun, round_: RoundArgument = None, dry_run: DryRun = False) -> None:
    """Promote a round that waits for a person (spec.requests.approveRound)."""
    _write(where, run, lambda seen: verbs.approve(seen, round_), dry_run=dry_run)


@app.command()
@placed
def abort(where: Where, run: NamedRun, round_: RoundArgument = None, dry_run: DryRun = False) -> None:
    """End the current round; users stay with the stable policy (spec.requests.abortRound)."""
    _write(where, run, lambda seen: verbs.abort(seen, round_), dry_run=dry_run)


@app.command()
@placed
def retry(
    where: Where,
    run: NamedRun,
    token: Annotated[str | None, typer.Option(help="The token to write; else the time.")] = None,
    dry_run: DryRun = False,
) -> None:
    """Let a stalled run try again (a new spec.requests.retryToken)."""
    chosen = token if token is not None else f"{_now():%Y%m%dT%H%M%S.%fZ}"
    _write(where, run, lambda seen: verbs.retry(seen, chosen), dry_run=dry_run)


@app.command()
@placed
def suspend(where: Where, run: NamedRun, dry_run: DryRun = False) -> None:
    """Start nothing new and suspend running Jobs; users stay served (spec.suspend: true)."""
    _write(where, run, verbs.suspend, dry_run=dry_run)


@app.command()
@placed
def resume(where: Where, run: NamedRun, dry_run: DryRun = False) -> None:
    """Let a suspended run go on (spec.suspend: false)."""
    _write(where, run, verbs.resume, dry_run=dry_run)


@app.command(name="logs")
@placed
def show_logs(
    where: Where,
    run: NamedRun,
    step: Annotated[str, typer.Argument(help=" | ".join(logs.STEPS), autocompletion=completing.steps)],
    round_: Annotated[int | None, typer.Option("--round", help="Else the newest that has pods.")] = None,
    attempt: Annotated[int | None, typer.Option(help="Else the newest.")] = None,
    container: Annotated[str | None, typer.Option("--container", "-c", help="Else the pod's main one.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the containers end.")] = False,
    tail: Annotated[int | None, typer.Option(min=0, help="Only so many of the last lines.")] = None,
    previous: Annotated[bool, typer.Option("--previous", "-p", help="Before the container's last restart.")] = False,
) -> None:
    """Print the logs of a step's pods, of the servers, or of the gateway."""
    found, seen = _seen(where, run)
    wanted = logs.Wanted(step, round_, attempt, container, follow, tail, previous)
    note = logs.note(seen, wanted)
    if note:
        _console(stderr=True).print(note)
    if not logs.show(found.pods, seen, wanted, lambda line: print(line, flush=follow)):
        raise typer.Exit(EXIT_REFUSED)


@app.command()
@placed
def audit(where: Where, run: RunArgument = None, output: OutputOption = Output.TABLE) -> None:
    """Check recorded = trained + waiting + excluded + expired, in a pod of the gateway; exit code 1: it is not so."""
    found, seen = _seen(where, run)
    result = auditing.audit(found, seen)
    if output is Output.TABLE:
        _console().print("\n".join(auditing.audit_lines(result)))
    else:
        _print(result, output)
    if not auditing.holds(result):
        raise typer.Exit(EXIT_UNWELL)


@app.command()
@placed
def report(
    where: Where,
    run: RunArgument = None,
    path: Annotated[Path | None, typer.Option("--output", "-o", help="The file; else RUN-report.html here.")] = None,
    show: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
) -> None:
    """Write a self-contained HTML page: rounds, curves, gate figures, fates of the records."""
    from prodrl_operator.report.page import report_page

    found, seen = _seen(where, run)
    snapshot, missing = auditing.snapshot(found, seen)
    target = (path or Path(f"{seen.name}-report.html")).absolute()
    try:
        target.write_text(report_page(snapshot, auditing.state_of(seen)), encoding="utf-8")
    except OSError as exc:
        raise InvalidError(f"Report {target}: cannot be written, {exc}; choose another file with -o") from exc
    for gap in missing:
        _console(stderr=True).print(f"not in the report: {gap}")
    print(target)
    if show:
        webbrowser.open(target.as_uri())


@app.command()
def completion(shell: Annotated[Shell, typer.Argument(help="bash | zsh | fish")]) -> None:
    """Print the completion script of a shell for `kubectl-prodrl`; `kubectl prodrl` completes with kubectl's own."""
    completing.script(shell.value)


def main() -> None:
    """The console script: errors become one line and exit code 2."""
    try:
        app(prog_name=completing.PROGRAM if completing.is_asked() else "kubectl prodrl")
    except OperatorError as exc:
        _console(stderr=True).print(f"error: {exc}", soft_wrap=True)
        raise SystemExit(EXIT_REFUSED) from exc
