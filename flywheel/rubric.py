"""The rubric: what a good reply is, as weighted criteria, and how their choices become a score. No I/O."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

MODEL_TYPE: Final = "llm-rubric"
CriterionType = Literal["llm-rubric", "regex", "not-regex", "contains", "min-length", "max-length", "tool-called"]
YES_NO = ("no", "yes")
FLAT_ID = "custom_rubrics"
FLAT_CHOICES = ("BAD", "GOOD")
"""AgentJet's flat text is one criterion with this id and these choices."""


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Criterion(Part):
    """One statement about a reply, or one check of its text."""

    id: str = Field(pattern=r"^[A-Za-z_][A-Za-z0-9_-]*$", max_length=64)
    """Its name in verdicts; a property of the judge's JSON."""
    type: CriterionType = MODEL_TYPE
    """Who decides: the judge (`llm-rubric`), or a check of the answer's text, which costs nothing."""
    value: str | int = ""
    """The statement; or the pattern, text, length or tool name that is looked for."""
    weight: float = Field(default=1.0, allow_inf_nan=False)
    """Its share of the score. A negative one takes away when the statement is true."""
    required: bool = False
    """A reply that fails this is rejected, whatever its score."""
    choices: dict[str, float] = {}
    """What the judge can choose, worst to best, with values in 0…1. A list spreads them evenly. Default: no, yes."""

    @field_validator("choices", mode="before")
    @classmethod
    def _spread(cls, choices: Any) -> Any:
        if isinstance(choices, dict):
            return {_word(choice): value for choice, value in choices.items()}
        if isinstance(choices, list):
            if len(choices) < 2:
                raise ValueError("a list of choices needs at least two")
            return {_word(choice): place / (len(choices) - 1) for place, choice in enumerate(choices)}
        return choices

    @model_validator(mode="after")
    def _fits_its_type(self) -> Self:
        if self.type in ("min-length", "max-length"):
            if not isinstance(self.value, int) or self.value < 0:
                raise ValueError(f"value of {self.type} must be a number of characters")
        elif not isinstance(self.value, str) or not self.value.strip():
            raise ValueError(f"value of {self.type} must be a text")
        if self.type in ("regex", "not-regex"):
            try:
                re.compile(str(self.value))
            except re.error as error:
                raise ValueError(f"value is no regular expression: {error}") from None
        if self.choices and self.type != MODEL_TYPE:
            raise ValueError(f"{self.type} has no choices")
        if any(not 0 <= value <= 1 for value in self.choices.values()):
            raise ValueError("values of choices must be in 0…1")
        if self.choices and len({choice.casefold() for choice in self.choices}) < max(2, len(self.choices)):
            raise ValueError("choices must be two or more that differ not only in upper and lower case")
        if self.required and self.weight < 0:
            raise ValueError("a criterion cannot be required and take away")
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

    def passes(self, value: float) -> bool:
        """Whether a value in 0…1 meets the criterion: at least half; for one that takes away, less than half."""
        return value < 0.5 if self.weight < 0 else value >= 0.5


def _word(choice: Any) -> str:
    # YAML reads an unquoted yes or no as a truth value.
    return YES_NO[choice] if isinstance(choice, bool) else str(choice)


class Escalation(Part):
    """Scores near the threshold are worth a second look."""

    band: tuple[float, float]
    """Lowest and highest score that is judged again."""
    repeats: int = Field(default=3, gt=0)
    """How often. The majority of the repeats decides; without one the task stays undecided."""

    @field_validator("band")
    @classmethod
    def _ordered(cls, band: tuple[float, float]) -> tuple[float, float]:
        if not 0 <= band[0] <= band[1] <= 1:
            raise ValueError("must be two scores in 0…1, the lower one first")
        return band


class RubricJudge(Part):
    """How the judge is asked, unless the configuration says otherwise."""

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
    criteria: list[Criterion] = []
    """What is looked at."""
    custom_rubrics: str | None = None
    """AgentJet's flat text: one more criterion, required, with the choices GOOD and BAD."""

    @model_validator(mode="after")
    def _whole(self) -> Self:
        every = self.every
        ids = [criterion.id for criterion in every]
        if doubled := sorted({name for name in ids if ids.count(name) > 1}):
            raise ValueError(f"criteria have the same id: {', '.join(doubled)}")
        if not any(criterion.weight > 0 for criterion in every):
            raise ValueError("no criterion has a positive weight, so no score could be reached")
        best = self.score({c.id: (min if c.weight < 0 else max)(c.scale.values()) for c in every})
        if best < self.threshold:
            raise ValueError(f"the best choices give a score of {best:.2f}, below the threshold {self.threshold:g}")
        return self

    @property
    def every(self) -> tuple[Criterion, ...]:
        """All criteria, AgentJet's flat text among them; those that cost nothing first."""
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
    def hash(self) -> str:
        """Changes with anything that can change a verdict; the description cannot."""
        content = self.model_dump_json(exclude={"description"})
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def score(self, values: Mapping[str, float]) -> float:
        """The score of a whole set of criterion values in 0…1.

        Sum of weight × value over the positive weights, minus what negative ones take, divided by the sum of the
        positive weights, clipped to 0…1. A failed required criterion makes it 0, so that as a reward it is worth
        nothing either. Raises KeyError for a criterion without a value.
        """
        if any(c.required and not c.passes(values[c.id]) for c in self.every):
            return 0.0
        total = sum(c.weight * values[c.id] for c in self.every)
        share = total / sum(c.weight for c in self.every if c.weight > 0)
        # Rounded, so that 0.1 + 0.6 reaches a threshold of 0.7.
        return min(1.0, max(0.0, round(share, 9)))
