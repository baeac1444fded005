"""A filter chain: what a task must pass before the judge is paid for it.

    id: default
    filters:
      - {type: rules, params: {min_answer_length: 1}}
      - {type: python, params: {path: my_filter.py, function: keep}}
      - {type: deduplication}
      - {type: llm_evaluate}

What is cheap runs first, in whatever order it is written, unless `keep_order` is set. A disabled filter has no
effect, and one that raises costs its own task and no other. This module reads chains; filters that need the store or
a whole round (deduplication, influence) are only described by it.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from flywheel.config.agentjet import filters_in
from flywheel.errors import ConfigError, FlywheelError
from flywheel.files import expanded
from flywheel.filtering.fingerprint import Deduplication
from flywheel.filtering.influence import Influence
from flywheel.filtering.llm_evaluate import LlmEvaluate
from flywheel.filtering.pii import Pii, Redactor
from flywheel.filtering.python_function import PythonFile, load_function
from flywheel.filtering.rules import Rules
from flywheel.user_code import FunctionError
from flywheel.yaml_file import explain, read_yaml

REMEDY: Final = "Correct the file; see `flywheel docs filters`."
Line = Mapping[str, Any]
M = TypeVar("M", bound=BaseModel)


class FilterEntry(BaseModel):
    """One filter of a chain."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: str
    enabled: bool = True
    params: dict[str, Any] = {}


class ChainFile(BaseModel):
    """A chain as it is written."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    version: Literal[1] = 1
    """Version of the file format."""
    id: str = Field(min_length=1)
    """Name of the chain."""
    description: str = ""
    """What it is for."""
    keep_order: bool = False
    """Run the filters in the order they are written in, even if that pays the judge for what would be dropped."""
    filters: list[FilterEntry]
    """The filters."""


@dataclass(frozen=True, slots=True)
class FilterDecision:
    """Whether a task goes on to the judge; if not, which filter stopped it and why, or what broke in it."""

    kept: bool
    filter: str = ""
    reason: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class LineFilter:
    """A filter that looks at one task line and nothing else."""

    name: str
    keep: Callable[[Line], tuple[bool, str]]

    def decide(self, line: Line) -> FilterDecision:
        try:
            # A copy: what one filter does to the line must not reach the next one, the judge or the task file.
            kept, reason = self.keep(copy.deepcopy(line))
        except FlywheelError:
            # No matter of this task: the filter cannot be asked at all.
            raise
        except FunctionError as error:
            return FilterDecision(False, self.name, error=f"filter {self.name}: {error}")
        except Exception as error:
            return FilterDecision(False, self.name, error=f"filter {self.name}: {type(error).__name__}: {error}")
        return FilterDecision(True) if kept else FilterDecision(False, self.name, reason)


Step = LineFilter | Deduplication


@dataclass(frozen=True, slots=True)
class Chain:
    """The enabled filters. `before` and `after` run in their order, before and after the judge.

    `redact` takes personal data out of a line, None if no filter does. `notices` say what of the file is not done as
    it is written. `hash` changes with anything that can change a decision.
    """

    id: str
    hash: str
    before: tuple[Step, ...]
    after: tuple[Step, ...] = ()
    redact: Redactor | None = None
    influence: Influence | None = None
    judge: LlmEvaluate | None = None
    notices: tuple[str, ...] = ()

    @property
    def deduplication(self) -> Deduplication | None:
        return next((step for step in (*self.before, *self.after) if isinstance(step, Deduplication)), None)

    def apply(self, line: Line) -> FilterDecision:
        """What the filters that look at single lines say of one; the others need the store."""
        for step in (*self.before, *self.after):
            if isinstance(step, LineFilter) and not (decision := step.decide(line)).kept:
                return decision
        return FilterDecision(True)


def load_chain(path: Path) -> Chain:
    """Read a chain. Raises ConfigError for whatever is wrong with it or with a Python file that it names."""
    return _Reading(path).chain()


def redactor_of(path: Path | None) -> Redactor | None:
    """What takes personal data out of task lines before they are stored, by the chain's `pii` filters; None without.

    Raises ConfigError for whatever is wrong with the chain.
    """
    return load_chain(path).redact if path is not None else None


def influence_of(path: Path | None) -> Influence | None:
    """The shares of a round that the chain allows, None where it has no `influence`. Raises ConfigError."""
    return _Reading(path).influence() if path is not None else None


class _Reading:
    """A chain file while it is read: every complaint names the file and the key."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._attempted = f"read filter chain {path}"
        raw = filters_in(
            read_yaml(path, self._attempted, "Set filter.chain to a chain in YAML.", keys_once=True).value
        )
        try:
            self._written = ChainFile.model_validate(raw)
        except ValidationError as error:
            raise ConfigError(self._attempted, explain(error, ChainFile), REMEDY) from None
        self._digest = hashlib.sha256(self._written.model_dump_json(exclude={"filters"}).encode())
        self._notices: list[str] = []

    def chain(self) -> Chain:
        made: list[tuple[str, Step | Pii | Influence | LlmEvaluate]] = []
        for place, entry in enumerate(self._written.filters):
            key = f"filters.{place}"
            if entry.type not in RANK:
                raise ConfigError(
                    self._attempted, f"`{key}.type`: {entry.type!r} is none of {', '.join(RANK)}", REMEDY
                )
            if not entry.enabled:
                continue
            if entry.type in ONCE and any(name == entry.type for name, _ in made):
                raise ConfigError(self._attempted, f"`{key}.type`: {entry.type} is there already", REMEDY)
            made.append((entry.type, self._made(entry, f"{key}.params")))
        ordered = made if self._written.keep_order else sorted(made, key=lambda one: RANK[one[0]])
        if ordered != made:
            self._notices.append(
                f"{self._path}: the filters run cheap before paid: {', '.join(name for name, _ in ordered)}. "
                "Set keep_order: true to run them as they are written"
            )
        steps = [LineFilter("pii", step.keep) if isinstance(step, Pii) else step for _, step in ordered]
        paid = next((place for place, step in enumerate(steps) if isinstance(step, LlmEvaluate)), len(steps))
        redactors = [step.redactor() for _, step in made if isinstance(step, Pii)]
        return Chain(
            id=self._written.id,
            hash=self._digest.hexdigest()[:16],
            before=tuple(step for step in steps[:paid] if isinstance(step, Step)),
            after=tuple(step for step in steps[paid:] if isinstance(step, Step)),
            redact=_in_turn(redactors) if redactors else None,
            influence=next((step for step in steps if isinstance(step, Influence)), None),
            judge=next((step for step in steps if isinstance(step, LlmEvaluate)), None),
            notices=tuple(self._notices),
        )

    def influence(self) -> Influence | None:
        """That filter alone: it is asked for often, and needs no Python file."""
        for place, entry in enumerate(self._written.filters):
            if entry.type == "influence" and entry.enabled:
                return self._checked(Influence, entry, f"filters.{place}.params")
        return None

    def _made(self, entry: FilterEntry, key: str) -> Step | Pii | Influence | LlmEvaluate:
        # A key says nothing about decisions, and does not belong into what is stored.
        decisive = {name: value for name, value in entry.params.items() if name != "api_key"}
        self._digest.update(f"{entry.type}\0{decisive!r}\0".encode("utf-8", "replace"))
        if entry.type == "rules":
            return LineFilter("rules", self._checked(Rules, entry, key).keep)
        if entry.type == "python":
            return self._python(self._checked(PythonFile, entry, key), key)
        if entry.type == "pii":
            pii = self._checked(Pii, entry, key)
            pii.check_engine()
            return pii
        if entry.type == "influence":
            return self._checked(Influence, entry, key)
        if entry.type == "llm_evaluate":
            return self._checked(LlmEvaluate, entry, key)
        found = self._checked(Deduplication, entry, key)
        if found.db_path is not None:
            self._notices.append(
                f"{self._path}: deduplication's db_path {found.db_path} is not used: earlier tasks are kept in "
                "Flywheel's own state, and that file is left as it is"
            )
        return found

    def _checked(self, kind: type[M], entry: FilterEntry, key: str) -> M:
        try:
            return kind.model_validate(entry.params)
        except ValidationError as error:
            raise ConfigError(self._attempted, f"`{key}`: {explain(error, kind)}", REMEDY) from None

    def _python(self, wanted: PythonFile, key: str) -> LineFilter:
        try:
            file = expanded(Path(wanted.path))
        except ValueError as error:
            raise ConfigError(self._attempted, f"`{key}.path`: {error}", REMEDY) from None
        file = file if file.is_absolute() else self._path.parent / file
        function = load_function(file, wanted.function, wanted.timeout_seconds)
        self._digest.update(file.read_bytes())
        return LineFilter("python", function)


def _in_turn(redactors: list[Redactor]) -> Redactor:
    def redact(line: dict[str, Any]) -> dict[str, Any]:
        for each in redactors:
            line = each(line)
        return line

    return redact


RANK: Final[Mapping[str, int]] = {
    "pii": 0,
    "rules": 1,
    "python": 1,
    "influence": 2,
    "deduplication": 3,
    "llm_evaluate": 4,
}
"""The types of filters, and in which order they run: what costs nothing first, what is paid for last."""
ONCE: Final = frozenset({"influence", "deduplication", "llm_evaluate"})
"""Types of which a chain has one at most."""
