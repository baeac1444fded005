"""The check `degenerate`: an endless loop, a tool call that became text, or broken encoding. And loops in messages
that were cut off, which cost a rollout its reward.

Songs, tables, logs and code repeat themselves too. What counts as a loop is how often and how much is repeated.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

from flywheel.judge.rubric.criterion import Criterion, Files, Reward
from flywheel.judge.rubric.text import split
from flywheel.records.verdict import Exchange

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
_TOKEN: Final = re.compile(
    r"[^\W\d_\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+|\d+|[^\s]", re.UNICODE
)
_NUMBER: Final = re.compile(r"\d+")
_SENTENCE_END: Final = re.compile(r"[^\W\d_] ?[.!?。！？]")
_DATA: Final = re.compile(r"\A\s*+(?:\{|\[\s*+[\[{\"])")
_TIME: Final = re.compile(r"\d{1,2}:\d{2}|\d{4}-\d{2}-\d{2}|\b\w+=\S+|0x[0-9a-f]+", re.IGNORECASE)
LONGEST: Final = 200_000
"""Characters at the end of a message in which a loop is looked for."""


class RepeatedRun(NamedTuple):
    """A unit of text that is repeated without a gap."""

    unit: str
    times: float
    characters: int
    """Characters of all repetitions together."""


class Degenerate(Criterion):
    """The answer is not degenerate: no loop, no malformed tool call, no broken encoding."""

    type: Literal["degenerate"] = "degenerate"
    weight: Reward = 1.0

    def decide(self, exchange: Exchange, files: Files) -> tuple[float, str]:
        prose, code = split(exchange.answer)
        problem = _find_loop(prose, code) or _find_malformed(exchange.answer, prose)
        return not problem, problem or "neither a loop nor a malformed tool call nor broken encoding"


def find_loop(message: str) -> str:
    """What a message that was cut off repeats without end, as a reason; empty if nothing is.

    Beyond the criterion's loops these are sentences on one line that differ only in their numbers. Data that was cut
    off is no JSON any more, and no prose either.
    """
    text = message[-LONGEST:]
    prose, code = ("", text) if _DATA.match(text) else split(text)
    if found := _find_loop(prose, code):
        return found
    for run in _longest_runs([_NUMBER.sub("#", token) for token in _TOKEN.findall(prose)], " ", 400):
        # Counted from its middle on, a unit may end before its last sentence does.
        is_prose = _SENTENCE_END.search(f"{run.unit} {run.unit}") and not set(run.unit) & set('{}[]|<>="')
        letters = min(40, sum(map(str.isalpha, run.unit)))
        if "#" in run.unit and is_prose and run.times * letters >= 1000:
            return _repeated(run)
    return ""


def written_call(prose: str) -> str:
    """The mark of a tool call that became text; empty if there is none."""
    match = _TOOL_TEXT.search(prose)
    return match[0] if match else ""


def _find_malformed(answer: str, prose: str) -> str:
    """A tool call that became text, a token of the chat template, or broken encoding. In code they are quotations."""
    if written := written_call(prose):
        return f"the text of a tool call: {written}"
    if match := _SPECIAL.search(prose):
        return f"a word of the chat template: {match[0].strip()}"
    if _BARE_CALL.match(answer) and _ARGUMENTS.search(answer):
        return "the answer is the text of a tool call"
    if _SURROGATE.search(answer):
        return "broken encoding: half of a character"
    for count, what in (
        (prose.count("\ufffd"), "replacement characters"),
        (len(_CONTROLS.findall(prose)), "control characters"),
        (len(_MOJIBAKE.findall(prose)), "characters decoded twice"),
    ):
        if count >= 3:
            return f"broken encoding: {count} {what}"
    return ""


def _find_loop(prose: str, code: str) -> str:
    """What is repeated without end, as a reason; empty if nothing is."""
    for text, is_loop in ((prose, _is_loop_in_prose), (code, _is_loop_in_code)):
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        levels: tuple[tuple[Sequence[str], str, int], ...] = (
            (text, "", 80),
            (_TOKEN.findall(text), " ", 400),
            (lines, "\n", 120),
        )
        for units, separator, longest_period in levels:
            for run in _longest_runs(units, separator, longest_period):
                if is_loop(run):
                    return _repeated(run)
    lines = [line.strip() for line in prose.splitlines() if line.strip() and not _TIME.search(line.strip())]
    for run in _longest_runs([_NUMBER.sub("#", line) for line in lines], "\n", 8):
        # The same sentence with another number, many times: "12. Check that the answer is complete.".
        size = run.unit.count("\n") + 1
        words = re.findall(r"[^\W\d_]{2,}", run.unit)
        is_long = len(words) >= 7 * size or sum(char.isalpha() for char in run.unit) >= 40 * size
        if run.times >= 10 and is_long and "#" in run.unit:
            return _repeated(run)
    # A long text that hardly ever says anything new, though not the same twice in a row.
    tokens = [token.casefold() for token in _TOKEN.findall(prose) if token[0].isalnum()]
    groups = list(zip(*(tokens[place:] for place in range(4)), strict=False))
    share = len(set(groups)) / len(groups) if len(groups) >= 250 else 1.0
    return f"only {share:.0%} of its word groups are new" if share < 0.15 else ""


def _is_loop_in_prose(run: RepeatedRun) -> bool:
    letters = sum(character.isalpha() for character in run.unit)
    if not letters:
        # Horizontal rules, dot leaders, blanks to fill in and zeros are long, but not endless.
        return run.characters >= 500 and run.times >= 100
    if len(set(run.unit)) == 1:
        return run.times >= 80
    if len(run.unit) >= 100:
        return run.times >= 4
    return (run.times >= 8 and run.characters >= 200) or (run.times >= 20 and run.characters >= 80)


def _is_loop_in_code(run: RepeatedRun) -> bool:
    """Tables of zeros, heartbeats in logs and test data repeat much more often than prose."""
    letters = sum(character.isalpha() for character in run.unit)
    if not letters:
        return run.characters >= 3000 and run.times >= 200
    if len(set(run.unit)) == 1:
        return run.times >= 600
    return run.times >= (15 if len(run.unit) >= 200 else 50) and run.characters >= 600


def _longest_runs(units: Sequence[str], separator: str, longest_period: int) -> list[RepeatedRun]:
    """The longest run of each period, in units."""
    import numpy as np  # not at the top: most commands do without it

    numbers: dict[str, int] = {}
    codes = np.fromiter((numbers.setdefault(unit, len(numbers)) for unit in units), np.int32)
    runs = []
    for period in range(1, min(longest_period, len(codes) // 3) + 1):
        # True where a unit equals the one a period later; edges are where that begins and ends.
        is_repeated = np.concatenate(([False], codes[period:] == codes[:-period], [False]))
        edges = np.flatnonzero(np.diff(is_repeated.astype(np.int8)))
        if not len(edges):
            continue
        lengths = edges[1::2] - edges[::2]
        longest = int(lengths.argmax())
        start, length = int(edges[2 * longest]), int(lengths[longest])
        if length >= 2 * period:
            covered = units[start : start + length + period]
            characters = sum(map(len, covered)) + len(separator) * len(covered)
            runs.append(RepeatedRun(separator.join(covered[:period]), (length + period) / period, characters))
    return runs


def _repeated(run: RepeatedRun) -> str:
    unit = " ".join(run.unit.split())
    return f"{(unit if len(unit) <= 60 else f'{unit[:59]}…')!r} is repeated {int(run.times)} times"
