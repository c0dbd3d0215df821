"""What a round is going to make, before it begins: the API server is asked whether it would take it.

Settings are frozen into a round, and users' data is spent on it. A Job that is refused days later, because of a label
or a limit, would cost both.
"""

from __future__ import annotations

from prodrl_operator.api.round import Policy, Round
from prodrl_operator.api.run import Run
from prodrl_operator.builders import serving, steps
from prodrl_operator.builders.gateway import gateway
from prodrl_operator.builders.metadata import Object, Platform
from prodrl_operator.names import Step

NOBODY = "00000000-0000-0000-0000-000000000000"
UNKNOWN = Policy(key="unknown", digest="sha256:" + "0" * 64, size_bytes=0)
"""The policy that is to come; nothing that is checked depends on it."""


def preview(run: Run, manifest: Object, platform: Platform) -> list[Object]:
    """Jobs, servers and gateway of the round that ``manifest`` will be; only their settings are what they will be."""
    made = {**manifest, "metadata": {**manifest["metadata"], "uid": NOBODY}}
    this = Round.model_validate({"metadata": made["metadata"], "spec": made["spec"], "status": {"policy": UNKNOWN}})
    is_trained = this.spec.number > 0
    wanted = [step for step in steps.COMMANDS if is_trained or step in (Step.EXPORTING, Step.GATING)]
    jobs = [steps.job(run, this, step, 0, platform) for step in wanted]
    users = gateway(run.model_copy(update={"spec": this.spec.settings}), platform)
    servers = [item for item in [*serving.serving(run, this, platform), *users] if item["kind"] == "Deployment"]
    return [*jobs, *servers]
