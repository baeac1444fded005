"""How long a text is: the characters that a reader sees. Pure."""

from __future__ import annotations

import unicodedata
from typing import Final

import regex

_UNSEEN: Final = regex.compile(r"[\p{Default_Ignorable_Code_Point}\p{Cf}\u2800]|[^\s\P{Cc}]")
"""Zero-width and other characters that show nothing, which white space does between others."""


def seen(text: str) -> str:
    """The text without what shows nothing and without white space at its ends, composed (é is one character)."""
    return str(_UNSEEN.sub("", unicodedata.normalize("NFC", text)).strip())


def trimmed(text: str) -> str:
    """The text without white space at its ends, composed; what shows nothing takes room all the same."""
    return unicodedata.normalize("NFC", text).strip()
