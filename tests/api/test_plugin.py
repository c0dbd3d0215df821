"""``kubectl prodrl`` as people call it: through a real kubectl, on a real API server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from prodrl_operator.cluster import port
from prodrl_operator.errors import ConflictError
from prodrl_operator.names import Reason, Step
from prodrl_operator.plugin import verbs, writing
from prodrl_operator.plugin.access import connect
from prodrl_operator.plugin.looking import look
from tests.support.api_world import ApiWorld
from tests.support.apiserver import ROOT, ApiServer

PROGRAMS = ("kubectl-prodrl", "kubectl_complete-prodrl")


@dataclass
class Shell:
    """A person's shell: kubectl and the plugin's programs on the PATH, a kubeconfig for one namespace."""

    folder: Path
    kubeconfig: Path

    def environment(self, **more: str) -> dict[str, str]:
        base = {key: value for key, value in os.environ.items() if not key.startswith(("KUBE", "_TYPER", "PYTEST"))}
        path = f"{self.folder}:/usr/bin:/bin"
        return base | {"PATH": path, "KUBECONFIG": str(self.kubeconfig), "HOME": str(self.folder)} | more

    def __call__(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        command = [str(self.folder / "kubectl"), *words]
        done = subprocess.run(command, env=self.environment(), capture_output=True, text=True, timeout=120, check=False)
        assert not check or done.returncode == 0, (words, done.stdout, done.stderr)
        return done

    def prodrl(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return self("prodrl", *words, check=check)


@pytest.fixture
def shell(api_server: ApiServer, tmp_path: Path) -> Shell:
    """The programs as an installation makes them from pyproject.toml."""
    entry_points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    (tmp_path / "kubectl").symlink_to(api_server.programs / "kubectl")
    for name in PROGRAMS:
        module, function = entry_points[name].split(":")
        script = tmp_path / name
        script.write_text(f"#!{sys.executable}\nfrom {module} import {function}\n{function}()\n")
        script.chmod(0o755)
    return Shell(tmp_path, api_server.kubeconfig_of("admin"))


@pytest.fixture(scope="module")
def standing(api_server: ApiServer) -> Iterator[ApiWorld]:
    """A run whose round 1 waits for approval, and whose operator does nothing more unless a test turns it."""
    it = ApiWorld(api_server, {"gate": {"approval": "Required"}})
    it.until(lambda w: w.at(1, Step.GATING) and w.round(1).status.reason == Reason.AWAITING_APPROVAL)
    yield it
    it.close()


@pytest.fixture
def world(api_server: ApiServer, standing: ApiWorld, shell: Shell) -> ApiWorld:
    """The same for every test, as it was at first: nothing is asked of the operator."""
    shell.kubeconfig = api_server.kubeconfig_of("admin", standing.namespace)
    standing.edit(suspend=None, requests=None, rounds={"max": 1})
    standing.turn()
    return standing


def managers(api_server: ApiServer, world: ApiWorld) -> dict[str, str]:
    """Field manager -> the fields of spec that it owns, as JSON."""
    words = ("get", "prun", "chess", "-n", world.namespace, "-o", "json", "--show-managed-fields")
    found = json.loads(api_server.kubectl(*words).stdout)["metadata"]["managedFields"]
    return {item["manager"]: json.dumps(item["fieldsV1"].get("f:spec", {})) for item in found}


def test_the_yaml_for_git_does_what_the_verb_does(world: ApiWorld, shell: Shell) -> None:
    for verb in ("suspend", "abort"):
        text = shell.prodrl(verb, "chess", "--dry-run").stdout
        wanted = yaml.safe_load(text)["spec"]
        patch = shell.folder / "patch.yaml"
        patch.write_text(text)
        # The server's own merge of the fragment, and what the verb writes, are the same spec.
        by_git = shell("patch", "prun", "chess", "--type=merge", f"--patch-file={patch}", "--dry-run=server", "-o=json")
        shell.prodrl(verb, "chess")
        assert json.loads(by_git.stdout)["spec"] == world.raw["spec"]
        assert wanted.items() <= world.raw["spec"].items() or "requests" in wanted
    again = shell.prodrl("suspend", "chess")
    assert "unchanged" in again.stdout


def test_kubectl_finds_the_plugin_and_completes_it(world: ApiWorld, shell: Shell) -> None:
    listed = shell("plugin", "list")
    assert str(shell.folder / "kubectl-prodrl") in listed.stdout
    assert "warning" not in listed.stderr.lower()

    def completed(*words: str) -> list[str]:
        *lines, directive = shell("__complete", "prodrl", *words).stdout.splitlines()
        assert directive == ":4"
        return [line.split("\t")[0] for line in lines if line]

    assert set(completed("s")) == {"status", "suspend"}
    assert completed("status", "") == ["chess"]
    assert completed("approve", "chess", "") == ["1"]
    assert completed("logs", "chess", "ga") == ["gate", "gateway"]
    assert completed("status", "-n", "default", "") == []


def test_a_stale_look_is_refused_by_the_server_and_looked_at_again(world: ApiWorld, shell: Shell) -> None:
    access = connect(str(shell.kubeconfig))
    assert access.namespace == world.namespace
    seen = look(access, world.namespace, "chess")
    stale = {"metadata": {"resourceVersion": seen.raw["metadata"]["resourceVersion"]}, "spec": {"suspend": True}}
    world.edit(rounds={"max": 7})
    with pytest.raises(ConflictError):
        access.store.merge_patch(port.RUN, world.namespace, "chess", stale, field_manager="x")
    newer, _ = writing.write(access, seen, lambda item: verbs.approve(item, 1))
    assert newer.spec["rounds"]["max"] == 7
    assert world.raw["spec"]["requests"]["approveRound"] == 1


def test_who_may_only_read_runs_sees_them_and_may_not_write(
    api_server: ApiServer, world: ApiWorld, shell: Shell
) -> None:
    namespace = ("-n", world.namespace)
    resources = "--resource=prodrlruns.prodrl.dev,prodrlrounds.prodrl.dev"
    api_server.kubectl("create", "role", "reader", "--verb=get,list", resources, *namespace)
    api_server.kubectl("create", "rolebinding", "reader", "--role=reader", "--user=nobody", *namespace)
    shell.kubeconfig = api_server.kubeconfig_of("nobody", world.namespace)
    seen = shell.prodrl("status", "chess").stdout
    assert "you may not list them: jobs, deployments, pods" in seen
    refused = shell.prodrl("approve", "chess", check=False)
    assert refused.returncode == 2
    assert "forbidden" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_what_cannot_be_had_is_an_error_in_one_line(api_server: ApiServer, world: ApiWorld, shell: Shell) -> None:
    for words in (("audit",), ("status", "shogi"), ("-n", "default", "status")):
        done = shell.prodrl(*words, check=False)
        assert done.returncode == 2, (words, done)
        assert len(done.stderr.splitlines()) == 1, done.stderr
        assert done.stderr.startswith("error: ")
    # Over TLS, with the token, the server itself answers: a command needs a node.
    assert "does not have a host assigned" in shell.prodrl("audit", check=False).stderr
    shell.kubeconfig = api_server.kubeconfig_of("admin", url="http://127.0.0.1:9")
    away = shell.prodrl("status", check=False)
    assert away.returncode == 2
    assert "no answer" in away.stderr
    assert "Traceback" not in away.stderr
    shell.kubeconfig = shell.folder / "missing"
    assert "kubeconfig" in shell.prodrl("status", check=False).stderr


# Last: it moves the world on.
def test_a_person_sees_approves_and_watches_a_round(api_server: ApiServer, world: ApiWorld, shell: Shell) -> None:
    seen = shell.prodrl("status", "--exit-code").stdout
    assert "WaitingForApproval" in seen
    assert f"kubectl prodrl approve chess 1 -n {world.namespace}" in seen
    assert "agreement: mean 0.01" in seen
    assert "servers: 1 of 1 ready" in seen

    fragment = shell.prodrl("approve", "chess", "--dry-run").stdout
    assert world.raw["spec"].get("requests", {}).get("approveRound", 0) == 0
    watch = subprocess.Popen(
        [shell.folder / "kubectl", "prodrl", "watch", "--interval", "0.2"],
        env=shell.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert watch.stdout is not None
        first = watch.stdout.readline()
        assert "WaitingForApproval, round 1 Gating" in first
        before = world.raw["spec"]
        done = shell.prodrl("approve", "chess")
        assert done.stdout.endswith(fragment)
        assert managers(api_server, world)["kubectl-prodrl"] == '{"f:requests": {"f:approveRound": {}}}'
        after = world.raw["spec"]
        assert {key for key in after if after[key] != before.get(key)} == {"requests"}
        world.until(lambda w: w.is_true("Completed"))
        lines, _ = watch.communicate(timeout=30)
        assert watch.returncode == 0
        assert "round 1: Promoted" in lines
        assert "stable: round 1" in lines
    finally:
        watch.kill()
        watch.wait()
    head, *rows = shell.prodrl("rounds").stdout.splitlines()
    assert head.startswith("ROUND")
    assert [row.split()[:2] for row in rows] == [["0", "Promoted"], ["1", "Promoted"]]
    refused = shell.prodrl("approve", "chess", check=False)
    assert refused.returncode == 2
    assert "does not wait for approval" in refused.stderr
