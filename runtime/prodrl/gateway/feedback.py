"""Rewards: what a client may post. Pure parsing; the durable part is ``segments``. Called by ``app``."""

from __future__ import annotations

import hashlib
import json
import math
import uuid
from dataclasses import dataclass
from typing import Any

import pydantic_core

from prodrl.gateway import identity
from prodrl.gateway.wire import Refusal
from prodrl.records import FeedbackEntry

MAX_ITEMS = 1000
MAX_KEY_CHARS = 255
MAX_LABELS = 16
MAX_LABEL_NAME_CHARS = 64
MAX_LABEL_CHARS = 512
_FIELDS = frozenset(("trajectory_id", "reward", "final", "idempotency_key", "metadata"))


@dataclass(frozen=True)
class Draft:
    """One valid reward that is not durable yet."""

    trajectory_id: str
    reward: float
    final: bool
    metadata: dict[str, str]
    key: str
    """The idempotency key, scoped by the API key."""
    is_generated: bool
    """The client gave no key: posting again counts again."""

    @property
    def feedback_id(self) -> str:
        """A function of the key, so that every replica gives a repeated post the same id."""
        return "f-" + hashlib.blake2b(self.key.encode(), digest_size=16, person=b"prodrl-feedback").hexdigest()

    def fingerprint(self) -> bytes:
        """What must be equal under one key."""
        return fingerprint(self.trajectory_id, self.reward, self.final, self.metadata)

    def entry(self, received_ms: int, request_ids: list[str], failed_request_ids: list[str]) -> FeedbackEntry:
        """The entry as it is stored."""
        return FeedbackEntry(
            feedback_id=self.feedback_id,
            idempotency_key=self.key,
            trajectory_id=self.trajectory_id,
            reward=self.reward,
            final=self.final,
            received_ms=received_ms,
            request_ids=request_ids,
            failed_request_ids=failed_request_ids,
            metadata=self.metadata,
        )


def fingerprint(trajectory_id: str, reward: float, final: bool, metadata: dict[str, str]) -> bytes:
    """Hash of the content of a reward."""
    content = json.dumps([trajectory_id, reward, final, sorted(metadata.items())])
    return hashlib.blake2b(content.encode(), digest_size=16).digest()


def parse(body: bytes, key_name: str, header_key: str | None) -> tuple[list[Draft], bool]:
    """The rewards in a request body, and whether it was a batch.

    Args:
        body: JSON, one item or ``{"items": [...]}``.
        key_name: Name of the API key; scopes trajectories and idempotency keys.
        header_key: The ``Idempotency-Key`` header; an item's own key wins over it.

    Raises:
        Refusal: 400 that names every fault of the body; nothing of a batch with a fault is taken.
    """
    try:
        content = pydantic_core.from_json(body)
    except ValueError as exc:
        raise _refusal([f"body: not JSON, {exc}; send one object or {{'items': [...]}}"]) from exc
    if isinstance(content, dict) and "items" in content:
        items, is_batch = content["items"], True
        if extra := sorted(set(content) - {"items"}):
            raise _refusal([f"body: unknown fields beside items, got {extra!r}; move them into the items"])
        if not isinstance(items, list) or not 1 <= len(items) <= MAX_ITEMS:
            got = len(items) if isinstance(items, list) else type(items).__name__
            raise _refusal([f"items: must be a list of 1 to {MAX_ITEMS} objects, got {got}; split the batch"])
    else:
        items, is_batch = [content], False
    faults: list[str] = []
    drafts: list[Draft] = []
    for index, item in enumerate(items):
        where = f"items[{index}]" if is_batch else ""
        default_key = f"{header_key}/{index}" if header_key and is_batch else header_key
        found, draft = _item(item, where, key_name, default_key)
        faults += found
        drafts += [draft] if draft else []
    if faults:
        raise _refusal(faults)
    return drafts, is_batch


def _refusal(faults: list[str]) -> Refusal:
    shown = "; ".join(faults[:10]) + (f"; and {len(faults) - 10} more" if len(faults) > 10 else "")
    return Refusal(400, f"Feedback: {shown}", code="invalid_feedback")


def _item(item: Any, where: str, key_name: str, default_key: str | None) -> tuple[list[str], Draft | None]:
    if not isinstance(item, dict):
        return [f"{where or 'body'}: must be an object, got {_show(item)}; send trajectory_id and reward"], None
    at = f"{where}." if where else ""
    faults: list[str] = []
    if extra := sorted(set(item) - _FIELDS):
        faults.append(f"{at}{extra[0]}: unknown field; use {', '.join(sorted(_FIELDS))}")
    trajectory, fault = _trajectory(item.get("trajectory_id"), key_name)
    faults += [at + fault] if fault else []
    reward = item.get("reward")
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not _is_finite(reward):
        faults.append(f"{at}reward: must be a finite number, got {_show(reward)}; send for example 1.0")
        reward = 0.0
    final = item.get("final", True)
    if not isinstance(final, bool):
        faults.append(f"{at}final: must be true or false, got {_show(final)}; leave it out for true")
    metadata = item.get("metadata") or {}
    if not _are_labels(metadata):
        faults.append(
            f"{at}metadata: must be at most {MAX_LABELS} strings of at most {MAX_LABEL_CHARS} characters with names of "
            f"at most {MAX_LABEL_NAME_CHARS}, got {_show(metadata)}; shorten it"
        )
    key = item.get("idempotency_key", default_key)
    if key is not None and (not isinstance(key, str) or not 1 <= len(key) <= MAX_KEY_CHARS):
        faults.append(f"{at}idempotency_key: must be 1 to {MAX_KEY_CHARS} characters, got {_show(key)}; shorten it")
    if faults:
        return faults, None
    scoped = f"{identity.scope(key_name)}:" + (f"key:{key}" if key else f"generated:{uuid.uuid4().hex}")
    return [], Draft(trajectory, float(reward), final, metadata, scoped, is_generated=key is None)


def _trajectory(value: Any, key_name: str) -> tuple[str, str]:
    if not isinstance(value, str) or not value:
        return "", f"trajectory_id: must be a string, got {_show(value)}; send the id of the conversation"
    try:
        return identity.trajectory_id(key_name, value), ""
    except identity.IdentityError as exc:
        return "", f"trajectory_id: {exc}"


def _is_finite(value: int | float) -> bool:
    try:
        return math.isfinite(float(value))
    except OverflowError:
        return False


def _are_labels(metadata: Any) -> bool:
    return (
        isinstance(metadata, dict)
        and len(metadata) <= MAX_LABELS
        and all(len(name) <= MAX_LABEL_NAME_CHARS for name in metadata)
        and all(isinstance(value, str) and len(value) <= MAX_LABEL_CHARS for value in metadata.values())
    )


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
