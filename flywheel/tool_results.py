"""Recorded results of tools, as the specification of a round stores them and rollouts use them."""

from __future__ import annotations

from collections.abc import Mapping
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
class Example:
    """A recorded call with its parsed arguments."""

    key: str
    tool: Tool
    arguments: dict[str, Any]
    result: Result


@dataclass(frozen=True, slots=True)
class SharedRecordings:
    """What rollouts may use of other traces: results by key, and examples by the digest of their tool."""

    results: Mapping[str, Result] = field(default_factory=dict)
    examples: Mapping[str, tuple[Example, ...]] = field(default_factory=dict)
