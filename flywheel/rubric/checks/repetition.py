"""Loops in a text: the same characters, words or lines again and again until the model was cut off.

Songs, tables, logs and code repeat themselves too, so what counts is how often and how much: figures below.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flywheel.rubric.checks.prose import split

_TOKEN: Final = re.compile(
    r"[^\W\d_\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+|\d+|[^\s]", re.UNICODE
)
_NUMBER: Final = re.compile(r"\d+")
_TIME: Final = re.compile(r"\d{1,2}:\d{2}|\d{4}-\d{2}-\d{2}|\b\w+=\S+|0x[0-9a-f]+", re.IGNORECASE)


class Run(NamedTuple):
    """A unit that stands `times` times beside each other and covers so many characters."""

    unit: str
    times: float
    characters: int


def find_loop(answer: str) -> str:
    """What is repeated without end, in words for a person; empty if nothing is."""
    prose, code = split(answer)
    for part, is_loop in ((prose, _is_loop_in_prose), (code, _is_loop_in_code)):
        for run in _runs(part):
            if is_loop(run):
                return f"{_shown(run.unit)} is repeated {int(run.times)} times"
    return _counted_loop(prose) or _stale(prose)


def _is_loop_in_prose(run: Run) -> bool:
    letters = sum(character.isalpha() for character in run.unit)
    if not letters:
        # Rules, dots of leaders, blanks to fill in, zeros: long, but not endless.
        return run.characters >= 500 and run.times >= 100
    if len(set(run.unit)) == 1:
        return run.times >= 80
    if len(run.unit) >= 100:
        return run.times >= 4
    return (run.times >= 8 and run.characters >= 200) or (run.times >= 20 and run.characters >= 80)


def _is_loop_in_code(run: Run) -> bool:
    """Tables of zeros, heartbeats in logs and test data repeat much more often than prose does."""
    letters = sum(character.isalpha() for character in run.unit)
    if not letters:
        return run.characters >= 3000 and run.times >= 200
    if len(set(run.unit)) == 1:
        return run.times >= 600
    return run.times >= (15 if len(run.unit) >= 200 else 50) and run.characters >= 600


def _runs(text: str) -> list[Run]:
    """The longest run of each period: of characters, of words, and of lines."""
    levels: tuple[tuple[Callable[[str], list[str]], str, int], ...] = (
        (list, "", 80),
        (_TOKEN.findall, " ", 400),
        (_lines, "\n", 120),
    )
    found = []
    for cut, glue, longest in levels:
        found += _periodic(cut(text), glue, longest)
    return found


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def _periodic(units: Sequence[str], glue: str, longest: int) -> list[Run]:
    numbers: dict[str, int] = {}
    codes: NDArray[np.int32] = np.fromiter((numbers.setdefault(unit, len(numbers)) for unit in units), np.int32)
    found = []
    for period in range(1, min(longest, len(codes) // 3) + 1):
        start, length = _longest_true(codes[period:] == codes[:-period])
        if length >= 2 * period:
            covered = units[start : start + length + period]
            unit = glue.join(units[start : start + period])
            found.append(Run(unit, (length + period) / period, sum(map(len, covered)) + len(glue) * len(covered)))
    return found


def _longest_true(flags: NDArray[np.bool_]) -> tuple[int, int]:
    """Where the longest stretch of true begins, and its length."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], flags, [False])).astype(np.int8)))
    if not len(edges):
        return 0, 0
    lengths = edges[1::2] - edges[::2]
    best = int(lengths.argmax())
    return int(edges[2 * best]), int(lengths[best])


def _counted_loop(prose: str) -> str:
    """The same sentence with another number, many times: "12. Check that the answer is complete."."""
    lines = [line for line in _lines(prose) if not _TIME.search(line)]
    for run in _periodic([_NUMBER.sub("#", line) for line in lines], "\n", 8):
        size = run.unit.count("\n") + 1
        words = re.findall(r"[^\W\d_]{2,}", run.unit)
        is_long = len(words) >= 7 * size or sum(character.isalpha() for character in run.unit) >= 40 * size
        if run.times >= 10 and is_long and "#" in run.unit:
            return f"{_shown(run.unit)} is repeated {int(run.times)} times"
    return ""


def _stale(prose: str) -> str:
    """Long text that hardly ever says a new thing, though never twice the same in a row."""
    tokens = [token.casefold() for token in _TOKEN.findall(prose) if token[0].isalnum()]
    size = 4
    total = len(tokens) - size + 1
    if total < 250:
        return ""
    share = len({tuple(tokens[place : place + size]) for place in range(total)}) / total
    return f"only {share:.0%} of its word groups are new" if share < 0.15 else ""


def _shown(unit: str) -> str:
    text = " ".join(unit.split())
    return repr(text if len(text) <= 60 else f"{text[:59]}…")
