"""A versioned set of criteria with a threshold: how their values become a score, and what contradicts in it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal, Self

from pydantic import Field, field_validator, model_validator
from pydantic.json_schema import SkipJsonSchema

from flywheel.rubric.criterion import KINDS, Criterion, Part, no_truth_value, wrong

FLAT_ID: Final = "custom_rubrics"
FLAT_CHOICES: Final = ("BAD", "GOOD")
"""AgentJet's flat text is one criterion with this id and these choices."""
FIT_FOR_ROLLOUTS: Final = (
    "Take those criteria out of the rubric, or give filter.rubric one without them; `flywheel export` hands accepted"
    " replies with tool calls to other trainers."
)
"""What to do about a rubric that is unfit for rollouts."""
ALIEN: Final = "alien"
"""The judge of the configuration: a model that is not the trained one."""


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
    """A reply with the verdict that it should get. The judge is not shown it."""

    query: str
    """The question."""
    answer: str
    """The reply."""
    verdict: Literal["accept", "reject"]
    """What the rubric should make of it."""
    reason: str = ""
    """Why."""
    reference: str = ""
    """The right answer, for `math-equal`."""
    trajectory: list[dict[str, Any]] | None = None
    """The model and tool messages on the way, in the OpenAI chat form, for the criteria that look at them."""


class UsedFile(Part):
    """A file that a criterion needs, as it was when the rubric was read."""

    path: str
    text: str


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
    criteria: list[Criterion] = Field(default=[])
    """What is looked at."""
    custom_rubrics: str | None = None
    """AgentJet's flat text: one more criterion, required, with the choices GOOD and BAD."""
    examples: list[Example] = Field(default=[], exclude_if=lambda examples: not examples)
    """Replies with the verdicts that they should get; `flywheel rubric check` holds the checks against them."""
    files: SkipJsonSchema[dict[str, UsedFile]] = Field(default={}, exclude_if=lambda files: not files)
    """The files that criteria name, read with the rubric: a round grades by what was there when it was planned."""

    _a_number = field_validator("threshold", mode="before")(no_truth_value)

    @model_validator(mode="after")
    def _whole(self) -> Self:
        for message, at in self._contradictions():
            raise wrong(message, *at)
        return self

    def _contradictions(self) -> Iterator[tuple[str, tuple[str | int, ...]]]:
        every = self.every
        seen: set[str] = set()
        for place, criterion in enumerate(self.criteria):
            if criterion.id in seen:
                yield f"criteria have the same id: {criterion.id}", ("criteria", place, "id")
            elif criterion.id == FLAT_ID and len(every) > len(self.criteria):
                yield f"the id {FLAT_ID} is that of the flat text", ("criteria", place, "id")
            seen.add(criterion.id)
        if not any(criterion.weight > 0 for criterion in every):
            yield "no criterion has a positive weight, so no score could be reached", ("criteria",)
            return
        best = self.score({c.id: (min if c.weight < 0 else max)(c.scale.values()) for c in every})
        if best < self.threshold:
            message = f"the best choices give a score of {best:.2f}, below the threshold {self.threshold:g}"
            yield message, ("threshold",)

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
    def unfit_for_rollouts(self) -> str:
        """Why no round can be graded by it; empty when rounds can. A rollout is one message: no tool runs in it, so a
        check of the steps would fail or pass whatever the policy does."""
        of_steps = [f"{each.id} ({each.type})" for each in self.every if KINDS[each.type].looks_at_steps]
        if not of_steps:
            return ""
        looks = "looks" if len(of_steps) == 1 else "look"
        return f"{' and '.join(of_steps)} of the rubric {self.id} {looks} at tool calls, and a rollout is one message"

    @property
    def hash(self) -> str:
        """Changes with anything that can change a verdict; the description and the examples cannot."""
        content = self.model_dump_json(exclude={"description", "examples", "files"})
        texts = "".join(f"\0{name}\0{used.text}" for name, used in sorted(self.files.items()))
        return hashlib.sha256(f"{content}{texts}".encode()).hexdigest()[:16]

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
