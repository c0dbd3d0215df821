"""The port over a real API server, with the official client. Called by ``caching``, ``leading`` and ``plugin``.

Watching is left to ``caching``. Objects stay plain dicts: one path for every kind, and none of the client's thousands
of model classes in memory. Every request has a time limit. Writes are never repeated here: whether a write that timed
out happened is found out by the next pass, which reads again and decides again.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urlencode

import urllib3
from kubernetes import config as kubernetes_config
from kubernetes.client import ApiClient, ApiException, Configuration

from prodrl_operator import names
from prodrl_operator.cluster.port import Finalizers, Kind, Object, Objects, Propagation, kind_of
from prodrl_operator.errors import (
    AlreadyExistsError,
    ClusterUnavailableError,
    ConflictError,
    ForbiddenError,
    InvalidError,
    NotFoundError,
    OperatorError,
)

CONNECT_SECONDS, READ_SECONDS = 5.0, 30.0
"""A dead API server is noticed, not waited for."""
PAGE_SIZE = 500
POOL_SIZE = 32
SERVICE_ACCOUNT_NAMESPACE = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"

_log = logging.getLogger(__name__)

_JSON = "application/json"
_NO_DRY_RUN = "does not support dry run"
_APPLY = "application/apply-patch+yaml"
_MERGE = "application/merge-patch+json"
_METADATA_LIST = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"


def connect(kubeconfig: str | None = None, context: str | None = None) -> KubernetesCluster:
    """As a pod of the cluster, if this is one; else, or where one is named, with a kubeconfig.

    Args:
        kubeconfig: None: $KUBECONFIG or ~/.kube/config.
        context: None: its current one.

    Raises:
        InvalidError: There is no usable configuration.
    """
    configuration = Configuration()
    try:
        if kubeconfig is None and context is None:
            try:
                kubernetes_config.load_incluster_config(client_configuration=configuration)
                return KubernetesCluster(configuration, default_namespace=own_namespace() or "default")
            except kubernetes_config.ConfigException:
                pass
        kubernetes_config.load_kube_config(kubeconfig, context, client_configuration=configuration)
        contexts, active = kubernetes_config.list_kube_config_contexts(kubeconfig)
    except (kubernetes_config.ConfigException, OSError) as exc:
        raise InvalidError(
            f"kubeconfig {kubeconfig or '(default)'}: cannot be used, {exc}; name one with --kubeconfig or KUBECONFIG"
        ) from exc
    chosen = next((item for item in contexts if item["name"] == context), active)
    return KubernetesCluster(configuration, default_namespace=chosen["context"].get("namespace", "default"))


def own_namespace() -> str | None:
    """The namespace of the pod that this runs in; None: it runs in none."""
    try:
        with open(SERVICE_ACCOUNT_NAMESPACE, encoding="utf-8") as file:
            return file.read().strip()
    except OSError:
        return None


class KubernetesCluster:
    """Implements :class:`prodrl_operator.cluster.port.Cluster`. Safe to be used by several threads.

    Args:
        configuration: Where the API server is and who we are; a rotated token is read again by the client's own hook.
        default_namespace: The namespace of the context, or of the pod that this runs in.
    """

    def __init__(self, configuration: Configuration, *, default_namespace: str = "default") -> None:
        # A connection that could not be made is tried again; a request that was sent never is.
        configuration.retries = urllib3.Retry(
            total=2, connect=2, read=0, redirect=0, status=0, other=0, respect_retry_after_header=False
        )
        configuration.connection_pool_maxsize = POOL_SIZE
        try:
            self.api = ApiClient(configuration)
        except ImportError as exc:
            raise InvalidError(
                f"proxy-url: {exc}, got {configuration.proxy!r}; install PySocks, or name an HTTP proxy"
            ) from exc
        self.default_namespace = default_namespace
        self.connect_seconds, self.read_seconds = CONNECT_SECONDS, READ_SECONDS
        """No connection and no answer is waited for longer."""
        self.page_size = PAGE_SIZE
        """Items of one answer to a list."""
        self.calls: dict[str, int] = {}
        """Requests so far by verb, for the metrics; approximate under concurrency."""

    def hurried(self, connect_seconds: float, read_seconds: float) -> KubernetesCluster:
        """Another client of the same server, with its own connections, that waits less."""
        other = KubernetesCluster(self.api.configuration, default_namespace=self.default_namespace)
        other.connect_seconds, other.read_seconds, other.calls = connect_seconds, read_seconds, self.calls
        return other

    # Reading.

    def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        """GET."""
        try:
            return self._object(_Request("get", "GET", _path(kind, namespace, name)))
        except NotFoundError:
            return None

    def list(self, kind: Kind, namespace: str | None = None, labels: Mapping[str, str] | None = None) -> list[Object]:
        """LIST in pages."""
        return _sorted(self._items(kind, namespace, labels, _JSON))

    def each(
        self, kind: Kind, namespace: str | None = None, labels: Mapping[str, str] | None = None
    ) -> Iterator[Object]:
        """LIST, one page in memory at a time; in no order, and where the list began anew, some twice."""
        for _, page in self._pages(kind, namespace, labels, _JSON):
            yield from page

    def list_metadata(
        self, kind: Kind, namespace: str | None = None, labels: Mapping[str, str] | None = None
    ) -> Objects:
        """LIST of ``metadata`` only: what a comparison of resourceVersions needs, at a fraction of the bytes."""
        return _sorted(self._items(kind, namespace, labels, _METADATA_LIST))

    def events_of(self, obj: Object) -> Objects:
        """Events about one object."""
        uid, namespace = obj["metadata"]["uid"], obj["metadata"]["namespace"]
        query = {"fieldSelector": f"involvedObject.uid={uid}"}
        return list(self._json(_Request("list", "GET", f"/api/v1/namespaces/{namespace}/events", query))["items"])

    # Writing.

    def create(self, manifest: Object) -> Object:
        """POST."""
        return self._post(manifest, {})

    def try_out(self, manifest: Object) -> None:
        """POST as a dry run; a webhook that cannot tell the difference is not asked."""
        try:
            self._post(manifest, {"dryRun": "All"})
        except AlreadyExistsError:
            return
        except InvalidError as exc:
            if _NO_DRY_RUN not in str(exc):
                raise
            _log.info("%s: %s", kind_of(manifest).kind, exc)

    def _post(self, manifest: Object, more: Mapping[str, str]) -> Object:
        query = {"fieldManager": names.FIELD_MANAGER, "fieldValidation": "Strict", **more}
        path = _path(kind_of(manifest), _namespace_of(manifest))
        return self._object(_Request("create", "POST", path, query, manifest))

    def apply(self, manifest: Object, *, field_manager: str = names.FIELD_MANAGER) -> Object:
        """PATCH, server-side apply, forced."""
        kind = kind_of(manifest)
        body = {name: value for name, value in manifest.items() if name != "status"}
        query = {"fieldManager": field_manager, "force": "true", "fieldValidation": "Strict"}
        path = _path(kind, _namespace_of(manifest), manifest["metadata"]["name"])
        return self._object(_Request("patch", "PATCH", path, query, body, _APPLY))

    def merge_patch(
        self, kind: Kind, namespace: str, name: str, patch: Object, *, field_manager: str = names.FIELD_MANAGER
    ) -> Object:
        """PATCH, JSON merge; ``metadata.resourceVersion`` in the patch is a precondition."""
        query = {"fieldManager": field_manager, "fieldValidation": "Strict"}
        return self._object(_Request("patch", "PATCH", _path(kind, namespace, name), query, patch, _MERGE))

    def delete(
        self,
        kind: Kind,
        namespace: str,
        name: str,
        *,
        uid: str | None = None,
        resource_version: str | None = None,
        propagation: Propagation = "Background",
    ) -> None:
        """DELETE with preconditions."""
        wanted = {"uid": uid, "resourceVersion": resource_version}
        preconditions = {key: value for key, value in wanted.items() if value is not None}
        body = {
            "kind": "DeleteOptions",
            "apiVersion": "v1",
            "propagationPolicy": propagation,
            **({"preconditions": preconditions} if preconditions else {}),
        }
        try:
            self._json(_Request("delete", "DELETE", _path(kind, namespace, name), body=body))
        except NotFoundError:
            return

    def update_status(self, manifest: Object) -> Object:
        """PUT of the status subresource under the object's resourceVersion."""
        kind, metadata = kind_of(manifest), manifest["metadata"]
        path = _path(kind, metadata["namespace"], metadata["name"]) + "/status"
        query = {"fieldManager": names.FIELD_MANAGER, "fieldValidation": "Strict"}
        return self._object(_Request("update", "PUT", path, query, manifest))

    def replace(self, manifest: Object) -> Object:
        """PUT of the whole object under its resourceVersion (the Lease)."""
        kind, metadata = kind_of(manifest), manifest["metadata"]
        query = {"fieldManager": names.FIELD_MANAGER}
        path = _path(kind, metadata["namespace"], metadata["name"])
        return self._object(_Request("update", "PUT", path, query, manifest))

    def set_finalizers(self, manifest: Object, finalizers: Finalizers) -> Object:
        """JSON merge patch of ``metadata.finalizers`` under the object's resourceVersion."""
        metadata = manifest["metadata"]
        patch = {"metadata": {"finalizers": finalizers, "resourceVersion": metadata["resourceVersion"]}}
        return self.merge_patch(kind_of(manifest), metadata["namespace"], metadata["name"], patch)

    # Pods.

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
        query = {"container": container, "follow": "true" if follow else None, "tailLines": tail_lines}
        path = f"/api/v1/namespaces/{namespace}/pods/{pod}/log"
        request = _Request("get", "GET", path, query)
        response = self._send(request, is_endless=follow)
        if response.status >= 400:
            _raise_for(response.status, response.read(), str(request))
        rest = b""
        try:
            for chunk in response.response.stream(65536):
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    yield line.decode(errors="replace")
        except urllib3.exceptions.HTTPError as exc:
            raise ClusterUnavailableError(f"{request}: the log broke off, {exc}; ask again") from exc
        finally:
            response.response.close()  # whoever stops reading leaves no connection behind
        if rest:
            yield rest.decode(errors="replace")

    # Requests.

    def _items(self, kind: Kind, namespace: str | None, labels: Mapping[str, str] | None, accept: str) -> Objects:
        found: Objects = []
        for is_first, page in self._pages(kind, namespace, labels, accept):
            found = page if is_first else found + page
        return found

    def _pages(
        self, kind: Kind, namespace: str | None, labels: Mapping[str, str] | None, accept: str
    ) -> Iterator[tuple[bool, Objects]]:
        """Pages, and whether the list begins with this one."""
        query: dict[str, Any] = {"limit": self.page_size}
        if labels:
            query["labelSelector"] = ",".join(f"{name}={value}" for name, value in sorted(labels.items()))
        is_first = True
        while is_first or query.get("continue"):
            try:
                page = self._json(_Request("list", "GET", _path(kind, namespace), query, accept=accept))
            except _ExpiredError:
                if is_first:
                    raise
                # The state that the pages are of is forgotten: all over again, as one page.
                is_first, query = True, {**query, "continue": None, "limit": None}
                continue
            query["continue"] = page.get("metadata", {}).get("continue")
            # Items of a list carry neither; metadata lists say null for none.
            described = {"apiVersion": kind.api_version, "kind": kind.kind}
            yield is_first, [_clean({**item, **described}) for item in page.pop("items") or ()]
            is_first = False

    def _object(self, request: _Request) -> Object:
        return _clean(self._json(request))

    def _json(self, request: _Request) -> Object:
        response = self._send(request)
        try:
            content = response.read()
        except urllib3.exceptions.HTTPError as exc:
            raise ClusterUnavailableError(f"{request}: the answer broke off, {exc}; trying again") from exc
        _raise_for(response.status, content, str(request))
        try:
            return dict(json.loads(content))
        except ValueError as exc:
            raise ClusterUnavailableError(f"{request}: the answer is not JSON, got {content[:80]!r}") from exc

    def _send(self, request: _Request, *, is_endless: bool = False) -> Any:
        self.calls[request.verb] = self.calls.get(request.verb, 0) + 1
        headers = {"Accept": request.accept, "User-Agent": names.FIELD_MANAGER}
        payload: Any = request.body
        if payload is not None:
            headers["Content-Type"] = request.content_type
            # JSON is YAML, and the client sends text as it is.
            payload = json.dumps(payload) if request.content_type == _APPLY else payload
        asked = {key: value for key, value in request.query.items() if value is not None}
        url = self.api.configuration.host + request.path + (f"?{urlencode(asked)}" if asked else "")
        try:
            self.api.update_params_for_auth(headers, [], ["BearerToken"], request.path, request.method, payload)
            limits = (self.connect_seconds, None if is_endless else self.read_seconds)
            return self.api.call_api(request.method, url, headers, payload, _request_timeout=limits)
        except (urllib3.exceptions.HTTPError, ApiException, OSError) as exc:
            raise ClusterUnavailableError(f"{request}: no answer, {exc}; trying again") from exc


class _ExpiredError(ClusterUnavailableError):
    """The resourceVersion that was asked for is too old."""


@dataclass(frozen=True)
class _Request:
    verb: str
    """As RBAC names it."""
    method: str
    path: str
    query: Mapping[str, Any] = field(default_factory=dict)
    body: Object | None = None
    content_type: str = _JSON
    accept: str = _JSON

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


def _path(kind: Kind, namespace: str | None, name: str | None = None) -> str:
    root = "/api/" if "/" not in kind.api_version else "/apis/"
    path = root + kind.api_version
    if namespace is not None:
        path += f"/namespaces/{quote(namespace, safe='')}"
    path += f"/{kind.plural}"
    if name is not None:
        if not name:
            raise InvalidError(f"{kind.kind}: metadata.name is empty, got ''; give it a name")
        path += f"/{quote(name, safe='')}"
    return path


def _namespace_of(manifest: Object) -> str:
    return str(manifest["metadata"].get("namespace", "default"))


def _clean(obj: Object) -> Object:
    """Without ``managedFields``: half of an object's bytes, and nobody here reads them."""
    obj.get("metadata", {}).pop("managedFields", None)
    return obj


def _sorted(items: Objects) -> Objects:
    return sorted(items, key=lambda o: (o["metadata"].get("namespace", ""), o["metadata"]["name"]))


def _raise_for(code: int, content: bytes, request: str) -> None:
    """An HTTP status as the kind of error that the caller acts on."""
    if code < 400:
        return
    try:
        status: Object = json.loads(content)
        message, reason = str(status.get("message", "")), str(status.get("reason", ""))
    except ValueError:
        status, reason = {}, ""
        message = bytes(content or b"")[:200].decode(errors="replace").strip()
    raise _error(code, reason, status)(f"{message or request} (HTTP {code}, {request})")


def _error(code: int, reason: str, status: Object) -> type[OperatorError]:
    if code == 404 and not (status.get("details") or {}).get("name"):
        # Not the object is missing but the kind, or the server behind the address.
        return ClusterUnavailableError
    if code == 500 and "duplicate entries for key" in str(status.get("message")):
        return InvalidError  # how a server-side apply refuses a list that names something twice
    if code == 409:
        return AlreadyExistsError if reason == "AlreadyExists" else ConflictError
    kinds: dict[int, type[OperatorError]] = {
        400: InvalidError,
        403: ForbiddenError,
        404: NotFoundError,
        405: InvalidError,
        413: InvalidError,
        410: _ExpiredError,
        415: InvalidError,
        422: InvalidError,
    }
    # 401 too: credentials that were rotated, or an authenticator that is away, are for a while.
    return kinds.get(code, ClusterUnavailableError)
