"""The API server's own record of who asked for what and when: the outside judge. Called by ``bench``."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import yaml

POPULATING, LOADING, OPERATOR = "admin", "loader", "operator"
"""Users: who makes the objects (not recorded), who changes them, who is measured."""
READING = frozenset({"get", "list", "watch"})


def policy() -> str:
    """Metadata of every answered request of the two that matter."""
    rules = [{"level": "Metadata", "users": [LOADING, OPERATOR]}, {"level": "None"}]
    stages = ["RequestReceived", "ResponseStarted"]
    return yaml.safe_dump({"apiVersion": "audit.k8s.io/v1", "kind": "Policy", "omitStages": stages, "rules": rules})


@dataclass(frozen=True)
class Request:
    """One answered request."""

    user: str
    verb: str
    resource: str
    namespace: str
    name: str
    path: str
    received: float
    answered: float
    code: int


class AuditLog:
    """The log file, read on from where the last look ended."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self.requests: list[Request] = []

    def read(self) -> None:
        """Take in what is new."""
        with self._path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                self.requests.append(_parsed(json.loads(line)))

    def of(self, user: str, begin: float, end: float) -> list[Request]:
        """A user's requests in a time, watches left out."""
        return [r for r in self.requests if r.user == user and r.verb != "watch" and begin <= r.received < end]

    def watches(self, begin: float, end: float) -> int:
        """Watches of the operator that ended in a time."""
        return sum(r.verb == "watch" and r.user == OPERATOR and begin <= r.answered < end for r in self.requests)


def by_kind(requests: Iterable[Request]) -> dict[str, int]:
    """Verb and resource -> number."""
    return dict(Counter(f"{r.verb} {r.resource}" for r in requests).most_common())


def _parsed(entry: dict) -> Request:  # type: ignore[type-arg]
    where = entry.get("objectRef") or {}
    return Request(
        user=entry["user"]["username"],
        verb=entry["verb"],
        resource=where.get("resource", ""),
        namespace=where.get("namespace", ""),
        name=where.get("name", ""),
        path=entry["requestURI"],
        received=_seconds(entry["requestReceivedTimestamp"]),
        answered=_seconds(entry["stageTimestamp"]),
        code=(entry.get("responseStatus") or {}).get("code", 0),
    )


def _seconds(stamp: str) -> float:
    return datetime.fromisoformat(stamp.replace("Z", "+00:00")).timestamp()
