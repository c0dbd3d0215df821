"""NetworkPolicies of a run: who may connect to its pods. Called by ``acting`` with the gateway; pure.

Only connections into the pods are limited. Where they connect to is left open: the store may be anywhere, inside the
cluster or out of it, and a NetworkPolicy knows addresses, not names. A namespace's own policies add to these: one that
lets Prometheus in, say, or one that limits egress.
"""

from __future__ import annotations

from collections.abc import Sequence

from prodrl_operator import names
from prodrl_operator.api.run import Run
from prodrl_operator.builders.metadata import STEP_WORDS, Object, Platform, gateway_name, labels, metadata
from prodrl_operator.names import Step

NAMESPACE_NAME = "kubernetes.io/metadata.name"
"""The label that every namespace carries by itself."""
EVERY_POD: Object = {"namespaceSelector": {}}


def network_policies(run: Run, platform: Platform) -> list[Object]:
    """One for each kind of pods; none with ``networkPolicy: None``."""
    if run.spec.network_policy == "None":
        return []
    name = run.metadata["name"]
    gateway, serving, trainer, evaluator = (_one(run, part) for part in ("gateway", "serving", "train", "gate"))
    users = {"ports": _ports(names.GATEWAY_PORT)}
    admin = _from([_operator(platform)], names.GATEWAY_ADMIN_PORT)
    figures = _from([EVERY_POD], names.PROGRESS_PORT)
    requests = _from([{"podSelector": gateway}, {"podSelector": evaluator}], names.SERVING_PORT)
    return [
        _policy(gateway_name(name), run, gateway, [users, admin, figures]),
        _policy(f"{name}-serving", run, serving, [requests]),
        _policy(f"{name}-steps", run, _steps(run), [figures]),
        # torchrun, gloo and NCCL choose ports as they go.
        _policy(f"{name}-train", run, trainer, [{"from": [{"podSelector": trainer}]}]),
    ]


def _operator(platform: Platform) -> Object:
    """The operator's pods, in its own namespace where that is known: a label is easily put on any pod."""
    namespace = platform.operator_namespace
    labels_of_namespace = {"matchLabels": {NAMESPACE_NAME: namespace}} if namespace else {}
    return {
        "namespaceSelector": labels_of_namespace,
        "podSelector": {"matchLabels": {names.LABEL_NAME: names.MANAGED_BY}},
    }


def _one(run: Run, component: str) -> Object:
    return {"matchLabels": labels(run, component)}


def _steps(run: Run) -> Object:
    """The pods of all Jobs."""
    shared = {key: value for key, value in labels(run, "").items() if key != names.LABEL_COMPONENT}
    words = [word for step, word in STEP_WORDS.items() if step is not Step.CANARY_DEPLOYING]
    rule = {"key": names.LABEL_COMPONENT, "operator": "In", "values": words}
    return {"matchLabels": shared, "matchExpressions": [rule]}


def _policy(name: str, run: Run, selector: Object, ingress: list[Object]) -> Object:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(name, run, labels(run, "network")),
        "spec": {"podSelector": selector, "policyTypes": ["Ingress"], "ingress": ingress},
    }


def _from(peers: Sequence[Object], port: int) -> Object:
    return {"from": list(peers), "ports": _ports(port)}


def _ports(port: int) -> list[Object]:
    return [{"protocol": "TCP", "port": port}]
