"""Which cluster the plugin talks to: the one that kubectl would."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from prodrl_operator.cluster import kubernetes
from prodrl_operator.plugin import access

OWN = "apiVersion: v1\nkind: Config\n"


@pytest.mark.parametrize(
    ("named", "variable", "own", "wanted"),
    [
        ("named", "variable", OWN, "named"),
        (None, "variable", OWN, "variable"),
        (None, None, OWN, "HOME/.kube/config"),
        (None, "", OWN, "HOME/.kube/config"),
        (None, None, "", None),
        (None, None, None, None),
    ],
)
def test_a_kubeconfig_goes_before_the_service_account_of_a_pod(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    named: str | None,
    variable: str | None,
    own: str | None,
    wanted: str | None,
) -> None:
    """None: the pod's own account, if this is a pod; an empty file counts as none."""
    asked: list[str | None] = []

    def connect(kubeconfig: str | None, context: str | None) -> SimpleNamespace:
        asked.append(kubeconfig)
        return SimpleNamespace(default_namespace="default", logs=None)

    monkeypatch.setattr(kubernetes, "connect", connect)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    if variable is not None:
        monkeypatch.setenv("KUBECONFIG", variable)
    if own is not None:
        (tmp_path / ".kube").mkdir()
        (tmp_path / ".kube" / "config").write_text(own, encoding="utf-8")
    access.connect(named)
    assert asked == [wanted and wanted.replace("HOME", str(tmp_path))]
