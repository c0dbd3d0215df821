"""What kstatus (Flux, cli-utils) makes of a custom resource: its published rules, in their order."""

from __future__ import annotations

from prodrl_operator.cluster.port import Object


def kstatus(obj: Object) -> str:
    """Current, InProgress, Failed or Terminating."""
    metadata, status = obj["metadata"], obj.get("status") or {}
    if "deletionTimestamp" in metadata:
        return "Terminating"
    observed = status.get("observedGeneration")
    if observed is not None and observed != metadata["generation"]:
        return "InProgress"
    found = {item["type"]: item["status"] for item in status.get("conditions", [])}
    if found.get("Reconciling") == "True":
        return "InProgress"
    if found.get("Stalled") == "True":
        return "Failed"
    if found.get("Ready") in ("False", "Unknown"):
        return "InProgress"
    return "Current"
