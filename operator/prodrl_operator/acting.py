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

from prodrl_operator import builders, names, observing
from prodrl_operator.api.round import Round
from prodrl_operator.api.run import Run
from prodrl_operator.builders import Platform
from prodrl_operator.cluster import port
from prodrl_operator.cluster.port import KINDS, Cluster, Kind, Object, Propagation
from prodrl_operator.errors import AlreadyExistsError, ForbiddenError, InvalidError, OperatorError, UnsupportedError
from prodrl_operator.names import Reason
from prodrl_operator.observing import Snapshot, is_orphan_of_ours, owner_uid
from prodrl_operator.rounds import decision as intents
from prodrl_operator.rounds.observed import Hindrance

OPTIONAL_KINDS = (port.PDB.kind, port.NETWORK_POLICY.kind)
"""Kinds whose objects a change of settings may make superfluous."""


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
            intents.DeleteOrphans: self._delete_orphans,
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
                reason = Reason.QUOTA if is_quota(exc) else Reason.FORBIDDEN
                raise HinderedError(Hindrance(reason, str(exc))) from exc
            except (InvalidError, UnsupportedError) as exc:
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
        manifest = builders.round_object(run, intent.number, intent.source, intent.lineage_round)
        if self._known(snapshot, manifest) is None:
            for item in builders.preview(run, manifest, self._platform):
                self._try_out(item)
        return self._create(snapshot, manifest, port.ROUND)

    def _try_out(self, manifest: Object) -> None:
        """Settings are judged before they are frozen; a quota is not, for it may have room when it counts."""
        try:
            self._cluster.try_out(manifest)
        except ForbiddenError as exc:
            if not is_quota(exc):
                raise

    def _delete_round(self, snapshot: Snapshot, intent: intents.DeleteRound) -> bool:
        return self._delete(port.ROUND, snapshot.rounds[intent.number])

    # Serving.

    def _ensure_gateway(self, snapshot: Snapshot, intent: intents.EnsureGateway) -> bool:
        manifests = self._gateway_manifests(snapshot, intent.settings_of)
        is_kept = _is_kept(snapshot)
        return any(self._apply(snapshot, item, is_kept=is_kept) for item in manifests) or self._prune(
            snapshot, manifests
        )

    def _gateway_manifests(self, snapshot: Snapshot, settings_of: int | None) -> list[Object]:
        run = self._gateway_run(snapshot, intents.EnsureGateway(settings_of))
        return [*builders.gateway(run, self._platform), *builders.network_policies(run, self._platform)]

    def _prune(self, snapshot: Snapshot, manifests: list[Object]) -> bool:
        """Delete the budgets and policies of the run that its settings ask for no more."""
        wanted = {(item["kind"], item["metadata"]["name"]) for item in manifests}
        uid = snapshot.observed.run.metadata["uid"]
        for (kind, name), live in snapshot.children.items():
            is_of_run = kind in OPTIONAL_KINDS and names.LABEL_ROUND not in live["metadata"]["labels"]
            is_ours = owner_uid(live) == uid or is_orphan_of_ours(live, snapshot.observed.run.metadata["name"])
            is_left = is_of_run and is_ours and (kind, name) not in wanted
            if is_left and self._delete(KINDS[kind], live):
                return True
        return False

    def _gateway_run(self, snapshot: Snapshot, intent: intents.EnsureGateway) -> Run:
        """The gateway follows the settings of the round in work: edits take effect with the next."""
        run = snapshot.observed.run
        if intent.settings_of is None:
            return run
        return run.model_copy(update={"spec": snapshot.observed.rounds[intent.settings_of].spec.settings})

    def _ensure_routes(self, snapshot: Snapshot, intent: intents.EnsureRoutes) -> bool:
        manifest = builders.routes_config_map(snapshot.observed.run, builders.route_table(intent.routes))
        return self._apply(snapshot, manifest, is_kept=_is_kept(snapshot))

    def _ensure_serving(self, snapshot: Snapshot, intent: intents.EnsureServing) -> bool:
        manifests = self._serving_manifests(snapshot, snapshot.observed.rounds[intent.number])
        is_kept = _is_kept(snapshot, intent.number)
        return any(self._apply(snapshot, item, is_fixed=True, is_kept=is_kept) for item in manifests)

    def _serving_manifests(self, snapshot: Snapshot, made_by: Round) -> list[Object]:
        """The stable policy's servers have a disruption budget, too."""
        run = snapshot.observed.run
        manifests = builders.serving(run, made_by, self._platform)
        stable = run.status.stable
        is_stable = stable is not None and stable.round == made_by.spec.number
        return [*manifests, *(builders.serving_budget(run, made_by) if is_stable else [])]

    def _delete_serving(self, snapshot: Snapshot, intent: intents.DeleteServing) -> bool:
        name = builders.serving_name(snapshot.observed.run.metadata["name"], intent.number)
        kinds = (port.DEPLOYMENT,) if intent.only_deployment else observing.KINDS_OF_SERVERS
        return any(self._delete_child(snapshot, kind, name) for kind in kinds)

    def _orphan_serving(self, snapshot: Snapshot, intent: intents.OrphanServing) -> bool:
        """Most have no owner already: only what became stable, or was to be kept, a moment ago has one."""
        run, observed = snapshot.observed.run, snapshot.observed
        manifests = self._gateway_manifests(snapshot, observed.gateway_settings_of)
        if intent.number in observed.rounds:
            manifests += self._serving_manifests(snapshot, observed.rounds[intent.number])
        for manifest in manifests:
            live = snapshot.children.get((manifest["kind"], manifest["metadata"]["name"]))
            if live is not None and owner_uid(live) == run.metadata["uid"]:
                self._cluster.apply(_only(live, _marked(_with_images_of(live, _ownerless(manifest)))))
                return True
        return False

    def _delete_orphans(self, snapshot: Snapshot, intent: intents.DeleteOrphans) -> bool:
        name = snapshot.observed.run.metadata["name"]
        for (kind, _), live in snapshot.children.items():
            number = live["metadata"]["labels"].get(names.LABEL_ROUND)
            is_kept = intent.kept is not None and number in (None, str(intent.kept))
            is_orphan = kind in observing.SERVING_KINDS and is_orphan_of_ours(live, name)
            if is_orphan and not is_kept and self._delete(KINDS[kind], live):
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
            spent=intent.spent,
        )
        this = observed.rounds[intent.number]
        manifests = builders.step_job(observed.run, this, intent.step, intent.attempt, inputs, self._platform)
        if self._known(snapshot, manifests[-1]) is None:
            self._check_alone(this, intent, manifests[-1])
        return any(self._create(snapshot, item, KINDS[item["kind"]]) for item in manifests)

    def _check_alone(self, this: Round, intent: intents.EnsureJob, manifest: Object) -> None:
        """Jobs and pods are watched apart: a Job may be seen to go before its pods were ever seen.

        Two attempts at once would write the same objects.
        """
        metadata = manifest["metadata"]
        # Not by run, which would be answered from what the watches have shown.
        told = (names.LABEL_MANAGED_BY, names.LABEL_COMPONENT, names.LABEL_ROUND, names.LABEL_STEP)
        labels = {name: metadata["labels"][name] for name in told}
        live = observing.live_pods(this.spec.run, self._cluster.list(port.POD, metadata["namespace"], labels))
        found = next((pods[0] for key, pods in sorted(live.items())), None)
        if found is None or self._cluster.get(port.JOB, metadata["namespace"], metadata["name"]) is not None:
            return
        raise NotYetError(f"{_where(found)}: of an attempt at {intent.step} of round {intent.number}, has not ended")

    def _delete_job(self, snapshot: Snapshot, intent: intents.DeleteJob) -> bool:
        # It stays until its pods are gone: what comes after it waits for that.
        return self._delete_child(snapshot, port.JOB, self._job_name(snapshot, intent), "Foreground")

    def _suspend_job(self, snapshot: Snapshot, intent: intents.SuspendJob) -> bool:
        name = self._job_name(snapshot, intent)
        live = snapshot.children[port.JOB.kind, name]
        metadata = _identity(live)
        if intent.suspend:
            metadata["annotations"] = {names.ANNOTATION_SUSPENDED: "true"}
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
        live = self._known(snapshot, manifest)
        if live is not None:
            return self._relabel(manifest, live)
        try:
            self._cluster.create(_marked(manifest))
        except AlreadyExistsError:
            metadata = manifest["metadata"]
            live = self._cluster.get(kind, metadata["namespace"], metadata["name"])
            if live is not None:
                self._check_owner(manifest, live)
                if not self._relabel(manifest, live):
                    raise NotYetError(f"{_where(live)}: was not seen yet; looking again") from None
        return True

    def _known(self, snapshot: Snapshot, manifest: Object) -> Object | None:
        """As it was observed; ours."""
        name = manifest["metadata"]["name"]
        if manifest["kind"] == port.ROUND.kind:
            return next((obj for obj in snapshot.rounds.values() if obj["metadata"]["name"] == name), None)
        live = snapshot.children.get((manifest["kind"], name))
        if live is not None:
            self._check_owner(manifest, live)
        return live

    def _relabel(self, manifest: Object, live: Object) -> bool:
        """Our labels are how we find what is ours: put back what somebody took off or changed.

        Whether they are on it now: a policy of the cluster that takes them off each time is not argued with.
        """
        if _is_labelled(manifest, live):
            return False
        if manifest["kind"] == port.ROUND.kind:
            wanted = " ".join(f"{key}={value}" for key, value in sorted(manifest["metadata"]["labels"].items()))
            text = f"{_where(live)}: lacks labels of ours; put them back: {wanted}"
            raise HinderedError(Hindrance(Reason.FOREIGN_OBJECT, text))
        labels = {"labels": manifest["metadata"]["labels"]}
        kind = {key: manifest[key] for key in ("apiVersion", "kind")}
        return _is_labelled(manifest, self._cluster.apply({**kind, "metadata": {**_identity(live), **labels}}))

    def _apply(self, snapshot: Snapshot, manifest: Object, *, is_fixed: bool = False, is_kept: bool = False) -> bool:
        """Apply what is missing or differs from what was applied.

        Args:
            snapshot: What is there.
            manifest: What shall be, with its owner.
            is_fixed: What is there stays as it is, but for its owner.
            is_kept: It has no owner, so that it outlives the run however that is deleted.
        """
        is_deleting = "deletionTimestamp" in snapshot.observed.run.metadata
        is_ownerless = is_kept or is_deleting
        wanted = _ownerless(manifest) if is_ownerless else manifest
        metadata = manifest["metadata"]
        live = known = snapshot.children.get((manifest["kind"], metadata["name"]))
        if live is None:
            live = self._cluster.get(KINDS[manifest["kind"]], metadata["namespace"], metadata["name"])
        if live is None and is_deleting:
            return False
        is_same = False
        if live is not None:
            is_orphan = is_orphan_of_ours(live, snapshot.observed.run.metadata["name"])
            if not is_orphan:
                self._check_owner(manifest, live)
            is_labelled = _is_labelled(manifest, live)
            is_same = _mark_of(live) == _mark_of(_marked(wanted)) or (is_fixed and is_orphan == is_ownerless)
            if is_labelled and is_same and known is None:
                raise NotYetError(f"{_where(live)}: was not seen yet; looking again")
            if is_labelled and is_same:
                return False
            wanted = _with_images_of(live, wanted) if is_fixed and (is_ownerless or is_same) else wanted
        wanted = _marked(wanted)
        after = self._cluster.apply(_only(live, wanted) if live is not None and is_deleting else wanted)
        return not is_same or _is_labelled(manifest, after)

    def _check_owner(self, manifest: Object, live: Object) -> None:
        """Ours, going away, or somebody else's."""
        where = _where(live)
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

    def _delete_child(self, snapshot: Snapshot, kind: Kind, name: str, propagation: Propagation = "Background") -> bool:
        live, run = snapshot.children.get((kind.kind, name)), snapshot.observed.run
        owners = {run.metadata["uid"], *(o["metadata"]["uid"] for o in snapshot.rounds.values())}
        # Until this run has a stable policy, what an earlier run of its name left goes on serving.
        is_orphan = (
            live is not None and kind.kind in observing.SERVING_KINDS and is_orphan_of_ours(live, run.metadata["name"])
        )
        is_ours = is_orphan and run.status.stable is not None
        if live is None or not (is_ours or owner_uid(live) in owners):
            return False
        return self._delete(kind, live, propagation)

    def _delete(self, kind: Kind, live: Object, propagation: Propagation = "Background") -> bool:
        metadata = live["metadata"]
        if "deletionTimestamp" in metadata:
            return False
        self._cluster.delete(
            kind, metadata["namespace"], metadata["name"], uid=metadata["uid"], propagation=propagation
        )
        return True


def _where(obj: Object) -> str:
    return f"{obj['kind']} {obj['metadata']['namespace']}/{obj['metadata']['name']}"


def _identity(live: Object) -> Object:
    """To apply to this very object, or to nothing."""
    return {key: live["metadata"][key] for key in ("name", "namespace", "uid")}


def _is_labelled(manifest: Object, live: Object) -> bool:
    return bool(manifest["metadata"]["labels"].items() <= live["metadata"].get("labels", {}).items())


def is_quota(exc: ForbiddenError) -> bool:
    """Whether it was a ResourceQuota that refused."""
    return "quota" in str(exc).lower()


def _marked(manifest: Object) -> Object:
    """With the hash of itself as an annotation: what was applied can be told without comparing defaults."""
    content = json.dumps(manifest, sort_keys=True)
    metadata = manifest["metadata"]
    mark = {names.ANNOTATION_MANIFEST: hashlib.sha256(content.encode()).hexdigest()[:16]}
    return {**manifest, "metadata": {**metadata, "annotations": {**metadata.get("annotations", {}), **mark}}}


def _mark_of(obj: Object) -> str | None:
    mark: str | None = obj["metadata"].get("annotations", {}).get(names.ANNOTATION_MANIFEST)
    return mark


def _only(live: Object, manifest: Object) -> Object:
    """Applied to this very object or not at all: one that was deleted meanwhile is not made anew."""
    return {**manifest, "metadata": {**manifest["metadata"], "uid": live["metadata"]["uid"]}}


def _is_kept(snapshot: Snapshot, number: int | None = None) -> bool:
    """Whether the gateway (None), or a round's servers, outlive the run."""
    run = snapshot.observed.run
    stable = run.status.stable
    return run.spec.on_delete.serving == "Keep" and stable is not None and number in (None, stable.round)


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
