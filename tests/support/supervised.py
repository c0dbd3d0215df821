"""The operator's whole process in threads, started again whenever it ends, as a kubelet would. Imported by tests."""

from __future__ import annotations

import sys
import threading
import traceback
from datetime import timedelta
from types import TracebackType
from typing import Any

from prodrl_operator.builders import Platform
from prodrl_operator.cluster.kubernetes import KubernetesCluster
from prodrl_operator.process import Options, Process
from tests.support.api_world import ApiWorld

RESTART_SECONDS = 0.5


class Supervised:
    """Use as a context manager.

    Args:
        world: Whose namespace, gateway and clock it works with.
        cluster: The client.
        skew: How far its clock is off the world's.
        options: Of the command line.
    """

    def __init__(
        self, world: ApiWorld, cluster: KubernetesCluster, *, skew: timedelta = timedelta(), **options: Any
    ) -> None:
        chosen = {"listen": "127.0.0.1:0", "lease_namespace": world.namespace, "namespaces": (world.namespace,)}
        self._options = Options(platform=Platform(), **(chosen | options))
        self._world, self._cluster, self._skew = world, cluster, skew
        self._stop = threading.Event()
        self.ends: list[str] = []
        """Exit codes, or what was thrown, of processes that ended by themselves."""
        self.process = self._new()
        self._thread = threading.Thread(target=self._keep_running, name=f"operator-{world.namespace}", daemon=True)

    def __enter__(self) -> Supervised:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, at: TracebackType | None) -> None:
        self.stop()
        self._thread.join(90)
        frame = sys._current_frames().get(self._thread.ident or 0) if self._thread.is_alive() else None
        where = "".join(traceback.format_stack(frame))
        assert frame is None, f"{self._world.namespace}: did not stop in 90 s, after {self.ends}; it is at\n{where}"

    def stop(self) -> None:
        """Let it end; leaving the block waits for it."""
        self._stop.set()
        self.process.stop()

    def _new(self) -> Process:
        world = self._world
        return Process(
            self._cluster, self._options, gateway_admin=world.gateway, clock=lambda: world.clock() + self._skew
        )

    def _keep_running(self) -> None:
        while not self._stop.is_set():
            try:
                end = str(self.process.run())
            except Exception as exc:
                end = repr(exc)
            if self._stop.wait(RESTART_SECONDS):
                return
            self.ends.append(end)
            self.process = self._new()
