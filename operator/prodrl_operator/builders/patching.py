"""The user's patch of a pod's spec, merged as a strategic merge patch would be. Called by ``pods``; pure.

Objects merge, lists of named things merge item by item (``workloads.MERGE_KEYS``), every other list is replaced.
``$patch: delete`` removes an object, or the item of a list that it names. What a patch may not hold was checked when
the run was read.
"""

from __future__ import annotations

from typing import Any

from prodrl_operator.api.workloads import MERGE_KEYS

Object = dict[str, Any]

_DIRECTIVE = "$patch"


def merged(target: Object, patch: Object) -> Object:
    """``target`` with ``patch`` on top; neither is changed."""
    result = dict(target)
    for name, value in patch.items():
        if isinstance(value, dict):
            if value.get(_DIRECTIVE) == "delete":
                result.pop(name, None)
            else:
                present = result.get(name)
                result[name] = merged(present if isinstance(present, dict) else {}, value)
        elif isinstance(value, list) and name in MERGE_KEYS:
            result[name] = _merged_list(result.get(name) or [], value, MERGE_KEYS[name])
        else:
            result[name] = value
    return result


def _merged_list(target: list[Object], patch: list[Object], key: str) -> list[Object]:
    """Known items keep their place; new ones come after."""
    result = list(target)
    for item in patch:
        position = next((i for i, present in enumerate(result) if present.get(key) == item[key]), None)
        if item.get(_DIRECTIVE) == "delete":
            if position is not None:
                del result[position]
        elif position is None:
            result.append(merged({}, item))
        else:
            result[position] = merged(result[position], item)
    return result
