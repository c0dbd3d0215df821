"""Whose conversation a request belongs to. Pure; called by ``app`` and ``feedback``.

An internal trajectory id is ``t-<scope><conversation>``: 12 hexadecimal digits of the API key's name and 24 of
(name, client's id). The scope makes the id spaces of two keys disjoint, and lets any replica see, without a table or
a secret, that an internal id that a client sends back is its own.
"""

from __future__ import annotations

import functools
import hashlib
import re
import secrets
from typing import Any

import pydantic

from prodrl.records import TRAFFIC_PREFIX

MAX_CLIENT_ID_CHARS = 512
"""Longest name that a client may give a conversation."""
ANONYMOUS = ""
"""Name of the only customer of a gateway without API keys; no key file can have it."""

_INTERNAL = re.compile(re.escape(TRAFFIC_PREFIX) + "[0-9a-f]{36}")
_HINTS = (b'"trajectory_id"', b'"prompt_cache_key"', b'"session_id"')


class IdentityError(Exception):
    """The client's name for its conversation cannot be used; the message is for the client."""


def scope(key_name: str) -> str:
    """The part of every internal id that belongs to one API key."""
    return _scope(key_name)


@functools.lru_cache(maxsize=4096)
def _scope(key_name: str) -> str:
    return hashlib.blake2b(key_name.encode(), digest_size=6, person=b"prodrl-scope").hexdigest()


def trajectory_id(key_name: str, client_id: str) -> str:
    """The internal id of the conversation that this customer calls ``client_id``.

    An internal id of the customer's own is returned as it is.

    Raises:
        IdentityError: Too long, or the internal id of another customer.
    """
    if len(client_id) > MAX_CLIENT_ID_CHARS:
        raise IdentityError(
            f"Trajectory id: at most {MAX_CLIENT_ID_CHARS} characters, got {len(client_id)}; send a shorter one"
        )
    if _INTERNAL.fullmatch(client_id):
        if not client_id.startswith(TRAFFIC_PREFIX + scope(key_name)):
            raise IdentityError(
                f"Trajectory {client_id}: began under another API key; use the key that the conversation began with"
            )
        return client_id
    text = f"{key_name}\0{client_id}".encode()
    return TRAFFIC_PREFIX + scope(key_name) + hashlib.blake2b(text, digest_size=12).hexdigest()


def fresh_trajectory_id(key_name: str) -> str:
    """The id of a conversation that the client did not name."""
    return TRAFFIC_PREFIX + scope(key_name) + secrets.token_hex(12)


def request_id(trajectory: str) -> str:
    """A new id under which the engine records one attempt of one request."""
    return f"{trajectory}.{secrets.token_hex(6)}"


def is_internal(trajectory: str) -> bool:
    """Whether the text has the shape of an internal id."""
    return _INTERNAL.fullmatch(trajectory) is not None


def name_in_header(value: bytes) -> str:
    """A header's bytes as the text that JSON would carry, so that both name the same conversation."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


class _Names(pydantic.BaseModel):
    """The fields of a request body that may name the conversation; everything else is skipped unparsed."""

    model_config = pydantic.ConfigDict(extra="ignore")

    metadata: Any = None
    prompt_cache_key: Any = None
    session_id: Any = None


def name_in_body(content_type: bytes, body: bytes) -> str | None:
    """The conversation's name in a JSON body, or None.

    ``metadata.trajectory_id`` wins over ``prompt_cache_key`` and that over ``session_id``. A body that is not JSON
    has no name: judging it is the engine's business.
    """
    media_type = content_type.partition(b";")[0].strip().lower()
    if media_type != b"application/json" or not any(hint in body for hint in _HINTS):
        return None
    try:
        names = _Names.model_validate_json(body)
    except pydantic.ValidationError:
        return None
    nested = names.metadata.get("trajectory_id") if isinstance(names.metadata, dict) else None
    for value in (nested, names.prompt_cache_key, names.session_id):
        if isinstance(value, str) and value:
            return value
    return None
