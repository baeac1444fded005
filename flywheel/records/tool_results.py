"""Offered tools and their recorded results, as the specification of a round stores them and rollouts use them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Tool:
    """An offered function. `digest` is a hash of its definition, which includes its name and its description."""

    name: str
    definition: Mapping[str, Any]
    digest: str


@dataclass(frozen=True, slots=True)
class Result:
    """What a tool returned. An error is a result, too."""

    content: str
    failed: bool = False


@dataclass(frozen=True, slots=True)
class SharedRecordings:
    """What rollouts may use of other traces: results by key of the call."""

    results: Mapping[str, Result] = field(default_factory=dict)


def functions_by_name(tools: Iterable[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The definitions of offered tools, in the OpenAI chat form or flat, as the GenAI convention writes them. If two
    have the same name, the last counts. Definitions without a name are left out."""
    found: dict[str, Mapping[str, Any]] = {}
    for tool in tools:
        function = tool.get("function")
        if not isinstance(function, Mapping):
            function = {key: value for key, value in tool.items() if key != "type"}
        if isinstance(name := function.get("name"), str) and name:
            found[name] = function
    return found
