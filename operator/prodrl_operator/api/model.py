"""Base classes and field types of the API models. Imported by ``run`` and ``round``.

Python names are snake_case, the API's are camelCase (aliases). Bounds that the CRD needs (every string and list
has a maximum) are part of the types, so that the generated schema and the Python check cannot drift apart.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated, Any, Literal

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


MESSAGE = "x-message"
"""Keyword of our JSON Schema: what a pattern asks for, in words. In the spec's CRD a rule says it in its place."""


def worded(message: str) -> Any:
    """What a value that the type's pattern refuses must be; the pattern itself may hold no backslash."""
    return Field(json_schema_extra={MESSAGE: message})


def _decimal(value: str) -> str:
    Decimal(value)
    return value


DECIMAL = "^-?[0-9]+([.][0-9]+)?([eE][-+]?[0-9]+)?$"
DecimalString = Annotated[str, StringConstraints(pattern=DECIMAL, max_length=32), AfterValidator(_decimal)]
"""A number as text: the API has no floats."""

Name = Annotated[
    str,
    StringConstraints(pattern="^[a-z]([-a-z0-9]*[a-z0-9])?$", max_length=63),
    worded("must be lower-case letters, digits and '-', beginning with a letter and not ending with '-'"),
]
"""A DNS label."""

NamespaceName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=63)]
"""A DNS label that may begin with a digit."""
ObjectName = Annotated[
    str,
    StringConstraints(pattern="^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", max_length=253),
    worded("must be lower-case letters, digits, '-' and '.', with a letter or digit at both ends"),
]
"""Of an object whose name may be a DNS subdomain."""
LabelKey = Annotated[
    str,
    StringConstraints(
        pattern=r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$",
        min_length=1,
        max_length=317,
    ),
]
"""Of a label or an annotation: an optional DNS prefix and a name."""
LabelValue = Annotated[
    str,
    StringConstraints(pattern="^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$", max_length=63),
    worded("must be empty, or letters, digits, '-', '_' and '.' with a letter or digit at both ends"),
]

Text = Annotated[str, StringConstraints(max_length=1024)]
Word = Annotated[str, StringConstraints(max_length=256)]
Message = Annotated[str, StringConstraints(max_length=32768)]
Timestamp = Annotated[str, StringConstraints(max_length=64), Field(json_schema_extra={"format": "date-time"})]
"""RFC 3339 in UTC."""


Count = Annotated[int, Field(ge=0, le=2**53 - 1)]
"""A natural number that JSON readers keep exact."""
Tally = Annotated[int, Field(ge=-(2**53) + 1, le=2**53 - 1)]
"""The same with a sign."""
RoundNumber = Annotated[int, Field(ge=0, le=1_000_000)]
Key = Annotated[str, StringConstraints(max_length=128)]
"""Of a mapping."""


class Condition(Status):
    """``metav1.Condition``."""

    type: Annotated[
        str,
        StringConstraints(
            pattern=r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?"
            r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])$",
            max_length=316,
        ),
    ]
    """CamelCase, one of ``names.Condition``."""
    status: Literal["True", "False", "Unknown"]
    """Whether it holds."""
    reason: Annotated[
        str,
        StringConstraints(pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$", min_length=1, max_length=1024),
    ]
    """CamelCase, one of ``names.Reason``."""
    message: Message
    """For people."""
    last_transition_time: Timestamp
    """When ``status`` last changed."""
    observed_generation: Count | None = None
    """The generation that this was said of."""


class LocalRef(Api):
    """A Secret of the run's namespace."""

    name: ObjectName
    """Its name."""
