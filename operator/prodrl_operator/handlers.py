"""kopf: watches and the life of the process's event loop. The only file that imports it. Called by ``process``.

Only ``on.event`` is used: such handlers keep no progress on objects, add no finalizer and no annotation, and are not
retried. All that happens in them is that the cache takes the event in; deciding, retrying and writing are the
controller's, which looks again by itself when an event never comes.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import kopf
from kubernetes.client import Configuration
from kubernetes.client.rest import should_bypass_proxies

from prodrl_operator import names
from prodrl_operator.cluster import port
from prodrl_operator.cluster.caching import OURS, WATCHED, CachedCluster
from prodrl_operator.cluster.port import Kind
from prodrl_operator.errors import InvalidError

CONNECT_SECONDS, REQUEST_SECONDS = 10, 30
SERVER_SECONDS, CLIENT_SECONDS = 300, 330
"""A watch ends by itself after so long, and is given up by us soon after: none can be silent for ever."""
STOP_LOOK_SECONDS = 0.2
PAGE_SIZE = 200
EXPIRED = 410
SELECTOR = ",".join(f"{name}={value}" for name, value in OURS.items())

_log = logging.getLogger(__name__)

_Handler = Callable[..., Awaitable[None]]


def registry(cached: CachedCluster, configuration: Configuration) -> kopf.OperatorRegistry:
    """Handlers that feed ``cached``, with the credentials of ``configuration``."""
    made = kopf.OperatorRegistry()
    kopf.on.login(registry=made)(_login(configuration))
    for kind in WATCHED:
        group, _, version = kind.api_version.rpartition("/")
        kopf.on.event(group, version, kind.plural, registry=made, id=f"see-{kind.plural}")(_taking_in(cached, kind))
    return made


def _taking_in(cached: CachedCluster, kind: Kind) -> _Handler:
    async def take_in(event: Any, **_context: Any) -> None:
        cached.note(kind, event["type"], dict(event["object"]))

    return take_in


def _login(configuration: Configuration) -> Callable[..., kopf.ConnectionInfo]:
    """Asked again whenever the API server refuses the old credentials: a rotated token is read then."""

    def login(**_context: Any) -> kopf.ConnectionInfo:
        return connection_info(configuration)

    return login


def connection_info(configuration: Configuration) -> kopf.ConnectionInfo:
    """The watches' way to the API server: the one that all other requests go.

    Raises:
        InvalidError: The watches cannot go it.
    """
    proxy: str | None = configuration.proxy
    if proxy and should_bypass_proxies(configuration.host, configuration.no_proxy or ""):
        proxy = None
    if proxy and not proxy.startswith(("http://", "https://")):
        raise InvalidError(f"proxy-url: the watches go through HTTP proxies only, got {proxy!r}; name such a one")
    if configuration.tls_server_name:
        raise InvalidError(
            f"tls-server-name: the watches cannot ask for another name than the server's own, got "
            f"{configuration.tls_server_name!r}; name a server whose certificate has its address"
        )
    bearer = configuration.get_api_key_with_prefix("authorization") or configuration.get_api_key_with_prefix(
        "BearerToken"
    )
    scheme, _space, token = (bearer or "").rpartition(" ")
    return kopf.ConnectionInfo(
        server=configuration.host,
        proxy_url=proxy or None,
        ca_path=configuration.ssl_ca_cert,
        insecure=not configuration.verify_ssl,
        scheme=scheme or None,
        token=token or None,
        username=configuration.username or None,
        password=configuration.password or None,
        certificate_path=configuration.cert_file,
        private_key_path=configuration.key_file,
    )


def settings() -> kopf.OperatorSettings:
    """Nothing of kopf's is written to objects, and no other kopf operator can pause this one."""
    made = kopf.OperatorSettings()
    # A name that is on no object: kopf takes its own finalizer off whatever no handler of its holds back.
    made.persistence.finalizer = f"{names.GROUP}/kopf"
    made.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=names.GROUP, v1=False)
    made.persistence.diffbase_storage = kopf.AnnotationsDiffBaseStorage(prefix=names.GROUP, key="last", v1=False)
    made.peering.standalone = True  # the Lease decides who acts
    made.scanning.disabled = True  # CRDs are there before the watches start, and namespaces need no permission
    made.posting.enabled = False  # events are the controller's: one a transition
    made.watching.connect_timeout = CONNECT_SECONDS
    made.watching.server_timeout = SERVER_SECONDS
    made.watching.client_timeout = CLIENT_SECONDS
    # The first list comes in pages, and of children only ours come at all: a cluster has pods by the ten thousand.
    made.watching.chunk_size = PAGE_SIZE
    for kind in WATCHED:
        if kind is not port.RUN:
            group, _, version = kind.api_version.rpartition("/")
            made.watching.label_selectors[group, version, kind.plural] = SELECTOR
    made.networking.request_timeout = REQUEST_SECONDS
    made.queueing.idle_timeout = 0.1  # a worker an object, each with its event, and thousands of objects at the start
    return made


async def watch(
    cached: CachedCluster,
    configuration: Configuration,
    namespaces: Sequence[str] | None,
    stop: threading.Event,
    ready: threading.Event | None = None,
) -> None:
    """Feed ``cached`` until ``stop`` is set, or until a signal when this is the main thread.

    Args:
        cached: What takes the events in.
        configuration: The API server and who we are.
        namespaces: Those to watch; None: all.
        stop: Ends it.
        ready: Set when the watches have begun.

    Raises:
        Exception: Whatever kopf could not go on with; the process had better start again.
    """
    logging.getLogger("kopf").setLevel(logging.WARNING)
    # A threading.Event would keep a thread of kopf's waiting after a signal has ended everything else.
    ended = asyncio.Event()
    follower = asyncio.create_task(_follow(stop, ended))
    try:
        while not ended.is_set():
            try:
                await kopf.operator(
                    registry=registry(cached, configuration),
                    settings=settings(),
                    clusterwide=namespaces is None,
                    namespaces=tuple(namespaces or ()),
                    standalone=True,
                    stop_flag=ended,
                    ready_flag=ready,
                )
                return
            except Exception as exc:
                # kopf begins a list anew after whatever else, but not when its next page has been forgotten meanwhile.
                if getattr(exc, "status", None) != EXPIRED:
                    raise
                _log.warning("watches: a list took too long, all begin anew (%s)", exc)
    finally:
        follower.cancel()


async def _follow(stop: threading.Event, ended: asyncio.Event) -> None:
    while not stop.is_set():
        await asyncio.sleep(STOP_LOOK_SECONDS)
    ended.set()


def watch_forever(
    cached: CachedCluster, configuration: Configuration, namespaces: Sequence[str] | None, stop: threading.Event
) -> None:
    """:func:`watch` in an event loop of its own. Blocks."""
    asyncio.run(watch(cached, configuration, namespaces, stop))
