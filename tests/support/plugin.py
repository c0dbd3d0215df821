"""What ``kubectl prodrl`` is tested on: the in-memory cluster behind the plugin's own doors, and a way to call it."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from prodrl_operator.cluster import port
from prodrl_operator.cluster.local.store import ObjectStore
from prodrl_operator.errors import ConflictError, InvalidError, NotFoundError
from prodrl_operator.plugin import access, cli
from prodrl_operator.plugin.access import Finished
from tests.support.operator_harness import World

Object = dict[str, Any]


def merged(target: Any, patch: Any) -> Any:
    """RFC 7396."""
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merged(result.get(key), value)
    return result


@dataclass
class PatchingStore:
    """The in-memory store, with the merge patch that a real API server has."""

    store: ObjectStore
    managers: list[str] = field(default_factory=list)
    before_patch: list[Callable[[], None]] = field(default_factory=list)
    """Each runs once, before a patch arrives: somebody else was faster."""

    def get(self, kind: port.Kind, namespace: str, name: str) -> Object | None:
        return self.store.get(kind, namespace, name)

    def list(
        self, kind: port.Kind, namespace: str | None = None, labels: Mapping[str, str] | None = None
    ) -> port.Objects:
        return self.store.list(kind, namespace, labels)

    def merge_patch(self, kind: port.Kind, namespace: str, name: str, patch: Object, *, field_manager: str) -> Object:
        if self.before_patch:
            self.before_patch.pop(0)()
        present = self.store.get(kind, namespace, name)
        if present is None:
            raise NotFoundError(name)
        wanted = patch.get("metadata", {}).get("resourceVersion")
        if wanted not in (None, present["metadata"]["resourceVersion"]):
            raise ConflictError(f"{name}: {wanted} is not the present version")

        def change(obj: Object) -> None:
            changed = merged(copy.deepcopy(obj), {**patch, "metadata": {}})
            obj.clear()
            obj.update(changed)

        done = self.store.edit(kind, namespace, name, change)
        assert done is not None
        self.managers.append(field_manager)
        return done


@dataclass
class FakePods:
    """Logs and commands, as scripted."""

    texts: dict[str, list[str]] = field(default_factory=dict)
    answers: Callable[[str, list[str]], Finished] | None = None
    commands: list[tuple[str, str | None, list[str]]] = field(default_factory=list)
    asked: list[tuple[str, str | None, bool, int | None]] = field(default_factory=list)

    def logs(
        self,
        namespace: str,
        pod: str,
        container: str | None = None,
        *,
        follow: bool = False,
        tail_lines: int | None = None,
    ) -> Iterator[str]:
        self.asked.append((pod, container, follow, tail_lines))
        if pod not in self.texts:
            raise InvalidError(f'container "{container}" in pod "{pod}" is waiting to start')
        yield from self.texts[pod]

    def previous_logs(self, namespace: str, pod: str, container: str | None, tail_lines: int | None) -> Iterator[str]:
        yield f"{pod} {container} {tail_lines}: before it crashed"

    def exec(self, namespace: str, pod: str, command: Sequence[str], container: str | None = None) -> Finished:
        self.commands.append((pod, container, list(command)))
        assert self.answers is not None
        return self.answers(pod, list(command))


@dataclass(frozen=True)
class Done:
    """How a call of the program ended."""

    code: int
    out: str
    err: str


class Kubectl:
    """``kubectl prodrl`` on a world."""

    def __init__(
        self, world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], namespace: str
    ) -> None:
        self.world = world
        self.store = PatchingStore(world.store)
        self.pods = FakePods()
        self.connected: list[tuple[str | None, str | None]] = []
        self._monkeypatch, self._capsys, self._namespace = monkeypatch, capsys, namespace
        monkeypatch.setattr(access, "connect", self._connect)
        monkeypatch.setattr(cli, "_now", lambda: self.world.now)

    def _connect(self, kubeconfig: str | None = None, context: str | None = None) -> access.Access:
        self.connected.append((kubeconfig, context))
        return access.Access(self.store, self.pods, self._namespace)

    def __call__(self, *arguments: str) -> Done:
        self._monkeypatch.setattr(sys, "argv", ["kubectl-prodrl", *arguments])
        self._capsys.readouterr()
        code: Any = 0
        try:
            cli.main()
        except SystemExit as done:
            code = done.code
        said = self._capsys.readouterr()
        return Done(int(code or 0), said.out, said.err)

    @property
    def raw(self) -> Object:
        """The run as stored."""
        found = self.world.store.get(port.RUN, "default", "chess")
        assert found is not None
        return found
