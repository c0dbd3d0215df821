"""Argo CD's Lua and Flux's expressions, run by a Lua interpreter and a CEL evaluator over runs in all their states."""

from __future__ import annotations

import copy
from typing import Any

import cel
import lupa.lua51
import pytest
import yaml

from prodrl_operator import names
from prodrl_operator.cluster import port
from prodrl_operator.names import TERMINAL, Reason, Step
from tests.packaging.rendering import ROOT, Object
from tests.support.operator_harness import NAME, World, blocking

ARGO = ROOT / "manifests" / "argocd"
FLUX = ROOT / "manifests" / "flux" / "kustomization.yaml"
ACTIONS = ("abort", "approve", "retry", "suspend", "resume")


def _lua_value(runtime: Any, value: Any) -> Any:
    """JSON as Argo CD hands it to a script: null is absent."""
    if isinstance(value, dict):
        return runtime.table_from({k: _lua_value(runtime, v) for k, v in value.items() if v is not None})
    if isinstance(value, list):
        return runtime.table_from([_lua_value(runtime, item) for item in value])
    return value


def _python_value(value: Any) -> Any:
    if lupa.lua51.lua_type(value) != "table":
        return value
    keys = list(value.keys())
    if keys and all(isinstance(key, int) for key in keys):
        return [_python_value(value[key]) for key in sorted(keys)]
    return {key: _python_value(value[key]) for key in keys}


def lua(script: str, obj: Object) -> Any:
    """Run a script over ``obj`` with the libraries that Argo CD opens, and give back what it returns."""
    runtime = lupa.lua51.LuaRuntime(register_eval=False, register_builtins=False)
    runtime.execute("io = nil; require = nil; dofile = nil; debug = nil; os = {date = os.date, time = os.time}")
    runtime.globals().obj = _lua_value(runtime, obj)
    return _python_value(runtime.execute(script))


def health(obj: Object) -> str:
    return str(lua((ARGO / "health.lua").read_text(), obj)["status"])


def allowed(obj: Object) -> set[str]:
    found = lua((ARGO / "actions" / "discovery.lua").read_text(), obj)
    assert set(found) == set(ACTIONS)
    return {name for name, action in found.items() if not action["disabled"]}


def act(name: str, obj: Object) -> Object:
    return dict(lua((ARGO / "actions" / name / "action.lua").read_text(), obj))


def run(
    generation: int = 2, observed: int | None = 2, *, number: int = 3, suspend: bool = False, **conditions: str
) -> Object:
    """A run with conditions given as Type="True/Reason"."""
    listed = []
    for kind, said in conditions.items():
        value, _, reason = said.partition("/")
        listed.append({"type": kind, "status": value, "reason": reason or "Because", "message": f"{kind} says so"})
    status: Object = {"conditions": listed, "currentRound": {"number": number, "step": "Training"}}
    if observed is not None:
        status["observedGeneration"] = observed
    spec = {"model": {"uri": "file:///m"}, **({"suspend": True} if suspend else {})}
    return {"metadata": {"name": "chess", "generation": generation}, "spec": spec, "status": status}


def deleted(obj: Object) -> Object:
    return {**obj, "metadata": {**obj["metadata"], "deletionTimestamp": "2026-01-01T00:00:00Z"}}


HEALTHY = run(Ready="True", Stalled="False", Progressing="True/Training")
STALLED = run(Ready="True", Stalled="True/GateBlocked", Progressing="False")
STALLED["status"]["haltedRound"] = 3
WAITING = run(Ready="True", Progressing=f"True/{Reason.AWAITING_APPROVAL}")
CASES = [
    ("healthy while rounds turn", HEALTHY, "Healthy"),
    ("deleting before anything else", deleted(STALLED), "Progressing"),
    ("new: no status at all", {"metadata": {"generation": 1}, "spec": {}}, "Progressing"),
    ("new: status without a generation", run(observed=None, Ready="True"), "Progressing"),
    ("the spec is newer than the status", run(generation=3, Ready="True", Stalled="True"), "Progressing"),
    ("stalled, though users are served", STALLED, "Degraded"),
    ("stalled before suspended", run(suspend=True, Ready="True", Stalled="True"), "Degraded"),
    ("suspended", run(suspend=True, Ready="True", Stalled="False"), "Suspended"),
    ("not ready yet", run(Ready="False/Starting", Stalled="False"), "Progressing"),
    ("the new spec is not in force yet", run(Ready="True", Stalled="False", Reconciling="True"), "Progressing"),
    ("stalled, and a suspension under way", run(Stalled="True", Reconciling="True", Ready="True"), "Progressing"),
    ("ready is unknown", run(Ready="Unknown", Stalled="False"), "Progressing"),
    ("no conditions yet", run(), "Progressing"),
]


@pytest.mark.parametrize(("obj", "wanted"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_health_in_the_documented_order(obj: Object, wanted: str) -> None:
    assert health(obj) == wanted


def test_the_message_says_what_a_person_must_know() -> None:
    script = (ARGO / "health.lua").read_text()
    assert lua(script, STALLED)["message"] == "Stalled says so"
    assert lua(script, HEALTHY)["message"] == "Progressing says so"


def expressions() -> dict[str, Any]:
    found = yaml.safe_load(FLUX.read_text())["spec"]["healthCheckExprs"]
    assert [item["kind"] for item in found] == [port.RUN.kind]
    assert found[0]["apiVersion"] == names.API_VERSION
    return {key: found[0][key] for key in ("inProgress", "failed", "current")}


def flux(obj: Object) -> str:
    """As Flux evaluates them: in progress, then failed, then current; an error, or none of them, is in progress."""
    variables: dict[str, Any] = {
        key: obj[key] for key in ("apiVersion", "kind", "metadata", "spec", "status") if key in obj
    }
    for state, expression in expressions().items():
        try:
            if cel.evaluate(expression, variables):
                return state
        except RuntimeError:
            return "inProgress"
    return "inProgress"


def kstatus(obj: Object) -> str:
    """The rules of kstatus for any custom resource."""
    conditions = {item["type"]: item["status"] for item in obj.get("status", {}).get("conditions", [])}
    if "deletionTimestamp" in obj["metadata"]:
        return "inProgress"
    if obj.get("status", {}).get("observedGeneration", obj["metadata"]["generation"]) != obj["metadata"]["generation"]:
        return "inProgress"
    if conditions.get("Reconciling") == "True":
        return "inProgress"
    if conditions.get("Stalled") == "True":
        return "failed"
    return "inProgress" if conditions.get("Ready", "True") != "True" else "current"


@pytest.mark.parametrize(("obj", "wanted"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_flux_and_argo_agree(obj: Object, wanted: str) -> None:
    said = {"Healthy": "current", "Suspended": "current", "Degraded": "failed", "Progressing": "inProgress"}[wanted]
    assert flux(obj) == said


def lives() -> list[Object]:
    """A run as stored through its life: started, promoted, blocked, stalled, retried, suspended, deleted."""
    it = World({"rounds": {"max": 2, "steps": 2, "batchSize": 2}}, blocking(1))
    found = []

    def look(count: int) -> None:
        for _ in range(count):
            raw = it.store.get(port.RUN, "default", NAME)
            if raw is not None:
                found.append(copy.deepcopy(raw))
                it.step()

    look(25)
    it.edit(requests={"retryToken": "again"})
    look(3)
    it.edit(suspend=True)
    look(3)
    it.store.delete(port.RUN, "default", NAME)
    look(5)
    return found


def test_all_three_agree_over_a_whole_life() -> None:
    seen = set()
    for obj in lives():
        answer = health(obj)
        seen.add(answer)
        said = {"Healthy": "current", "Suspended": "current", "Degraded": "failed", "Progressing": "inProgress"}[answer]
        assert flux(obj) == said, obj["status"]
        # kstatus takes a run that the operator has not seen at all for current; everything else it sees alike.
        if obj.get("status", {}).get("conditions"):
            assert kstatus(obj) == said, obj["status"]
    assert seen == {"Healthy", "Suspended", "Degraded", "Progressing"}


def test_actions_are_offered_where_they_make_sense() -> None:
    assert allowed(HEALTHY) == {"abort", "suspend"}
    assert allowed(run(number=0, Ready="False")) == {"suspend"}
    assert allowed(STALLED) == {"abort", "retry", "suspend"}
    assert allowed(run(Stalled=f"True/{Reason.INVALID_SPEC}")) == {"abort", "suspend"}
    assert allowed(run(Stalled=f"True/{Reason.IMAGE_PULL}")) == {"abort", "suspend"}, "it goes on once cured"
    assert allowed(run(suspend=True)) == {"abort", "resume"}
    assert allowed(run(Progressing=f"True/{Reason.AWAITING_APPROVAL}")) == {"abort", "approve", "suspend"}
    assert "approve" in allowed(run(Stalled=f"True/{Reason.GATE_INCONCLUSIVE}"))
    assert allowed({"metadata": {"generation": 1}}) == {"suspend"}
    assert allowed(deleted(STALLED)) == set()
    for step in TERMINAL:
        halted = run(Ready="True", Stalled="True/GateBlocked")
        halted["status"]["currentRound"]["step"] = step
        assert ("abort" in allowed(halted)) == (step == Step.FAILED), "what is over cannot be given up"
    committed = run(Ready="True")
    committed["status"]["stable"] = {"round": 3}
    assert "abort" not in allowed(committed)


@pytest.mark.parametrize("name", ACTIONS)
def test_an_action_writes_spec_and_nothing_else(name: str) -> None:
    before = {"approve": WAITING, "retry": STALLED}.get(name, run(Ready="True"))
    after = act(name, before)
    assert {key: value for key, value in after.items() if key != "spec"} == {
        key: value for key, value in before.items() if key != "spec"
    }
    assert after["spec"] != before["spec"]
    assert after["spec"]["model"] == before["spec"]["model"]


def test_actions_keep_other_requests() -> None:
    before = copy.deepcopy(WAITING)
    before["spec"]["requests"] = {"retryToken": "old", "abortRound": 1}
    assert act("approve", before)["spec"]["requests"] == {"retryToken": "old", "abortRound": 1, "approveRound": 3}


def promoted_last() -> Object:
    obj = run(Ready="True")
    obj["status"]["currentRound"]["step"] = "Promoted"
    return obj


def being_promoted() -> Object:
    obj = run(Ready="True")
    obj["status"]["stable"] = {"round": 3}
    return obj


@pytest.mark.parametrize(
    ("name", "obj", "why"),
    [
        ("approve", HEALTHY, "nothing to approve"),
        ("approve", STALLED, "nothing to approve"),
        ("approve", run(number=0, Progressing=f"True/{Reason.AWAITING_APPROVAL}"), "nothing to approve"),
        ("approve", {"metadata": {"generation": 1}, "spec": {}}, "nothing to approve"),
        ("abort", promoted_last(), "nothing to abort"),
        ("abort", being_promoted(), "round 3 is stable already"),
        ("abort", run(number=0), "nothing to abort"),
        ("abort", {"metadata": {"generation": 1}, "spec": {}}, "nothing to abort"),
        ("retry", HEALTHY, "not stalled"),
        ("retry", run(Stalled=f"True/{Reason.IMAGE_PULL}"), "cannot cure ImagePullFailed: Stalled says so"),
        ("retry", run(Stalled=f"True/{Reason.INVALID_SPEC}"), "cannot cure InvalidSpec"),
        ("retry", {"metadata": {"generation": 1}, "spec": {}}, "not stalled"),
    ],
)
def test_an_action_of_a_menu_that_is_too_old_is_refused(name: str, obj: Object, why: str) -> None:
    """Argo CD asks the discovery script for its menu only; the action runs on the object as it is by then."""
    assert name not in allowed(obj)
    with pytest.raises(lupa.lua51.LuaError, match=why):
        act(name, obj)


def applied(it: World, name: str) -> None:
    raw = it.store.get(port.RUN, "default", NAME)
    assert raw is not None
    assert name in allowed(raw), (name, raw["status"])
    it.edit(**{key: value for key, value in act(name, raw)["spec"].items() if key in ("requests", "suspend")})


def test_the_operator_does_what_an_action_asks() -> None:
    it = World({"rounds": {"max": 3, "steps": 2, "batchSize": 2}, "gate": {"approval": "Required"}}, blocking(2))
    it.until(lambda w: w.at(1, Step.GATING) and w.condition("Progressing")[1] == Reason.AWAITING_APPROVAL)
    applied(it, "approve")
    it.until(lambda w: w.at(1, Step.PROMOTED))
    it.until(lambda w: w.is_true("Stalled"))
    applied(it, "retry")
    it.until(lambda w: w.has_round(3) and not w.is_true("Stalled"))
    applied(it, "suspend")
    it.until(lambda w: w.is_true("Suspended"))
    applied(it, "resume")
    it.until(lambda w: not w.is_true("Suspended"))
    applied(it, "abort")
    it.until(lambda w: w.at(3, Step.ABORTED))


def test_the_config_map_holds_the_same_scripts() -> None:
    data = yaml.safe_load((ARGO / "argocd-cm.yaml").read_text())["data"]
    key = f"{names.GROUP}_{port.RUN.kind}"
    assert data[f"resource.customizations.health.{key}"] == (ARGO / "health.lua").read_text()
    actions = yaml.safe_load(data[f"resource.customizations.actions.{key}"])
    assert actions["discovery.lua"] == (ARGO / "actions" / "discovery.lua").read_text()
    scripts = {item["name"]: item["action.lua"] for item in actions["definitions"]}
    assert scripts == {name: (ARGO / "actions" / name / "action.lua").read_text() for name in ACTIONS}
