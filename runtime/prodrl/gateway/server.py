"""uvicorn servers in one event loop: users' traffic, the operator's admin port, figures. Called by ``prodrl gateway``.

Wires the parts, keeps house once a second (keys, routes file, spool), and stops in order: no new connections, running
requests finish, feedback is committed, exit 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pydantic
import uvicorn
import uvloop

from prodrl import progress
from prodrl.config import GatewayConfig, RouteTable
from prodrl.errors import UsageError
from prodrl.gateway import admin, app, keys, protocol, proxy, routing, segments, spool, stats, upstream, wire
from prodrl.store import open_store
from prodrl.store.port import Store

logger = logging.getLogger(__name__)

TICK_SECONDS = 1.0
BACKLOG = 2048


Address = tuple[str, int]
"""Host and port."""


def serve(
    config: GatewayConfig,
    *,
    users: Address,
    operator: Address,
    metrics: Address | None = None,
    routes_path: str | Path | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT; returns when everything accepted is answered and durable.

    Args:
        config: The gateway's.
        users: Where requests and feedback come in.
        operator: Where routes come in and status goes out.
        metrics: Where figures alone are, for a scraper that must not reach the operator's port.
        routes_path: JSON RouteTable to start from.

    Raises:
        UsageError: A port cannot be taken.
    """
    sockets = [_listen(*address) for address in (users, operator, metrics) if address]
    spool_dir = os.environ.get("PRODRL_SPOOL_DIR")
    settings = Settings(
        writer=config.writer or os.environ.get("POD_NAME") or socket.gethostname(),
        api_keys_dir=_path(config.api_keys_dir or os.environ.get("PRODRL_API_KEYS_DIR")),
        spool_dir=_path(spool_dir),
        routes_path=_path(routes_path),
    )
    store = open_store(config.store)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(config, settings, store, *sockets))


@dataclass(frozen=True)
class Settings:
    """Where this replica finds things on its machine; None: it has none of that."""

    writer: str
    api_keys_dir: Path | None = None
    spool_dir: Path | None = None
    routes_path: Path | None = None


class Gateway:
    """The running parts of one replica; ``start`` and ``stop`` it inside an event loop."""

    def __init__(self, config: GatewayConfig, settings: Settings, store: Store) -> None:
        self._config = config
        self._spool = spool.Spool(settings.spool_dir)
        self._keys = keys.ApiKeys(settings.api_keys_dir)
        self._stats = self._spool.load_stats()
        conversations = routing.Conversations(config.sticky_seconds)
        self._spool.load_conversations(conversations, time.time())
        self.router = routing.Router(conversations, routing.Health(config.connect_retry_seconds))
        self.routes = RoutesSource(self.router, settings.routes_path)
        self._log = segments.FeedbackLog(store, settings.writer)
        self._upstream = upstream.Upstream(config.upstream_timeout_seconds)
        self.is_draining = False
        self.deps = self._wire()
        admin_deps = admin.AdminDeps(
            traffic=self.deps,
            routes=self.routes,
            started_ms=segments.now_ms(),
            writer=settings.writer,
            feedback_failures=lambda: self._log.failures,
        )
        self._traffic_server = self._server(app.make_app(self.deps))
        self._admin_server = self._server(admin.make_admin_app(admin_deps))
        self._metrics_server = self._server(admin.make_metrics_app(admin_deps))
        self._tasks: list[asyncio.Task[None]] = []
        self._is_stopped = asyncio.Event()

    def _wire(self) -> app.Deps:
        trails = stats.Trails()
        return app.Deps(
            keys=self._keys,
            proxy=proxy.Proxy(
                router=self.router,
                upstream=self._upstream,
                counters=self._stats,
                trails=trails,
                retry_seconds=self._config.connect_retry_seconds,
            ),
            feedback=self._log,
            router=self.router,
            stats=self._stats,
            trails=trails,
            max_body_bytes=self._config.max_body_bytes,
            max_header_bytes=self._config.max_header_bytes,
            is_draining=lambda: self.is_draining,
        )

    def _server(self, application: wire.App) -> _Server:
        return _Server(
            uvicorn.Config(
                application,
                http=protocol.bounded_protocol(self._config.max_header_bytes),
                interface="asgi3",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                date_header=False,
                proxy_headers=False,
                backlog=BACKLOG,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=self._config.drain_seconds,  # type: ignore[arg-type]
            )
        )

    async def start(self, *sockets: socket.socket) -> None:
        """Listen, open the feedback log, begin to keep house; sockets of users, operator and, perhaps, scrapers."""
        self.routes.refresh()
        self._log.start()
        servers = (self._traffic_server, self._admin_server, self._metrics_server)[: len(sockets)]
        for server, sock in zip(servers, sockets, strict=True):
            self._tasks.append(asyncio.create_task(server.serve(sockets=[sock])))
        while not all(server.started for server in servers):
            await asyncio.sleep(0.01)
        self._tasks.append(asyncio.create_task(self._keep_house()))

    async def stop(self) -> None:
        """Finish what runs, commit what was posted, close."""
        traffic_task, *other_tasks, house = self._tasks
        self.is_draining = True
        self._traffic_server.should_exit = True
        await traffic_task
        await self._log.close()
        self._is_stopped.set()
        await house
        self._admin_server.should_exit = self._metrics_server.should_exit = True
        await asyncio.gather(*other_tasks)
        await self._upstream.close()

    async def _keep_house(self) -> None:
        while not self._is_stopped.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._is_stopped.wait(), TICK_SECONDS)
            try:
                await asyncio.to_thread(self._keys.refresh)
                self.routes.refresh()
                await self._save()
            except Exception:  # the loop's edge
                logger.exception("Housekeeping: failed; trying again")

    async def _save(self) -> None:
        seats = self.router.conversations
        rows = seats.take_journal()
        held = seats.items() if self._spool.is_long else []
        await asyncio.to_thread(self._spool.save, self._stats.changes, self._stats.snapshot(), rows, held)


class RoutesSource:
    """The route table from a file until the operator pushes one; from then on only what is pushed."""

    def __init__(self, router: routing.Router, path: Path | None) -> None:
        self._router = router
        self._path = path
        self._signature: tuple[int, int, int] | None = None
        self._is_pushed = False

    def push(self, table: RouteTable) -> None:
        """Apply a table from the operator."""
        self._is_pushed = True
        self._apply(table)

    def refresh(self) -> None:
        """Read the file again if it changed and nothing was pushed."""
        if self._path is None or self._is_pushed:
            return
        try:
            found = self._path.stat()
            signature = (found.st_ino, found.st_mtime_ns, found.st_size)
            if signature == self._signature:
                return
            self._signature = signature
            self._apply(RouteTable.model_validate_json(self._path.read_bytes()))
        except FileNotFoundError:
            return
        except (OSError, pydantic.ValidationError) as exc:
            logger.error("Routes %s: not applied, %s; the table in use stays", self._path, exc)

    def _apply(self, table: RouteTable) -> None:
        if self._router.apply(table):
            weights = {f"round {route.round}": route.weight for route in table.routes}
            logger.info("Routes %s: applied, weights %s", table.version, weights)


class _Server(uvicorn.Server):
    """A server that leaves the process's signals to ``_serve``: two of them share one process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _serve(config: GatewayConfig, settings: Settings, store: Store, *sockets: socket.socket) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if progress.stop_requested.is_set():
        return
    gateway = Gateway(config, settings, store)
    await gateway.start(*sockets)
    logger.info("Gateway %s: traffic on %s, admin on %s", settings.writer, *map(_address, sockets[:2]))
    await stop.wait()
    logger.info("Gateway %s: stopping", settings.writer)
    await gateway.stop()


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as exc:
        sock.close()
        raise UsageError(f"Gateway: cannot listen on {host}:{port}, {exc.strerror}; choose another port") from exc
    sock.setblocking(False)
    return sock


def _address(sock: socket.socket) -> str:
    return "{}:{}".format(*sock.getsockname()[:2])


def _path(text: str | Path | None) -> Path | None:
    return Path(text) if text else None
