"""Base classes and field types of the API models. Imported by ``run`` and ``round``.

Python names are snake_case, the API's are camelCase (aliases). Bounds that the CRD needs (every string and list
has a maximum) are part of the types, so that the generated schema and the Python check cannot drift apart.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints
from pydantic.alias_generators import to_camel


class Api(BaseModel):
    """Frozen, strict about names, camelCase outside."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        alias_generator=to_camel,
        populate_by_name=True,
        protected_namespaces=(),
        use_attribute_docstrings=True,
    )


class Status(Api):
    """Status is written by us and read back from a server that may hold a newer field: unknown ones are ignored."""

    model_config = ConfigDict(extra="ignore")


def _decimal(value: str) -> str:
    Decimal(value)
    return value


DecimalString = Annotated[
    str, StringConstraints(pattern=r"^-?[0-9]+(\.[0-9]+)?([eE]-?[0-9]+)?$", max_length=32), AfterValidator(_decimal)
]
"""A number as text: the API has no floats."""

Name = Annotated[str, StringConstraints(pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$", max_length=63)]
"""A DNS label."""

Text = Annotated[str, StringConstraints(max_length=1024)]
Word = Annotated[str, StringConstraints(max_length=256)]
Message = Annotated[str, StringConstraints(max_length=32768)]
Timestamp = Annotated[str, StringConstraints(max_length=64), Field(json_schema_extra={"format": "date-time"})]
"""RFC 3339 in UTC."""


class Condition(Status):
    """``metav1.Condition``."""

    type: Annotated[str, StringConstraints(max_length=316)]
    """CamelCase, one of ``names.Condition``."""
    status: Annotated[str, StringConstraints(pattern="^(True|False|Unknown)$", max_length=7)]
    """True, False or Unknown."""
    reason: Annotated[str, StringConstraints(min_length=1, max_length=1024)]
    """CamelCase, one of ``names.Reason``."""
    message: Message
    """For people."""
    last_transition_time: Timestamp
    """When ``status`` last changed."""
    observed_generation: int | None = None
    """The generation that this was said of."""


class LocalRef(Api):
    """A Secret of the run's namespace."""

    name: Name
    """Its name."""
