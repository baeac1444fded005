"""The checks `regex`, `not-regex`, `contains`, `min-length` and `max-length`."""

from __future__ import annotations

from collections.abc import Iterable

import regex

from flywheel.errors import CheckError
from flywheel.rubric import pattern
from flywheel.rubric.criterion import Criterion
from flywheel.rubric.pattern import normal_forms, trimmed, visible
from flywheel.rubric.rubric import Rubric
from flywheel.verdict import Exchange


def search(wanted: str, texts: Iterable[str], subject: str) -> bool:
    """Whether the pattern matches in one of the texts. Raises CheckError, which names `subject`, after a timeout."""
    try:
        return pattern.search(wanted, texts, regex.DOTALL)
    except TimeoutError as error:
        raise CheckError(
            f"decide {subject}",
            f"its pattern {error}",
            "Rewrite nested repetitions such as (a+)+ so that there is one way to match.",
        ) from None


def check_pattern(criterion: Criterion, exchange: Exchange, _rubric: Rubric | None) -> tuple[bool, str]:
    found = search(str(criterion.value), normal_forms(exchange.answer), f"criterion {criterion.id}")
    return found == (criterion.type == "regex"), f"the pattern is {'found' if found else 'not found'}"


def check_contains(criterion: Criterion, exchange: Exchange, _rubric: Rubric | None) -> tuple[bool, str]:
    wanted = tuple(normal_forms(str(criterion.value)))
    found = any(form in text for text in normal_forms(exchange.answer) for form in wanted)
    return found, f"the text is {'found' if found else 'not found'}"


def check_length(criterion: Criterion, exchange: Exchange, _rubric: Rubric | None) -> tuple[bool, str]:
    limit = int(str(criterion.value))
    is_minimum = criterion.type == "min-length"
    length = len((visible if is_minimum else trimmed)(exchange.answer))
    return length >= limit if is_minimum else length <= limit, f"{length} characters"
