"""A filter chain: what a task must pass before the judge is called for it.

    id: default
    filters:
      - {type: rules, params: {min_answer_length: 1}}
      - {type: python, params: {path: my_filter.py, function: keep}}
      - {type: deduplication}
      - {type: llm_evaluate}

Filters run by cost, the cheapest first, unless `keep_order` is set. A disabled filter has no effect. A filter that
raises fails its task and no other. The filters of an AgentJet file are such a chain, with `keep_order` and `decides`.
This module reads chains and runs the filters of single task lines. The pre-filter runs `deduplication`, which needs
the store; rounds apply `influence`.
"""

from __future__ import annotations

import copy
import difflib
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import Field, ValidationError

from flywheel.config.agentjet import filters_in
from flywheel.config.file import Config
from flywheel.config.interpolation import values_of
from flywheel.config.section import Section
from flywheel.errors import ConfigError, FilterError, FlywheelError
from flywheel.judge.filters.deduplication import Deduplication
from flywheel.judge.filters.influence import Influence
from flywheel.judge.filters.llm_evaluate import LlmEvaluate
from flywheel.judge.filters.pii import Pii, Redactor
from flywheel.judge.filters.python_filter import PythonFile, load_filter
from flywheel.judge.filters.rules import Rules
from flywheel.system.files import expanded, tidied
from flywheel.system.http_client import endpoint_url
from flywheel.system.limited_call import FunctionError
from flywheel.system.shortage import shortage_of
from flywheel.system.yaml_file import YamlDocument, explain, read_yaml

REMEDY: Final = "Correct the file; see `flywheel docs rubrics-and-filters`."
Line = Mapping[str, Any]
Parameters = Pii | Rules | PythonFile | Influence | Deduplication | LlmEvaluate
FILTERS: Final[Mapping[str, tuple[int, type[Parameters]]]] = {
    "pii": (0, Pii),
    "rules": (1, Rules),
    "python": (1, PythonFile),
    "influence": (2, Influence),
    "deduplication": (3, Deduplication),
    "llm_evaluate": (4, LlmEvaluate),
}
"""The types of filters: their rank by cost, and their parameters."""
ONCE: Final = frozenset({"influence", "deduplication", "llm_evaluate"})
"""Types that a chain can have only once."""


class FilterEntry(Section):
    """One filter of a chain."""

    type: str
    enabled: bool = True
    params: dict[str, Any] = Field(default={})


class ChainFile(Section):
    """A chain as it is written."""

    version: Literal[1] = 1
    """Version of the file format."""
    id: str = Field(min_length=1)
    """Name of the chain."""
    description: str = ""
    """What it is for."""
    keep_order: bool = False
    """Run the filters in the order of the file, even if the judge is called for tasks that a later one rejects."""
    decides: bool = False
    """Without an enabled `llm_evaluate`, accept what passes the filters: no judge is asked."""
    filters: list[FilterEntry] = Field(max_length=64)
    """The filters."""


@dataclass(frozen=True, slots=True)
class FilterDecision:
    """Whether a task passes. If not, `filter` rejected it for `reason`, or failed with `error`."""

    kept: bool
    filter: str = ""
    reason: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class LineFilter:
    """A filter that decides by one task line alone."""

    name: str
    keep: Callable[[Line], tuple[bool, str]]
    """Whether the task passes, and the reason if not."""

    def decide(self, line: Line) -> FilterDecision:
        """Raises FlywheelError if the filter cannot run at all; other errors concern this task alone."""
        try:
            # A copy, so that no filter changes what the next one, the judge and the task file get.
            kept, reason = self.keep(copy.deepcopy(line))
        except FlywheelError:
            raise
        except FunctionError as error:
            return FilterDecision(False, self.name, error=f"filter {self.name}: {error}")
        except Exception as error:
            if (lack := shortage_of(error)) is not None:
                raise FilterError(f"apply the filter {self.name}", *lack, retryable=True) from error
            return FilterDecision(False, self.name, error=f"filter {self.name}: {type(error).__name__}: {error}")
        return FilterDecision(True) if kept else FilterDecision(False, self.name, reason)


Step = LineFilter | Deduplication


@dataclass(frozen=True, slots=True)
class Chain:
    """The enabled filters of a chain."""

    id: str
    hash: str
    """Changes with everything that can change a decision."""
    before: tuple[Step, ...]
    """Filters that run before the judge, in order."""
    after: tuple[Step, ...] = ()
    """Filters that run after the judge, in order."""
    redact: Redactor | None = None
    """Removes personal data from a task line; None without a `pii` filter that does."""
    influence: Influence | None = None
    judge: LlmEvaluate | None = None
    decides: bool = False
    """Whether it accepts what passes its filters, and no judge is asked."""
    notices: tuple[str, ...] = ()
    """What differs from the file, for the user."""

    @property
    def deduplication(self) -> Deduplication | None:
        return next((step for step in (*self.before, *self.after) if isinstance(step, Deduplication)), None)

    def apply(self, line: Line) -> FilterDecision:
        """The decision of the filters that need one line only."""
        for step in (*self.before, *self.after):
            if isinstance(step, LineFilter) and not (decision := step.decide(line)).kept:
                return decision
        return FilterDecision(True)


def load_chain(
    path: Path, if_missing: str = "Set filter.chain to a chain in YAML.", folder: Path | None = None
) -> Chain:
    """Read a chain and the Python files that it names. Raises ConfigError; `if_missing` is its remedy if there is no
    such file. Relative paths start at `folder`, by default the chain's."""
    folder = folder or path.parent
    file, document = _read(path, if_missing)
    # `decides` says who decides, not how the filters do.
    digest = hashlib.sha256(file.model_dump_json(exclude={"filters", "decides"}).encode())
    filters: list[tuple[str, LineFilter | Parameters]] = []
    redactors: list[Redactor] = []
    for index, entry in enumerate(file.filters):
        if (params := _parameters(path, document, index, entry)) is None:
            continue
        # Not the API key: it decides nothing, and must not be stored.
        decisive = {name: value for name, value in entry.params.items() if "api_key" not in name}
        digest.update(f"{entry.type}\0{decisive!r}\0".encode("utf-8", "replace"))
        step: LineFilter | Parameters = params
        if isinstance(params, Rules):
            step = LineFilter("rules", params.keep)
        elif isinstance(params, Pii):
            params.check_engine()
            redactors.append(params.redactor())
            step = LineFilter("pii", params.keep)
        elif isinstance(params, PythonFile):
            try:
                python = folder / expanded(Path(params.path))
            except ValueError as error:
                raise _error(path, f"{_place(document, index, 'params', 'path')}{error}") from None
            step = LineFilter("python", load_filter(python, params.function, params.timeout_seconds))
            digest.update(python.read_bytes())
        filters.append((entry.type, step))
    ordered = filters if file.keep_order else sorted(filters, key=lambda each: FILTERS[each[0]][0])
    steps = [step for _, step in ordered]
    notices = [
        f"{path}: deduplication's db_path {folder / step.db_path} is not used: earlier tasks are kept in Flywheel's"
        " own state, and that file is left as it is"
        for step in steps
        if isinstance(step, Deduplication) and step.db_path is not None
    ]
    notices += [
        f"{path}: deduplication sends questions to {step.model} at {endpoint_url(step.base_url) or 'no endpoint'}"
        for step in steps
        if isinstance(step, Deduplication) and step.model is not None
    ]
    if ordered != filters:
        notices.append(
            f"{path}: the filters run by cost, the cheapest first: {', '.join(name for name, _ in ordered)}. "
            "Set keep_order: true to run them in the order of the file"
        )
    evaluate = next((step for step in steps if isinstance(step, LlmEvaluate)), None)
    if file.decides and evaluate is None:
        notices.append(f"{path}: its filters have no enabled llm_evaluate: they alone decide, and no judge is asked")
    judge = next((index for index, step in enumerate(steps) if isinstance(step, LlmEvaluate)), len(steps))
    return Chain(
        id=file.id,
        hash=digest.hexdigest()[:16],
        before=tuple(step for step in steps[:judge] if isinstance(step, Step)),
        after=tuple(step for step in steps[judge:] if isinstance(step, Step)),
        redact=(lambda line: reduce(lambda so_far, each: each(so_far), redactors, line)) if redactors else None,
        influence=next((step for step in steps if isinstance(step, Influence)), None),
        judge=evaluate,
        decides=file.decides and evaluate is None,
        notices=tuple(notices),
    )


def chain_of(config: Config) -> Chain | None:
    """The configured chain, if there is one. Raises ConfigError."""
    path = config.filter.chain
    if path is None:
        return None
    folder = None
    if config.project is not None and config.file is not None and path == tidied(config.file):
        folder = config.project.folder
    return load_chain(path, config.correction("filter", "chain"), folder)


def redactor_of(config: Config) -> Redactor | None:
    """What removes personal data from task lines before they are stored; None without `pii`. Raises ConfigError."""
    chain = chain_of(config)
    return chain.redact if chain is not None else None


def influence_of(config: Config) -> Influence | None:
    """The `influence` of the configured chain, None without one. Loads no Python file. Raises ConfigError."""
    return next((params for _, params in entries_of(config) if isinstance(params, Influence)), None)


def entries_of(config: Config) -> list[tuple[FilterEntry, Parameters | None]]:
    """The filters of the configured chain with their parameters, None for a disabled one. Loads no Python file.
    Raises ConfigError."""
    path = config.filter.chain
    if path is None:
        return []
    file, document = _read(path, config.correction("filter", "chain"))
    return [(entry, _parameters(path, document, index, entry)) for index, entry in enumerate(file.filters)]


def _read(path: Path, if_missing: str) -> tuple[ChainFile, YamlDocument | None]:
    """A chain, and the file that has it; None where it is a translated configuration, with other keys and lines."""
    document = read_yaml(path, f"read filter chain {path}", if_missing, keys_once=True)
    raw = filters_in(values_of(document, f"read filter chain {path}"))
    own = document if raw is document.value else None
    try:
        file = ChainFile.model_validate(raw)
    except ValidationError as error:
        raise _error(path, explain(error, ChainFile, own)) from None
    types = [entry.type if entry.enabled else "" for entry in file.filters]
    for index, name in enumerate(types):
        if name in ONCE and name in types[:index]:
            raise _error(path, f"{_place(own, index, 'type')}{name} is there already")
    return file, own


def _parameters(path: Path, document: YamlDocument | None, index: int, entry: FilterEntry) -> Parameters | None:
    """The parameters of a filter, None if it is disabled."""
    if entry.type not in FILTERS:
        close = difflib.get_close_matches(entry.type, FILTERS, n=1)
        meant = f"did you mean {close[0]}?" if close else f"it is none of {', '.join(FILTERS)}"
        raise _error(path, f"{_place(document, index, 'type')}there is no filter {entry.type!r}: {meant}")
    model = FILTERS[entry.type][1]
    below = ("filters", index, "params")
    try:
        return model.model_validate(entry.params) if entry.enabled else None
    except ValidationError as error:
        raise _error(path, f"filter {entry.type}: {explain(error, model, document, below=below)}") from None


def _place(document: YamlDocument | None, index: int, *below: str) -> str:
    """Where a problem of a filter is, before its message."""
    path: list[int | str] = ["filters", index, *below]
    line = f"line {document.position(path).line}: " if document is not None else ""
    return f"{line}`{'.'.join(map(str, path))}`: "


def _error(path: Path, why: str) -> ConfigError:
    return ConfigError(f"read filter chain {path}", why, REMEDY)
