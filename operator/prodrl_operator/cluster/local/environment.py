"""The local environment behind one class: object store, controllers, processes and Services below one data folder.

The command ``prodrl-operator local`` starts it and runs the controller on its ``store``. The data folder:

- ``state.db``: the objects, Secrets among them (mode 0600)
- ``lock``: held by the controller that runs; ``owner.json`` says which
- ``pods/UID``: one pod's containers (attempts with their exit codes), files and emptyDirs
- ``logs/NAMESPACE_POD.CONTAINER.log``: what it printed
- ``volumes/NAMESPACE/CLAIM``: persistent volume claims
- ``proxy``: endpoints of the Services

When the controller is killed, pods and Services go on; the next start adopts them.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import filelock

from prodrl_operator.cluster.local import containers, jobs, network, podspec, proxy
from prodrl_operator.cluster.local.containers import Container
from prodrl_operator.cluster.local.runner import Runner, Settings
from prodrl_operator.cluster.local.store import ObjectStore
from prodrl_operator.cluster.local.workloads import Workloads
from prodrl_operator.errors import InvalidError

_log = logging.getLogger(__name__)

Object = dict[str, Any]

_IDLE_SECONDS = 0.1
_RESYNC_SECONDS = 1.0
_VOLUME_SECONDS = 2.0
_EVENT_SECONDS = 60.0
_JOIN_SECONDS = 10.0


class LocalCluster:
    """A cluster on this machine.

    Args:
        data: The data folder; created when missing. One controller at a time.
        crds: The CustomResourceDefinitions to serve.
        publish: Service name -> port of 127.0.0.1 at which the Service's first port is offered, too; 0 chooses one
            that is free (and the next start keeps it). ``published`` has the choice.
        settings: Back-offs, stop time, variables for every container.

    Example:
        >>> cluster = LocalCluster(Path("data"), crds, publish={"chess-gateway": 8080})
        >>> cluster.start()
        >>> cluster.store.apply(manifest)
        >>> cluster.stop(terminate=True)
    """

    def __init__(
        self,
        data: Path,
        crds: list[Object],
        *,
        publish: Mapping[str, int] | None = None,
        settings: Settings | None = None,
    ) -> None:
        if sys.platform != "linux":
            raise InvalidError(f"local environment: needs Linux, got {sys.platform!r}; use a cluster")
        self.data = data.resolve()
        self.data.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.settings = settings or Settings()
        self.failures = 0
        """Steps of the loop that raised; each is logged."""
        self._lock = filelock.FileLock(self.data / "lock", timeout=0)
        self._acquire()
        try:
            self._proxy = Container(self.data / "proxy")
            self.published = self._choose_ports(dict(publish or {}))
            """Service name -> port of 127.0.0.1."""
            self.store = ObjectStore(self.data / "state.db", crds=crds, admit=podspec.check)
            addresses = network.Addresses(self.data)
            back_off = jobs.BackOff(self.settings.back_off_base, self.settings.back_off_limit)
            self.workloads = Workloads(self.store, addresses, back_off=back_off)
            self.runner = Runner(self.store, self.data, addresses, self.settings)
        except BaseException:
            self._lock.release()
            raise
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._endpoints: list[Object] | None = None

    def start(self) -> None:
        """Run the environment in a thread of its own."""
        self._unwatch = self.store.watch(lambda _: self._wake.set())
        self._thread = threading.Thread(target=self._loop, name="local-cluster", daemon=True)
        self._thread.start()

    def stop(self, *, terminate: bool = True) -> None:
        """Stop; with ``terminate`` every process ends, soon after ``settings.stop_seconds``; else they go on."""
        self._stopping.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout=_JOIN_SECONDS)
            self._unwatch()
        if terminate:
            self.runner.stop()
            self._stop_proxy()
        self.runner.close()
        self.store.close()
        self._lock.release()

    def log_path(self, namespace: str, pod: str, container: str) -> Path:
        """Where a container's output is."""
        return self.data / "logs" / f"{namespace}_{pod}.{container}.log"

    # Inside.

    def _acquire(self) -> None:
        try:
            self._lock.acquire()
        except filelock.Timeout as error:
            owner = containers.read_json(self.data / "owner.json") or {}
            message = f"data folder {self.data}: is in use by process {owner.get('pid', 'unknown')}"
            raise InvalidError(f"{message}; stop that one, or choose another folder with --data") from error
        (self.data / "owner.json").write_text(json.dumps({"pid": os.getpid()}))

    def _choose_ports(self, publish: dict[str, int]) -> dict[str, int]:
        """A published port must be free, unless our own proxy of an earlier start holds it."""
        held = containers.read_json_list(self.data / "proxy" / "endpoints.json") if self._proxy_runs() else []
        ours = {item["port"] for item in held if item["host"] == "127.0.0.1" and item["targets"]}
        before = containers.read_json(self.data / "published.json") or {}
        chosen = {}
        for service, wanted in publish.items():
            port = wanted or before.get(service, 0)
            if port not in ours and not network.can_bind("127.0.0.1", [port]):
                if wanted:
                    message = f"port {port} of 127.0.0.1 (for Service {service}): is in use by another process"
                    raise InvalidError(f"{message}; stop that one, or choose another port")
                port = 0
            chosen[service] = port or network.free_port("127.0.0.1")
        (self.data / "published.json").write_text(json.dumps(chosen))
        return chosen

    def _proxy_runs(self) -> bool:
        return self._proxy.state().phase == "running"

    def _loop(self) -> None:
        due = dict.fromkeys(("workloads", "volumes", "events"), 0.0)
        while not self._stopping.is_set():
            changed = self._wake.wait(_IDLE_SECONDS)
            self._wake.clear()
            now = time.monotonic()
            try:
                self.runner.sync()
                if changed or now >= due["workloads"]:
                    due["workloads"] = now + _RESYNC_SECONDS
                    self.workloads.sync()
                    self._serve()
                if now >= due["volumes"]:
                    due["volumes"] = now + _VOLUME_SECONDS
                    self.runner.refresh_volumes()
                if now >= due["events"]:
                    due["events"] = now + _EVENT_SECONDS
                    self.store.expire_events()
            except Exception:  # the loop's edge: counted, logged, tried again
                self.failures += 1
                _log.exception("local environment: a step failed")
                self._stopping.wait(1.0)

    def _serve(self) -> None:
        """Tell the proxy the present endpoints and keep it running."""
        folder = self.data / "proxy"
        folder.mkdir(mode=0o700, exist_ok=True)
        endpoints = self.workloads.listeners(self.published)
        if endpoints != self._endpoints:
            temporary = folder / "endpoints.json.new"
            temporary.write_text(json.dumps(endpoints))
            os.replace(temporary, folder / "endpoints.json")
            self._endpoints = endpoints
        state = self._proxy.state()
        if state.phase in ("new", "ended"):
            number = 0 if state.phase == "new" else state.attempt + 1
            argv = [sys.executable, "-S", "-E", "-s", proxy.__file__, str(folder)]
            spec = {"argv": argv, "env": {}, "cwd": str(folder), "log": str(self.data / "logs" / "proxy.log")}
            self._proxy.prepare(number, spec)
            self._proxy.launch(number)

    def _stop_proxy(self) -> None:
        self._proxy.kill()
        deadline = time.monotonic() + 5
        while self._proxy.state().phase in ("starting", "running") and time.monotonic() < deadline:
            time.sleep(0.02)
            self._proxy.kill()
        containers.kill_marked(str(self.data / "proxy"))
        containers.reap()
