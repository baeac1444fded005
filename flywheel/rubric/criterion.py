"""One criterion of a rubric: a statement for the judge, or a check that costs nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, field_validator, model_validator
from pydantic_core import PydanticCustomError

from flywheel.rubric import pattern
from flywheel.rubric.language_names import code_of
from flywheel.rubric.pattern import PatternError

MODEL_TYPE: Final = "llm-rubric"
QUERY: Final = "query"
"""`value` of a `language` criterion that goes by the question."""

_TEXT: Final = {"type": "string", "pattern": r"\S"}
_NAMES: Final = {"anyOf": [_TEXT, {"type": "array", "items": _TEXT, "minItems": 1}]}


@dataclass(frozen=True, slots=True)
class Kind:
    """One type. `check` raises ValueError for a value that it cannot use."""

    summary: str
    check: Callable[[Any], None]
    schema: Mapping[str, Any] | None
    """JSON Schema of `value`; None where it has none."""
    needs_value: bool = True
    options: frozenset[str] = frozenset()
    can_take_away: bool = True
    """Whether a negative weight makes sense: not where a good answer is what is found."""
    looks_at_steps: bool = False
    """Whether it looks at the calls of a reply, of which a rollout of one message has none."""


def _text(value: Any) -> None:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("must be a text")


def _pattern(value: Any) -> None:
    _text(value)
    pattern.check(value)


def _count(value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError("must be a number of characters")


def _names(value: Any) -> None:
    listed = value if isinstance(value, list) else [value]
    if not listed or any(not isinstance(name, str) or not name.strip() for name in listed):
        raise ValueError("must be a text or a list of texts: names of tools")


def _language(value: Any) -> None:
    if value != QUERY and (not isinstance(value, str) or code_of(value) is None):
        raise ValueError(f"must be `{QUERY}`, or a language by its English name or ISO 639 code, not {value!r}")


def _json_schema(value: Any) -> None:
    if isinstance(value, str) and value.strip():
        return
    if not isinstance(value, dict):
        raise ValueError("must be a JSON Schema, or the name of a file that holds one")
    from jsonschema import SchemaError
    from jsonschema.validators import validator_for

    kind = validator_for(value)
    try:
        kind.check_schema(value)
    except SchemaError as error:
        where = "".join(f".{part}" for part in error.absolute_path)
        raise ValueError(f"is no JSON Schema: at `value{where}`, {error.message}") from None


def _reference(value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, str | int | float) or not str(value).strip():
        raise ValueError("must be the right answer, a text or a number")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("must be a finite number")


def _function(value: Any) -> None:
    path, _, name = str(value).rpartition(":")
    if not isinstance(value, str) or not path.strip() or not name.isidentifier():
        raise ValueError("must be `path:function`, such as `checks.py:is_polite`")


def _nothing(value: Any) -> None:
    raise ValueError("is not used by this type; leave it out")


KINDS: Final[Mapping[str, Kind]] = MappingProxyType(
    {
        MODEL_TYPE: Kind(
            "The judge decides whether the statement is true.", _text, _TEXT, options=frozenset({"choices"})
        ),
        "regex": Kind("The pattern is found in the answer.", _pattern, {**_TEXT, "format": "regex"}),
        "not-regex": Kind("The pattern is not found in the answer.", _pattern, {**_TEXT, "format": "regex"}),
        "contains": Kind("The text is in the answer.", _text, _TEXT),
        "min-length": Kind("The answer has at least so many characters.", _count, {"type": "integer", "minimum": 0}),
        "max-length": Kind("The answer has at most so many characters.", _count, {"type": "integer", "minimum": 0}),
        "language": Kind(
            "The answer is in the language of the question, or in this one.", _language, _TEXT, needs_value=False
        ),
        "json-schema": Kind(
            "The answer is JSON that the schema allows.",
            _json_schema,
            {"anyOf": [_TEXT, {"$ref": "https://json-schema.org/draft/2020-12/schema"}]},
        ),
        "math-equal": Kind(
            "The last \\boxed{…} of the answer equals the reference.",
            _reference,
            {"anyOf": [_TEXT, {"type": "number"}]},
            needs_value=False,
            options=frozenset({"reference"}),
        ),
        "tool-called": Kind(
            "Tools of these names were called, so many times together.",
            _names,
            _NAMES,
            options=frozenset({"min", "max"}),
            looks_at_steps=True,
        ),
        "tool-sequence": Kind(
            "The tools were called in this order.",
            _names,
            _NAMES,
            options=frozenset({"match"}),
            looks_at_steps=True,
        ),
        "no-error-span": Kind(
            "No tool call and no model call failed on the way.",
            _nothing,
            None,
            needs_value=False,
            can_take_away=False,
            looks_at_steps=True,
        ),
        "degenerate": Kind(
            "The answer is not degenerate: no loop, no malformed tool call, no broken encoding.",
            _nothing,
            None,
            needs_value=False,
            can_take_away=False,
        ),
        "python": Kind("A function of your own decides.", _function, {"type": "string", "pattern": r"^.*\S.*:\w+$"}),
    }
)
OPTIONS: Final = ("choices", "reference", "min", "max", "match")
"""The keys that only some types know."""

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
    "degenerate",
    "python",
]
Value = str | int | float | list[str] | dict[str, Any]
YES_NO: Final = ("no", "yes")


def _is_none(value: object) -> bool:
    return value is None


def wrong(message: str, *at: str | int, pos: int | None = None) -> PydanticCustomError:
    """An error that knows the key it is about, below the part that raises it."""
    return PydanticCustomError("rubric", "{message}", {"message": message, "at": list(at), "pos": pos})


def no_truth_value(value: Any) -> Any:
    """YAML reads an unquoted off as false, which would do as a 0."""
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
    reference: Annotated[str, Field(coerce_numbers_to_str=True)] | None = Field(default=None, exclude_if=_is_none)
    """The right answer for `math-equal`; the same as its `value`. Default: the task's `metadata.reference`."""
    min: int | None = Field(default=None, ge=0, exclude_if=_is_none)
    """The fewest calls for `tool-called`. Default: 1, or 0 when `max` is 0."""
    max: int | None = Field(default=None, ge=0, exclude_if=_is_none)
    """The most calls for `tool-called`. Default: any number."""
    match: Literal["exact", "subsequence"] | None = Field(default=None, exclude_if=_is_none)
    """Whether `tool-sequence` lists all calls, or calls that others may stand between (the default)."""

    _a_number = field_validator("weight", mode="before")(no_truth_value)

    @field_validator("choices", mode="before")
    @classmethod
    def _spread(cls, choices: Any) -> Any:
        if isinstance(choices, dict):
            return {_word(choice): value for choice, value in choices.items()}
        if isinstance(choices, list):
            if len(choices) < 2:
                raise ValueError("a list of choices needs at least two")
            if len({_word(choice) for choice in choices}) < len(choices):
                raise ValueError("a choice is listed twice")
            return {_word(choice): place / (len(choices) - 1) for place, choice in enumerate(choices)}
        return choices

    @model_validator(mode="after")
    def _fits_its_type(self) -> Self:
        kind = KINDS[self.type]
        if self.value != "" or kind.needs_value:
            try:
                kind.check(self.value)
            except PatternError as error:
                raise wrong(f"value {error}", "value", pos=error.pos) from None
            except ValueError as error:
                raise wrong(f"value of {self.type} {error}", "value") from None
        for option in OPTIONS:
            if option not in kind.options and getattr(self, option) not in (None, {}):
                raise wrong(f"{self.type} has no {option}", option)
        if self.reference is not None and not (self.reference.strip() and self.value == ""):
            raise wrong("give the reference once: as `value` or as `reference`", "reference")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise wrong(f"min {self.min} is more than max {self.max}: that is never met", "min")
        self._check_choices()
        self._check_weight()
        return self

    def _check_choices(self) -> None:
        if any(not 0 <= value <= 1 for value in self.choices.values()):
            raise wrong("values of choices must be in 0…1", "choices")
        if any(choice != choice.strip() or not choice for choice in self.choices):
            raise wrong("choices must not be empty, nor begin or end with white space", "choices")
        if self.choices and len({choice.casefold() for choice in self.choices}) < max(2, len(self.choices)):
            raise wrong("choices must be two or more that differ not only in upper and lower case", "choices")

    def _check_weight(self) -> None:
        if self.weight < 0 and not KINDS[self.type].can_take_away:
            message = (
                f"{self.type} is met by a sound reply, so a negative weight would punish those: make it positive"
            )
            raise wrong(message, "weight")
        if not self.required:
            return
        if self.weight < 0:
            raise wrong("a criterion cannot be required and take away", "weight")
        if self.weight == 0:
            raise wrong(
                "it is required but has weight 0: give it a positive weight, or leave out `required`", "weight"
            )
        if not any(self.passes(value) for value in self.scale.values()):
            raise wrong("it is required, but its best choice is below 0.5: no reply could pass", "choices")

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
        return tuple(self.value) if isinstance(self.value, list) else (str(self.value),)

    @property
    def language(self) -> str:
        """The language that `value` names; `query` for that of the question."""
        return str(self.value) or QUERY

    @property
    def right_answer(self) -> str:
        """What `math-equal` compares with, if the rubric says it."""
        return self.reference or str(self.value)

    @property
    def file(self) -> str:
        """The file that the criterion needs, as `value` names it; empty if it needs none."""
        if self.type == "python":
            return str(self.value).rpartition(":")[0]
        return self.value if self.type == "json-schema" and isinstance(self.value, str) else ""

    def passes(self, value: float) -> bool:
        """Whether a value in 0…1 meets the criterion: at least half; for one that takes away, less than half."""
        return value < 0.5 if self.weight < 0 else value >= 0.5


def _word(choice: Any) -> str:
    # YAML reads an unquoted yes or no as a truth value.
    return YES_NO[choice] if isinstance(choice, bool) else str(choice)
