"""Sizes that others must know without loading torch. Read by ``model`` and ``runspec``."""

from __future__ import annotations

CONTEXT = 256
"""Longest conversation in tokens."""
VOCABULARY = 256
