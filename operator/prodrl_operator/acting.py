"""Intents carried out through the port: at most one mutation a pass. Called by ``controller``.

Everything is checked against the snapshot first, so that a pass with nothing to do calls nothing. What exists under
our name but belongs to somebody else is never touched.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Iterable
from typing import Any

from prodrl_operator import builders, names
from prodrl_operator.api.run import Run
from prodrl_operator.builders import Platform
from prodrl_operator.cluster import port
from prodrl_operator.cluster.port import KINDS, Cluster, Kind, Object
from prodrl_operator.errors import AlreadyExistsError, ForbiddenError, InvalidError, OperatorError
from prodrl_operator.names import Reason
from prodrl_operator.observing import Snapshot, is_orphan_of_ours, owner_uid
from prodrl_operator.rounds import decision as intents
from prodrl_operator.rounds.observed import Hindrance

SERVING_KINDS = (port.CONFIG_MAP, port.SERVICE, port.DEPLOYMENT)
"""In the order of deletion: the trigger of the next pass goes last."""


class HinderedError(OperatorError):
    """A person must clear something away."""

    def __init__(self, hindrance: Hindrance) -> None:
        super().__init__(hindrance.message)
        self.hindrance = hindrance


class NotYetError(OperatorError):
    """An object of the same name is still going away."""


class Actor:
    """Carries out the intents of one snapshot after the other."""

    def __init__(self, cluster: Cluster, platform: Platform) -> None:
        self._cluster = cluster
        self._platform = platform
        self._acts: dict[type, Callable[[Snapshot, Any], bool]] = {
            intents.AddFinalizer: self._add_finalizer,
            intents.RemoveFinalizer: self._remove_finalizer,
            intents.CreateRound: self._create_round,
            intents.DeleteRound: self._delete_round,
            intents.EnsureGateway: self._ensure_gateway,
            intents.EnsureRoutes: self._ensure_routes,
            intents.EnsureServing: self._ensure_serving,
            intents.DeleteServing: self._delete_serving,
            intents.EnsureJob: self._ensure_job,
            intents.DeleteJob: self._delete_job,
            intents.SuspendJob: self._suspend_job,
            intents.OrphanServing: self._orphan_serving,
        }

    def act(self, snapshot: Snapshot, wanted: Iterable[intents.Intent]) -> bool:
        """Carry out the first intent that is not fulfilled; whether there was one.

        Raises:
            HinderedError: Only a person can clear the way.
            NotYetError: Something of that name is still going away.
        """
        for intent in wanted:
            try:
                if self._acts[type(intent)](snapshot, intent):
                    return True
            except ForbiddenError as exc:
                reason = Reason.QUOTA if "quota" in str(exc).lower() else Reason.FORBIDDEN
                raise HinderedError(Hindrance(reason, str(exc))) from exc
            except InvalidError as exc:
                raise HinderedError(Hindrance(Reason.INVALID_CONFIGURATION, str(exc))) from exc
        return False

    # Run and rounds.

    def _add_finalizer(self, snapshot: Snapshot, _: intents.AddFinalizer) -> bool:
        present = snapshot.run["metadata"].get("finalizers", [])
        self._cluster.set_finalizers(snapshot.run, [*present, names.FINALIZER])
        return True

    def _remove_finalizer(self, snapshot: Snapshot, _: intents.RemoveFinalizer) -> bool:
        present = snapshot.run["metadata"].get("finalizers", [])
        self._cluster.set_finalizers(snapshot.run, [item for item in present if item != names.FINALIZER])
        return True

    def _create_round(self, snapshot: Snapshot, intent: intents.CreateRound) -> bool:
        run = snapshot.observed.run
        return self._create(
            snapshot, builders.round_object(run, intent.number, intent.source, intent.lineage_round), port.ROUND
        )

    def _delete_round(self, snapshot: Snapshot, intent: intents.DeleteRound) -> bool:
        return self._delete(port.ROUND, snapshot.rounds[intent.number])

    # Serving.

    def _ensure_gateway(self, snapshot: Snapshot, intent: intents.EnsureGateway) -> bool:
        return any(
            self._apply(snapshot, item)
            for item in builders.gateway(self._gateway_run(snapshot, intent), self._platform)
        )

    def _gateway_run(self, snapshot: Snapshot, intent: intents.EnsureGateway) -> Run:
        """The gateway follows the settings of the newest round: edits take effect with the next."""
        run = snapshot.observed.run
        if intent.settings_of is None:
            return run
        return run.model_copy(update={"spec": snapshot.observed.rounds[intent.settings_of].spec.settings})

    def _ensure_routes(self, snapshot: Snapshot, intent: intents.EnsureRoutes) -> bool:
        manifest = builders.routes_config_map(snapshot.observed.run, builders.route_table(intent.routes))
        return self._apply(snapshot, manifest)

    def _ensure_serving(self, snapshot: Snapshot, intent: intents.EnsureServing) -> bool:
        made_by = snapshot.observed.rounds[intent.number]
        return any(
            self._apply(snapshot, item, is_fixed=True)
            for item in builders.serving(snapshot.observed.run, made_by, self._platform)
        )

    def _delete_serving(self, snapshot: Snapshot, intent: intents.DeleteServing) -> bool:
        name = builders.serving_name(snapshot.observed.run.metadata["name"], intent.number)
        kinds = (port.DEPLOYMENT,) if intent.only_deployment else SERVING_KINDS
        return any(self._delete_child(snapshot, kind, name) for kind in kinds)

    def _orphan_serving(self, snapshot: Snapshot, intent: intents.OrphanServing) -> bool:
        run, observed = snapshot.observed.run, snapshot.observed
        newest = observed.numbers[-1] if observed.numbers else None
        manifests = builders.gateway(self._gateway_run(snapshot, intents.EnsureGateway(newest)), self._platform)
        if intent.number in observed.rounds:
            manifests += builders.serving(run, observed.rounds[intent.number], self._platform)
        for manifest in manifests:
            live = snapshot.children.get((manifest["kind"], manifest["metadata"]["name"]))
            if live is not None and owner_uid(live) == run.metadata["uid"]:
                self._cluster.apply(_marked(_with_images_of(live, _ownerless(manifest))))
                return True
        return False

    # Jobs.

    def _ensure_job(self, snapshot: Snapshot, intent: intents.EnsureJob) -> bool:
        observed = snapshot.observed
        get = observed.rounds.get

        def made_by(number: int | None) -> Any:
            return None if number is None else get(number)

        inputs = builders.StepInputs(
            source=made_by(intent.source),
            lineage=made_by(intent.lineage),
            stable=made_by(intent.stable),
            candidate_url=observed.urls.get(intent.number),
            stable_url=observed.urls.get(intent.stable) if intent.stable is not None else None,
        )
        this = observed.rounds[intent.number]
        manifests = builders.step_job(observed.run, this, intent.step, intent.attempt, inputs, self._platform)
        return any(self._create(snapshot, item, KINDS[item["kind"]]) for item in manifests)

    def _delete_job(self, snapshot: Snapshot, intent: intents.DeleteJob) -> bool:
        return self._delete_child(snapshot, port.JOB, self._job_name(snapshot, intent))

    def _suspend_job(self, snapshot: Snapshot, intent: intents.SuspendJob) -> bool:
        name = self._job_name(snapshot, intent)
        live = snapshot.children[port.JOB.kind, name]
        metadata = {"name": name, "namespace": live["metadata"]["namespace"], "uid": live["metadata"]["uid"]}
        self._cluster.apply(
            {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": {"suspend": intent.suspend}}
        )
        return True

    def _job_name(self, snapshot: Snapshot, intent: intents.DeleteJob | intents.SuspendJob) -> str:
        run_name = snapshot.observed.run.metadata["name"]
        return builders.job_name(run_name, intent.number, intent.step, intent.attempt)

    # The port.

    def _create(self, snapshot: Snapshot, manifest: Object, kind: Kind) -> bool:
        """Create what is not there; whether something was written."""
        if self._is_there(snapshot, manifest):
            return False
        try:
            self._cluster.create(_marked(manifest))
        except AlreadyExistsError:
            metadata = manifest["metadata"]
            live = self._cluster.get(kind, metadata["namespace"], metadata["name"])
            if live is not None:
                self._check_owner(manifest, live)
        return True

    def _is_there(self, snapshot: Snapshot, manifest: Object) -> bool:
        name = manifest["metadata"]["name"]
        if manifest["kind"] == port.ROUND.kind:
            return any(obj["metadata"]["name"] == name for obj in snapshot.rounds.values())
        live = snapshot.children.get((manifest["kind"], name))
        if live is None:
            return False
        self._check_owner(manifest, live)
        return True

    def _apply(self, snapshot: Snapshot, manifest: Object, *, is_fixed: bool = False) -> bool:
        """Apply what is missing or differs from what was applied; ``is_fixed``: what is there stays as it is."""
        is_deleting = "deletionTimestamp" in snapshot.observed.run.metadata
        wanted = _marked(_ownerless(manifest) if is_deleting else manifest)
        metadata = manifest["metadata"]
        live = snapshot.children.get((manifest["kind"], metadata["name"]))
        if live is None:
            live = self._cluster.get(KINDS[manifest["kind"]], metadata["namespace"], metadata["name"])
        if live is None and is_deleting:
            return False
        if live is not None:
            is_adopted = is_orphan_of_ours(live)
            if not is_adopted:
                self._check_owner(manifest, live)
            mark = live["metadata"].get("annotations", {}).get(names.ANNOTATION_MANIFEST)
            if mark == wanted["metadata"]["annotations"][names.ANNOTATION_MANIFEST] or (is_fixed and not is_adopted):
                return False
        self._cluster.apply(wanted)
        return True

    def _check_owner(self, manifest: Object, live: Object) -> None:
        """Ours, going away, or somebody else's."""
        where = f"{live['kind']} {live['metadata']['namespace']}/{live['metadata']['name']}"
        if "deletionTimestamp" in live["metadata"]:
            raise NotYetError(f"{where}: is still being deleted; waiting")
        wanted = owner_uid(manifest)
        if owner_uid(live) == wanted:
            return
        owners = [o for o in live["metadata"].get("ownerReferences", []) if o.get("controller")]
        if owners and owners[0].get("apiVersion", "").startswith(f"{names.GROUP}/"):
            raise NotYetError(f"{where}: belongs to an earlier object of the same name; waiting for garbage collection")
        message = f"{where}: exists and is not ours; delete or rename it, or choose another name for the run"
        raise HinderedError(Hindrance(Reason.FOREIGN_OBJECT, message))

    def _delete_child(self, snapshot: Snapshot, kind: Kind, name: str) -> bool:
        live = snapshot.children.get((kind.kind, name))
        owners = {snapshot.observed.run.metadata["uid"], *(o["metadata"]["uid"] for o in snapshot.rounds.values())}
        if live is None or owner_uid(live) not in owners:
            return False
        return self._delete(kind, live)

    def _delete(self, kind: Kind, live: Object) -> bool:
        metadata = live["metadata"]
        if "deletionTimestamp" in metadata:
            return False
        self._cluster.delete(kind, metadata["namespace"], metadata["name"], uid=metadata["uid"])
        return True


def _marked(manifest: Object) -> Object:
    """With the hash of itself as an annotation: what was applied can be told without comparing defaults."""
    content = json.dumps(manifest, sort_keys=True)
    metadata = manifest["metadata"]
    mark = {names.ANNOTATION_MANIFEST: hashlib.sha256(content.encode()).hexdigest()[:16]}
    return {**manifest, "metadata": {**metadata, "annotations": {**metadata.get("annotations", {}), **mark}}}


def _ownerless(manifest: Object) -> Object:
    metadata = {name: value for name, value in manifest["metadata"].items() if name != "ownerReferences"}
    return {**manifest, "metadata": metadata}


def _with_images_of(live: Object, manifest: Object) -> Object:
    """A newer operator may have newer default images: letting go of servers must not restart them."""
    if manifest["kind"] != port.DEPLOYMENT.kind:
        return manifest
    result = copy.deepcopy(manifest)
    template, running = result["spec"]["template"]["spec"], live["spec"]["template"]["spec"]
    for field in ("initContainers", "containers"):
        images = {item["name"]: item["image"] for item in running.get(field, [])}
        for item in template.get(field, []):
            item["image"] = images.get(item["name"], item["image"])
    return result
