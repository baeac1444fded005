"""The checks of patterns, texts and lengths."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import regex
from pydantic import Field

from flywheel.judge.rubric.criterion import Criterion, Files, Pattern, Text
from flywheel.judge.rubric.text import normal_forms, search, trimmed, visible
from flywheel.records.verdict import Exchange


class Regex(Criterion):
    """The pattern is found in the answer."""

    type: Literal["regex"] = "regex"
    value: Pattern

    def decide(self, exchange: Exchange, files: Files) -> tuple[float, str]:
        return _found(self.value, exchange)


class NotRegex(Criterion):
    """The pattern is not found in the answer."""

    type: Literal["not-regex"] = "not-regex"
    value: Pattern

    def decide(self, exchange: Exchange, files: Files) -> tuple[float, str]:
        found, reason = _found(self.value, exchange)
        return not found, reason


def _found(pattern: str, exchange: Exchange) -> tuple[bool, str]:
    found = search(pattern, normal_forms(exchange.answer), regex.DOTALL)
    return found, f"the pattern is {'found' if found else 'not found'}"


class Contains(Criterion):
    """The text is in the answer."""

    type: Literal["contains"] = "contains"
    value: Text

    def decide(self, exchange: Exchange, files: Files) -> tuple[float, str]:
        wanted = tuple(normal_forms(self.value))
        found = any(form in text for text in normal_forms(exchange.answer) for form in wanted)
        return found, f"the text is {'found' if found else 'not found'}"


class MinLength(Criterion):
    """The answer has at least so many characters."""

    type: Literal["min-length"] = "min-length"
    value: Annotated[int, Field(strict=True, ge=0)]
    reads_whole_texts: ClassVar = True

    def decide(self, exchange: Exchange, files: Files) -> tuple[float, str]:
        length = len(visible(exchange.answer))
        return length >= self.value, f"{length} characters"


class MaxLength(Criterion):
    """The answer has at most so many characters."""

    type: Literal["max-length"] = "max-length"
    value: Annotated[int, Field(strict=True, ge=0)]
    reads_whole_texts: ClassVar = True

    def decide(self, exchange: Exchange, files: Files) -> tuple[float, str]:
        length = len(trimmed(exchange.answer))
        return length <= self.value, f"{length} characters"
