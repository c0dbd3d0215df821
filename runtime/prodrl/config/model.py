"""The base of every configuration class: frozen, strict about names, JSON in and out.

Imported by the other modules of this package. The operator writes these classes, the runtime's
processes read them with ``--config PATH``; nothing here may import more than pydantic.
"""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, ValidationError

from prodrl.errors import UsageError


class Config(BaseModel):
    """A frozen pydantic model that refuses unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), use_attribute_docstrings=True)

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Read the resolved JSON that the operator wrote.

        Raises:
            UsageError: The file is missing, or its content does not fit; the message lists every fault.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as exc:
            raise UsageError(f"Configuration {path}: cannot be read, {exc.strerror}; check --config") from exc
        try:
            return cls.model_validate_json(text)
        except ValidationError as exc:
            faults = "; ".join(f"{'.'.join(map(str, e['loc'])) or '(root)'}: {e['msg']}" for e in exc.errors())
            raise UsageError(f"Configuration {path}: not a {cls.__name__}, {faults}; correct these fields") from exc
