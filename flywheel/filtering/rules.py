"""Rules: limits on question and answer that need no model."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from flywheel.rubric import pattern


def _checked(text: str) -> str:
    pattern.check(text)
    return text


class Rules(BaseModel):
    """What a task must satisfy; lengths are in characters."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    min_query_length: int = Field(default=0, ge=0)
    """Shortest question."""
    max_query_length: int | None = Field(default=None, gt=0)
    """Longest question."""
    min_answer_length: int = Field(default=0, ge=0)
    """Shortest answer, white space at its ends not counted."""
    max_answer_length: int | None = Field(default=None, gt=0)
    """Longest answer."""
    exclude: list[Annotated[str, AfterValidator(_checked)]] = []
    """Regular expressions; a task whose answer has a match is dropped."""

    def keep(self, line: Mapping[str, Any]) -> tuple[bool, str]:
        query, answer = str(line["main_query"]), str(line["answer"])
        checks = (
            (len(query) < self.min_query_length, "the question is too short"),
            (self.max_query_length is not None and len(query) > self.max_query_length, "the question is too long"),
            (len(answer.strip()) < self.min_answer_length, "the answer is too short"),
            (self.max_answer_length is not None and len(answer) > self.max_answer_length, "the answer is too long"),
        )
        # One by one: patterns are not searched for in what is too long.
        matches = ((_is_found(each, answer), f"the answer matches {each}") for each in self.exclude)
        return next(((False, reason) for failed, reason in chain(checks, matches) if failed), (True, ""))


def _is_found(wanted: str, answer: str) -> bool:
    try:
        return pattern.search(wanted, answer)
    except TimeoutError:
        raise TimeoutError(
            f"the pattern {wanted} ran longer than {pattern.SECONDS:g} s on an answer of {len(answer)} characters. "
            "Rewrite nested repetitions such as (a+)+ so that there is one way to match"
        ) from None
