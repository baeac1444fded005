"""Splits an answer in Markdown into prose and code."""

from __future__ import annotations

import json
import re
from typing import Final, NamedTuple

_FENCED: Final = re.compile(
    r"^[ \t]{0,3}(`{3,}+|~{3,}+)[^\n]*+\n(.*?)(?:^[ \t]{0,3}\1[`~]*[ \t]*$|\Z)", re.MULTILINE | re.DOTALL
)
_TABLE: Final = re.compile(r"^[ \t]*[|│┃┌├└╔╠╚+].*$", re.MULTILINE)
_INDENTED: Final = re.compile(r"^(?: {4,}+|\t)(?![ \t]*+[-*+•\d]).*$", re.MULTILINE)
_INLINE: Final = re.compile(r"`[^`\n]*`")
_FORMULA: Final = re.compile(
    r"\$\$.+?\$\$|\$[^$\n]+\$|\\\[(?:(?!\\\[).)+?\\\]|\\\((?:(?!\\\().)+?\\\)|\\[A-Za-z]+(?:\{[^{}\n]*\})*", re.DOTALL
)
_ADDRESS: Final = re.compile(
    r"\b(?:https?://|www\.)\S+|(?<![\w.+-])[\w.+-]++@[\w-]++\.[\w.]+|(?:/[\w.-]+){2,}|(?<!\w)\w+(?:[._/]\w+)+"
)
"""URLs, e-mail addresses, paths and dotted names. Each alternative can begin only where a run of its characters
begins: a search that began at every character of a long run would take quadratic time."""


class Parts(NamedTuple):
    """A text in two parts."""

    prose: str
    """Everything but code, without inline code."""
    code: str
    """Fenced blocks, indented lines and rows of tables."""


def split(text: str) -> Parts:
    """Prose and code of a text. A fence that is not closed reaches to the end; JSON as a whole is code."""
    if text.lstrip()[:1] in ("{", "["):
        try:
            json.loads(text)
        except (ValueError, RecursionError):
            pass
        else:
            return Parts("", text)
    code: list[str] = []

    def cut_out(match: re.Match[str]) -> str:
        code.append(match[0])
        return "\n"

    for pattern in (_FENCED, _TABLE, _INDENTED):
        text = pattern.sub(cut_out, text)
    return Parts(_INLINE.sub(" ", text), "\n".join(code))


def words_only(text: str) -> str:
    """The prose without formulas, addresses and dotted names: what tells its language."""
    return _ADDRESS.sub(" ", _FORMULA.sub(" ", split(text).prose))
