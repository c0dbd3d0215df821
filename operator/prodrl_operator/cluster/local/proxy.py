"""The TCP proxy of the Services: a program of its own under a shim, so that users are served while no controller runs.

Run as a script: ``python -S -E -s proxy.py FOLDER``. It reads FOLDER/endpoints.json, which the controller replaces
as a whole, and writes FOLDER/status.json with the faults of its listeners. A Service with no ready
endpoint has no listener: connections are refused, as in Kubernetes. Targets are used in turn; one that refuses is
skipped. Connections that exist stay when endpoints change. Standard library only.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_POLL_SECONDS = 0.1
_CONNECT_SECONDS = 5.0
_ROUNDS = 5
_CHUNK_BYTES = 1 << 16

Address = tuple[str, int]


class Listener:
    """One address and its present targets."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self.targets: list[Address] = []
        self._turn = 0
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        """Listen; raises OSError when the address is taken."""
        host, port = self.address
        self._server = await asyncio.start_server(self._serve, host, port, reuse_address=True, limit=_CHUNK_BYTES)

    def close(self) -> None:
        """Stop listening; connections that exist go on."""
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream = await self._connect()
        if upstream is None:
            writer.transport.abort()
            return
        up_reader, up_writer = upstream
        try:
            await asyncio.gather(_pump(reader, up_writer), _pump(up_reader, writer))
        except OSError:  # one side reset: so does the other
            writer.transport.abort()
            up_writer.transport.abort()
        finally:
            writer.close()
            up_writer.close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        for _ in range(_ROUNDS):
            targets = list(self.targets)
            for _ in targets:
                self._turn += 1
                host, port = targets[self._turn % len(targets)]
                try:
                    return await asyncio.wait_for(asyncio.open_connection(host, port), _CONNECT_SECONDS)
                except (OSError, asyncio.TimeoutError):  # noqa: UP041  (the same class only from 3.11 on)
                    continue
            await asyncio.sleep(_POLL_SECONDS)  # all targets died at once: the next endpoints may be on their way
        return None


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy one direction; its end becomes the other side's end, the opposite direction goes on."""
    _set_no_delay(writer)
    while chunk := await reader.read(_CHUNK_BYTES):
        writer.write(chunk)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()


def _set_no_delay(writer: asyncio.StreamWriter) -> None:
    connection = writer.get_extra_info("socket")
    if connection is not None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class Proxy:
    """All listeners, kept equal to the endpoints file."""

    def __init__(self, report: Callable[[dict[str, str]], None]) -> None:
        self.listeners: dict[Address, Listener] = {}
        self._report = report
        self._faults: dict[str, str] | None = None

    async def update(self, wanted: list[dict[str, Any]]) -> None:
        """Open, close and retarget."""
        targets = {(w["host"], w["port"]): [(host, port) for host, port in w["targets"]] for w in wanted}
        faults: dict[str, str] = {}
        for address in [known for known in self.listeners if not targets.get(known)]:
            self.listeners.pop(address).close()
        for address, ends in targets.items():
            if not ends:
                continue
            if address not in self.listeners:
                listener = Listener(address)
                try:
                    await listener.open()
                except OSError as error:
                    faults[f"{address[0]}:{address[1]}"] = str(error)
                    continue
                self.listeners[address] = listener
            self.listeners[address].targets = ends
        if faults != self._faults:
            self._faults = faults
            self._report(faults)


async def run(folder: Path) -> None:
    """Follow the endpoints file for ever."""

    def report(faults: dict[str, str]) -> None:
        temporary = folder / "status.json.new"
        temporary.write_text(json.dumps({"faults": faults}))
        os.replace(temporary, folder / "status.json")

    proxy = Proxy(report)
    wanted: list[dict[str, Any]] = []
    seen = None
    while True:
        try:
            stat = (folder / "endpoints.json").stat()
            if (stat.st_mtime_ns, stat.st_ino) != seen:
                wanted = json.loads((folder / "endpoints.json").read_text())
                seen = (stat.st_mtime_ns, stat.st_ino)
        except FileNotFoundError:
            pass
        await proxy.update(wanted)  # also without a change: a taken address may be free now
        await asyncio.sleep(_POLL_SECONDS)


if __name__ == "__main__":
    asyncio.run(run(Path(sys.argv[1])))
