"""The embedded object store: Kubernetes' API semantics in one process, behind the ``Cluster`` port.

The controller writes through the port; the environment's own controllers (``workloads``, ``runner``) through
``edit`` and ``remove``, which skip the admission that users' writes go through. The in-memory form (no path) is the
fake that the crash sweep uses: ``on_mutation`` is called around every commit of a port call and may raise there.
Namespaces are implied, RBAC and quotas do not exist, and whatever isn't implemented raises UnsupportedError.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal

from prodrl_operator.cluster.local import admission, applying, garbage, schema
from prodrl_operator.cluster.local.journal import Entry, Journal, Key
from prodrl_operator.cluster.port import EVENT, KINDS, Kind, Object, Objects, Propagation, WatchEvent
from prodrl_operator.errors import (
    AlreadyExistsError,
    ConflictError,
    InvalidError,
    NotFoundError,
    UnsupportedError,
)

_log = logging.getLogger(__name__)

When = Literal["before", "after"]
OnMutation = Callable[[str, Object], None]
"""``(when, mutation)``: when is "before" or "after" the commit; mutation is ``{"verb", "object"}``."""

_Names = list[str]  # inside the class, ``list`` is the port's method

_SERVER_FIELDS = ("uid", "resourceVersion", "generation", "creationTimestamp", "deletionTimestamp")
_EVENT_LIFETIME = timedelta(hours=1)


def now_utc() -> datetime:
    """The wall clock."""
    return datetime.now(UTC)


def timestamp(moment: datetime) -> str:
    """RFC 3339 with seconds, as the API writes times."""
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


class ObjectStore:
    """Objects with Kubernetes' semantics; implements ``Cluster``.

    Args:
        path: SQLite file, or None to keep everything in memory.
        crds: CustomResourceDefinitions whose kinds are served and validated.
        on_mutation: Called around every commit made through the port.
        admit: Called with every built-in object before it is stored; raises to refuse it.
        now: The clock.
        collect: False leaves garbage collection to explicit ``collect_garbage`` calls.
    """

    def __init__(
        self,
        path: Path | None = None,
        *,
        crds: list[Object] | None = None,
        on_mutation: OnMutation | None = None,
        admit: Callable[[Object], None] | None = None,
        now: Callable[[], datetime] = now_utc,
        collect: bool = True,
    ) -> None:
        self.on_mutation = on_mutation
        self._admit = admit
        self._now = now
        self._collect = collect
        self._lock = threading.RLock()
        self._system = threading.local()
        self._has_garbage = False
        self._watchers: list[queue.SimpleQueue[WatchEvent | None]] = []
        self._schemas = {item.kind: item for crd in crds or () for item in schema.load(crd)}
        custom = {name for name, kind in KINDS.items() if "." in kind.api_version.split("/")[0] and _is_ours(kind)}
        self._kinds = {name: kind for name, kind in KINDS.items() if name not in custom or name in self._schemas}
        self._collected_kinds = frozenset((kind.api_version, kind.kind) for kind in self._kinds.values())
        self._journal = Journal(path)
        self._version, self._entries = self._journal.load()
        if collect:
            self.collect_garbage()

    # Reading.

    def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        """The object as it is now, or None."""
        self._require(kind.kind, kind.api_version)
        with self._lock:
            entry = self._entries.get((kind.kind, namespace, name))
            return None if entry is None else _copy(entry.body)

    def list(self, kind: Kind, namespace: str | None = None, labels: Mapping[str, str] | None = None) -> list[Object]:
        """Objects that carry all ``labels``, sorted by namespace and name."""
        self._require(kind.kind, kind.api_version)
        wanted = (labels or {}).items()
        with self._lock:
            return [
                _copy(entry.body)
                for key, entry in sorted(self._entries.items())
                if key[0] == kind.kind
                and namespace in (None, key[1])
                and wanted <= entry.body["metadata"].get("labels", {}).items()
            ]

    # Writing: the port.

    def create(self, manifest: Object) -> Object:
        """Create; status and server-owned metadata are ignored."""
        obj = self._read_manifest(manifest)
        with self._lock:
            if obj["metadata"].pop("resourceVersion", None):
                raise InvalidError(f"{_where(obj)}: resourceVersion must not be set on objects to be created")
            if _key(obj) in self._entries:
                raise AlreadyExistsError(f"{_where(obj)}: already exists; choose another name")
            return self._insert("create", obj, applied=None)

    def try_out(self, manifest: Object) -> None:
        """Look at it as ``create`` does."""
        with self._lock:
            self._admitted(self._read_manifest(manifest), None)

    def apply(self, manifest: Object) -> Object:
        """Server-side apply by our one manager; an apply that changes nothing writes nothing."""
        applied = self._read_manifest(manifest)
        if twice := applying.named_twice(applied, self._list_keys(applied["kind"])):
            raise InvalidError(f"{_where(applied)}: {twice} names an item twice; keep one of them")
        with self._lock:
            wanted = applied["metadata"].pop("resourceVersion", None)
            uid = applied["metadata"].pop("uid", None)
            entry = self._entries.get(_key(applied))
            if entry is None:
                if wanted or uid:
                    raise ConflictError(f"{_where(applied)}: is gone; read again")
                return self._insert("apply", _copy(applied), applied=applied)
            _check_preconditions(entry.body, uid, wanted)
            return self._merge(entry, applied)

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
        """Delete; a missing object is fine."""
        self._require(kind.kind, kind.api_version)
        if propagation not in ("Background", "Foreground", "Orphan"):
            raise InvalidError(f"{kind.kind} {namespace}/{name}: unknown propagation, got {propagation!r}")
        with self._lock:
            entry = self._entries.get((kind.kind, namespace, name))
            if entry is None:
                return
            _check_preconditions(entry.body, uid, resource_version)
            self._delete(entry, propagation)
            self._after_write()

    def update_status(self, manifest: Object) -> Object:
        """PUT of the status subresource; everything but ``status`` is ignored."""
        given = self._read_manifest(manifest)
        kind = given["kind"]
        has_status = self._schemas[kind].has_status if kind in self._schemas else kind in admission.STATUS_KINDS
        if not has_status:
            raise UnsupportedError(f"{_where(given)}: the kind has no status subresource")
        with self._lock:
            entry = self._present(given)
            obj = {name: value for name, value in entry.body.items() if name != "status"}
            if "status" in manifest:
                obj["status"] = _copy(manifest["status"])
            return self._replace("update_status", entry, obj)

    def set_finalizers(self, manifest: Object, finalizers: _Names) -> Object:
        """Replace the finalizers; an object that is being deleted goes with its last one."""
        with self._lock:
            entry = self._present(self._read_manifest(manifest))
            obj = _copy(entry.body)
            if "deletionTimestamp" in obj["metadata"] and set(finalizers) - set(obj["metadata"].get("finalizers", ())):
                raise InvalidError(f"{_where(obj)}: no finalizer can be added while deleting, got {finalizers!r}")
            obj["metadata"]["finalizers"] = list(finalizers)
            return self._replace("set_finalizers", entry, obj)

    def watch(self, notify: Callable[[WatchEvent], None]) -> Callable[[], None]:
        """Deliver changes from now on, in order, from a thread of its own."""
        events: queue.SimpleQueue[WatchEvent | None] = queue.SimpleQueue()

        def deliver() -> None:
            while (event := events.get()) is not None:
                try:
                    notify(event)
                except Exception:  # a watcher's fault must not end its watch
                    _log.exception("watch: the receiver failed on %s", event.type)

        thread = threading.Thread(target=deliver, name="store-watch", daemon=True)
        with self._lock:
            self._watchers.append(events)
        thread.start()

        def stop() -> None:
            with self._lock:
                if events in self._watchers:
                    self._watchers.remove(events)
            events.put(None)
            if thread is not threading.current_thread():
                thread.join(timeout=5)

        return stop

    def renew(self) -> None:
        """Every read is new here."""

    def events_of(self, obj: Object) -> Objects:
        """Events about one object."""
        uid, namespace = obj["metadata"]["uid"], obj["metadata"]["namespace"]
        return [e for e in self.list(EVENT, namespace) if e.get("involvedObject", {}).get("uid") == uid]

    # Writing: the environment's own controllers.

    @contextmanager
    def as_system(self) -> Iterator[None]:
        """Writes of this thread do not reach ``on_mutation`` (they are not the controller's)."""
        before = getattr(self._system, "active", False)
        self._system.active = True
        try:
            yield
        finally:
            self._system.active = before

    def edit(
        self, kind: Kind, namespace: str, name: str, change: Callable[[Object], None], *, uid: str | None = None
    ) -> Object | None:
        """Change an object in place under the lock, past admission; None when it is gone or has another uid."""
        with self.as_system(), self._lock:
            entry = self._entries.get((kind.kind, namespace, name))
            if entry is None or uid not in (None, entry.body["metadata"]["uid"]):
                return None
            obj = _copy(entry.body)
            change(obj)
            return self._replace("edit", entry, obj, admit=False)

    def remove(self, kind: Kind, namespace: str, name: str, *, uid: str) -> None:
        """End a pod's graceful deletion, or delete with no grace; finalizers still hold the object."""
        with self.as_system(), self._lock:
            entry = self._entries.get((kind.kind, namespace, name))
            if entry is not None and entry.body["metadata"]["uid"] == uid:
                self._delete(entry, "Background", is_final=True)
                self._after_write()

    def collect_garbage(self) -> int:
        """Run garbage collection until nothing is left to do; returns the number of steps."""
        steps = 0
        with self.as_system(), self._lock:
            while action := garbage.next_action((e.body for e in self._entries.values()), self._collected_kinds):
                self._collect_one(action)
                steps += 1
            self._has_garbage = False
        return steps

    def expire_events(self) -> None:
        """Forget Events older than an hour, as the API server does."""
        oldest = timestamp(self._now() - _EVENT_LIFETIME)
        with self.as_system(), self._lock:
            old = [e for key, e in self._entries.items() if key[0] == "Event"]
            for entry in [e for e in old if e.body["metadata"]["creationTimestamp"] < oldest]:
                self._commit("expire", _key(entry.body), None, entry.body)

    def close(self) -> None:
        """Stop the watches and close the file."""
        with self._lock:
            for events in self._watchers:
                events.put(None)
            self._watchers.clear()
            self._journal.close()

    # Inside, all under the lock.

    def _require(self, kind: str, api_version: str) -> Kind:
        found = self._kinds.get(kind)
        if found is None or found.api_version != api_version:
            raise UnsupportedError(f"kind {api_version}/{kind}: is not served locally; known: {sorted(self._kinds)}")
        return found

    def _read_manifest(self, manifest: Object) -> Object:
        kind = manifest.get("kind", "")
        self._require(kind, manifest.get("apiVersion", ""))
        obj = admission.normalize(manifest, is_custom=kind in self._schemas)
        for name in ("generation", "creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds"):
            obj["metadata"].pop(name, None)
        obj.pop("status", None)
        return obj

    def _present(self, given: Object) -> Entry:
        entry = self._entries.get(_key(given))
        if entry is None:
            raise NotFoundError(f"{_where(given)}: not found; it was deleted")
        metadata = given["metadata"]
        if not metadata.get("resourceVersion"):
            raise InvalidError(f"{_where(given)}: metadata.resourceVersion must be set for an update; read first")
        _check_preconditions(entry.body, metadata.get("uid"), metadata["resourceVersion"])
        return entry

    def _insert(self, verb: str, obj: Object, *, applied: Object | None) -> Object:
        metadata = obj["metadata"]
        metadata["uid"] = str(uuid.uuid4())
        metadata["creationTimestamp"] = timestamp(self._now())
        if self._has_generation(obj["kind"]):
            metadata["generation"] = 1
        obj = self._admitted(obj, None)
        result = self._commit(verb, _key(obj), Entry(obj, applied), obj)
        self._after_write()
        return result

    def _list_keys(self, kind: str) -> applying.ListKeys:
        custom = self._schemas.get(kind)
        return custom.list_keys if custom else applying.built_in_list_keys

    def _merge(self, entry: Entry, applied: Object) -> Object:
        keys = self._list_keys(applied["kind"])
        before = entry.applied or {}
        metadata = entry.body["metadata"]
        obj: Object = _copy(applying.merge(entry.body, before, applied, keys))
        for name in _SERVER_FIELDS:
            if name in metadata:
                obj["metadata"][name] = metadata[name]
        if "deletionTimestamp" in metadata and set(obj["metadata"].get("finalizers", ())) - set(
            metadata.get("finalizers", ())
        ):
            raise InvalidError(f"{_where(obj)}: no finalizer can be added while the object is being deleted")
        return self._replace("apply", entry, obj, applied=applied)

    def _replace(
        self, verb: str, entry: Entry, obj: Object, *, applied: Object | None = None, admit: bool = True
    ) -> Object:
        """Store ``obj`` in place of ``entry``; bumps the generation when anything but metadata and status changed."""
        if admit:
            obj = self._admitted(obj, entry.body)
        metadata = obj["metadata"]
        if not metadata.get("finalizers"):
            metadata.pop("finalizers", None)
        applied = entry.applied if applied is None else applied
        if obj == entry.body:
            if applied != entry.applied:  # nothing visible changed, but the ownership of fields did
                entry.applied = applied
                self._journal.save(self._version, _key(obj), entry)
            unchanged: Object = _copy(obj)
            return unchanged
        if self._has_generation(obj["kind"]) and _desired(obj) != _desired(entry.body):
            metadata["generation"] += 1
        if "deletionTimestamp" in metadata and not metadata.get("finalizers") and not _is_graceful(obj):
            last = self._commit(verb, _key(obj), None, obj)
            self._after_write()
            return last
        result = self._commit(verb, _key(obj), Entry(obj, applied), obj)
        self._after_write()
        return result

    def _delete(self, entry: Entry, propagation: str, *, is_final: bool = False) -> None:
        obj = _copy(entry.body)
        metadata = obj["metadata"]
        finalizers = [f for f in metadata.get("finalizers", ()) if f not in (garbage.FOREGROUND, garbage.ORPHAN)]
        marker = {"Foreground": garbage.FOREGROUND, "Orphan": garbage.ORPHAN}.get(propagation)
        if is_final:
            finalizers = list(metadata.get("finalizers", ()))
        elif marker:
            finalizers.append(marker)
        grace = 0 if is_final else _grace_seconds(obj)
        if not finalizers and not grace:
            self._commit("delete", _key(obj), None, obj)
            return
        metadata["finalizers"] = finalizers
        if not finalizers:
            del metadata["finalizers"]
        if "deletionTimestamp" not in metadata:
            metadata["deletionTimestamp"] = timestamp(self._now() + timedelta(seconds=grace))
            if "generation" in metadata:
                metadata["generation"] += 1
        metadata["deletionGracePeriodSeconds"] = grace
        if obj != entry.body:
            self._commit("delete", _key(obj), Entry(obj, entry.applied), obj)

    def _admitted(self, obj: Object, old: Object | None) -> Object:
        custom = self._schemas.get(obj["kind"])
        if custom:
            obj = custom.fill_defaults(obj)
            admission.check(obj, len(json.dumps(obj)))
            custom.check(obj, old)
        else:
            admission.fill_defaults(obj)
            admission.check(obj, len(json.dumps(obj)))
            admission.check_built_in(obj, old)
            if self._admit:
                self._admit(obj)
        admitted: Object = _copy(obj)
        return admitted

    def _has_generation(self, kind: str) -> bool:
        return kind in self._schemas or kind in admission.GENERATION_KINDS

    def _collect_one(self, action: garbage.Action) -> None:
        entry = next(e for e in self._entries.values() if e.body["metadata"]["uid"] == action.uid)
        if action.verb in ("Background", "Foreground"):
            self._delete(entry, action.verb)
            return
        obj = _copy(entry.body)
        metadata = obj["metadata"]
        if action.verb == "DropOwners":
            metadata["ownerReferences"] = [o for o in metadata["ownerReferences"] if o["uid"] not in action.values]
            if not metadata["ownerReferences"]:
                del metadata["ownerReferences"]
        else:
            metadata["finalizers"] = [f for f in metadata["finalizers"] if f not in action.values]
        self._replace("collect", entry, obj, admit=False)

    def _after_write(self) -> None:
        if self._collect and self._has_garbage and not getattr(self._system, "active_collection", False):
            self._system.active_collection = True
            try:
                self.collect_garbage()
            finally:
                self._system.active_collection = False

    def _commit(self, verb: str, key: Key, entry: Entry | None, obj: Object) -> Object:
        """The one place where state changes."""
        mutation = {"verb": verb, "object": obj}
        hook = None if getattr(self._system, "active", False) else self.on_mutation
        version = self._version + 1
        obj["metadata"]["resourceVersion"] = str(version)
        if hook:
            hook("before", _copy(mutation))
        self._journal.save(version, key, entry)
        is_new = key not in self._entries
        self._version = version
        self._has_garbage |= entry is None or "deletionTimestamp" in obj["metadata"]
        self._has_garbage |= is_new and "ownerReferences" in obj["metadata"]
        if entry is None:
            del self._entries[key]
        else:
            self._entries[key] = entry
        event = WatchEvent("DELETED" if entry is None else "ADDED" if is_new else "MODIFIED", _copy(obj))
        for events in self._watchers:
            events.put(event)
        if hook:
            hook("after", _copy(mutation))
        result: Object = _copy(obj)
        return result


_copy = admission.copy


def _is_ours(kind: Kind) -> bool:
    return kind.api_version.split("/")[0] == "prodrl.dev"


def _key(obj: Object) -> Key:
    return obj["kind"], obj["metadata"]["namespace"], obj["metadata"].get("name", "")


def _where(obj: Object) -> str:
    return f"{obj['kind']} {obj['metadata']['namespace']}/{obj['metadata'].get('name')}"


def _desired(obj: Object) -> Object:
    return {name: value for name, value in obj.items() if name not in ("metadata", "status")}


def _check_preconditions(obj: Object, uid: str | None, resource_version: str | None) -> None:
    metadata = obj["metadata"]
    if uid and uid != metadata["uid"]:
        raise ConflictError(f"{_where(obj)}: uid is {metadata['uid']}, got {uid!r}; it is another object, read again")
    if resource_version and resource_version != metadata["resourceVersion"]:
        present = metadata["resourceVersion"]
        raise ConflictError(f"{_where(obj)}: resourceVersion is {present}, got {resource_version!r}; read again")


def _grace_seconds(obj: Object) -> int:
    """Pods that run on a node end gracefully; everything else goes at once."""
    is_running = obj["kind"] == "Pod" and obj["spec"].get("nodeName")
    if not is_running or obj.get("status", {}).get("phase") in ("Succeeded", "Failed"):
        return 0
    return max(1, int(obj["spec"].get("terminationGracePeriodSeconds", 30)))


def _is_graceful(obj: Object) -> bool:
    return bool(obj["metadata"].get("deletionGracePeriodSeconds"))
