"""Loopback addresses of pods (127.64.0.0/10) and Services (127.32.0.0/11). Used by ``runner`` and ``services``.

On Linux all of 127.0.0.0/8 is this machine, so that every pod can have the port it was written for. Two data folders
of one machine use different blocks (by a hash of the folder), and an address is given out only when its ports
can be bound.
"""

from __future__ import annotations

import hashlib
import ipaddress
import socket
from collections.abc import Collection, Iterator
from pathlib import Path

from prodrl_operator.errors import ClusterUnavailableError

_PODS = ipaddress.ip_network("127.64.0.0/10")
_SERVICES = ipaddress.ip_network("127.32.0.0/11")
_BLOCK_BITS = 10
"""Addresses of one data folder: 1024 pods, 1024 Services."""


class Addresses:
    """Gives out addresses; which are taken is what the stored objects say."""

    def __init__(self, data: Path) -> None:
        self._seed = int.from_bytes(hashlib.sha256(str(data.resolve()).encode()).digest()[:4], "big")
        self._next = 0

    def free_pod_address(self, taken: Collection[str | None], ports: Collection[int]) -> str:
        """An address that no living pod has; goes round, so that a freed one rests for a while."""
        for address in self._block(_PODS, self._next):
            self._next += 1
            if address not in taken and can_bind(address, ports):
                return address
        raise ClusterUnavailableError(f"network {_PODS}: no free address, got {len(taken)} pods; delete some")

    def free_service_address(self, taken: Collection[str | None], ports: Collection[int]) -> str:
        """An address that no Service has."""
        for address in self._block(_SERVICES, 0):
            if address not in taken and can_bind(address, ports):
                return address
        raise ClusterUnavailableError(f"network {_SERVICES}: no free address, got {len(taken)} Services; delete some")

    def _block(self, whole: ipaddress.IPv4Network | ipaddress.IPv6Network, start: int) -> Iterator[str]:
        size = 1 << _BLOCK_BITS
        base = (self._seed % (whole.num_addresses // size)) * size
        for offset in range(size):
            index = (start + offset) % size
            if 0 < index < size - 1:
                yield str(whole[base + index])


def can_bind(address: str, ports: Collection[int]) -> bool:
    """Whether all ports are free at the address now."""
    for port in ports:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((address, port))
            except OSError:
                return False
    return True


def free_port(address: str) -> int:
    """Any port that is free at the address now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind((address, 0))
        return int(listener.getsockname()[1])
