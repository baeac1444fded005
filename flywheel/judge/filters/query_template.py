"""The template of a question, and its particulars: numbers, names and quotations."""

from __future__ import annotations

import re
from typing import Final

from flywheel.records import similarity

_QUOTED: Final = re.compile(
    r"\"[^\"\n]*\"|“[^“”]*”|„[^„“”]*[“”]|«[^«»]*»|「[^「」]*」|『[^『』]*』|《[^《》]*》|`[^`\n]*`"
    r"|(?<!\w)'[^'\n]*'(?!\w)|‘[^‘’]*’(?!\w)"
)
_ADDRESS: Final = re.compile(r"\b\w{1,20}://\S+|(?<!\S)[^\s@]{1,256}@[^\s@]+\.\w+")
_NUMBER: Final = re.compile(r"\d+(?:[.,:]\d+)*")
_NAME: Final = re.compile(r"(?<=[\w,;)] )(?!I['’])(?:[A-Z][\w'’]*\w)(?: [A-Z][\w'’]*\w)*")
"""Capitalised words inside a sentence."""


def template(query: str) -> str:
    """The question with placeholders for quotations, addresses, names and numbers."""
    for pattern, mask in ((_QUOTED, " q "), (_ADDRESS, " a "), (_NAME, "n"), (_NUMBER, "0")):
        query = pattern.sub(mask, query)
    return similarity.normalised(query)


def particulars(query: str) -> frozenset[int]:
    """Hashes of the words of names and quotations. Names are found by their capitals, if there are small letters."""
    found = _QUOTED.findall(query)
    if any(char.islower() for char in query):
        found += _NAME.findall(_QUOTED.sub(" q ", query))
    return similarity.words(" ".join(found)) if found else frozenset()
