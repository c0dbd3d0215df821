"""Many stamped runs on the API server, by plain HTTP. Called by ``bench``."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Callable, Sequence

import aiohttp

from benchmarks.operator.template import Stamp, Template
from prodrl_operator import names
from prodrl_operator.cluster import port
from prodrl_operator.cluster.port import Object, kind_of

AT_ONCE = 48
FIRST_SERVICE = 512
"""Cluster addresses below are left to the server."""


class Http:
    """A connection pool to the API server as one user."""

    def __init__(self, url: str, certificate: str, token: str) -> None:
        self._url = url
        self._tls = ssl.create_default_context(cafile=certificate)
        self._headers = {"Authorization": f"Bearer {token}", "User-Agent": "benchmark"}

    async def __aenter__(self) -> Http:
        connector = aiohttp.TCPConnector(ssl=self._tls, limit=AT_ONCE)
        self._session = aiohttp.ClientSession(self._url, headers=self._headers, connector=connector, trust_env=False)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def post(self, manifest: Object) -> Object:
        """Create; returns the answer's metadata."""
        path = path_of(manifest).rpartition("/")[0]
        query = f"?fieldManager={names.FIELD_MANAGER}"
        return await self._send("POST", path + query, manifest, "application/json")

    async def namespace(self, name: str) -> None:
        """Create a namespace."""
        body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
        await self._send("POST", "/api/v1/namespaces", body, "application/json")

    async def patch(self, path: str, patch: Object) -> Object:
        """JSON merge."""
        return await self._send("PATCH", path, patch, "application/merge-patch+json")

    async def watch(self, path: str, see: Callable[[Object], None]) -> None:
        """Hand over objects as they change, until cancelled."""
        timeout = aiohttp.ClientTimeout(total=None, sock_read=None)
        async with self._session.get(f"{path}?watch=1", timeout=timeout, read_bufsize=2**20) as answer:
            async for line in answer.content:
                see(json.loads(line)["object"])

    async def _send(self, method: str, path: str, body: Object, content_type: str) -> Object:
        headers = {"Content-Type": content_type}
        async with self._session.request(method, path, data=json.dumps(body), headers=headers) as answer:
            content = await answer.read()
            if answer.status >= 300:
                raise RuntimeError(f"{method} {path}: {answer.status} {content[:600].decode(errors='replace')}")
            metadata: Object = json.loads(content)["metadata"]
            return metadata


def path_of(manifest: Object) -> str:
    """The object's path on the API server."""
    kind, metadata = kind_of(manifest), manifest["metadata"]
    root = "/api" if "/" not in kind.api_version else "/apis"
    return f"{root}/{kind.api_version}/namespaces/{metadata['namespace']}/{kind.plural}/{metadata['name']}"


def stamps(runs: int, namespaces: int) -> list[Stamp]:
    """Names and addresses of ``runs`` runs."""
    found = []
    for index in range(runs):
        first = FIRST_SERVICE + 2 * index
        found.append(
            Stamp(
                namespace=f"team-{index % namespaces:02d}",
                name=f"run-{index:05d}",
                gateway_address=f"10.96.{first >> 8}.{first & 255}",
                serving_address=f"10.96.{(first + 1) >> 8}.{(first + 1) & 255}",
                pod_address=f"127.10.{index // 250}.{index % 250 + 1}",
            )
        )
    return found


async def populate(http: Http, template: Template, wanted: Sequence[Stamp]) -> None:
    """Make everything."""
    for namespace in sorted({stamp.namespace for stamp in wanted}):
        await http.namespace(namespace)
    waiting = list(reversed(wanted))

    async def work() -> None:
        while waiting:
            await _make(http, template, waiting.pop())

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE // 4):
            group.create_task(work())


async def _make(http: Http, template: Template, stamp: Stamp) -> None:
    run, status = template.run(stamp)
    _, _, run_uid = await _with_status(http, run, status)
    rounds = [await _with_status(http, *item) for item in template.rounds(stamp, run_uid)]
    uids = template.uids(run_uid, [uid for _, _, uid in rounds])
    made = await asyncio.gather(*(_with_status(http, *item) for item in template.children(stamp, uids)))
    job_uids = {name: uid for kind, name, uid in made if kind == port.JOB.kind}
    await asyncio.gather(*(_with_status(http, *item) for item in template.pods(stamp, job_uids)))


async def _with_status(http: Http, manifest: Object, status: Object | None) -> tuple[str, str, str]:
    """Kind, name and UID."""
    metadata = await http.post(manifest)
    if status:
        await http.patch(path_of(manifest) + "/status", {"status": status})
    return manifest["kind"], metadata["name"], metadata["uid"]
