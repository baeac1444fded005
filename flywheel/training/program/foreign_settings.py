"""AgentJet's settings as its workflows and judges read them (`config`).

It runs in the user's interpreter: only the standard library is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class ForeignSettings(dict[str, Any]):
    """A section with access by attribute and by item. At the root, `astuner` is `ajet`. Raises AttributeError or
    KeyError with the full path of a key that is missing."""

    def __init__(self, values: Mapping[str, Any], path: str = "config") -> None:
        super().__init__({key: _section(value, f"{path}.{key}") for key, value in values.items()})
        self._path = path
        if path == "config" and "ajet" in self:
            self["astuner"] = self["ajet"]

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(self._why(name) if not name.startswith("_") else name)

    def __missing__(self, key: str) -> Any:
        raise KeyError(self._why(key))

    def _why(self, name: str) -> str:
        return f"{self._path}.{name} is neither in the configuration nor a documented setting of AgentJet"


def _section(value: Any, path: str) -> Any:
    if isinstance(value, Mapping):
        return ForeignSettings(value, path)
    return (
        [_section(each, f"{path}.{place}") for place, each in enumerate(value)] if isinstance(value, list) else value
    )
