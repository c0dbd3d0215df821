"""A settled run, as the operator leaves it in the middle of collecting, to be stamped often. Called by ``populate``.

The objects come from the in-memory world that the controller's tests use: what was sent to the cluster for children,
what was stored for the run, its rounds and pods. A stamp replaces names, addresses and UIDs, and marks manifests again.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from tests.support.fake_kubelet import Outcome
from tests.support.operator_harness import NAME, World, all_well

from prodrl_operator import acting, builders, names
from prodrl_operator.cluster import port
from prodrl_operator.cluster.port import Object
from prodrl_operator.names import Step

SPEC: Object = {
    "model": {"uri": "s3://models/base", "servedName": NAME},
    "storage": {"uri": "s3://store/chess"},
    "rounds": {"max": 1000, "steps": 16, "batchSize": 64},
    "gateway": {"authentication": "Anonymous"},
}
SETTLING_STEPS = 30
"""Of five seconds each: the first policy's servers are ready, nothing drains any more."""
STATUS_KINDS = (port.DEPLOYMENT.kind, port.JOB.kind, port.POD.kind)


@dataclass(frozen=True)
class Stamp:
    """What makes one run another."""

    namespace: str
    name: str
    gateway_address: str
    """Cluster address of the gateway's Service."""
    serving_address: str
    pod_address: str
    """Where the gateway's pod answers."""


class Template:
    """One settled run."""

    def __init__(self) -> None:
        world = World(SPEC, _script)
        world.now = datetime.now(UTC) - timedelta(minutes=30)
        self._sent: dict[tuple[str, str], Object] = {}
        self._record(world)
        world.until(lambda it: it.at(1, Step.COLLECTING))
        world.steps(SETTLING_STEPS)
        stored = world.store.list
        self._run = stored(port.RUN)[0]
        self._rounds = stored(port.ROUND)
        self._pods = stored(port.POD)
        self._statuses = {
            (item["kind"], item["metadata"]["name"]): _real_status(item)
            for kind in (port.DEPLOYMENT, port.JOB, port.POD)
            for item in stored(kind)
        }
        assert world.gateway.routes is not None, "a served run has routes"
        self._routes = world.gateway.routes.routes
        kinds = (port.ROUND.kind, port.EVENT.kind)
        self._children = [item for (kind, _), item in self._sent.items() if kind not in kinds]
        self.size = len(self._children) + len(self._pods) + len(self._rounds) + 1
        """Objects a run, itself included."""
        self.collect_job = next(
            item["metadata"]["name"] for item in self._children if item["metadata"]["name"].endswith("-collect-a0")
        ).removeprefix(NAME)
        self.collect_result = json.dumps(_collected())

    def _record(self, world: World) -> None:
        store, sent = world.store, self._sent
        create, apply = store.create, store.apply

        def recorded(write: Any) -> Any:
            def send(manifest: Object) -> Object:
                if names.ANNOTATION_MANIFEST in manifest["metadata"].get("annotations", {}):
                    sent[manifest["kind"], manifest["metadata"]["name"]] = manifest
                return dict(write(manifest))

            return send

        # The controller's writes come through these two; the scripted cluster's do too, and its pods are left out.
        store.create, store.apply = recorded(create), recorded(apply)  # type: ignore[method-assign]
        world.restart()

    # Stamps, in the order in which they are needed.

    def run(self, stamp: Stamp) -> tuple[Object, Object]:
        """The run, and its status."""
        return self._split(self._run, stamp, {})

    def rounds(self, stamp: Stamp, run_uid: str) -> list[tuple[Object, Object]]:
        """The rounds and their statuses."""
        return [self._split(item, stamp, {self._run["metadata"]["uid"]: run_uid}) for item in self._rounds]

    def uids(self, run_uid: str, round_uids: list[str]) -> dict[str, str]:
        """Those of the template -> those that the API server gave."""
        olds = [self._run["metadata"]["uid"], *(item["metadata"]["uid"] for item in self._rounds)]
        return dict(zip(olds, [run_uid, *round_uids], strict=True))

    def children(self, stamp: Stamp, uids: dict[str, str]) -> list[tuple[Object, Object | None]]:
        """Everything but pods, with the status that it has."""
        found = []
        for item in self._children:
            manifest = _rendered(item, stamp, uids)
            if item["metadata"]["name"] == f"{NAME}-routes":
                table = builders.route_table(self._routes_of(stamp))
                manifest["data"] = {"routes.json": table.model_dump_json()}
            manifest = _marked(manifest)
            if manifest["kind"] == port.SERVICE.kind:
                is_gateway = manifest["metadata"]["labels"][names.LABEL_COMPONENT] == "gateway"
                manifest["spec"] = {
                    **manifest["spec"],
                    "clusterIP": stamp.gateway_address if is_gateway else stamp.serving_address,
                }
            status = self._statuses.get((item["kind"], item["metadata"]["name"]))
            found.append((manifest, _rendered(status, stamp, uids) if status else None))
        return found

    def pods(self, stamp: Stamp, job_uids: dict[str, str]) -> list[tuple[Object, Object]]:
        """The pods and their statuses; ``job_uids``: by name."""
        found = []
        for item in self._pods:
            pod, status = self._split(item, stamp, {})
            owner = pod["metadata"]["ownerReferences"][0]
            # A Deployment's pods belong to a ReplicaSet, which nobody looks at.
            owner["uid"] = job_uids.get(owner["name"]) or str(uuid.uuid5(uuid.NAMESPACE_DNS, pod["metadata"]["name"]))
            if owner["kind"] == port.DEPLOYMENT.kind:
                owner["kind"] = "ReplicaSet"
            if pod["metadata"]["labels"].get(names.LABEL_COMPONENT) == "gateway":
                status |= {"podIP": stamp.pod_address, "podIPs": [{"ip": stamp.pod_address}]}
            found.append((pod, status))
        return found

    def pod_of(self, job: str, stamp: Stamp) -> Object:
        """The pod of one of the run's Jobs, as it was made."""
        found = next(
            item
            for item in self._pods
            if item["metadata"]["ownerReferences"][0]["name"] == job.replace(stamp.name, NAME)
        )
        return self._split(found, stamp, {})[0]

    def version(self, stamp: Stamp) -> str:
        """Of the routes that the gateway has applied."""
        return builders.route_table(self._routes_of(stamp)).version

    def _routes_of(self, stamp: Stamp) -> list[Any]:
        url = f"http://{stamp.serving_address}:{names.SERVING_PORT}"
        return [route.model_copy(update={"url": url}) for route in self._routes]

    def _split(self, item: Object, stamp: Stamp, uids: dict[str, str]) -> tuple[Object, Object]:
        made = _rendered(item, stamp, uids)
        status = made.pop("status")
        if made["kind"] == port.POD.kind:
            status = dict(self._statuses[item["kind"], item["metadata"]["name"]])
        for key in ("uid", "resourceVersion", "creationTimestamp", "generation"):
            made["metadata"].pop(key, None)
        return made, status


def _script(number: int, step: Step, attempt: int) -> Outcome | None:
    return None if (number, step) == (1, Step.COLLECTING) else all_well(number, step, attempt)


def _collected() -> Object:
    outcome = all_well(1, Step.COLLECTING, 0)
    assert isinstance(outcome.message, dict)
    return outcome.message


def _marked(manifest: Object) -> Object:
    """Marked anew, as what the operator would send now."""
    del manifest["metadata"]["annotations"][names.ANNOTATION_MANIFEST]
    if not manifest["metadata"]["annotations"]:
        del manifest["metadata"]["annotations"]
    return acting._marked(manifest)


def _rendered(item: Object, stamp: Stamp, uids: dict[str, str]) -> Object:
    text = json.dumps(item)
    text = text.replace(f"{NAME}-gateway.default.svc", stamp.gateway_address)
    text = text.replace(f"{NAME}-r0000-serve.default.svc", stamp.serving_address)
    text = text.replace('"namespace": "default"', f'"namespace": "{stamp.namespace}"').replace(NAME, stamp.name)
    for old, new in uids.items():
        text = text.replace(old, new)
    rendered: Object = json.loads(text)
    return rendered


def _real_status(item: Object) -> Object:
    """As the controllers of a cluster write it, where the in-memory ones are content with less."""
    status = dict(item["status"])
    if item["kind"] == port.POD.kind:
        status["containerStatuses"] = [{"imageID": "", **entry} for entry in status["containerStatuses"]]
    if item["kind"] == port.JOB.kind:
        status["uncountedTerminatedPods"] = {}
        conditions = status.get("conditions", [])
        if conditions:
            status["conditions"] = [{**conditions[0], "type": "SuccessCriteriaMet"}, *conditions]
    return status
