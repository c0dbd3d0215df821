"""Writing a verb: under the resourceVersion it was decided on, as a field manager of its own. Called by ``cli``.

Who keeps the object in Git is told what to put there, because a tool that syncs it may take the change back.
"""

from __future__ import annotations

from typing import Any

import yaml

from prodrl_operator import names
from prodrl_operator.cluster.port import RUN, Object
from prodrl_operator.errors import ConflictError
from prodrl_operator.plugin.access import Access
from prodrl_operator.plugin.looking import Look, look
from prodrl_operator.plugin.verbs import Change, Verb

FIELD_MANAGER = "kubectl-prodrl"
TRIES = 8
"""The operator writes status all the time, and every write is a new resourceVersion."""

KEEPERS: tuple[tuple[str, str, str], ...] = (
    ("annotations", "argocd.argoproj.io/tracking-id", "Argo CD"),
    ("labels", "argocd.argoproj.io/instance", "Argo CD"),
    ("labels", "kustomize.toolkit.fluxcd.io/name", "Flux (Kustomization)"),
    ("labels", "helm.toolkit.fluxcd.io/name", "Flux (HelmRelease)"),
    ("annotations", "meta.helm.sh/release-name", "Helm"),
)
"""Where a GitOps tool marks what it keeps, most telling first."""


def keeper(raw: Object) -> str | None:
    """The tool that keeps this object, with its name for it; None: nobody's mark is on it."""
    metadata = raw["metadata"]
    for place, key, tool in KEEPERS:
        value = (metadata.get(place) or {}).get(key)
        if value:
            return f"{tool} {str(value).split(':')[0]}"
    if (metadata.get("labels") or {}).get("app.kubernetes.io/managed-by") == "Helm":
        return "Helm"
    return None


def fragment(seen: Look, change: Change) -> str:
    """The YAML to put into Git; also a patch file of kubectl and kustomize."""
    document: dict[str, Any] = {
        "apiVersion": names.API_VERSION,
        "kind": RUN.kind,
        "metadata": {"name": seen.name, "namespace": seen.namespace},
        "spec": change.spec,
    }
    return yaml.safe_dump(document, sort_keys=False)


def write(access: Access, seen: Look, verb: Verb) -> tuple[Look, Change]:
    """Decide and write; after a conflict look and decide again.

    Raises:
        InvalidError: The verb is refused, now or on a newer look.
        ConflictError: The object changes faster than it can be written.
    """
    for _ in range(TRIES):
        change = verb(seen)
        if change.is_in_force:
            return seen, change
        patch = {"metadata": {"resourceVersion": seen.raw["metadata"]["resourceVersion"]}, "spec": change.spec}
        try:
            access.store.merge_patch(RUN, seen.namespace, seen.name, patch, field_manager=FIELD_MANAGER)
        except ConflictError:
            seen = look(access, seen.namespace, seen.name)
            continue
        return seen, change
    raise ConflictError(f"ProdRLRun {seen.namespace}/{seen.name}: changed {TRIES} times meanwhile; try again")
