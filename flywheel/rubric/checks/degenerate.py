"""Whether an answer is degenerate: a loop, the text of a tool call that went wrong, or broken encoding."""

from __future__ import annotations

import re
from typing import Final

from flywheel.rubric import Criterion, Rubric
from flywheel.rubric.checks.found import Found, found
from flywheel.rubric.checks.prose import split
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
    from flywheel.rubric.checks.repetition import find_loop  # needs numpy: judging that does without starts sooner

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
