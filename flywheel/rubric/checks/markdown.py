"""What of an answer is prose, and what is code, tables, formulas and addresses."""

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
"""Each alternative begins where a run of its characters begins: begun at every character of a long one, a search
takes quadratic time."""


class Parts(NamedTuple):
    """`prose` is what is left; `code` are fenced blocks, indented lines and rows of tables."""

    prose: str
    code: str


def split(text: str) -> Parts:
    """Prose and code of an answer in Markdown. A fence that is not closed reaches to the end."""
    if text.lstrip()[:1] in ("{", "[") and _is_json(text):
        return Parts("", text)
    code: list[str] = []

    def take(match: re.Match[str]) -> str:
        code.append(match[0])
        return "\n"

    for pattern in (_FENCED, _TABLE, _INDENTED):
        text = pattern.sub(take, text)
    return Parts(_INLINE.sub(" ", text), "\n".join(code))


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def words_only(text: str) -> str:
    """Prose without formulas, addresses and names with dots: what a language can be told by."""
    return _ADDRESS.sub(" ", _FORMULA.sub(" ", split(text).prose))
