"""Probes of containers: run in threads, judged by pure counting. Called by ``runner``.

HTTP probes count 200-399 as success and do not follow redirects to other hosts; exec probes run as children of the
controller with the container's environment and are killed at their timeout.
"""

from __future__ import annotations

import http.client
import socket
import subprocess
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

Object = dict[str, Any]


@dataclass(frozen=True)
class Target:
    """What a probe needs to know of its container."""

    address: str
    ports: Mapping[str, int]
    env: Mapping[str, str]
    cwd: str
    translate: Callable[[str], str]


@dataclass
class Verdict:
    """Consecutive results of one probe."""

    is_passing: bool
    has_failed: bool = False
    """The failure threshold was reached."""
    successes: int = 0
    failures: int = 0
    message: str = ""

    def count(self, message: str | None, probe: Object) -> None:
        """Take in one result; None is a success."""
        if message is None:
            self.successes, self.failures = self.successes + 1, 0
            if self.successes >= probe.get("successThreshold", 1):
                self.is_passing, self.has_failed = True, False
        else:
            self.successes, self.failures, self.message = 0, self.failures + 1, message
            if self.failures >= probe.get("failureThreshold", 3):
                self.is_passing, self.has_failed = False, True


@dataclass
class _Running:
    verdict: Verdict
    next_at: float
    future: Future[str | None] | None = None


@dataclass
class Watcher:
    """The probes of one attempt of one container."""

    container: Object
    began: float
    """On the monotonic clock; delays count from here."""
    target: Target
    pool: ThreadPoolExecutor
    was_started: bool = False
    was_ready: bool = False
    """What an earlier controller had found of this attempt: holds until a probe says otherwise."""
    _probes: dict[str, _Running] = field(default_factory=dict)

    @property
    def is_started(self) -> bool:
        """Whether the startup probe has passed (or there is none)."""
        return "startupProbe" not in self.container or self._verdict("startupProbe").is_passing

    @property
    def is_ready(self) -> bool:
        """Whether the container may get traffic."""
        if not self.is_started:
            return False
        return "readinessProbe" not in self.container or self._verdict("readinessProbe").is_passing

    @property
    def failure(self) -> str | None:
        """Why the container must be restarted."""
        for name in ("startupProbe", "livenessProbe"):
            verdict = self._probes[name].verdict if name in self._probes else None
            if verdict and verdict.has_failed:
                return f"{name} failed: {verdict.message}"
        return None

    def poll(self, now: float) -> None:
        """Collect results and start the probes that are due; never blocks."""
        names = ("livenessProbe", "readinessProbe") if self.is_started else ("startupProbe",)
        for name in names:
            probe = self.container.get(name)
            if probe is not None:
                self._poll_one(name, probe, now)

    def _poll_one(self, name: str, probe: Object, now: float) -> None:
        self._verdict(name)
        running = self._probes[name]
        if running.future is not None:
            if not running.future.done():
                return
            running.verdict.count(running.future.result(), probe)
            running.future = None
        if now >= running.next_at:
            running.next_at = now + probe.get("periodSeconds", 10)
            running.future = self.pool.submit(check, probe, self.target)

    def _verdict(self, name: str) -> Verdict:
        if name not in self._probes:
            at_first = {"startupProbe": self.was_started, "readinessProbe": self.was_ready, "livenessProbe": True}
            delay = self.container[name].get("initialDelaySeconds", 0)
            self._probes[name] = _Running(Verdict(is_passing=at_first[name]), self.began + delay)
        return self._probes[name].verdict


def check(probe: Object, target: Target) -> str | None:
    """Run one probe once; None when it succeeds, else why not."""
    timeout = probe.get("timeoutSeconds", 1)
    try:
        if "httpGet" in probe:
            return _http(probe["httpGet"], target, timeout)
        if "tcpSocket" in probe:
            port = _port(probe["tcpSocket"]["port"], target)
            host = probe["tcpSocket"].get("host") or target.address
            socket.create_connection((host, port), timeout=timeout).close()
            return None
        command = [target.translate(part) for part in probe["exec"]["command"]]
        done = subprocess.run(
            command, env=dict(target.env), cwd=target.cwd, timeout=timeout, capture_output=True, check=False
        )
        return None if done.returncode == 0 else f"exit code {done.returncode}"
    except (OSError, http.client.HTTPException, subprocess.SubprocessError, KeyError) as error:
        return f"{type(error).__name__}: {error}"


def _http(get: Object, target: Target, timeout: float) -> str | None:
    port = _port(get["port"], target)
    is_tls = get.get("scheme", "HTTP").upper() == "HTTPS"
    connect = http.client.HTTPSConnection if is_tls else http.client.HTTPConnection
    connection = connect(get.get("host") or target.address, port, timeout=timeout)
    try:
        headers = {header["name"]: header["value"] for header in get.get("httpHeaders", ())}
        connection.request("GET", get.get("path", "/"), headers={"User-Agent": "kube-probe/local"} | headers)
        status = connection.getresponse().status
        return None if 200 <= status < 400 else f"HTTP status {status}"
    finally:
        connection.close()


def _port(port: int | str, target: Target) -> int:
    return port if isinstance(port, int) else target.ports[port]
