"""What the watches and the lists have shown of a cluster, so that an idle run costs no request. Called by ``process``.

The API server stays the judge: every write goes to it under a precondition, or creates a name that is a function of
what was decided, so that something old here costs a conflict and never a second object. After a refused write the
object is read again. A resync by ``list`` finds whatever the watches missed: additions, changes and deletions.

Read only what the operator's label selects, by run; everything else, and a single child, is read from the server.
Objects handed out are shared: callers never change them. Children come without what nobody here reads of them.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from prodrl_operator import names
from prodrl_operator.cluster import port
from prodrl_operator.cluster.kubernetes import KubernetesCluster
from prodrl_operator.cluster.port import Finalizers, Kind, Object, Objects, Propagation, WatchEvent
from prodrl_operator.cluster.slimming import slim
from prodrl_operator.errors import (
    AlreadyExistsError,
    ClusterUnavailableError,
    ConflictError,
    InvalidError,
    NotFoundError,
    OperatorError,
)

_log = logging.getLogger(__name__)

WATCHED = (port.RUN, port.ROUND, port.JOB, port.DEPLOYMENT, port.POD)
"""Kinds whose changes wake the controller."""
LISTED = (port.SERVICE, port.CONFIG_MAP, port.PDB, port.NETWORK_POLICY)
"""Kinds that change by our own hand only; a resync finds what others did."""
OURS = {names.LABEL_MANAGED_BY: names.MANAGED_BY}
MANY = 50
"""More differences of a kind than this are read by one list instead of one by one."""
MOST_FAULTS = 1
"""One kind that cannot be listed does not hide the others; after a second fault the server is taken for down."""
TOMBSTONES = 20_000

_REFUSED = (ConflictError, NotFoundError, AlreadyExistsError, InvalidError)
_Where = tuple[str, str, str]
"""Kind, namespace, name."""


class CachedCluster:
    """Implements :class:`prodrl_operator.cluster.port.Watched`.

    Args:
        cluster: The API server.
        namespaces: Those that are watched; None: all.
    """

    def __init__(self, cluster: KubernetesCluster, namespaces: Sequence[str] | None = None) -> None:
        self.server = cluster
        self._namespaces: Sequence[str | None] = (None,) if namespaces is None else tuple(namespaces)
        self._lock = threading.Lock()
        self._objects: dict[_Where, Object] = {}
        self._by_run: dict[tuple[str, str, str], dict[str, Object]] = defaultdict(dict)
        """Kind, namespace and run -> name -> object."""
        self._gone: OrderedDict[str, str] = OrderedDict()
        """UIDs that were seen deleted, and at which resource version: a late event must not bring them back.

        A later version may: to a watch that selects by label, an object is deleted when somebody takes its label off.
        """
        self._listeners: list[Callable[[WatchEvent], None]] = []
        self.is_synced = threading.Event()
        """Set once everything was listed, be it in several tries."""
        self._renewing = threading.Lock()
        self._listed: set[tuple[str, str | None]] = set()
        """Kinds and namespaces that were listed at least once."""

    def limit(self, namespaces: Sequence[str] | None) -> None:
        """Look at these namespaces only; before the first look."""
        self._namespaces = (None,) if namespaces is None else tuple(namespaces)

    # Reading.

    def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        """A run from the cache; anything else as it is on the server now."""
        if kind is port.RUN:
            with self._lock:
                found = self._objects.get((kind.kind, namespace, name))
            if found is not None:
                return found
        return self._refresh(kind, namespace, name)

    def list(self, kind: Kind, namespace: str | None = None, labels: Mapping[str, str] | None = None) -> Objects:
        """All runs, or a run's children, from the cache; anything else from the server."""
        labels = labels or {}
        is_of_run = namespace is not None and kind in (*WATCHED, *LISTED) and names.LABEL_RUN in labels
        if is_of_run:
            with self._lock:
                its = self._by_run.get((kind.kind, str(namespace), labels[names.LABEL_RUN]), {})
                found = list(its.values())
            return [item for item in _sorted(found) if labels.items() <= item["metadata"].get("labels", {}).items()]
        if kind is port.RUN and not labels:
            with self._lock:
                found = [o for (its_kind, space, _), o in self._objects.items() if its_kind == kind.kind]
            return [o for o in _sorted(found) if namespace in (None, o["metadata"]["namespace"])]
        return self.server.list(kind, namespace, labels)

    def events_of(self, obj: Object) -> Objects:
        """From the server."""
        return self.server.events_of(obj)

    # Writing: through, and what the server answered is kept.

    def create(self, manifest: Object) -> Object:
        """POST."""
        return self._written(manifest, lambda: self.server.create(manifest))

    def try_out(self, manifest: Object) -> None:
        """POST as a dry run."""
        self.server.try_out(manifest)

    def apply(self, manifest: Object) -> Object:
        """PATCH."""
        return self._written(manifest, lambda: self.server.apply(manifest))

    def update_status(self, manifest: Object) -> Object:
        """PUT of the status."""
        return self._written(manifest, lambda: self.server.update_status(manifest))

    def set_finalizers(self, manifest: Object, finalizers: Finalizers) -> Object:
        """PATCH of the finalizers."""
        return self._written(manifest, lambda: self.server.set_finalizers(manifest, finalizers))

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
        """DELETE, then what is left of it."""
        try:
            self.server.delete(
                kind, namespace, name, uid=uid, resource_version=resource_version, propagation=propagation
            )
        finally:
            self._refresh(kind, namespace, name)

    def _written(self, manifest: Object, write: Callable[[], Object]) -> Object:
        try:
            written = write()
        except _REFUSED:
            metadata = manifest["metadata"]
            if (kind := port.kind_of(manifest)) in (*WATCHED, *LISTED):
                self._refresh(kind, metadata.get("namespace", "default"), metadata["name"])
            raise
        if "deletionTimestamp" in written["metadata"] and not written["metadata"].get("finalizers"):
            self._forget(written)  # the last finalizer went: so did the object
        else:
            self._keep(written)
        return written

    def _refresh(self, kind: Kind, namespace: str, name: str) -> Object | None:
        found = self.server.get(kind, namespace, name)
        if found is not None:
            self._keep(found)
            return found
        self._miss((kind.kind, namespace, name))
        return None

    # What is known.

    def note(self, kind: Kind, event_type: str | None, obj: Object) -> None:
        """Take in an event of a watch (no type: an item of its first list) and pass it on as a hint."""
        obj = {"apiVersion": kind.api_version, "kind": kind.kind, **obj}
        metadata = obj["metadata"] = dict(obj["metadata"])
        metadata.pop("managedFields", None)
        if event_type == "DELETED":
            self._forget(obj)
            self._hint(WatchEvent("DELETED", obj))
        elif self._keep(obj):
            self._hint(WatchEvent("ADDED" if event_type in (None, "ADDED") else "MODIFIED", obj))

    def watch(self, notify: Callable[[WatchEvent], None]) -> Callable[[], None]:
        """Pass on what :meth:`note` takes in and what :meth:`renew` finds."""
        with self._lock:
            self._listeners.append(notify)

        def stop() -> None:
            with self._lock:
                if notify in self._listeners:
                    self._listeners.remove(notify)

        return stop

    def renew(self) -> None:
        """Compare with the server: one list of metadata a kind, and only what differs is read."""
        faults: list[OperatorError] = []
        with self._renewing:
            for kind, namespace in itertools.product((*WATCHED, *LISTED), self._namespaces):
                try:
                    self._renew_kind(kind, namespace)
                    self._listed.add((kind.kind, namespace))
                except OperatorError as exc:
                    faults.append(exc)
                    if sum(isinstance(fault, ClusterUnavailableError) for fault in faults) > MOST_FAULTS:
                        break
        if len(self._listed) == len((*WATCHED, *LISTED)) * len(self._namespaces):
            self.is_synced.set()
        if faults:
            raise faults[0]

    def _renew_kind(self, kind: Kind, namespace: str | None) -> None:
        labels = None if kind is port.RUN else OURS
        with self._lock:
            before = {where: obj for where, obj in self._objects.items() if _is_in(where, kind, namespace)}
        if not before:
            self._take(self.server.each(kind, namespace, labels))
            return
        listed = self.server.list_metadata(kind, namespace, labels)
        present = {_where(kind, item): item["metadata"] for item in listed}
        for where, obj in before.items():
            found = present.get(where)
            if found is None or found["uid"] != obj["metadata"]["uid"]:
                # Perhaps only younger than the list: asked for by name.
                self._renew_one(kind, where)
        changed = [where for where, metadata in present.items() if self._is_news(where, metadata)]
        if len(changed) > MANY:
            self._take(self.server.each(kind, namespace, labels))
            return
        for where in changed:
            self._renew_one(kind, where)

    def _renew_one(self, kind: Kind, where: _Where) -> None:
        with self._lock:
            known = self._objects.get(where)
        found = self.server.get(kind, where[1], where[2])
        if found is not None:
            if self._keep(found):
                self._hint(WatchEvent("MODIFIED", found))
            elif known is not None and not self._is_known(where):
                self._hint(WatchEvent("DELETED", known))  # it lost our label: gone, as far as we can see
        elif known is not None:
            self._miss(where)
            self._hint(WatchEvent("DELETED", known))

    def _is_known(self, where: _Where) -> bool:
        with self._lock:
            return where in self._objects

    def _take(self, objects: Iterable[Object]) -> None:
        for obj in objects:
            if self._keep(obj):
                self._hint(WatchEvent("MODIFIED", obj))

    def _is_news(self, where: _Where, metadata: Object) -> bool:
        with self._lock:
            known = self._objects.get(where)
            return not self._is_gone(metadata) and (known is None or _is_newer(metadata, known["metadata"]))

    def _keep(self, obj: Object) -> bool:
        """Remember it, unless something newer is known; whether it was news."""
        kind, metadata = obj["kind"], obj["metadata"]
        labels = metadata.get("labels", {})
        where = (kind, metadata["namespace"], metadata["name"])
        with self._lock:
            known = self._objects.get(where)
            if kind != port.RUN.kind and not OURS.items() <= labels.items():
                self._drop(where)  # somebody took our label off
                return False
            if self._is_gone(metadata) or (known is not None and not _is_newer(metadata, known["metadata"])):
                return False
            self._drop(where)
            self._objects[where] = obj = slim(obj)
            if names.LABEL_RUN in labels:
                self._by_run[kind, metadata["namespace"], labels[names.LABEL_RUN]][metadata["name"]] = obj
            return True

    def _is_gone(self, metadata: Object) -> bool:
        uid = metadata["uid"]
        return uid in self._gone and not _is_later(metadata["resourceVersion"], self._gone[uid], otherwise=False)

    def _forget(self, obj: Object) -> None:
        metadata = obj["metadata"]
        where = (obj["kind"], metadata["namespace"], metadata["name"])
        with self._lock:
            self._gone[metadata["uid"]] = metadata["resourceVersion"]
            while len(self._gone) > TOMBSTONES:
                self._gone.popitem(last=False)
            known = self._objects.get(where)
            if known is not None and known["metadata"]["uid"] == metadata["uid"]:
                self._drop(where)

    def _miss(self, where: _Where) -> None:
        """It was not found. No tombstone: an answer can be old, and what is there after all must come back."""
        with self._lock:
            self._drop(where)

    def _drop(self, where: _Where) -> None:
        known = self._objects.pop(where, None)
        if known is None:
            return
        run = known["metadata"].get("labels", {}).get(names.LABEL_RUN)
        family = (where[0], where[1], str(run))
        siblings = self._by_run.get(family)
        if siblings is not None:
            siblings.pop(where[2], None)
            if not siblings:
                del self._by_run[family]

    def _hint(self, event: WatchEvent) -> None:
        with self._lock:
            listeners = tuple(self._listeners)
        for notify in listeners:
            try:
                notify(event)
            except Exception:  # a receiver's fault must not end the watch
                _log.exception("watch: the receiver failed on %s", event.type)

    def __len__(self) -> int:
        with self._lock:
            return len(self._objects)


def _where(kind: Kind, obj: Object) -> _Where:
    return kind.kind, obj["metadata"]["namespace"], obj["metadata"]["name"]


def _is_in(where: _Where, kind: Kind, namespace: str | None) -> bool:
    return where[0] == kind.kind and namespace in (None, where[1])


def _is_newer(metadata: Object, known: Object) -> bool:
    """Where resource versions cannot be compared, what came last is the newer."""
    old, new = known["resourceVersion"], metadata["resourceVersion"]
    return _is_later(new, old, otherwise=new != old)


def _is_later(version: str, than: str, *, otherwise: bool) -> bool:
    """Resource versions of one server compare as numbers; ``otherwise`` where they are none."""
    try:
        return int(version) > int(than)
    except ValueError:
        return otherwise


def _sorted(objects: Objects) -> Objects:
    return sorted(objects, key=lambda o: (o["metadata"]["namespace"], o["metadata"]["name"]))
