"""A rubric: weighted criteria, each a statement that the judge decides or a check that code decides.

Its keys, their validation, and how choices become a score. Files are read in `file`.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal, Self, get_args

from pydantic import BeforeValidator, Field, TypeAdapter, field_validator, model_validator
from pydantic.json_schema import SkipJsonSchema

from flywheel.judge.rubric.checks import (
    call_format,
    degenerate,
    json_schema,
    language,
    math_equal,
    python_check,
    texts,
    tool_calls,
)
from flywheel.judge.rubric.checks import ground_truth as truth
from flywheel.judge.rubric.criterion import Criterion, Example, LlmRubric, Part, UsedFile, invalid, reject_bool

MODEL_TYPE: Final = "llm-rubric"
MAX_CRITERIA: Final = 256
MAX_EXAMPLES: Final = 1000
SAME_ID: Final = "criteria have the same id"
FLAT_ID: Final = "custom_rubrics"
FLAT_CHOICES: Final = ("BAD", "GOOD")
"""Id and choices of the criterion that AgentJet's flat text becomes."""
ALIEN: Final = "alien"
"""The judge model of the configuration, which is not the trained model."""


def _with_type(criterion: Any) -> Any:
    """Without a type the judge decides. An option that is null is none, whatever the type."""
    if not isinstance(criterion, dict):
        return criterion
    given = {key: each for key, each in criterion.items() if each is not None or key in Criterion.model_fields}
    return {"type": MODEL_TYPE, **given}


_Union = (
    LlmRubric | texts.Regex | texts.NotRegex | texts.Contains | texts.MinLength | texts.MaxLength | language.Language
    | json_schema.JsonSchema | math_equal.MathEqual | tool_calls.ToolCalled | tool_calls.ToolSequence
    | truth.ExpectedTools | truth.OptimalSteps | tool_calls.NoErrorSpan | tool_calls.RedundantCall
    | tool_calls.StepEfficiency | call_format.CallFormat | tool_calls.Timeout | degenerate.Degenerate
    | python_check.Python
)  # fmt: skip
AnyCriterion = Annotated[_Union, Field(discriminator="type"), BeforeValidator(_with_type)]
KINDS: Final[Mapping[str, type[Criterion]]] = MappingProxyType(
    {str(model.model_fields["type"].default): model for model in get_args(_Union)}
)
"""The models of criteria by type."""
CRITERION: Final[TypeAdapter[Criterion]] = TypeAdapter(AnyCriterion)
"""Validates a criterion by its type."""


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
    criteria: list[AnyCriterion] = Field(default=[], max_length=MAX_CRITERIA)
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
                raise invalid(f"{SAME_ID}: {criterion.id}", "criteria", index, "id")
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
        listed: list[Criterion] = list(self.criteria)
        if self.custom_rubrics and self.custom_rubrics.strip():
            scale = dict(zip(FLAT_CHOICES, (0.0, 1.0), strict=True))
            listed.append(LlmRubric(id=FLAT_ID, value=self.custom_rubrics, required=True, choices=scale))
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
