"""Checks of the answer as a text: patterns, words, length."""

from __future__ import annotations

import regex

from flywheel.errors import CheckError
from flywheel.rubric import Criterion, Rubric, pattern
from flywheel.rubric.checks.found import Found, found
from flywheel.rubric.pattern import seen, trimmed
from flywheel.verdict import Exchange


def search(wanted: str, text: str, named: str) -> bool:
    """Whether the pattern is found. Raises CheckError when that takes too long; `named` is what asks."""
    try:
        return pattern.search(wanted, text, regex.DOTALL)
    except TimeoutError:
        raise CheckError(
            f"decide {named}",
            f"its pattern ran longer than {pattern.SECONDS:g} s on an answer of {len(text)} characters",
            "Rewrite nested repetitions such as (a+)+ so that there is one way to match.",
        ) from None


def _is_found(criterion: Criterion, exchange: Exchange) -> bool:
    return any(
        search(str(criterion.value), text, f"criterion {criterion.id}") for text in pattern.forms(exchange.answer)
    )


def regex_is_found(criterion: Criterion, exchange: Exchange, _rubric: Rubric | None) -> Found:
    holds = _is_found(criterion, exchange)
    return found(holds, f"the pattern is {'found' if holds else 'not found'}")


def regex_is_not_found(criterion: Criterion, exchange: Exchange, _rubric: Rubric | None) -> Found:
    holds = not _is_found(criterion, exchange)
    return found(holds, f"the pattern is {'not found' if holds else 'found'}")


def contains(criterion: Criterion, exchange: Exchange, _rubric: Rubric | None) -> Found:
    wanted = str(criterion.value)
    holds = any(form in text for text in pattern.forms(exchange.answer) for form in pattern.forms(wanted))
    return found(holds, f"the text is {'found' if holds else 'not found'}")


def is_long_enough(criterion: Criterion, exchange: Exchange, _rubric: Rubric | None) -> Found:
    length = len(seen(exchange.answer))
    return found(length >= int(str(criterion.value)), f"{length} characters")


def is_short_enough(criterion: Criterion, exchange: Exchange, _rubric: Rubric | None) -> Found:
    length = len(trimmed(exchange.answer))
    return found(length <= int(str(criterion.value)), f"{length} characters")
