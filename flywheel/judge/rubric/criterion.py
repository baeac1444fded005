"""Criteria: statements that the judge decides, and checks that code decides. Their types, keys and validation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, field_validator, model_validator
from pydantic_core import PydanticCustomError

from flywheel.judge.rubric import pattern
from flywheel.judge.rubric.language_names import code_of
from flywheel.judge.rubric.pattern import PatternError

MODEL_TYPE: Final = "llm-rubric"
QUERY: Final = "query"
"""The `value` of a `language` criterion that expects the language of the question."""
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
class Kind:
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


def _check_text(value: Any) -> None:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("must be a text")


def _check_pattern(value: Any) -> None:
    _check_text(value)
    pattern.check(value)


def _check_count(value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError("must be a number of characters")


def _check_names(value: Any) -> None:
    names = value if isinstance(value, list) else [value]
    if not names or any(not isinstance(name, str) or not name.strip() for name in names):
        raise ValueError("must be a text or a list of texts: names of tools")


def _check_language(value: Any) -> None:
    if value != QUERY and (not isinstance(value, str) or code_of(value) is None):
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
KINDS: Final[Mapping[str, Kind]] = MappingProxyType(
    {
        MODEL_TYPE: Kind("The judge decides whether the statement is true.", _TEXT, options=frozenset({"choices"})),
        "regex": Kind("The pattern is found in the answer.", _PATTERN),
        "not-regex": Kind("The pattern is not found in the answer.", _PATTERN),
        "contains": Kind("The text is in the answer.", _TEXT),
        "min-length": Kind("The answer has at least so many characters.", _COUNT),
        "max-length": Kind("The answer has at most so many characters.", _COUNT),
        "language": Kind(
            "The answer is in the language of the question, or in this one.", _LANGUAGE, needs_value=False
        ),
        "json-schema": Kind("The answer is JSON that the schema allows.", _SCHEMA),
        "math-equal": Kind(
            "The last \\boxed{…} of the answer equals the reference.",
            _REFERENCE,
            needs_value=False,
            options=frozenset({"reference"}),
        ),
        "tool-called": Kind(
            "Tools of these names were called, so many times together.",
            _TOOLS,
            options=frozenset({"min", "max"}),
            checks_steps=True,
        ),
        "tool-sequence": Kind(
            "The tools were called in this order.", _TOOLS, options=frozenset({"match"}), checks_steps=True
        ),
        "no-error-span": Kind(
            "No tool call and no model call failed on the way.",
            _NO_VALUE,
            needs_value=False,
            allows_negative_weight=False,
            checks_steps=True,
        ),
        "redundant-call": Kind(
            "A tool was called again with the same arguments and the same result; these tools may be.",
            _TOOLS,
            needs_value=False,
            finds_fault=True,
            checks_steps=True,
        ),
        "step-efficiency": Kind(
            "The share of calls that neither failed nor repeated an earlier one; these tools may be repeated.",
            _TOOLS,
            needs_value=False,
            options=frozenset({"max"}),
            allows_negative_weight=False,
            checks_steps=True,
        ),
        "call-format": Kind(
            "The share of calls whose arguments are JSON that the tool's definition allows; or that one is not.",
            _FORMAT,
            needs_value=False,
            allows_negative_weight=False,
            finds_fault=INVALID,
            checks_steps=True,
        ),
        "timeout": Kind(
            "A step timed out, or the reply took more than so many seconds.",
            _SECONDS,
            needs_value=False,
            finds_fault=True,
            checks_steps=True,
        ),
        "degenerate": Kind(
            "The answer is not degenerate: no loop, no malformed tool call, no broken encoding.",
            _NO_VALUE,
            needs_value=False,
            allows_negative_weight=False,
        ),
        "python": Kind("A function of your own decides.", _FUNCTION),
    }
)
OPTIONS: Final = ("choices", "reference", "min", "max", "match")
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
