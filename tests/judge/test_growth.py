"""What is looked for in texts takes time in proportion to their length, whatever the text.

A pattern of the standard library's `re` holds the interpreter's lock while it runs: one that is quadratic stops the
whole daemon. So everything that runs over traced texts is given texts that are known to make patterns slow, once
short and once four times as long. Quadratic work takes sixteen times as long then. What takes a few milliseconds is
passed over.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import regex

import flywheel
from flywheel.judge import answer, prompt
from flywheel.judge.filters import pii
from flywheel.judge.filters.deduplication import particulars, template
from flywheel.judge.rubric.checks import check, math_equal
from flywheel.judge.rubric.rubric import CRITERION, Rubric
from flywheel.judge.rubric.text import split, visible, words_only
from flywheel.records.similarity import normalised, numbers, prompt_signatures, words
from flywheel.records.verdict import Exchange
from flywheel.system.terminal import escape_terminal
from tests.cases import for_each
from tests.judge.rubric.steps import made
from tests.processor_time import least_seconds, seconds

READERS = (
    "system", "records", "judge", "judge.filters", "judge.rubric", "judge.rubric.checks", "store", "store.views",
    "training.data", "sources", "sources.spans", "sources.studio", "sources.jsonl", "sources.otlp",
)  # fmt: skip
"""Packages whose code sees what agents, tools and models wrote."""
SHORT, LONG = 3_000, 12_000
FLOOR_SECONDS = 0.01
MOST_GROWTH = 10.0

UNITS = (
    "a", "7", "f0", "A", "é", "中", "_", "@", " ", "\n", "\t", "{", "}", "[", "(", "|", "$", "#", "-", "/", "\\", "`",
    "'", '"', "=", ".", ",", "<", "“", "‘", "«", "a@", "a.", "a/", "a-", "a=", "a'", "$a", " a", " 'a", "a, ", "Ab ",
    "1 ", "1-", "1. ", "(1", "+1", "1:", "00", "AA11", "0x", "\\[", "\\(", "\\a{", "\\boxed{", "{a", '{"a":', "{\"",
    "~~~\n", "```\n", "```", "https://", "www.", "sk-", "eyJ", "password ", "api_key", "id ", "<think>", "<|tool",
    "-----BEGIN ", "-----BEGIN PRIVATE KEY-----", "criteria", "choice ", "check'", "<<<A ", "a@b.co ", "<｜",
    "[{'name", "4111 1111 1111 1111 ", "DE", "Yes. ", "。",
)  # fmt: skip
OPENINGS = (
    "choice",
    "{check",
    "```",
    "```\n",
    "[",
    "{'",
    "id",
    "tel",
    "A",
    "\\boxed",
    "\\a{",
    "$$",
    "-----BEGIN ",
    "</s>",
    "Action",
)
FILLINGS = (" ", "\n", "a", "1", "-", "`")


def texts(length: int, ends: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Names and texts of about this length."""
    for unit in UNITS:
        for end in ends:
            yield f"{unit!r} … {end!r}", unit * (length // len(unit)) + end
    for opening in OPENINGS:
        for filling in FILLINGS:
            yield f"{opening!r} {filling!r} … '!'", opening + filling * length + "!"


def all_patterns() -> dict[str, re.Pattern[Any] | regex.Pattern[Any]]:
    found = {}
    names = [f"flywheel.{module.name}" for module in pkgutil.iter_modules(flywheel.__path__) if not module.ispkg]
    for package in READERS:
        path = importlib.import_module(f"flywheel.{package}").__path__
        names += [f"flywheel.{package}.{module.name}" for module in pkgutil.iter_modules(path) if not module.ispkg]
    for name in sorted(set(names) - {"flywheel.__main__"}):
        for key, value in vars(importlib.import_module(name)).items():
            if isinstance(value, re.Pattern | regex.Pattern):
                found[f"{name}.{key}"] = value
    return found


def everywhere(wanted: re.Pattern[Any] | regex.Pattern[Any], text: str) -> None:
    for _ in wanted.finditer(text if isinstance(wanted.pattern, str) else text.encode()):
        pass


PATTERNS = all_patterns()
RUBRIC = Rubric.model_validate({"id": "r", "criteria": [{"id": "c", "value": "It is right."}]})
CHECKS: dict[str, dict[str, Any]] = {
    "regex": {"value": "never"},
    "not-regex": {"value": "never"},
    "contains": {"value": "never"},
    "min-length": {"value": 1},
    "max-length": {"value": 1},
    "language": {},
    "json-schema": {"value": {"type": "object"}},
    "math-equal": {"value": "7"},
    "tool-called": {"value": "f"},
    "tool-sequence": {"value": ["f"]},
    "expected-tools": {"order": "as-listed"},
    "optimal-steps": {},
    "no-error-span": {},
    "redundant-call": {"weight": -1},
    "step-efficiency": {},
    "call-format": {},
    "timeout": {"weight": -1},
    "degenerate": {},
}


def checked(type_: str, text: str) -> None:
    criterion = CRITERION.validate_python({"id": "c", "type": type_, **CHECKS[type_]})
    check(
        criterion,
        Exchange(
            text,
            text,
            trajectory=(*made("f", text, text), *made("f", {"a": text}, text, status="error")),
            line={"metadata": {"ground_truth": {"target_tools": ["f", text or "f"], "optimal_steps": 1}}},
        ),
    )


def unreadable(read: Callable[[str], Any]) -> Callable[[str], None]:
    def work(text: str) -> None:
        with suppress(answer.UnreadableError):
            read(text)

    return work


FUNCTIONS: dict[str, Callable[[str], Any]] = {
    **{f"check {name}": partial(checked, name) for name in CHECKS},
    "split": split,
    "words_only": words_only,
    "math_equal.boxed": math_equal.boxed,
    "pii.find": lambda text: pii.find(text, regions=("US", "CN")),
    "template": template,
    "particulars": particulars,
    "similarity.words": words,
    "similarity.numbers": numbers,
    "similarity.normalised": normalised,
    "prompt_signatures": lambda text: prompt_signatures([text]),
    "visible": visible,
    "answer.read": unreadable(partial(answer.read, RUBRIC.asked, nonce="0123456789abcdef")),
    "answer.object_in": unreadable(answer.object_in),
    "disarmed": escape_terminal,
    "prompt.messages": lambda text: prompt.messages(
        RUBRIC, Exchange(text, text, history=({"role": "user", "content": text},))
    ),
}


def growth(work: Callable[[str], Any], *ends: str) -> str:
    """A text on which the work grows faster than it may, measured again before it is told; empty if there is none."""
    for (name, long), (_, short) in zip(texts(LONG, ends), texts(SHORT, ends), strict=True):
        spent = seconds(partial(work, long))
        if spent < FLOOR_SECONDS or spent < MOST_GROWTH * seconds(partial(work, short)):
            continue
        before, after = least_seconds(partial(work, short), partial(work, long))
        ratio = after / max(before, 1e-6)
        if ratio > MOST_GROWTH:
            return f"{name}: {ratio:.0f} times as long for four times the text"
    return ""


@pytest.mark.slow
@for_each("name", PATTERNS)
def test_no_pattern_grows_faster_than_its_text(name: str) -> None:
    assert growth(partial(everywhere, PATTERNS[name]), "", "!", "-") == ""


@pytest.mark.slow
@pytest.mark.parametrize("name", FUNCTIONS)
def test_nothing_that_reads_texts_grows_faster_than_them(name: str) -> None:
    work = FUNCTIONS[name]
    work("warm up")
    assert growth(work, "!") == ""
