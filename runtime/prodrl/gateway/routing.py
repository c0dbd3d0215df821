"""Which policy answers a conversation. Pure: time is an argument, nothing is awaited. Called by ``proxy``.

A new conversation is placed by a hash of its id, in proportion to the weights; a conversation that has begun stays
with its policy while that policy is in the table, whatever the weights become.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from prodrl.config import Route, RouteTable

MAX_CONVERSATIONS = 200_000
"""Conversations remembered by one replica; past it the longest idle one is forgotten."""
PROBE_SECONDS = 1.0
"""A policy that is down gets one request this often, to see whether it is back."""


@dataclass(frozen=True)
class Choice:
    """The policy for the next attempt of a request."""

    route: Route
    is_new: bool
    """The conversation has no answer yet."""
    left: str | None = None
    """Digest of the policy that the conversation began on and now leaves; None in the ordinary case."""


def point(trajectory: str) -> float:
    """Where the conversation lies in [0, 100); uniform, the same on every replica."""
    digest = hashlib.blake2b(trajectory.encode(), digest_size=8, person=b"prodrl-weights").digest()
    return (int.from_bytes(digest, "big") >> 11) * (100.0 / (1 << 53))


def place(trajectory: str, routes: Sequence[Route]) -> Route | None:
    """The route that owns the conversation's point; None when no route has a weight.

    Routes are laid out from the oldest round to the newest, so that a growing canary keeps what it had.
    """
    weighted = sorted((route for route in routes if route.weight), key=lambda route: (route.round, route.digest))
    total = sum(route.weight for route in weighted)
    at = point(trajectory) * total / 100.0
    edge = 0
    for route in weighted:
        edge += route.weight
        if at < edge:
            return route
    return weighted[-1] if weighted else None


class Conversations:
    """Trajectory -> policy that began it, least recently used first, bounded in number and age."""

    def __init__(self, sticky_seconds: float, max_size: int = MAX_CONVERSATIONS) -> None:
        self._sticky_seconds = sticky_seconds
        self._max_size = max_size
        self._held: OrderedDict[str, tuple[str, float]] = OrderedDict()
        self._active: Counter[str] = Counter()
        self._journal: dict[str, tuple[str, float]] = {}

    def get(self, trajectory: str, now: float) -> str | None:
        """The digest that the conversation holds."""
        self._expire(now)
        held = self._held.get(trajectory)
        return held[0] if held else None

    def peek(self, trajectory: str) -> str | None:
        """The digest that the conversation holds or held, as far as it is remembered."""
        held = self._held.get(trajectory)
        return held[0] if held else None

    def hold(self, trajectory: str, digest: str, now: float) -> None:
        """Remember the conversation's policy, and that it was active now."""
        before = self._held.pop(trajectory, None)
        if before:
            self._active[before[0]] -= 1
        self._held[trajectory] = self._journal[trajectory] = (digest, now)
        self._active[digest] += 1
        self._expire(now)

    def active(self, now: float) -> dict[str, int]:
        """Conversations active within the sticky window, by digest."""
        self._expire(now)
        return {digest: count for digest, count in self._active.items() if count}

    def items(self) -> list[tuple[str, str, float]]:
        """(trajectory, digest, last active), longest idle first."""
        return [(trajectory, digest, at) for trajectory, (digest, at) in self._held.items()]

    def take_journal(self) -> list[tuple[str, str, float]]:
        """What was held since the last call, for whoever keeps it over a restart."""
        journal, self._journal = self._journal, {}
        return [(trajectory, digest, at) for trajectory, (digest, at) in journal.items()]

    def _expire(self, now: float) -> None:
        while self._held:
            trajectory, (digest, at) = next(iter(self._held.items()))
            if len(self._held) <= self._max_size and at > now - self._sticky_seconds:
                return
            del self._held[trajectory]
            self._active[digest] -= 1
            if not self._active[digest]:
                del self._active[digest]


class Health:
    """Which policies cannot be reached. Learned from requests; nobody else asks the servers."""

    def __init__(self, window_seconds: float) -> None:
        self._window_seconds = window_seconds
        self._failing_since: dict[str, float] = {}
        self._probed: dict[str, float] = {}

    def succeeded(self, digest: str) -> None:
        """The server answered."""
        self._failing_since.pop(digest, None)
        self._probed.pop(digest, None)

    def failed(self, digest: str, now: float) -> None:
        """The server could not be reached."""
        self._failing_since.setdefault(digest, now)

    def is_down(self, digest: str, now: float) -> bool:
        """Not reachable for the whole retry window."""
        since = self._failing_since.get(digest)
        return since is not None and now - since >= self._window_seconds

    def may_probe(self, digest: str, now: float) -> bool:
        """Whether this request is the one that looks if the server is back; True at most once a PROBE_SECONDS."""
        if now - self._probed.get(digest, float("-inf")) < PROBE_SECONDS:
            return False
        self._probed[digest] = now
        return True

    def keep(self, digests: Collection[str]) -> None:
        """Forget every other policy."""
        for known in (self._failing_since, self._probed):
            for digest in [digest for digest in known if digest not in digests]:
                del known[digest]


class Router:
    """The table that is applied, and who sits where."""

    def __init__(self, conversations: Conversations, health: Health) -> None:
        self.table: RouteTable | None = None
        self.conversations = conversations
        self.health = health

    def apply(self, table: RouteTable) -> bool:
        """Use this table from now on. Returns False when it is the one in use."""
        if self.table == table:
            return False
        before = {route.digest: route.url for route in self.routes}
        self.table = table
        self.health.keep({route.digest for route in table.routes if before.get(route.digest) == route.url})
        return True

    @property
    def routes(self) -> tuple[Route, ...]:
        """The routes in use; empty before the first table."""
        return self.table.routes if self.table else ()

    @property
    def stable(self) -> Route | None:
        """The oldest policy with traffic: a candidate is always younger than the policy it is compared with."""
        return min((r for r in self.routes if r.weight), key=lambda route: route.round, default=None)

    def choose(self, trajectory: str | None, now: float, avoid: Collection[str] = ()) -> Choice | None:
        """The policy for this conversation, not among ``avoid``; None when there is none for it.

        None as trajectory asks for the stable policy, whoever asks.
        """
        if trajectory is None:
            return Choice(self.stable, True) if self.stable and self.stable.digest not in avoid else None
        held = self.conversations.get(trajectory, now)
        if held is None:
            route = place(trajectory, [route for route in self.routes if route.digest not in avoid])
            return Choice(route, True) if route else None
        own = next((route for route in self.routes if route.digest == held), None)
        if own is not None and held not in avoid:
            return Choice(own, False)
        heir = place(trajectory, self.routes) if own is None else self.stable
        if heir is None or heir.digest in avoid:
            return None
        return Choice(heir, False, left=held)

    def commit(self, trajectory: str, digest: str, now: float) -> bool:
        """The policy began to answer. Returns True when the conversation is new."""
        is_new = self.conversations.get(trajectory, now) is None
        self.conversations.hold(trajectory, digest, now)
        return is_new
