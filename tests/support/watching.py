"""kopf's watches in a thread, as the operator runs them in its process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from prodrl_operator import handlers
from prodrl_operator.cluster.caching import CachedCluster
from prodrl_operator.cluster.kubernetes import KubernetesCluster


@contextmanager
def watching(
    cluster: KubernetesCluster, cached: CachedCluster, namespaces: Sequence[str] | None = None
) -> Iterator[None]:
    """Feed the cache until the block ends; what ended the watches early is raised there."""
    stop, ready = threading.Event(), threading.Event()
    faults: list[BaseException] = []

    def run() -> None:
        try:
            asyncio.run(handlers.watch(cached, cluster.api.configuration, namespaces, stop, ready))
        except BaseException as exc:
            faults.append(exc)
            ready.set()

    thread = threading.Thread(target=run, name="kopf", daemon=True)
    thread.start()
    assert ready.wait(30), "kopf did not start in 30 s"
    try:
        yield
    finally:
        stop.set()
        thread.join(30)
        assert not thread.is_alive(), "kopf did not stop in 30 s"
    if faults:
        raise faults[0]
