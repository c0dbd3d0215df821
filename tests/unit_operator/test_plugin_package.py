"""What is shipped around the plugin says what the plugin is: programs, Krew's manifest, the page for people."""

from __future__ import annotations

import importlib
import re
import tomllib
from pathlib import Path

import pytest
import typer
import yaml

from prodrl_operator.plugin.cli import app
from prodrl_operator.plugin.logs import STEPS

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
COMMANDS = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}


@pytest.mark.parametrize("name", ["kubectl-prodrl", "kubectl_complete-prodrl"])
def test_the_programs_that_kubectl_looks_for_are_installed(name: str) -> None:
    module, function = PROJECT["scripts"][name].split(":")
    assert callable(getattr(importlib.import_module(module), function))


def test_krews_manifest_keeps_krews_rules() -> None:
    path = ROOT / "manifests/krew/prodrl.yaml"
    manifest = yaml.safe_load(path.read_text())
    spec = manifest["spec"]
    assert (manifest["apiVersion"], manifest["kind"]) == ("krew.googlecontainertools.github.com/v1alpha2", "Plugin")
    assert manifest["metadata"]["name"] == path.stem
    assert spec["version"] == f"v{PROJECT['version']}"
    assert 0 < len(spec["shortDescription"]) <= 50
    assert not spec["shortDescription"].endswith(".")
    selectors = [tuple(sorted(platform["selector"]["matchLabels"].items())) for platform in spec["platforms"]]
    assert len(set(selectors)) == len(selectors)
    for platform in spec["platforms"]:
        assert platform["bin"] == "kubectl-prodrl"
        assert re.fullmatch(r"[0-9a-f]{64}", platform["sha256"])
        assert platform["uri"].startswith("https://")
        assert platform["files"]


def test_the_page_names_every_command_step_and_exit_code() -> None:
    text = (ROOT / "docs/kubectl-prodrl.md").read_text()
    assert not [name for name in COMMANDS if not re.search(rf"(`|prodrl ){re.escape(name)}\b", text)]
    assert all(f"`{step}`" in text for step in STEPS)


def test_help_is_there_for_every_command_with_the_place_options() -> None:
    group = typer.main.get_command(app)
    for name in COMMANDS - {"completion"}:
        options = {word for item in group.commands[name].params for word in item.opts}  # type: ignore[attr-defined]
        assert {"-n", "--namespace", "--context", "--kubeconfig"} <= options, name
        assert group.commands[name].help, name  # type: ignore[attr-defined]
