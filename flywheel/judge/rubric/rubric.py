"""A rubric: weighted criteria, each a statement that the judge decides or a check that code decides.

Its keys, their validation, and how choices become a score. Files are read in `file`.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, field_validator, model_validator
from pydantic.json_schema import SkipJsonSchema
from pydantic_core import PydanticCustomError

from flywheel.judge.rubric.text import PatternError, check_pattern
from flywheel.records.ground_truth import parse_ground_truth

LANGUAGES: Final[Mapping[str, list[str]]] = json.loads(
    Path(__file__).with_name("language_names.json").read_text(encoding="utf-8")
)
"""By ISO 639-1 code the English name of a language, then stems of its own name and of its names in neighbouring
languages."""


def language_code(name: str) -> str | None:
    """The code of a language by its code (`de`, `de-AT`), English name or own name; None if it is unknown."""
    name = name.strip().casefold()
    if (code := name.replace("_", "-").partition("-")[0]) in LANGUAGES:
        return code
    return next((code for code, names in LANGUAGES.items() if name in map(str.casefold, names)), None)


MODEL_TYPE: Final = "llm-rubric"
AS_LISTED: Final = "as-listed"
"""The `order` of an `expected-tools` criterion that counts calls in the order of the ground truth only."""
QUERY: Final = "query"
"""The `value` of a `language` criterion that expects the language of the question."""
MAX_CRITERIA: Final = 256
MAX_EXAMPLES: Final = 1000
YES_NO: Final = ("no", "yes")
VALID: Final = "valid"
INVALID: Final = "invalid"
"""The values of a `call-format` criterion: whether it counts the calls that are right, or finds one that is not."""


class ValueType(NamedTuple):
    """What `value` can be for a type of criteria."""

    check: Callable[[Any], None]
    """Raises ValueError for a `value` that the type cannot use."""
    schema: Mapping[str, Any] | None
    """JSON Schema of `value`; None for a type without one."""


@dataclass(frozen=True, slots=True)
class CriterionKind:
    """A type of criteria."""

    summary: str
    value: ValueType
    needs_value: bool = True
    options: frozenset[str] = frozenset()
    """Those of OPTIONS that the type has."""
    allows_negative_weight: bool = True
    """False for types that good answers meet: a negative weight would punish them."""
    finds_fault: bool | str = False
    """Whether bad replies meet the type: it is a penalty, and a positive weight would reward them. A text: with this
    `value`, it is one."""
    checks_steps: bool = False
    """Whether the type looks at tool calls and other steps."""
    needs_truth: str = ""
    """The part of a task's ground truth that the type needs; empty if it needs none."""


def _check_text(value: Any) -> None:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("must be a text")


def _check_pattern(value: Any) -> None:
    _check_text(value)
    check_pattern(value)


def _check_count(value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError("must be a number of characters")


def _check_names(value: Any) -> None:
    names = value if isinstance(value, list) else [value]
    if not names or any(not isinstance(name, str) or not name.strip() for name in names):
        raise ValueError("must be a text or a list of texts: names of tools")


def _check_language(value: Any) -> None:
    if value != QUERY and (not isinstance(value, str) or language_code(value) is None):
        raise ValueError(f"must be `{QUERY}`, or a language by its English name or ISO 639 code, not {value!r}")


def _check_schema(value: Any) -> None:
    if isinstance(value, str) and value.strip():
        return
    if not isinstance(value, dict):
        raise ValueError("must be a JSON Schema, or the name of a file that holds one")
    from jsonschema_rs import ValidationError, meta

    try:
        meta.validate(value)
    except ValidationError as error:
        where = "".join(f".{part}" for part in error.instance_path)
        raise ValueError(f"is no JSON Schema: at `value{where}`, {error.message}") from None


def _check_reference(value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, str | int | float) or not str(value).strip():
        raise ValueError("must be the right answer, a text or a number")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("must be a finite number")


def _check_function(value: Any) -> None:
    path, _, name = str(value).rpartition(":")
    if not isinstance(value, str) or not path.strip() or not name.isidentifier():
        raise ValueError("must be `path:function`, such as `checks.py:is_polite`")


def _check_format(value: Any) -> None:
    if value not in (VALID, INVALID):
        raise ValueError(f"must be `{VALID}` or `{INVALID}`, not {value!r}")


def _check_seconds(value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError("must be a number of seconds above 0")


def _check_no_value(value: Any) -> None:
    raise ValueError("is not used by this type; leave it out")


_A_TEXT: Final = {"type": "string", "pattern": r"\S"}
_TEXT: Final = ValueType(_check_text, _A_TEXT)
_PATTERN: Final = ValueType(_check_pattern, {**_A_TEXT, "format": "regex"})
_COUNT: Final = ValueType(_check_count, {"type": "integer", "minimum": 0})
_TOOLS: Final = ValueType(_check_names, {"anyOf": [_A_TEXT, {"type": "array", "items": _A_TEXT, "minItems": 1}]})
_LANGUAGE: Final = ValueType(_check_language, _A_TEXT)
_SCHEMA: Final = ValueType(
    _check_schema, {"anyOf": [_A_TEXT, {"$ref": "https://json-schema.org/draft/2020-12/schema"}]}
)
_REFERENCE: Final = ValueType(_check_reference, {"anyOf": [_A_TEXT, {"type": "number"}]})
_FUNCTION: Final = ValueType(_check_function, {"type": "string", "pattern": r"^.*\S.*:\w+$"})
_FORMAT: Final = ValueType(_check_format, {"enum": [VALID, INVALID]})
_SECONDS: Final = ValueType(_check_seconds, {"type": "number", "exclusiveMinimum": 0})
_NO_VALUE: Final = ValueType(_check_no_value, None)
KINDS: Final[Mapping[str, CriterionKind]] = MappingProxyType(
    {
        MODEL_TYPE: CriterionKind(
            "The judge decides whether the statement is true.", _TEXT, options=frozenset({"choices"})
        ),
        "regex": CriterionKind("The pattern is found in the answer.", _PATTERN),
        "not-regex": CriterionKind("The pattern is not found in the answer.", _PATTERN),
        "contains": CriterionKind("The text is in the answer.", _TEXT),
        "min-length": CriterionKind("The answer has at least so many characters.", _COUNT),
        "max-length": CriterionKind("The answer has at most so many characters.", _COUNT),
        "language": CriterionKind(
            "The answer is in the language of the question, or in this one.", _LANGUAGE, needs_value=False
        ),
        "json-schema": CriterionKind("The answer is JSON that the schema allows.", _SCHEMA),
        "math-equal": CriterionKind(
            "The last \\boxed{…} of the answer equals the reference.",
            _REFERENCE,
            needs_value=False,
            options=frozenset({"reference"}),
        ),
        "tool-called": CriterionKind(
            "Tools of these names were called, so many times together.",
            _TOOLS,
            options=frozenset({"min", "max"}),
            checks_steps=True,
        ),
        "tool-sequence": CriterionKind(
            "The tools were called in this order.", _TOOLS, options=frozenset({"match"}), checks_steps=True
        ),
        "expected-tools": CriterionKind(
            "The tools that the task's ground truth names were called: the F1 of both sets, or in that order.",
            _NO_VALUE,
            needs_value=False,
            options=frozenset({"order"}),
            allows_negative_weight=False,
            checks_steps=True,
            needs_truth="target_tools",
        ),
        "optimal-steps": CriterionKind(
            "The smallest number of calls, by the task's ground truth, divided by that of the reply; at most 1.",
            _NO_VALUE,
            needs_value=False,
            allows_negative_weight=False,
            checks_steps=True,
            needs_truth="optimal_steps",
        ),
        "no-error-span": CriterionKind(
            "No tool call and no model call failed on the way.",
            _NO_VALUE,
            needs_value=False,
            allows_negative_weight=False,
            checks_steps=True,
        ),
        "redundant-call": CriterionKind(
            "A tool was called again with the same arguments and the same result; these tools may be.",
            _TOOLS,
            needs_value=False,
            finds_fault=True,
            checks_steps=True,
        ),
        "step-efficiency": CriterionKind(
            "The share of calls that neither failed nor repeated an earlier one; these tools may be repeated.",
            _TOOLS,
            needs_value=False,
            options=frozenset({"max"}),
            allows_negative_weight=False,
            checks_steps=True,
        ),
        "call-format": CriterionKind(
            "The share of calls whose arguments are JSON that the tool's definition allows; or that one is not.",
            _FORMAT,
            needs_value=False,
            allows_negative_weight=False,
            finds_fault=INVALID,
            checks_steps=True,
        ),
        "timeout": CriterionKind(
            "A step timed out, or the reply took more than so many seconds.",
            _SECONDS,
            needs_value=False,
            finds_fault=True,
            checks_steps=True,
        ),
        "degenerate": CriterionKind(
            "The answer is not degenerate: no loop, no malformed tool call, no broken encoding.",
            _NO_VALUE,
            needs_value=False,
            allows_negative_weight=False,
        ),
        "python": CriterionKind("A function of your own decides.", _FUNCTION, options=frozenset({"files"})),
    }
)
OPTIONS: Final = ("choices", "reference", "min", "max", "match", "order", "files")
"""Keys that only some types have."""

CriterionType = Literal[
    "llm-rubric",
    "regex",
    "not-regex",
    "contains",
    "min-length",
    "max-length",
    "language",
    "json-schema",
    "math-equal",
    "tool-called",
    "tool-sequence",
    "expected-tools",
    "optimal-steps",
    "no-error-span",
    "redundant-call",
    "step-efficiency",
    "call-format",
    "timeout",
    "degenerate",
    "python",
]
Value = str | int | float | list[str] | dict[str, Any]


def invalid(message: str, *path: str | int, pos: int | None = None) -> PydanticCustomError:
    """An error about the key at `path` below the model that raises it; `pos` is an offset in its text."""
    return PydanticCustomError("rubric", "{message}", {"message": message, "at": list(path), "pos": pos})


def reject_bool(value: Any) -> Any:
    """YAML reads an unquoted `off` as false, which would pass for 0."""
    if isinstance(value, bool):
        raise ValueError("must be a number; yes, no, on and off are none")
    return value


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Criterion(Part):
    """One statement about a reply, or one check of it."""

    id: str = Field(pattern=r"^[A-Za-z_][A-Za-z0-9_-]*$", max_length=64)
    """Its name in verdicts; a property of the judge's JSON."""
    type: CriterionType = MODEL_TYPE
    """Who decides: the judge (`llm-rubric`), or a check, which costs nothing and comes first."""
    value: Annotated[
        Value, PlainValidator(lambda value: "" if value is None else value, json_schema_input_type=Any)
    ] = ""
    """The statement; or the pattern, text, number, names, language, schema, answer or function that its type asks."""
    weight: float = Field(default=1.0, allow_inf_nan=False)
    """Its share of the score. A negative one takes away when the statement is true."""
    required: bool = False
    """A reply that fails this is rejected, whatever its score."""
    choices: dict[str, float] = {}
    """What the judge can choose, worst to best, with values in 0…1. A list spreads them evenly. Default: no, yes."""
    reference: Annotated[str, Field(coerce_numbers_to_str=True)] | None = Field(
        default=None, exclude_if=lambda value: value is None
    )
    """The right answer for `math-equal`; the same as its `value`. Default: the task's `metadata.reference`."""
    min: int | None = Field(default=None, ge=0, exclude_if=lambda value: value is None)
    """The fewest calls for `tool-called`. Default: 1, or 0 when `max` is 0."""
    max: int | None = Field(default=None, ge=0, exclude_if=lambda value: value is None)
    """The most calls for `tool-called`; the calls that are enough for `step-efficiency`. Default: any number."""
    match: Literal["exact", "subsequence"] | None = Field(default=None, exclude_if=lambda value: value is None)
    """Whether `tool-sequence` lists all calls, or calls that others may stand between (the default)."""
    order: Literal["any", "as-listed"] | None = Field(default=None, exclude_if=lambda value: value is None)
    """Whether `expected-tools` compares the sets of names (`any`, the default), or requires all of them in their
    order, without error."""
    files: list[str] | None = Field(default=None, exclude_if=lambda value: value is None)
    """Files that the function of `python` reads, relative to the rubric: another content makes another rubric."""

    _reject_bool = field_validator("weight", mode="before")(reject_bool)

    @field_validator("choices", mode="before")
    @classmethod
    def _spread(cls, choices: Any) -> Any:
        """A list of choices with values at equal distances. Keys are texts: YAML reads an unquoted yes as true."""
        if not isinstance(choices, dict | list):
            return choices
        names = [YES_NO[name] if isinstance(name, bool) else str(name) for name in choices]
        if any(name != name.strip() or not name for name in names):
            raise ValueError("choices must not be empty, nor begin or end with white space")
        if (names or isinstance(choices, list)) and len({name.casefold() for name in names}) < max(2, len(names)):
            raise ValueError("there must be at least two choices, which differ not only in upper and lower case")
        if isinstance(choices, dict):
            return dict(zip(names, choices.values(), strict=True))
        return {name: index / (len(names) - 1) for index, name in enumerate(names)}

    @model_validator(mode="after")
    def _fits_its_type(self) -> Self:
        kind = KINDS[self.type]
        if self.value != "" or kind.needs_value:
            try:
                kind.value.check(self.value)
            except PatternError as error:
                raise invalid(f"value {error}", "value", pos=error.pos) from None
            except ValueError as error:
                raise invalid(f"value of {self.type} {error}", "value") from None
        for option in OPTIONS:
            if option not in kind.options and getattr(self, option) not in (None, {}):
                raise invalid(f"{self.type} has no {option}", option)
        if self.reference is not None and not (self.reference.strip() and self.value == ""):
            raise invalid("give the reference once: as `value` or as `reference`", "reference")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise invalid(f"min {self.min} is more than max {self.max}: that is never met", "min")
        if self.files is not None and not all(name.strip() for name in self.files or [""]):
            raise invalid("it lists no file", "files")
        if any(not 0 <= value <= 1 for value in self.choices.values()):
            raise invalid("values of choices must be in 0…1", "choices")
        return self

    @model_validator(mode="after")
    def _weight_fits(self) -> Self:
        kind = KINDS[self.type]
        finds_fault = kind.finds_fault is True or (bool(self.value) and self.value == kind.finds_fault)
        if self.weight > 0 and finds_fault:
            why = "is met by a faulty reply, so a positive weight would reward those: make it negative"
            raise invalid(f"{self.type} {why}", "weight")
        if self.weight < 0 and not (kind.allows_negative_weight or finds_fault):
            why = "is met by a sound reply, so a negative weight would punish those: make it positive"
            raise invalid(f"{self.type} {why}", "weight")
        if self.required and self.weight < 0:
            raise invalid("a criterion cannot be required and take away", "weight")
        if self.required and self.weight == 0:
            why = "it is required but has weight 0: give it a positive weight, or leave out `required`"
            raise invalid(why, "weight")
        if self.required and not any(self.passes(value) for value in self.scale.values()):
            raise invalid("it is required, but its best choice is below 0.5: no reply could pass", "choices")
        return self

    @property
    def asks_the_judge(self) -> bool:
        return self.type == MODEL_TYPE

    @property
    def scale(self) -> Mapping[str, float]:
        """Choices with their values, worst to best."""
        if not self.choices:
            return dict(zip(YES_NO, (0.0, 1.0), strict=True))
        return dict(sorted(self.choices.items(), key=lambda choice: choice[1]))

    @property
    def names(self) -> tuple[str, ...]:
        """The tools that `value` names."""
        if self.value == "":
            return ()
        return tuple(self.value) if isinstance(self.value, list) else (str(self.value),)

    @property
    def right_answer(self) -> str:
        """The reference of `math-equal`; empty if the rubric has none."""
        return self.reference or str(self.value)

    @property
    def file(self) -> str:
        """The file that the criterion uses, as `value` names it; empty if it uses none."""
        if self.type == "python":
            return str(self.value).rpartition(":")[0]
        return self.value if self.type == "json-schema" and isinstance(self.value, str) else ""

    def passes(self, value: float) -> bool:
        """Whether a value in 0…1 passes: at least half; with a negative weight, less than half."""
        return value < 0.5 if self.weight < 0 else value >= 0.5


FLAT_ID: Final = "custom_rubrics"
FLAT_CHOICES: Final = ("BAD", "GOOD")
"""Id and choices of the criterion that AgentJet's flat text becomes."""
ALIEN: Final = "alien"
"""The judge model of the configuration, which is not the trained model."""


class Escalation(Part):
    """Judge scores near the threshold again."""

    band: tuple[float, float]
    """Lowest and highest score that is judged again."""
    repeats: int = Field(default=3, gt=0)
    """How often they are judged. The majority decides; without one the task stays undecided."""

    @field_validator("band")
    @classmethod
    def _ordered(cls, band: tuple[float, float]) -> tuple[float, float]:
        if not 0 <= band[0] <= band[1] <= 1:
            raise ValueError("must be two scores in 0…1, the lower one first")
        return band


class RubricJudge(Part):
    """Settings of the judge; the configuration takes precedence."""

    model: str = Field(default=ALIEN, min_length=1, exclude_if=lambda model: model == ALIEN)
    """`alien` is the model that the configuration names; another name takes its place, at the same endpoint."""
    temperature: float = Field(default=0.0, ge=0)
    """Sampling temperature of the judge."""
    max_tokens: int = Field(default=2048, gt=0)
    """Longest answer of the judge, tokens."""
    per_criterion: bool = False
    """One call for each criterion instead of one for all of them."""
    repeats: int = Field(default=1, gt=0)
    """How often every task is judged; the majority decides. Give a temperature above 0 when it is more than once."""
    escalate: Escalation | None = None
    """Judge scores inside a band again."""


class Example(Part):
    """A reply with the verdict that it should get. The judge does not see it."""

    query: str
    """The question."""
    answer: str
    """The reply."""
    verdict: Literal["accept", "reject"]
    """The verdict that it should get."""
    reason: str = ""
    """Why."""
    reference: str = ""
    """The right answer, for `math-equal`."""
    trajectory: list[dict[str, Any]] | None = None
    """The model and tool messages before the reply, in the OpenAI chat format, for the checks of the steps."""
    ground_truth: dict[str, Any] | None = None
    """The task's `metadata.ground_truth`, for `expected-tools` and `optimal-steps`."""

    @field_validator("ground_truth")
    @classmethod
    def _is_ground_truth(cls, raw: dict[str, Any] | None) -> dict[str, Any] | None:
        parse_ground_truth(raw)
        return raw


class UsedFile(Part):
    """A file that a criterion uses, as it was when the rubric was read. `uses` has name and SHA-256 of each module
    of the folder that it imports, and of the files that its criteria list."""

    path: str
    text: str
    uses: tuple[tuple[str, str], ...] = Field(default=(), exclude_if=lambda uses: not uses)


class Rubric(Part):
    """A versioned set of criteria with a threshold."""

    version: Literal[1] = 1
    """Version of the file format."""
    id: str = Field(min_length=1)
    """Name of the rubric."""
    description: str = ""
    """What it is for."""
    threshold: float = Field(default=0.7, ge=0, le=1)
    """A reply is accepted when its score is at least this."""
    judge: RubricJudge = RubricJudge()
    """How the judge is asked."""
    criteria: list[Criterion] = Field(default=[], max_length=MAX_CRITERIA)
    """What is looked at."""
    custom_rubrics: str | None = None
    """AgentJet's flat text: one more criterion, required, with the choices GOOD and BAD."""
    examples: list[Example] = Field(default=[], max_length=MAX_EXAMPLES, exclude_if=lambda examples: not examples)
    """Replies with the verdicts that they should get; `flywheel rubric check` holds the checks against them."""
    files: SkipJsonSchema[dict[str, UsedFile]] = Field(default={}, exclude_if=lambda files: not files)
    """The files that criteria name, read with the rubric: a round uses them as they were when it was planned."""

    _reject_bool = field_validator("threshold", mode="before")(reject_bool)

    @model_validator(mode="after")
    def _can_be_met(self) -> Self:
        every = self.every
        ids: set[str] = set()
        for index, criterion in enumerate(self.criteria):
            if criterion.id in ids:
                raise invalid(f"criteria have the same id: {criterion.id}", "criteria", index, "id")
            if criterion.id == FLAT_ID and len(every) > len(self.criteria):
                raise invalid(f"the id {FLAT_ID} is that of the flat text", "criteria", index, "id")
            ids.add(criterion.id)
        if not any(criterion.weight > 0 for criterion in every):
            raise invalid("no criterion has a positive weight, so no score could be reached", "criteria")
        best = self.score({c.id: (min if c.weight < 0 else max)(c.scale.values()) for c in every})
        if best < self.threshold:
            message = f"the best choices give a score of {best:.2f}, below the threshold {self.threshold:g}"
            raise invalid(message, "threshold")
        return self

    @property
    def every(self) -> tuple[Criterion, ...]:
        """All criteria, including AgentJet's flat text; checks first, which cost nothing."""
        listed = list(self.criteria)
        if self.custom_rubrics and self.custom_rubrics.strip():
            scale = dict(zip(FLAT_CHOICES, (0.0, 1.0), strict=True))
            listed.append(Criterion(id=FLAT_ID, value=self.custom_rubrics, required=True, choices=scale))
        return tuple(sorted(listed, key=lambda criterion: criterion.asks_the_judge))

    @property
    def asked(self) -> tuple[Criterion, ...]:
        """The criteria that the judge decides."""
        return tuple(criterion for criterion in self.every if criterion.asks_the_judge)

    @property
    def has_functions(self) -> bool:
        """Whether functions of users decide criteria: they may read what no hash knows of."""
        return any(criterion.type == "python" for criterion in self.criteria)

    @property
    def hash(self) -> str:
        """A hash of everything that can change a verdict: all but the description and the examples."""
        content = self.model_dump_json(exclude={"description", "examples", "files"})
        texts = "".join(
            "\0".join(("", name, used.text, *itertools.chain(*used.uses)))
            for name, used in sorted(self.files.items())
        )
        return hashlib.sha256(f"{content}{texts}".encode()).hexdigest()[:16]

    def score(self, values: Mapping[str, float]) -> float:
        """The score of a whole set of criterion values in 0…1.

        The sum of weight × value over all criteria, divided by the sum of the positive weights, clipped to 0…1. It is
        0 if a required criterion failed, as a reward too. Raises KeyError for a criterion without a value.
        """
        if any(c.required and not c.passes(values[c.id]) for c in self.every):
            return 0.0
        total = sum(c.weight * values[c.id] for c in self.every)
        share = total / sum(c.weight for c in self.every if c.weight > 0)
        # Rounded, so that 0.1 + 0.6 reaches a threshold of 0.7.
        return min(1.0, max(0.0, round(share, 9)))
