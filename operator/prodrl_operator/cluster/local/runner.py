"""The kubelet of this machine: pods become processes. Level-based; ``environment`` calls ``sync`` in a loop.

What runs is known from the pods' folders (``containers``), what should run from the store; ``sync`` never waits.
A controller that was killed and comes back finds its pods running and goes on with them. What the translation of
a pod is, and what it ignores, says ``podspec``.
"""

from __future__ import annotations

import base64
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prodrl_operator.cluster import port
from prodrl_operator.cluster.local import containers, network, podspec, podstatus, probes, volumes
from prodrl_operator.cluster.local.containers import Container, State
from prodrl_operator.cluster.local.store import ObjectStore, timestamp
from prodrl_operator.errors import InvalidError, UnsupportedError

_log = logging.getLogger(__name__)

Object = dict[str, Any]

NODE = "local"
DRAIN_SECONDS = 0.4
"""A pod leaves its Services this long before it is told to stop; Kubernetes needs a preStop sleep for that."""
STARTING_SECONDS = 2.0
"""A shim that has not started its container by then is started again."""
RETRY_SECONDS = 1.0
"""After a step of a pod that raised."""
JOB_NICE = 5
"""Jobs give way to what serves users."""

_PASSED_ON = frozenset(
    [
        "HOME",
        "USER",
        "LOGNAME",
        "LANG",
        "LC_ALL",
        "TZ",
        "TMPDIR",
        "VIRTUAL_ENV",
        "LD_LIBRARY_PATH",
        "CUDA_HOME",
        "CUDA_VISIBLE_DEVICES",
        "NVIDIA_VISIBLE_DEVICES",
        "NVIDIA_DRIVER_CAPABILITIES",
        "SSL_CERT_FILE",
        "SSL_CERT_DIR",
        "REQUESTS_CA_BUNDLE",
    ]
)


@dataclass(frozen=True)
class Settings:
    """Times of the runner, in seconds."""

    back_off_base: float = 1.0
    back_off_limit: float = 60.0
    stop_seconds: float = 10.0
    """Longest grace when the whole environment stops."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables for every container, below its own."""


@dataclass
class _Memory:
    """What is lost with the controller and found again by looking: probes and ends that were asked for."""

    watchers: dict[str, probes.Watcher] = field(default_factory=dict)
    term_at: dict[str, float] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    """Container -> why it waits."""
    drained_at: float = 0.0
    """When the pod, on its way out, has left the Services."""
    retry_at: float = 0.0
    is_emptied: bool = False


class Runner:
    """Runs the pods of ``store`` below ``data``."""

    def __init__(
        self, store: ObjectStore, data: Path, addresses: network.Addresses, settings: Settings | None = None
    ) -> None:
        self.store = store
        self.data = data
        self.addresses = addresses
        self.settings = settings or Settings()
        self._memory: dict[str, _Memory] = {}
        self._pool = ThreadPoolExecutor(max_workers=8, thread_name_prefix="probe")
        for name in ("pods", "logs", "volumes"):
            (data / name).mkdir(mode=0o700, parents=True, exist_ok=True)

    def sync(self) -> None:
        """One step of every pod."""
        containers.reap()
        pods = self.store.list(port.POD)
        for pod in pods:
            try:
                self._sync_pod(pod)
            except (InvalidError, UnsupportedError) as error:
                self._fail_pod(pod, "CreateContainerConfigError", str(error))
            except Exception:  # one pod's trouble (a full disk, say) must not stop the others
                self._memory[pod["metadata"]["uid"]].retry_at = time.monotonic() + RETRY_SECONDS
                _log.exception("pod %s/%s: sync failed", pod["metadata"]["namespace"], pod["metadata"]["name"])
        self._remove_strangers({pod["metadata"]["uid"] for pod in pods})

    def stop(self) -> None:
        """Stop everything that runs, within ``stop_seconds``; the objects stay."""
        folders = [Container(path) for path in (self.data / "pods").glob("*/containers/*")]
        for container in folders:
            container.terminate()
        deadline = time.monotonic() + self.settings.stop_seconds
        while any(c.state().phase in ("starting", "running") for c in folders) and time.monotonic() < deadline:
            time.sleep(0.05)
        while self._any_lives() and time.monotonic() < deadline + 5:
            for container in folders:  # again and again: one may just be starting
                container.kill()
            time.sleep(0.02)
        containers.kill_marked(str(self.data / "pods"))
        containers.reap()

    def _any_lives(self) -> bool:
        containers.reap()
        locks = (self.data / "pods").glob("*/containers/*/*/lock")
        return containers.has_children(self.data / "pods") or any(containers.is_locked(path) for path in locks)

    def close(self) -> None:
        """End the probes."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    # One pod.

    def _sync_pod(self, pod: Object) -> None:
        uid = pod["metadata"]["uid"]
        memory = self._memory.setdefault(uid, _Memory())
        if time.monotonic() < memory.retry_at:
            return
        if "deletionTimestamp" in pod["metadata"]:
            self._end_pod(pod, memory)
            return
        phase = pod.get("status", {}).get("phase", "Pending")
        if phase in ("Succeeded", "Failed"):
            if not memory.is_emptied:  # its emptyDirs may be large
                volumes.empty(self._folder(pod))
                memory.is_emptied = True
            return
        if not pod["spec"].get("nodeName"):
            pod = self._bind(pod) or pod
        for container in [*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]]:
            if not container.get("command"):
                name = container["name"]
                message = f"container {name}: has no command and images are not run here; give an explicit command"
                self._fail_pod(pod, "CommandRequired", message)
                return
        states = self._advance(pod, memory)
        self._report(pod, memory, states)

    def _bind(self, pod: Object) -> Object | None:
        others = (other.get("status", {}) for other in self.store.list(port.POD))
        taken = {other.get("podIP") for other in others if other.get("phase") not in ("Succeeded", "Failed")}
        ports = [p["containerPort"] for c in pod["spec"]["containers"] for p in c.get("ports", ())]
        address = self.addresses.free_pod_address(taken, ports)
        now = timestamp(podstatus.now())

        def bind(it: Object) -> None:
            it["spec"]["nodeName"] = NODE
            it["status"] = {"phase": "Pending", "podIP": address, "podIPs": [{"ip": address}], "hostIP": "127.0.0.1"}
            it["status"] |= {"startTime": now, "conditions": [podstatus.condition("PodScheduled", True, now)]}

        return self._edit(pod, bind)

    def _advance(self, pod: Object, memory: _Memory) -> dict[str, State]:
        """Start what is to start now, restart what is to restart; the states afterwards."""
        states: dict[str, State] = {}
        policy = pod["spec"].get("restartPolicy", "Always")
        for container in pod["spec"].get("initContainers", ()):
            name = container["name"]
            states[name] = self._step(pod, memory, container, "OnFailure" if policy == "Always" else policy)
            if states[name].phase != "ended" or states[name].code != 0:
                return states
        for container in pod["spec"]["containers"]:
            states[container["name"]] = self._step(pod, memory, container, policy)
        return states

    def _step(self, pod: Object, memory: _Memory, container: Object, policy: str) -> State:
        name = container["name"]
        box = self._box(pod, name)
        state = box.state()
        if state.phase == "running":
            memory.reasons.pop(name, None)
            self._probe(pod, memory, container, box, state)
        elif state.phase == "new" or (state.phase == "ended" and podstatus.should_restart(policy, state.code)):
            memory.watchers.pop(name, None)
            memory.term_at.pop(name, None)
            if state.phase == "ended" and not self._is_due(box, state):
                memory.reasons[name] = "CrashLoopBackOff"
            elif self._start(pod, memory, container, box):
                return box.state()
        elif state.phase == "starting" and time.time() - state.started > STARTING_SECONDS:
            box.launch(state.attempt)  # the controller died before its shim began
        return state

    def _is_due(self, box: Container, state: State) -> bool:
        limits = {"base": self.settings.back_off_base, "limit": self.settings.back_off_limit}
        wait = containers.back_off_seconds(box.history(), **limits)
        return time.time() >= state.finished + wait or time.time() < state.finished  # a clock set back must not wait

    def _start(self, pod: Object, memory: _Memory, container: Object, box: Container) -> bool:
        last = box.last_attempt()
        number = 0 if last is None else last + 1
        try:
            spec = self._render(pod, container, box.folder / str(number))
        except KeyError as error:
            memory.reasons[container["name"]] = f"CreateContainerConfigError: {error.args[0]}"
            return False
        memory.reasons.pop(container["name"], None)
        box.prepare(number, spec)
        box.launch(number)
        return True

    def _render(self, pod: Object, container: Object, folder: Path) -> dict[str, Any]:
        translation = self._translation(pod, container, folder)
        volumes.project(pod, container, self._folder(pod), self._read_object(pod), translation.hosts)
        pod_ip = pod["status"]["podIP"]
        declared = dict(podspec.environment(pod, container, pod_ip, self._read_texts(pod)))
        log = self.data / "logs" / f"{pod['metadata']['namespace']}_{pod['metadata']['name']}.{container['name']}.log"
        cwd = container.get("workingDir")
        work = self._folder(pod) / "work"
        work.mkdir(parents=True, exist_ok=True)
        env = self._base_environment(pod) | {name: translation.text(value) for name, value in declared.items()}
        command = [*container["command"], *container.get("args", ())]
        return {
            "argv": [translation.text(podspec.expand(part, declared)) for part in command],
            "env": env,
            "cwd": translation.text(cwd) if cwd else str(work),
            "log": str(log),
            "nice": JOB_NICE if podstatus.is_of_job(pod) else 0,
            "message_from_log": container.get("terminationMessagePolicy") == "FallbackToLogsOnError",
        }

    def _base_environment(self, pod: Object) -> dict[str, str]:
        own = str(Path(sys.executable).parent)
        env = {name: value for name, value in os.environ.items() if name in _PASSED_ON}
        env["PATH"] = os.pathsep.join([own, os.environ.get("PATH", os.defpath)])
        env["HOSTNAME"] = str(pod["spec"].get("hostname", pod["metadata"]["name"]))
        return {**env, **self.settings.environment}

    def _translation(self, pod: Object, container: Object, folder: Path) -> podspec.Translation:
        mounts = volumes.targets(pod, container, self._folder(pod), self.data)
        paths = {mount: str(target) for mount, target in mounts.items()}
        paths[container.get("terminationMessagePath", "/dev/termination-log")] = str(folder / "termination-log")
        namespace = pod["metadata"]["namespace"]
        return podspec.Translation(paths, pod["status"]["podIP"], namespace, self._resolve)

    def _resolve(self, service: str, namespace: str, host: str | None) -> str | None:
        if host is None:
            found = self.store.get(port.SERVICE, namespace, service)
            address = (found or {}).get("spec", {}).get("clusterIP")
            return None if address == "None" else address
        for pod in self.store.list(port.POD, namespace):
            if host in (pod["metadata"]["name"], pod["spec"].get("hostname")):
                return str(pod.get("status", {}).get("podIP")) if pod.get("status") else None
        return None

    def _probe(self, pod: Object, memory: _Memory, container: Object, box: Container, state: State) -> None:
        name = container["name"]
        if name not in memory.watchers:
            folder = box.folder / str(state.attempt)
            spec = containers.read_spec(folder)
            ports = {p["name"]: p["containerPort"] for p in container.get("ports", ()) if "name" in p}
            translate = self._translation(pod, container, folder).text
            target = probes.Target(pod["status"]["podIP"], ports, spec["env"], spec["cwd"], translate)
            before = podstatus.status_of(pod, name, state.attempt)
            found = {"was_started": before.get("started", False), "was_ready": before.get("ready", False)}
            memory.watchers[name] = probes.Watcher(container, time.monotonic(), target, self._pool, **found)
        watcher = memory.watchers[name]
        watcher.poll(time.monotonic())
        if watcher.failure and name not in memory.term_at:
            _log.info("pod %s container %s: %s", pod["metadata"]["name"], name, watcher.failure)
            memory.term_at[name] = time.monotonic()
            self._ask_to_end(pod, container, box)
        self._kill_when_late(pod, memory, name, box)

    # The end of a pod.

    def _end_pod(self, pod: Object, memory: _Memory) -> None:
        if any(c.get("ready") for c in pod.get("status", {}).get("containerStatuses", ())):
            memory.drained_at = time.monotonic() + DRAIN_SECONDS
            self._edit(pod, podstatus.mark_not_ready)
        if time.monotonic() < memory.drained_at:
            return
        is_over = True
        for container in [*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]]:
            name = container["name"]
            box = self._box(pod, name)
            state = box.state()
            if state.phase == "starting" and time.time() - state.started > STARTING_SECONDS:
                box.launch(state.attempt)  # let it come up, so that its shim can end it
            if state.phase in ("starting", "running"):
                is_over = False
                if state.phase == "running" and name not in memory.term_at:
                    memory.term_at[name] = time.monotonic()  # a restarted controller asks again
                    self._ask_to_end(pod, container, box)
                self._kill_when_late(pod, memory, name, box)
        if is_over:
            containers.kill_marked(str(self._folder(pod)))
            self._memory.pop(pod["metadata"]["uid"], None)
            volumes.release(self._folder(pod))
            self.store.remove(*_id(pod), uid=pod["metadata"]["uid"])

    def _ask_to_end(self, pod: Object, container: Object, box: Container) -> None:
        hook = (container.get("lifecycle") or {}).get("preStop")
        if not hook:
            box.terminate()
            return
        spec = containers.read_spec(box.folder / str(box.last_attempt()))
        grace = pod["spec"].get("terminationGracePeriodSeconds", 30)

        def run() -> None:
            if "sleep" in hook:
                time.sleep(min(hook["sleep"]["seconds"], grace))
            else:
                command = [self._translation(pod, container, box.folder).text(c) for c in hook["exec"]["command"]]
                try:
                    subprocess.run(command, env=spec["env"], cwd=spec["cwd"], timeout=grace, check=False)
                except (OSError, subprocess.SubprocessError) as error:
                    _log.warning("pod %s: preStop failed: %s", pod["metadata"]["name"], error)
            box.terminate()

        self._pool.submit(run)

    def _kill_when_late(self, pod: Object, memory: _Memory, name: str, box: Container) -> None:
        asked = memory.term_at.get(name)
        grace = pod["spec"].get("terminationGracePeriodSeconds", 30)
        if asked is not None and time.monotonic() > asked + grace:
            box.kill()

    def _fail_pod(self, pod: Object, reason: str, message: str) -> None:
        for container in [*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]]:
            self._box(pod, container["name"]).kill()

        def fail(it: Object) -> None:
            it.setdefault("status", {}).update(phase="Failed", reason=reason, message=message)

        self._edit(pod, fail)

    def _remove_strangers(self, known: set[str]) -> None:
        """Pods that are gone from the store (they cannot be, unless the state file was replaced) must not run."""
        for folder in (self.data / "pods").iterdir():
            if folder.name not in known:
                containers.kill_marked(str(folder))
                volumes.release(folder)
                self._memory.pop(folder.name, None)

    # Reports and lookups.

    def _report(self, pod: Object, memory: _Memory, states: Mapping[str, State]) -> None:
        facts = {}
        for container in [*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]]:
            name = container["name"]
            watcher = memory.watchers.get(name)
            state = states.get(name, State("new"))
            is_running = state.phase == "running"
            history = self._box(pod, name).history() if state.attempt else []
            facts[name] = podstatus.Fact(
                state=state,
                last=next((past for past in reversed(history) if past.attempt < state.attempt), None),
                reason=memory.reasons.get(name, ""),
                is_started=is_running and watcher is not None and watcher.is_started,
                is_ready=is_running and watcher is not None and watcher.is_ready,
            )
        status = podstatus.pod_status(pod, facts)
        if status != pod.get("status"):
            self._edit(pod, lambda it: it.update(status=status))

    def _edit(self, pod: Object, change: Callable[[Object], None]) -> Object | None:
        return self.store.edit(*_id(pod), change, uid=pod["metadata"]["uid"])

    def _folder(self, pod: Object) -> Path:
        return self.data / "pods" / str(pod["metadata"]["uid"])

    def _box(self, pod: Object, name: str) -> Container:
        return Container(self._folder(pod) / "containers" / name)

    def _read_object(self, pod: Object) -> Callable[[str, str], Object | None]:
        namespace = pod["metadata"]["namespace"]
        return lambda kind, name: self.store.get(port.KINDS[kind], namespace, name)

    def _read_texts(self, pod: Object) -> Callable[[str, str], Mapping[str, str] | None]:
        read = self._read_object(pod)

        def texts(kind: str, name: str) -> Mapping[str, str] | None:
            obj = read(kind, name)
            data = (obj or {}).get("data", {})
            if kind == "Secret":
                data = {key: base64.b64decode(value).decode(errors="replace") for key, value in data.items()}
            return None if obj is None else data

        return texts

    def refresh_volumes(self) -> None:
        """Bring mounted ConfigMaps and Secrets of running pods up to date."""
        for pod in self.store.list(port.POD):
            if pod.get("status", {}).get("phase") != "Running" or "deletionTimestamp" in pod["metadata"]:
                continue
            for container in pod["spec"]["containers"]:
                box = self._box(pod, container["name"])
                hosts = self._translation(pod, container, box.folder / str(box.last_attempt() or 0)).hosts
                try:
                    volumes.project(pod, container, self._folder(pod), self._read_object(pod), hosts)
                except KeyError as error:
                    _log.warning("pod %s: a mounted object is gone: %s", pod["metadata"]["name"], error)


def _id(pod: Object) -> tuple[port.Kind, str, str]:
    return port.POD, pod["metadata"]["namespace"], pod["metadata"]["name"]
