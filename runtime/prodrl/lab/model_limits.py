"""Sizes that others must know without loading torch. Read by ``model`` and ``runspec``."""

from __future__ import annotations

CONTEXT = 512
"""Longest conversation in tokens; a full board takes 70, a move and its reply 85."""
VOCABULARY = 256
