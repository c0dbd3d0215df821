"""How the plugin reaches a cluster: objects through the port, pods' logs, and commands run inside pods.

Called by ``cli`` through :func:`connect`, which tests replace. Commands run inside the gateway's pods because a
person's machine has neither the store's credentials nor a route to pods, and those pods have both.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from prodrl_operator.cluster.port import Kind, Object, Objects
from prodrl_operator.errors import ClusterUnavailableError, ForbiddenError, InvalidError, NotFoundError, OperatorError

if TYPE_CHECKING:
    from prodrl_operator.cluster.kubernetes import KubernetesCluster

READ_SECONDS = 30.0
EXEC_SECONDS = 300.0
"""An audit reads every record of a run."""


class Store(Protocol):
    """The part of the port that the plugin reads through, and the one way it writes."""

    def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        """The object as it is now, or None."""
        ...

    def list(self, kind: Kind, namespace: str | None = None, labels: Mapping[str, str] | None = None) -> Objects:
        """Objects that carry all ``labels``."""
        ...

    def merge_patch(self, kind: Kind, namespace: str, name: str, patch: Object, *, field_manager: str) -> Object:
        """JSON merge patch; ``metadata.resourceVersion`` in it is a precondition (ConflictError)."""
        ...


@dataclass(frozen=True)
class Finished:
    """A command that ran in a pod."""

    exit_code: int
    output: str
    error: str


class PodAccess(Protocol):
    """What goes through the API server to a pod."""

    def logs(
        self,
        namespace: str,
        pod: str,
        container: str | None = None,
        *,
        follow: bool = False,
        tail_lines: int | None = None,
    ) -> Iterator[str]:
        """Lines of a container's log as they come."""
        ...

    def previous_logs(self, namespace: str, pod: str, container: str | None, tail_lines: int | None) -> Iterator[str]:
        """Lines of the container before its last restart."""
        ...

    def exec(self, namespace: str, pod: str, command: Sequence[str], container: str | None = None) -> Finished:
        """Run a command and wait for its end."""
        ...


@dataclass(frozen=True)
class Access:
    """A cluster as the plugin sees it."""

    store: Store
    pods: PodAccess
    namespace: str
    """Of the kubeconfig's context."""


def connect(kubeconfig: str | None = None, context: str | None = None) -> Access:
    """Through a kubeconfig, chosen as kubectl chooses it.

    Raises:
        InvalidError: There is no usable kubeconfig.
    """
    from prodrl_operator.cluster import kubernetes  # noqa: PLC0415  (a second of imports, not for --help)

    # Any kubeconfig goes before a pod's own service account, as in kubectl.
    cluster = kubernetes.connect(kubeconfig or os.environ.get("KUBECONFIG") or _own_kubeconfig(), context)
    return Access(cluster, KubernetesPods(cluster), cluster.default_namespace)


def _own_kubeconfig() -> str | None:
    path = Path.home() / ".kube" / "config"
    return str(path) if path.is_file() and path.stat().st_size > 0 else None


class KubernetesPods:
    """:class:`PodAccess` with the official client."""

    def __init__(self, cluster: KubernetesCluster) -> None:
        self._cluster = cluster
        self.logs = cluster.logs

    def previous_logs(self, namespace: str, pod: str, container: str | None, tail_lines: int | None) -> Iterator[str]:
        """What a container that crashed said. Raises what the port raises."""
        from kubernetes.client import ApiException, CoreV1Api  # noqa: PLC0415
        from urllib3.exceptions import HTTPError  # noqa: PLC0415

        wanted: dict[str, Any] = {"container": container, "tail_lines": tail_lines}
        options = {key: value for key, value in wanted.items() if value is not None}
        options |= {"_preload_content": False, "_request_timeout": READ_SECONDS}
        answer: Any
        try:
            answer = CoreV1Api(self._cluster.api).read_namespaced_pod_log(pod, namespace, previous=True, **options)
            content = bytes(answer.data)
        except ApiException as exc:
            raise _status_error(exc.status, f"Pod {pod}: no log before its last restart, {_said(exc)}") from exc
        except HTTPError as exc:
            raise ClusterUnavailableError(f"Pod {pod}: no answer, {exc}; try again") from exc
        yield from content.decode(errors="replace").splitlines()

    def exec(self, namespace: str, pod: str, command: Sequence[str], container: str | None = None) -> Finished:
        """Run a command over a WebSocket. Raises what the port raises."""
        from kubernetes.client import ApiClient, ApiException, CoreV1Api  # noqa: PLC0415
        from kubernetes.stream import stream  # noqa: PLC0415
        from kubernetes.stream.ws_client import ERROR_CHANNEL, STDERR_CHANNEL, STDOUT_CHANNEL  # noqa: PLC0415

        # A client of its own: ``stream`` replaces a method of the client while it runs.
        client = ApiClient(self._cluster.api.configuration)
        try:
            socket = stream(
                CoreV1Api(client).connect_get_namespaced_pod_exec,
                pod,
                namespace,
                command=list(command),
                **({"container": container} if container else {}),
                stdin=False,
                stdout=True,
                stderr=True,
                tty=False,
                binary=True,  # a character may be split between two frames
                _preload_content=False,
            )
        except ApiException as exc:
            raise _refusal(pod, str(exc.reason)) from exc
        socket.run_forever(timeout=EXEC_SECONDS)
        if socket.is_open():
            socket.close()
            raise ClusterUnavailableError(f"Pod {pod}: {command[0]} did not end within {EXEC_SECONDS:g} s; try again")
        read = {name: socket.read_channel(name) for name in (STDOUT_CHANNEL, STDERR_CHANNEL, ERROR_CHANNEL)}
        output, error, status = (bytes(part).decode(errors="replace") for part in read.values())
        return Finished(exit_code_of(pod, status), output, error)


def exit_code_of(pod: str, status: str) -> int:
    """The exit code in what the API server says at the end of a command (a ``Status`` object)."""
    try:
        said = json.loads(status)
    except ValueError as exc:
        raise ClusterUnavailableError(f"Pod {pod}: the connection broke off, got {status[:80]!r}; try again") from exc
    if said.get("status") == "Success":
        return 0
    for cause in (said.get("details") or {}).get("causes") or []:
        if cause.get("reason") == "ExitCode":
            return int(cause["message"])
    raise ClusterUnavailableError(f"Pod {pod}: the command could not run, {said.get('message', '')}")


def _refusal(pod: str, reason: str) -> OperatorError:
    found = re.search(r"Handshake status (\d+)", reason)
    code = int(found.group(1)) if found else 0
    said = re.search(r'"message":\s*"([^"]*)"', reason)
    hint = "; it needs the verbs get and create on pods/exec" if code in (401, 403) else ""
    why = said.group(1) if said else reason[:200]
    return _status_error(code, f"Pod {pod}: a command cannot be run in it, {why}{hint}")


def _status_error(code: int, text: str) -> OperatorError:
    kinds: dict[int, type[OperatorError]] = {
        400: InvalidError,
        401: ForbiddenError,
        403: ForbiddenError,
        404: NotFoundError,
    }
    return kinds.get(code, ClusterUnavailableError)(text)


def _said(exc: Any) -> str:
    """The message of the ``Status`` in an error's body."""
    try:
        return str(json.loads(exc.body)["message"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {exc.status}"
