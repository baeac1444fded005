"""What the criteria of all types have in common. Each type is a model of its own: its docstring says what it is, its
fields have its options, and `decide` checks it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
)
from pydantic.json_schema import SkipJsonSchema
from pydantic_core import PydanticCustomError

from flywheel.judge.rubric.text import PatternError, check_pattern
from flywheel.records.ground_truth import parse_ground_truth
from flywheel.records.verdict import Exchange

YES_NO: Final = ("no", "yes")
A_TEXT: Final = {"type": "string", "pattern": r"\S"}
_NAMES: Final = {"anyOf": [A_TEXT, {"type": "array", "items": A_TEXT, "minItems": 1}]}


def invalid(message: str, *path: str | int, pos: int | None = None) -> PydanticCustomError:
    """An error about the key at `path` of the model, by default the key that is validated; `pos` is an offset in its
    text."""
    return PydanticCustomError("rubric", "{message}", {"message": message, "at": list(path), "pos": pos})


def reject_bool(value: Any) -> Any:
    """YAML reads an unquoted `off` as false, which would pass for 0."""
    if isinstance(value, bool):
        raise ValueError("must be a number; yes, no, on and off are none")
    return value


def checked(check: Callable[[Any], None], *, optional: bool = False) -> PlainValidator:
    """Validates a `value`: `check` raises ValueError for one that cannot be used. An optional one can be empty."""

    def validated(value: Any) -> Any:
        value = "" if value is None else value
        if not optional or value != "":
            try:
                check(value)
            except PatternError as error:
                raise invalid(f"it {error}", pos=error.pos) from None
        return value

    return PlainValidator(validated)


def _check_text(value: Any) -> None:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("it must be a text")


def _check_pattern(value: Any) -> None:
    _check_text(value)
    check_pattern(value)


def _check_names(value: Any) -> None:
    names = value if isinstance(value, list) else [value]
    if not names or any(not isinstance(name, str) or not name.strip() for name in names):
        raise ValueError("it must be a text or a list of texts: names of tools")


def _check_empty(value: Any) -> None:
    raise ValueError("it is not used by this type; leave it out")


Text = Annotated[str, checked(_check_text), WithJsonSchema(A_TEXT)]
Pattern = Annotated[str, checked(_check_pattern), WithJsonSchema({**A_TEXT, "format": "regex"})]
Tools = Annotated[str | list[str], checked(_check_names), WithJsonSchema(_NAMES)]
ToolsOrNone = Annotated[str | list[str], checked(_check_names, optional=True), WithJsonSchema(_NAMES)]


def reward(weight: float, info: ValidationInfo) -> float:
    if weight < 0:
        why = "is met by a sound reply, so a negative weight would punish those: make it positive"
        raise invalid(f"{info.data['type']} {why}")
    return weight


def penalty(weight: float, info: ValidationInfo) -> float:
    if weight > 0:
        why = "is met by a faulty reply, so a positive weight would reward those: make it negative"
        raise invalid(f"{info.data['type']} {why}")
    return weight


def tool_names(value: str | list[str]) -> tuple[str, ...]:
    """The names in a `value`."""
    return tuple(value) if isinstance(value, list) else tuple(filter(None, [value]))


Weight = Annotated[float, BeforeValidator(reject_bool), Field(allow_inf_nan=False, validate_default=True)]
Reward = Annotated[Weight, AfterValidator(reward), Field(json_schema_extra={"minimum": 0})]
"""The weight of a type that good answers meet."""
Penalty = Annotated[Weight, AfterValidator(penalty), Field(json_schema_extra={"maximum": 0})]
"""The weight of a type that bad answers meet: the default is none."""


def require_weight(schema: dict[str, Any]) -> None:
    """The JSON Schema of a type with a penalty."""
    schema["required"].append("weight")
    del schema["properties"]["weight"]["default"]


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


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


Files = Mapping[str, UsedFile]
"""The files that a rubric uses, as its criteria name them."""


class Criterion(Part):
    """One statement about a reply, or one check of it."""

    id: str = Field(pattern=r"^[A-Za-z_][A-Za-z0-9_-]*$", max_length=64)
    """Its name in verdicts; a property of the judge's JSON."""
    type: str
    """Who decides: the judge (`llm-rubric`), or a check, which costs nothing and comes first."""
    value: SkipJsonSchema[Annotated[Any, checked(_check_empty, optional=True)]] = ""
    """The statement; or the pattern, text, number, names, language, schema, answer or function that its type asks."""
    weight: Weight = 1.0
    """Its share of the score. A negative one takes away when the statement is true."""
    required: bool = False
    """A reply that fails this is rejected, whatever its score."""
    choices: SkipJsonSchema[dict[str, float]] = {}
    """What the judge can choose, worst to best, with values in 0…1. A list spreads them evenly. Default: no, yes."""

    asks_the_judge: ClassVar = False
    reads_whole_texts: ClassVar = False
    """Whether it gets texts of any length. Others get the beginning and the end of long ones."""

    @field_validator("required")
    @classmethod
    def _can_be_required(cls, required: bool, info: ValidationInfo) -> bool:
        weight = info.data.get("weight", 1.0)
        if required and weight < 0:
            raise invalid("a required criterion cannot have a negative weight", "weight")
        if required and weight == 0:
            why = "it is required but has weight 0: give it a positive weight, or leave out `required`"
            raise invalid(why, "weight")
        return required

    @field_validator("choices")
    @classmethod
    def _has_choices(cls, choices: dict[str, float], info: ValidationInfo) -> dict[str, float]:
        if choices and not cls.asks_the_judge:
            raise invalid(f"{info.data['type']} has no choices")
        return choices

    @property
    def scale(self) -> Mapping[str, float]:
        """Choices with their values, worst to best."""
        if not self.choices:
            return dict(zip(YES_NO, (0.0, 1.0), strict=True))
        return dict(sorted(self.choices.items(), key=lambda choice: choice[1]))

    @property
    def file(self) -> str:
        """The file that the criterion uses, as `value` names it; empty if it uses none."""
        return ""

    def passes(self, value: float) -> bool:
        """Whether a value in 0…1 passes: at least half; with a negative weight, less than half."""
        return value < 0.5 if self.weight < 0 else value >= 0.5

    def is_decided(self, example: Example) -> bool:
        """Whether the example has what the check needs."""
        return not self.asks_the_judge

    def decide(self, exchange: Exchange, files: Files) -> tuple[float, str]:
        """How far the criterion is met (0…1), and the reason. Raises CheckError if it cannot be decided."""
        raise NotImplementedError(f"the judge decides {self.id}")


def _spread(choices: Any) -> Any:
    """A list of choices with values at equal distances. Keys are texts: YAML reads an unquoted yes as true."""
    if not isinstance(choices, dict | list):
        return choices
    names = [YES_NO[name] if isinstance(name, bool) else str(name) for name in choices]
    if any(name != name.strip() or not name for name in names):
        raise ValueError("choices must not be empty, nor begin or end with white space")
    if (names or isinstance(choices, list)) and len({name.casefold() for name in names}) < max(2, len(names)):
        raise ValueError("there must be at least two choices that differ in more than upper and lower case")
    if isinstance(choices, dict):
        return dict(zip(names, choices.values(), strict=True))
    return {name: index / (len(names) - 1) for index, name in enumerate(names)}


Share = Annotated[float, Field(ge=0, le=1)]
Choice = str | bool | float


class LlmRubric(Criterion):
    """The judge decides whether the statement is true."""

    type: Literal["llm-rubric"] = "llm-rubric"
    value: Text
    choices: Annotated[
        dict[str, Share],
        BeforeValidator(
            _spread,
            Annotated[list[Choice], Field(min_length=2)] | Annotated[dict[str, Share], Field(min_length=2)],
        ),
    ] = {}

    asks_the_judge: ClassVar = True

    @field_validator("choices")
    @classmethod
    def _can_be_met(cls, choices: dict[str, float], info: ValidationInfo) -> dict[str, float]:
        if choices and info.data.get("required") and max(choices.values()) < 0.5:
            raise invalid("it is required, but its best choice is below 0.5: no reply could pass")
        return choices
