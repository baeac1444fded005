"""Rules: limits on question and answer that need no model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"no regular expression: {error}") from None
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
    exclude: list[Annotated[str, AfterValidator(_pattern)]] = []
    """Regular expressions; a task whose answer has a match is dropped."""

    def keep(self, line: Mapping[str, Any]) -> tuple[bool, str]:
        query, answer = str(line["main_query"]), str(line["answer"])
        checks = (
            (len(query) < self.min_query_length, "the question is too short"),
            (self.max_query_length is not None and len(query) > self.max_query_length, "the question is too long"),
            (len(answer.strip()) < self.min_answer_length, "the answer is too short"),
            (self.max_answer_length is not None and len(answer) > self.max_answer_length, "the answer is too long"),
            *((re.search(pattern, answer) is not None, f"the answer matches {pattern}") for pattern in self.exclude),
        )
        return next(((False, reason) for failed, reason in checks if failed), (True, ""))
