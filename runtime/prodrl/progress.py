"""How far a step is, and whether it was told to stop.

Every step's ``run(config, progress)`` reports through :class:`Progress` and looks at :data:`stop_requested` in its
loops; ``cli`` serves the figures with :func:`serve` and sets the event on SIGTERM. What the figures mean is the
step's business.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prodrl.errors import PreemptedError, UsageError

stop_requested = threading.Event()
"""Set by SIGTERM. Long loops check it and raise :class:`~prodrl.errors.PreemptedError` at the next safe point."""


def check_stop(thing: str) -> None:
    """Raise if the process was told to stop.

    Raises:
        PreemptedError: ``stop_requested`` is set.
    """
    if stop_requested.is_set():
        raise PreemptedError(f"{thing}: stopped by SIGTERM before it was finished; a new attempt goes on")


class Progress:
    """Counts towards a total; may be written and read from different threads.

    Example:
        ``progress = Progress(64, "trajectories"); progress.advance(3)``
    """

    def __init__(self, total: float | None = None, unit: str = "") -> None:
        self._lock = threading.Lock()
        self._done = 0.0
        self._total = total
        self._unit = unit
        self._message = ""
        self._started_ms = int(time.time() * 1000)

    def advance(self, n: float = 1) -> None:
        """Count ``n`` more."""
        with self._lock:
            self._done += n

    def set(self, done: float, total: float | None = None, message: str = "", unit: str | None = None) -> None:
        """Replace the figures. ``total`` and ``unit`` None keep what is there; ``message`` is always replaced."""
        with self._lock:
            self._done = done
            self._message = message
            self._total = self._total if total is None else total
            self._unit = self._unit if unit is None else unit

    @property
    def done(self) -> float:
        """What is counted so far."""
        with self._lock:
            return self._done

    def snapshot(self) -> dict[str, Any]:
        """What ``GET /progress`` answers."""
        with self._lock:
            return {
                "done": self._done,
                "total": self._total,
                "unit": self._unit,
                "message": self._message,
                "started_ms": self._started_ms,
            }

    def metrics(self) -> str:
        """The same in Prometheus' text format."""
        seen = self.snapshot()
        lines = [
            "# HELP prodrl_step_done Units of the step that are finished.",
            "# TYPE prodrl_step_done gauge",
            f"prodrl_step_done{_unit_label(seen['unit'])} {seen['done']:.17g}",
            "# HELP prodrl_step_start_time_seconds Unix time at which the step began.",
            "# TYPE prodrl_step_start_time_seconds gauge",
            f"prodrl_step_start_time_seconds {seen['started_ms'] / 1000:.3f}",
        ]
        if seen["total"] is not None:
            lines += [
                "# HELP prodrl_step_total Units that the step has to do.",
                "# TYPE prodrl_step_total gauge",
                f"prodrl_step_total{_unit_label(seen['unit'])} {seen['total']:.17g}",
            ]
        return "\n".join(lines) + "\n"


def _unit_label(unit: str) -> str:
    escaped = unit.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'{{unit="{escaped}"}}' if unit else ""


class _Handler(BaseHTTPRequestHandler):
    """GET only; anything else is answered by the base class."""

    server_version = "prodrl"
    sys_version = ""
    timeout = 10
    progress: Progress

    def do_GET(self) -> None:
        """Answer the three paths that exist."""
        path = self.path.partition("?")[0]
        if path == "/progress":
            self._answer(200, "application/json", json.dumps(self.progress.snapshot()))
        elif path == "/metrics":
            self._answer(200, "text/plain; version=0.0.4; charset=utf-8", self.progress.metrics())
        elif path == "/healthz":
            self._answer(200, "text/plain; charset=utf-8", "ok\n")
        else:
            self._answer(404, "text/plain; charset=utf-8", "not found; try /progress, /metrics or /healthz\n")

    def _answer(self, status: int, content_type: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # the base class names it
        """Scrapes are not worth a line."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True


@contextlib.contextmanager
def serve(progress: Progress, host: str, port: int) -> Iterator[tuple[str, int]]:
    """Serve ``progress`` over HTTP while the block runs; gives the address that was bound (port 0 picks one).

    Raises:
        UsageError: The address cannot be bound.
    """
    handler = type("_BoundHandler", (_Handler,), {"progress": progress})
    try:
        server = _Server((host, port), handler)
    except OSError as exc:
        raise UsageError(
            f"Progress server {host}:{port}: cannot listen, {exc.strerror or exc}; give another address to --listen"
        ) from exc
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.2}, name="progress", daemon=True)
    thread.start()
    try:
        bound_host, bound_port = server.server_address[:2]
        yield str(bound_host), int(bound_port)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
