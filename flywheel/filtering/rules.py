"""Rules: limits on question and answer that need no model."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from flywheel.rubric import pattern
from flywheel.rubric.pattern import normal_forms, trimmed, visible


def _checked(text: str) -> str:
    pattern.check(text)
    return text


class Rules(BaseModel):
    """What a task must satisfy; lengths are in characters, white space at the ends not counted.

    Nor is what shows nothing (zero-width characters) where there have to be so many.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    min_query_length: int = Field(default=0, ge=0)
    """Shortest question."""
    max_query_length: int | None = Field(default=None, gt=0)
    """Longest question."""
    min_answer_length: int = Field(default=0, ge=0)
    """Shortest answer."""
    max_answer_length: int | None = Field(default=None, gt=0)
    """Longest answer."""
    exclude: list[Annotated[str, AfterValidator(_checked)]] = []
    """Regular expressions; a task whose answer has a match is dropped."""

    def keep(self, line: Mapping[str, Any]) -> tuple[bool, str]:
        query, answer = str(line["main_query"]), str(line["answer"])
        checks = (
            (_is_short(query, self.min_query_length), "the question is too short"),
            (_is_long(query, self.max_query_length), "the question is too long"),
            (_is_short(answer, self.min_answer_length), "the answer is too short"),
            (_is_long(answer, self.max_answer_length), "the answer is too long"),
        )
        # One by one: patterns are not searched for in what is too long.
        matches = ((_is_found(each, answer), f"the answer matches {each}") for each in self.exclude)
        return next(((False, reason) for failed, reason in chain(checks, matches) if failed), (True, ""))


def _is_short(text: str, fewest: int) -> bool:
    return fewest > 0 and len(visible(text)) < fewest


def _is_long(text: str, most: int | None) -> bool:
    return most is not None and len(trimmed(text)) > most


def _is_found(wanted: str, answer: str) -> bool:
    try:
        return pattern.search(wanted, normal_forms(answer))
    except TimeoutError as error:
        raise TimeoutError(
            f"the pattern {wanted} {error}. "
            "Rewrite nested repetitions such as (a+)+ so that there is one way to match"
        ) from None
