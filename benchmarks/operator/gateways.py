"""All gateways' admin ports, on loopback: an address is a replica with the routes it was given. Called by ``bench``."""

from __future__ import annotations

import asyncio
import json
import threading

from prodrl_operator import names


class Gateways:
    """One server with an address of loopback a pod, in a thread of its own."""

    def __init__(self) -> None:
        self.versions: dict[str, str] = {}
        """Address -> version of the routes it applied."""
        self.silent: set[str] = set()
        """Addresses that accept and never answer."""
        self.requests = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="gateways", daemon=True)

    def start(self, versions: dict[str, str]) -> None:
        """Listen on these addresses, each with the version of the routes that it has applied."""
        self.versions |= versions
        self._thread.start()
        serving = asyncio.start_server(self._serve, list(versions), names.GATEWAY_ADMIN_PORT, backlog=16)
        self._server = asyncio.run_coroutine_threadsafe(serving, self._loop).result(120)

    def stop(self) -> None:
        """Close."""
        self._loop.call_soon_threadsafe(self._server.close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        address = writer.get_extra_info("sockname")[0]
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                body = await reader.readexactly(_length(head))
                if address in self.silent:
                    await reader.read()  # until the other side gives up
                    return
                self.requests += 1
                writer.write(self._answer(address, head, body))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            if not self._loop.is_closed():
                writer.close()

    def _answer(self, address: str, head: bytes, body: bytes) -> bytes:
        if head.startswith(b"PUT"):
            self.versions[address] = json.loads(body)["version"]
            content = b"{}"
        else:
            content = json.dumps(
                {"version": self.versions.get(address), "stats": {}, "conversations": {}, "pid": 1}
            ).encode()
        return (
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(content) + content
        )


def _length(head: bytes) -> int:
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line.partition(b":")[2])
    return 0
