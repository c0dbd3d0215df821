"""One local run from start to end: environment, controller, views. Called by ``cli``."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.live import Live

from prodrl_operator.api import crd
from prodrl_operator.api.run import Run
from prodrl_operator.builders import Platform, gateway_name
from prodrl_operator.cluster.local.environment import LocalCluster
from prodrl_operator.cluster.port import Cluster
from prodrl_operator.controller import Controller
from prodrl_operator.errors import AlreadyExistsError
from prodrl_operator.gateway_admin import HttpGatewayAdmin
from prodrl_operator.local import manifests, preflight
from prodrl_operator.local.audits import Audits
from prodrl_operator.report import snapshot as snapshots
from prodrl_operator.report import terminal
from prodrl_operator.report.live import LivePage
from prodrl_operator.report.page import page_data, report_page
from prodrl_operator.report.snapshot import Snapshot
from prodrl_operator.report.summary import summary

EXIT_COMPLETED, EXIT_STALLED, EXIT_INTERRUPTED = 0, 3, 130
LOOK_SECONDS = 1.0
PAGE_SECONDS = 3.0
SAY_SECONDS = 15.0
"""Without a terminal: a line at least so often, and at every change of step."""


@dataclass(frozen=True)
class Options:
    """What the command line says."""

    path: Path
    data: Path
    port: int = 0
    """The gateway's port on 127.0.0.1; 0: any free one."""
    page_port: int = 0
    """The live page's port; 0: any free one."""
    keep: bool = False
    """Stay and serve after the run ended, until Ctrl-C."""


def write_whole(path: Path, text: str) -> None:
    """Replace a file in one step."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def load(cluster: Cluster, others: list[dict[str, Any]], run: dict[str, Any]) -> None:
    """Create what is not there, apply what is: a second start of the same folder takes edits of the YAML."""
    for document in [*others, run]:
        try:
            cluster.create(document)
        except AlreadyExistsError:
            cluster.apply(document)


def state_of(run: Run) -> str | None:
    """Completed or Stalled once the run has come to its end, else None."""
    for condition in run.status.conditions:
        if condition.status == "True" and condition.type in ("Completed", "Stalled"):
            fresh = condition.observed_generation in (None, run.metadata.get("generation"))
            return condition.type if fresh else None
    return None


class Session:
    """Holds what one local run needs; ``turn`` blocks until the run ends or a signal arrives."""

    def __init__(self, options: Options) -> None:
        preflight.check_platform()
        self.others, self.document = manifests.read(options.path)
        run = manifests.parse_run(self.document)
        preflight.check_model(run)
        preflight.check_store(run)
        if options.page_port:
            preflight.check_port(options.page_port, "--page-port")
        self.options = options
        self.name = run.metadata["name"]
        self.namespace = run.metadata.get("namespace", "default")
        self.audits = Audits(run)
        options.data.mkdir(parents=True, exist_ok=True)
        self.environment = LocalCluster(
            options.data, list(crd.crds().values()), publish={gateway_name(self.name): options.port}
        )
        self._stop = threading.Event()
        self._last: Snapshot | None = None
        self._finished_rounds = -1

    def turn(self, console: Console) -> int:
        """Run to the end. Returns the exit code."""
        environment = self.environment
        environment.start()
        try:
            load(environment.store, self.others, self.document)
            page = LivePage(self.name, self.options.page_port)
            self._announce(page)
            controller = Controller(environment.store, Platform(local=True), gateway_admin=HttpGatewayAdmin())
            worker = threading.Thread(target=controller.run_forever, args=(self._stop,), name="controller")
            with _signals(self._stop.set):
                worker.start()
                state = self._watch(console, page)
                if state in ("Completed", "Stalled"):
                    self._finish(state, page)
                    if self.options.keep:
                        console.print(f"run {state.lower()}; users stay served at {self.endpoint} until Ctrl-C")
                        self._stop.wait()
                self._stop.set()
                worker.join(timeout=30)
            self._finish(state, page)
            page.close()
        finally:
            self._stop.set()
            environment.stop(terminate=True)
        self._say(console, state)
        return {"Completed": EXIT_COMPLETED, "Stalled": EXIT_STALLED}.get(state, EXIT_INTERRUPTED)

    @property
    def endpoint(self) -> str:
        """Where users connect."""
        return f"http://127.0.0.1:{self.environment.published[gateway_name(self.name)]}"

    def _announce(self, page: LivePage) -> None:
        facts = {"endpoint": self.endpoint, "page": page.url, "pid": os.getpid(), "run": self.name}
        write_whole(self.options.data / "endpoint.json", json.dumps(facts, indent=1))

    def _watch(self, console: Console, page: LivePage) -> str:
        drawn, spoke, said = 0.0, 0.0, ""
        with Live(console=console, refresh_per_second=2, transient=True, auto_refresh=False) as live:
            while not self._stop.wait(LOOK_SECONDS):
                seen = self._look()
                if seen is None:
                    continue
                ended = state_of(seen.run)
                if console.is_terminal:
                    live.update(terminal.view(seen, page.url, self.endpoint), refresh=True)
                elif terminal.place(seen) != said or time.monotonic() - spoke > SAY_SECONDS:
                    console.print(f"{time.strftime('%H:%M:%S')} {terminal.line(seen)}", highlight=False, soft_wrap=True)
                    said, spoke = terminal.place(seen), time.monotonic()
                if time.monotonic() - drawn > PAGE_SECONDS or ended:
                    self._draw(seen, ended or "Running", page)
                    drawn = time.monotonic()
                if ended:
                    return ended
        return "Interrupted"

    def _look(self) -> Snapshot | None:
        seen = snapshots.take(self.environment.store, self.namespace, self.name, self.options.data, self._last)
        if seen is None:
            return None
        if seen.run.status.rounds_finished != self._finished_rounds:
            self._finished_rounds = seen.run.status.rounds_finished
            self.audits.renew()
        self._last = dataclasses.replace(seen, audit=self.audits.audit, curves=self.audits.curves)
        return self._last

    def _draw(self, seen: Snapshot, state: str, page: LivePage) -> None:
        facts = summary(seen, state)
        write_whole(self.options.data / "summary.json", json.dumps(facts, indent=1))
        page.update(page_data(seen, state), facts)

    def _finish(self, state: str, page: LivePage) -> None:
        self.audits.renew(wait=True)
        seen = self._look()
        if seen is not None:
            self._draw(seen, state, page)
            write_whole(self.options.data / "report.html", report_page(seen, state))

    def _say(self, console: Console, state: str) -> None:
        if self._last is None:
            return
        for condition in self._last.run.status.conditions:
            if condition.type == "Stalled" and condition.status == "True":
                console.print(f"[bold red]stalled[/]: {condition.reason}: {condition.message}", highlight=False)
        console.print(f"run {self.name}: {state}; summary {self.options.data / 'summary.json'}", soft_wrap=True)
        console.print(f"report: {self.options.data / 'report.html'}", soft_wrap=True)


class _signals:  # noqa: N801  (used as a verb: with _signals(...))
    """SIGINT and SIGTERM call ``stop`` while the block runs; the second one is the default again."""

    def __init__(self, stop: Callable[[], None]) -> None:
        self._stop = stop
        self._before: dict[int, Any] = {}

    def __enter__(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._caught)

    def _caught(self, number: int, _frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN if number == signal.SIGTERM else signal.default_int_handler)
        self._stop()

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
