"""The parts of a pod that a run may set, as Kubernetes names them. Imported by ``run``.

Typed dicts, not models: builders put the values into manifests as they are. Only what the CRD's schema promises is
here; rules between fields are CEL, in ``rules``.
"""

from __future__ import annotations

from typing import (
    Annotated,
    Literal,
    NotRequired,  # pydantic asks for these before Python 3.12
)

from pydantic import ConfigDict, Field, StringConstraints, with_config
from typing_extensions import TypedDict

from prodrl_operator.api.model import ObjectName, Word, worded

_AS_IN_A_POD = ConfigDict(extra="forbid", use_attribute_docstrings=True)

VariableName = Annotated[
    str,
    StringConstraints(pattern="^[A-Za-z_][A-Za-z0-9_.-]*$", max_length=253),
    worded("must be letters, digits, '_', '-' and '.', not beginning with a digit"),
]
DataKey = Annotated[
    str,
    StringConstraints(pattern="^[-._A-Za-z0-9]+$", max_length=253),
    worded("must be letters, digits, '-', '_' and '.'"),
]
Quantity = Annotated[
    int | Annotated[str, StringConstraints(pattern=r"^[0-9]+(\.[0-9]*)?([eE][0-9]+|[munkMGTPE]|[KMGTPE]i)?$")],
    Field(json_schema_extra={"maxLength": 64}),
]
"""An amount as in a pod: ``2``, ``500m``, ``16Gi``."""


@with_config(_AS_IN_A_POD)
class KeyRef(TypedDict):
    """One key of a Secret or a ConfigMap of the run's namespace."""

    name: ObjectName
    """The object's name."""
    key: DataKey
    """The key in it."""
    optional: NotRequired[bool]
    """Whether the pod may start without it."""


@with_config(_AS_IN_A_POD)
class FieldRef(TypedDict):
    """A field of the pod itself."""

    fieldPath: Word
    """For example ``metadata.name`` or ``status.hostIP``."""


@with_config(_AS_IN_A_POD)
class EnvSource(TypedDict):
    """Where a variable's value comes from: exactly one of these."""

    secretKeyRef: NotRequired[KeyRef]
    """A key of a Secret."""
    configMapKeyRef: NotRequired[KeyRef]
    """A key of a ConfigMap."""
    fieldRef: NotRequired[FieldRef]
    """A field of the pod."""


@with_config(_AS_IN_A_POD)
class EnvVar(TypedDict):
    """An environment variable, as in a container."""

    name: VariableName
    """Its name. Names that begin with ``PRODRL_`` or ``POD_`` are the operator's."""
    value: NotRequired[Annotated[str, StringConstraints(max_length=8192)]]
    """Its value; numbers need quotes."""
    valueFrom: NotRequired[EnvSource]
    """Where the value comes from instead."""


@with_config(_AS_IN_A_POD)
class Toleration(TypedDict):
    """A taint that the pod tolerates."""

    key: NotRequired[Annotated[str, StringConstraints(max_length=317)]]
    """The taint's key; absent with operator Exists: every taint."""
    operator: NotRequired[Literal["Exists", "Equal"]]
    """Absent: Equal."""
    value: NotRequired[Annotated[str, StringConstraints(max_length=63)]]
    """The taint's value, with operator Equal."""
    effect: NotRequired[Literal["NoSchedule", "PreferNoSchedule", "NoExecute"]]
    """Absent: every effect."""
    tolerationSeconds: NotRequired[Annotated[int, Field(ge=0, le=31_536_000)]]
    """How long the pod stays after a NoExecute taint; absent: for ever."""


@with_config(_AS_IN_A_POD)
class ResourceClaim(TypedDict):
    """A claim of the pod that the container uses (dynamic resource allocation)."""

    name: Annotated[str, StringConstraints(max_length=63)]
    """The claim's name in the pod."""
    request: NotRequired[Annotated[str, StringConstraints(max_length=63)]]
    """One request of the claim; absent: all."""


Quantities = Annotated[dict[Annotated[str, StringConstraints(max_length=317)], Quantity], Field(max_length=16)]


@with_config(_AS_IN_A_POD)
class Resources(TypedDict):
    """As in a container."""

    requests: NotRequired[Quantities]
    """What the scheduler sets aside, for example ``cpu``, ``memory``, ``nvidia.com/gpu``."""
    limits: NotRequired[Quantities]
    """What the container may use at most."""
    claims: NotRequired[Annotated[list[ResourceClaim], Field(max_length=16)]]
    """Claims of the pod that the container uses."""
