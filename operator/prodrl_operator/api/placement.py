"""Where pods may run, as Kubernetes names it: spreading, affinity, device claims. Imported by ``workloads``.

Typed dicts, like those of ``pods``: builders put the values into manifests as they are. Bounds are generous for people
and small enough for a CRD.
"""

from __future__ import annotations

from typing import (
    Annotated,
    Literal,
    NotRequired,  # pydantic asks for these before Python 3.12
)

from pydantic import ConfigDict, Field, StringConstraints, with_config
from typing_extensions import TypedDict

from prodrl_operator.api.model import Name, NamespaceName, Word

_AS_IN_A_POD = ConfigDict(extra="forbid", use_attribute_docstrings=True)

LabelKey = Annotated[str, StringConstraints(min_length=1, max_length=317)]
LabelValue = Annotated[str, StringConstraints(max_length=63)]
"""Without patterns, which would be in the CRD a hundred times; a round's pods are tried out before it begins."""
Weight = Annotated[int, Field(ge=1, le=100)]
_Values = Annotated[list[LabelValue], Field(max_length=32)]
_Keys = Annotated[list[LabelKey], Field(max_length=8)]
_Labels = Annotated[dict[str, LabelValue], Field(max_length=16)]


@with_config(_AS_IN_A_POD)
class LabelRule(TypedDict):
    """One requirement on labels."""

    key: LabelKey
    """The label."""
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"]
    """How it is compared."""
    values: NotRequired[_Values]
    """With In and NotIn."""


@with_config(_AS_IN_A_POD)
class LabelSelector(TypedDict):
    """Which pods are meant."""

    matchLabels: NotRequired[_Labels]
    """Labels with these values."""
    matchExpressions: NotRequired[Annotated[list[LabelRule], Field(max_length=8)]]
    """Requirements, all of which must hold."""


@with_config(_AS_IN_A_POD)
class TopologySpread(TypedDict):
    """How evenly pods are spread over nodes, racks or zones."""

    maxSkew: Annotated[int, Field(ge=1, le=1000)]
    """Largest difference between two domains."""
    topologyKey: LabelKey
    """Node label whose values are the domains."""
    whenUnsatisfiable: Literal["DoNotSchedule", "ScheduleAnyway"]
    """Whether a pod waits when it cannot be spread."""
    labelSelector: NotRequired[LabelSelector]
    """Which pods are counted; absent: the pods of the same workload."""
    minDomains: NotRequired[Annotated[int, Field(ge=1, le=1000)]]
    """Least number of domains."""
    nodeAffinityPolicy: NotRequired[Literal["Honor", "Ignore"]]
    """Whether nodes that the pod may not use are domains."""
    nodeTaintsPolicy: NotRequired[Literal["Honor", "Ignore"]]
    """Whether tainted nodes are domains."""
    matchLabelKeys: NotRequired[_Keys]
    """Labels of the pod itself that are added to the selector."""


@with_config(_AS_IN_A_POD)
class NodeRule(TypedDict):
    """One requirement on a node."""

    key: LabelKey
    """The node's label, or with matchFields the field."""
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"]
    """How it is compared."""
    values: NotRequired[Annotated[list[Word], Field(max_length=64)]]
    """With In, NotIn, Gt and Lt."""


@with_config(_AS_IN_A_POD)
class NodeTerm(TypedDict):
    """Requirements on a node, all of which must hold."""

    matchExpressions: NotRequired[Annotated[list[NodeRule], Field(max_length=16)]]
    """On its labels."""
    matchFields: NotRequired[Annotated[list[NodeRule], Field(max_length=4)]]
    """On its fields."""


@with_config(_AS_IN_A_POD)
class NodeSelector(TypedDict):
    """Terms of which one must hold."""

    nodeSelectorTerms: Annotated[list[NodeTerm], Field(max_length=8)]
    """The terms."""


@with_config(_AS_IN_A_POD)
class NodePreference(TypedDict):
    """A wish on nodes."""

    weight: Weight
    """How much it counts."""
    preference: NodeTerm
    """The wish."""


@with_config(_AS_IN_A_POD)
class NodeAffinity(TypedDict):
    """Which nodes."""

    requiredDuringSchedulingIgnoredDuringExecution: NotRequired[NodeSelector]
    """Must hold."""
    preferredDuringSchedulingIgnoredDuringExecution: NotRequired[Annotated[list[NodePreference], Field(max_length=8)]]
    """Should hold."""


@with_config(_AS_IN_A_POD)
class PodTerm(TypedDict):
    """Beside which pods."""

    topologyKey: LabelKey
    """Node label that says what "beside" means."""
    labelSelector: NotRequired[LabelSelector]
    """Which pods."""
    namespaces: NotRequired[Annotated[list[NamespaceName], Field(max_length=16)]]
    """Of which namespaces; absent: the run's."""
    namespaceSelector: NotRequired[LabelSelector]
    """The same by labels."""
    matchLabelKeys: NotRequired[_Keys]
    """Labels of the pod itself that are added to the selector."""


@with_config(_AS_IN_A_POD)
class PodPreference(TypedDict):
    """A wish on neighbours."""

    weight: Weight
    """How much it counts."""
    podAffinityTerm: PodTerm
    """The wish."""


@with_config(_AS_IN_A_POD)
class PodAffinity(TypedDict):
    """Beside which pods, or with podAntiAffinity away from which."""

    requiredDuringSchedulingIgnoredDuringExecution: NotRequired[Annotated[list[PodTerm], Field(max_length=8)]]
    """Must hold."""
    preferredDuringSchedulingIgnoredDuringExecution: NotRequired[Annotated[list[PodPreference], Field(max_length=8)]]
    """Should hold."""


@with_config(_AS_IN_A_POD)
class Affinity(TypedDict):
    """Where the scheduler puts pods."""

    nodeAffinity: NotRequired[NodeAffinity]
    """Which nodes."""
    podAffinity: NotRequired[PodAffinity]
    """Beside which pods."""
    podAntiAffinity: NotRequired[PodAffinity]
    """Away from which pods."""


@with_config(_AS_IN_A_POD)
class PodClaim(TypedDict):
    """Devices by dynamic resource allocation; ``resources.claims`` hands them to the main container."""

    name: Name
    """Name of the claim in the pod."""
    resourceClaimName: NotRequired[Annotated[str, StringConstraints(max_length=253)]]
    """A ResourceClaim of the run's namespace; all pods of the workload share it."""
    resourceClaimTemplateName: NotRequired[Annotated[str, StringConstraints(max_length=253)]]
    """A ResourceClaimTemplate: each pod gets a claim of its own."""
