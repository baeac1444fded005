"""The filter `rules`: limits on the length of question and answer, and patterns that the answer must not match."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from flywheel.config.section import Section
from flywheel.judge.rubric.text import check_pattern, normal_forms, search, trimmed, visible


def _checked(text: str) -> str:
    check_pattern(text)
    return text


class Rules(Section):
    """Parameters of `rules`. Lengths are in characters without white space at the ends.

    Minimum lengths do not count invisible characters either (such as zero-width ones).
    """

    min_query_length: int = Field(default=0, ge=0)
    """Shortest question."""
    max_query_length: int | None = Field(default=None, gt=0)
    """Longest question."""
    min_answer_length: int = Field(default=0, ge=0)
    """Shortest answer."""
    max_answer_length: int | None = Field(default=None, gt=0)
    """Longest answer."""
    exclude: list[Annotated[str, AfterValidator(_checked)]] = Field(default=[], max_length=256)
    """Regular expressions; a task whose answer has a match is dropped."""

    def keep(self, line: Mapping[str, Any]) -> tuple[bool, str]:
        query, answer = str(line["main_query"]), str(line["answer"])
        for name, text, least, most in (
            ("question", query, self.min_query_length, self.max_query_length),
            ("answer", answer, self.min_answer_length, self.max_answer_length),
        ):
            if least > 0 and len(visible(text)) < least:
                return False, f"the {name} is too short"
            if most is not None and len(trimmed(text)) > most:
                return False, f"the {name} is too long"
        # After the lengths: patterns are not searched in texts that are too long.
        for each in self.exclude:
            try:
                if search(each, normal_forms(answer)):
                    return False, f"the answer matches {each}"
            except TimeoutError as error:
                raise TimeoutError(
                    f"the pattern {each} {error}. "
                    "Rewrite nested repetitions such as (a+)+ so that there is one way to match"
                ) from None
        return True, ""
