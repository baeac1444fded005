"""Whether an answer is degenerate: a loop, the text of a tool call that went wrong, or broken encoding."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flywheel.rubric import Criterion, Rubric
from flywheel.rubric.checks.found import Found, found
from flywheel.rubric.checks.markdown import split
from flywheel.verdict import Exchange

_TOOL_TEXT: Final = re.compile(
    r"</?tool_calls?>|</?tool_use>|</?function_calls?>|<function=|</?invoke\b|<\|tool[\w▁]*\|>|<\|python_tag\|>"
    r"|\[/?TOOL_CALLS?\]|<｜tool[\w▁]*｜>|<\|?/?tool_calls?_?(?:begin|start|end)\|?>|✿FUNCTION✿|✿ARGS✿"
)
_SPECIAL: Final = re.compile(
    r"<\|(?:im_start|im_end|im_sep|endoftext|eot_id|start_header_id|end_header_id|begin_of_text|end_of_text|eom_id"
    r"|user|assistant|system|end|pad)\|>|<(?:start|end)_of_turn>|<｜[^｜\n]{1,40}｜>|\[/INST\]|<0x[0-9A-F]{2}>|</s>\s*$"
)
_BARE_CALL: Final = re.compile(
    r"""\A\s*+(?:Action\s*:\s*)?[\[{]\s*["']?(?:\{\s*["'])?(?:name|function|tool|tool_name|tool_calls|action)["']\s*:"""
)
_ARGUMENTS: Final = re.compile(r"""["'](?:arguments|parameters|tool_input|action_input|args)["']\s*:""")
_MOJIBAKE: Final = re.compile(
    r"[ÃÂ][\u0080-\u00bf]|Ã[\u0152\u0153\u0160\u0161\u0178\u017d\u017e\u0192\u02c6\u02dc\u2013-\u203a\u20ac\u2122]"
    r"|â€[\u0153\u0161\u0080-\u00bf\u2018-\u203a\u2122\u02dc\u0152]|ï»¿|ï¿½|[ÐÑ][\u0080-\u00bf]|[åæç][\u0080-\u00bf]{2}"
)
_CONTROLS: Final = re.compile(r"[\x00-\x08\x0b\x0e-\x1a\x1c-\x1f\x7f-\x84\x86-\x9f\ufdd0-\ufdef\ufffe\uffff]")
_SURROGATE: Final = re.compile(r"[\ud800-\udfff]")


def is_sound(_criterion: Criterion, exchange: Exchange, _rubric: Rubric | None) -> Found:
    from flywheel.rubric.checks.degenerate import find_loop  # needs numpy: judging that does without starts sooner

    problem = find_loop(exchange.answer) or _tool_text(exchange.answer) or _encoding(exchange.answer)
    return found(not problem, problem or "neither a loop nor a malformed tool call nor broken encoding")


def _tool_text(answer: str) -> str:
    """A tool call that became text, or a word of the chat template. What is quoted as code is a quotation."""
    prose = split(answer).prose
    if match := _TOOL_TEXT.search(prose):
        return f"the text of a tool call: {match[0]}"
    if match := _SPECIAL.search(prose):
        return f"a word of the chat template: {match[0].strip()}"
    if _BARE_CALL.match(answer) and _ARGUMENTS.search(answer):
        return "the answer is the text of a tool call"
    return ""


def _encoding(answer: str) -> str:
    if _SURROGATE.search(answer):
        return "broken encoding: half of a character"
    prose = split(answer).prose
    for pattern, what in (
        (re.compile("\ufffd"), "replacement characters"),
        (_CONTROLS, "control characters"),
        (_MOJIBAKE, "characters decoded twice"),
    ):
        if (count := len(pattern.findall(prose))) >= 3:
            return f"broken encoding: {count} {what}"
    return ""


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
