"""A filter chain: what a task must pass before the judge is paid for it.

    id: default
    filters:
      - {type: rules, params: {min_answer_length: 1}}
      - {type: python, params: {path: my_filter.py, function: keep}}
      - {type: llm_evaluate}

The order is kept, a disabled filter has no effect, and a filter that raises costs its own task and no other.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from flywheel.errors import ConfigError
from flywheel.filtering.python_file import load_function
from flywheel.filtering.rules import Rules
from flywheel.yaml_file import explain, read_yaml

REMEDY = "Correct the file; see docs/rubrics.md."
Line = Mapping[str, Any]
Filter = Callable[[Line], tuple[bool, str]]


class FilterEntry(BaseModel):
    """One filter of a chain."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: str
    enabled: bool = True
    params: dict[str, Any] = {}


class ChainFile(BaseModel):
    """A chain as it is written."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: Literal[1] = 1
    id: str = Field(min_length=1)
    description: str = ""
    filters: list[FilterEntry]


@dataclass(frozen=True, slots=True)
class FilterDecision:
    """Whether a task goes on to the judge; if not, which filter stopped it and why, or what broke in it."""

    kept: bool
    filter: str = ""
    reason: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class Chain:
    """The enabled filters in their order. `hash` changes with anything that can change a decision."""

    id: str
    filters: tuple[tuple[str, Filter], ...]
    hash: str

    def apply(self, line: Line) -> FilterDecision:
        """What the chain says of one task line."""
        for name, keep in self.filters:
            try:
                # A copy: what one filter does to the line must not reach the next one, the judge or the task file.
                kept, reason = keep(copy.deepcopy(line))
            except (Exception, SystemExit) as error:
                return FilterDecision(False, name, error=f"filter {name}: {type(error).__name__}: {error}")
            if not kept:
                return FilterDecision(False, name, reason)
        return FilterDecision(True)


def load_chain(path: Path) -> Chain:
    """Read a chain. Raises ConfigError for whatever is wrong with it or with a Python file that it names."""
    attempted = f"read filter chain {path}"
    raw = read_yaml(path, attempted, "Set filter.chain to a chain in YAML.")
    try:
        written = ChainFile.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(attempted, explain(error, ChainFile), REMEDY) from None
    digest = hashlib.sha256(written.model_dump_json().encode())
    filters: list[tuple[str, Filter]] = []
    for place, entry in enumerate(written.filters):
        key = f"filters.{place}"
        if entry.type not in TYPES:
            raise ConfigError(attempted, f"`{key}.type`: {entry.type!r} is none of {', '.join(TYPES)}", REMEDY)
        if not entry.enabled:
            continue
        made = TYPES[entry.type](entry.params, path, attempted, f"{key}.params")
        if made is not None:
            filters.append((entry.type, made[0]))
            digest.update(made[1])
    return Chain(written.id, tuple(filters), digest.hexdigest()[:16])


Made = tuple[Filter, bytes] | None
"""A filter, and what of it is not in the chain's own text but changes its decisions."""


def _rules(params: dict[str, Any], _path: Path, attempted: str, key: str) -> Made:
    try:
        return Rules.model_validate(params).keep, b""
    except ValidationError as error:
        raise ConfigError(attempted, f"`{key}`: {explain(error, Rules)}", REMEDY) from None


def _python(params: dict[str, Any], path: Path, attempted: str, key: str) -> Made:
    if set(params) - {"path", "function"} or not isinstance(params.get("path"), str):
        raise ConfigError(attempted, f"`{key}` takes `path` (a Python file) and `function` (default: keep)", REMEDY)
    file = Path(params["path"]).expanduser()
    file = file if file.is_absolute() else path.parent / file
    return load_function(file, str(params.get("function", "keep"))), file.read_bytes()


def _judge_comes_here(params: dict[str, Any], _path: Path, attempted: str, key: str) -> Made:
    if params:
        raise ConfigError(attempted, f"`{key}`: the judge is set up by judge and filter.rubric", REMEDY)
    return None


TYPES: Mapping[str, Callable[[dict[str, Any], Path, str, str], Made]] = {
    "rules": _rules,
    "python": _python,
    "llm_evaluate": _judge_comes_here,
}
