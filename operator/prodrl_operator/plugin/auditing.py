"""``audit`` and ``report``: figures that only the store knows, asked inside a pod of the gateway. Called by ``cli``.

The gateway's pods hold the store's credentials and the runtime's commands; a person's machine needs neither.
"""

from __future__ import annotations

import json
from typing import Any

from pydantic import ValidationError

from prodrl_operator.api.round import Round
from prodrl_operator.api.run import Run
from prodrl_operator.cluster.port import ROUND
from prodrl_operator.errors import InvalidError, NotFoundError, OperatorError
from prodrl_operator.names import GATEWAY_ADMIN_PORT, LABEL_RUN, Condition
from prodrl_operator.plugin.access import Access, Finished
from prodrl_operator.plugin.looking import Look, owner_uid, printable
from prodrl_operator.report.snapshot import Snapshot

CONTAINER = "gateway"
COUNTERS = (
    "import os,urllib.request as r;h=os.environ['POD_IP'];h=f'[{h}]' if ':' in h else h;"
    f"o=r.build_opener(r.ProxyHandler({{}}));"
    f"print(o.open(f'http://{{h}}:{GATEWAY_ADMIN_PORT}/admin/status',timeout=5).read().decode())"
)
"""What a replica counted, from its own admin port, which nothing outside the cluster reaches."""


def store_arguments(spec: dict[str, Any]) -> list[str]:
    """How ``prodrl data`` finds the run's store; credentials are in the pod's environment."""
    storage = spec["storage"]
    options = {"--store": "uri", "--endpoint-url": "endpointUrl", "--region": "region"}
    return [word for option, field in options.items() if storage.get(field) for word in (option, str(storage[field]))]


def gateway_pods(look: Look) -> list[str]:
    """Pods that can be asked. Raises NotFoundError."""
    found = [pod.name for pod in look.pods_of("gateway") if pod.state == "Running"]
    if not found:
        states = ", ".join(f"{pod.name} {pod.state}" for pod in look.pods_of("gateway")) or "none"
        raise NotFoundError(
            f"ProdRLRun {look.namespace}/{look.name}: no pod of its gateway runs (pods: {states}), and only they reach "
            f"the store; see kubectl prodrl status"
        )
    return found


def ask(access: Access, look: Look, arguments: list[str]) -> dict[str, Any]:
    """Run ``prodrl data ...`` in a pod of the gateway and parse what it prints."""
    pod = gateway_pods(look)[0]
    command = ["prodrl", "data", *arguments, *store_arguments(look.spec)]
    done = access.pods.exec(look.namespace, pod, command, CONTAINER)
    try:
        return dict(printable(json.loads(done.output)))
    except (ValueError, TypeError) as exc:
        raise InvalidError(f"Pod {pod}: {' '.join(command[:3])} gave no figures, {_last_words(done)}") from exc


def audit(access: Access, look: Look) -> dict[str, Any]:
    """Where every recorded trajectory went."""
    deadline = (look.spec.get("recording") or {}).get("rewardDeadlineSeconds")
    return ask(access, look, ["audit", "--json", *(["--reward-deadline", str(deadline)] if deadline else [])])


def holds(found: dict[str, Any]) -> bool:
    """Whether the equation holds: as the audit says, and as its own figures add up."""
    fate = found["fate"]
    excluded = fate["excluded"]
    left_out = sum(excluded.values()) if isinstance(excluded, dict) else int(excluded)
    adds_up = fate["recorded"] == fate["trained"] + fate["waiting"] + left_out + fate["expired"]
    return bool(found["holds"]) and adds_up


def audit_lines(found: dict[str, Any]) -> list[str]:
    """For people."""
    lines = [str(found["equation"])]
    lines += [f"note: {note}" for note in found.get("notes") or []]
    lines += [f"FAULT: {fault}" for fault in found.get("faults") or []]
    return [*lines, "the equation holds" if holds(found) else "the equation DOES NOT hold"]


def counters(access: Access, look: Look) -> dict[str, dict[str, float]]:
    """The gateway's counters by policy, summed over the replicas that answer."""
    total: dict[str, dict[str, float]] = {}
    for pod in gateway_pods(look):
        done = access.pods.exec(look.namespace, pod, ["python", "-c", COUNTERS], CONTAINER)
        try:
            stats = dict(json.loads(done.output)).get("stats") or {}
        except ValueError:
            continue  # the report says what the others counted
        for digest, values in stats.items():
            mine = total.setdefault(digest, {})
            for key, value in values.items():
                if isinstance(value, int | float):
                    mine[key] = mine.get(key, 0) + value
    return total


def snapshot(access: Access, look: Look) -> tuple[Snapshot, list[str]]:
    """All that the report is drawn from, and what could not be had: a report with gaps is better than none."""
    run, rounds = _models(access, look)
    missing: list[str] = []
    figures: dict[str, Any] = {}
    for name, arguments in (("audit", None), ("curves", ["curves"])):
        try:
            figures[name] = audit(access, look) if arguments is None else ask(access, look, arguments)
        except OperatorError as exc:
            missing.append(f"{name}: {exc}")
    try:
        figures["gateway"] = counters(access, look)
    except OperatorError as exc:
        missing.append(f"counters: {exc}")
    curves = (figures.get("curves") or {}).get("steps", [])
    seen = Snapshot(
        run=run, rounds=rounds, pods=[], gateway=figures.get("gateway"), audit=figures.get("audit"), curves=curves
    )
    return seen, missing


def state_of(look: Look) -> str:
    """The word in the report's heading."""
    ended = (kind.value for kind in (Condition.COMPLETED, Condition.STALLED) if look.is_true(kind))
    return next(ended, "Running")


def _models(access: Access, look: Look) -> tuple[Run, list[Round]]:
    objects = access.store.list(ROUND, look.namespace, {LABEL_RUN: look.name})
    ours = [obj for obj in objects if owner_uid(obj) == look.raw["metadata"].get("uid")]
    try:
        run = Run(metadata=look.raw["metadata"], spec=look.raw["spec"], status=look.status)
        rounds = [Round(metadata=o["metadata"], spec=o["spec"], status=o.get("status") or {}) for o in ours]
    except ValidationError as exc:
        raise InvalidError(
            f"ProdRLRun {look.namespace}/{look.name}: cannot be read by this version, {exc.error_count()} faults, "
            f"first {exc.errors()[0]['loc']}: {exc.errors()[0]['msg']}; use a plugin of the operator's version"
        ) from exc
    return run, sorted(rounds, key=lambda item: item.spec.number)


def _last_words(done: Finished) -> str:
    lines = [line for line in done.error.strip().splitlines() if line]
    return str(printable(f"exit code {done.exit_code}{f': {lines[-1]}' if lines else ''}"))
