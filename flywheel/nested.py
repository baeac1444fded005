"""Values inside nested JSON, whatever somebody else wrote there."""

from __future__ import annotations

from typing import Any


def dig(value: Any, *keys: str) -> Any:
    """The value below nested keys, or None where there is no such path."""
    for key in keys:
        if not isinstance(value, dict):
            return None
        value = value.get(key)
    return value
