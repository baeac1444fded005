"""Regular expressions that users write: checked when they are read, and searched for within a time."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from functools import lru_cache
from typing import Final

import regex

SECONDS: Final = 2.0
"""What a pattern may take on one text. One that backtracks without end must not hold a thread for ever."""


class PatternError(ValueError):
    """A pattern that is none; `pos` is where, in characters."""

    def __init__(self, message: str, pos: int | None) -> None:
        super().__init__(message)
        self.pos = pos


def check(pattern: str) -> None:
    """Raises PatternError, or ValueError where no place is known."""
    try:
        re.compile(pattern)
        regex.compile(pattern)
    except (re.error, regex.error) as error:
        raise PatternError(f"is no regular expression: {error}", error.pos) from None
    except (RecursionError, OverflowError) as error:
        raise ValueError(f"is no regular expression: {error}") from None


def forms(text: str) -> Iterator[str]:
    """The forms of a text in which something is looked for: as it is, and with composed characters and line feeds.

    An é can be one character or two, and so can the end of a line; nobody sees which, and a pattern means both.
    """
    yield text
    composed = unicodedata.normalize("NFC", text).replace("\r\n", "\n")
    if composed != text:
        yield composed


def search(pattern: str, text: str, flags: int = 0) -> bool:
    """Whether the pattern is found. Raises TimeoutError after SECONDS.

    Nested repetitions can take for ever, and the standard library's `re` would let no other thread run meanwhile.
    """
    # `concurrent` lets other threads run: the event loop is one of them.
    return _compiled(pattern, flags).search(text, timeout=SECONDS, concurrent=True) is not None


@lru_cache(maxsize=256)
def _compiled(pattern: str, flags: int) -> regex.Pattern[str]:
    return regex.compile(pattern, flags)


_UNSEEN: Final = regex.compile(r"[\p{Default_Ignorable_Code_Point}\p{Cf}\u2800]|[^\s\P{Cc}]")
"""Zero-width and other characters that show nothing, which white space does between others."""


def seen(text: str) -> str:
    """The text without what shows nothing and without white space at its ends, composed (é is one character)."""
    return str(_UNSEEN.sub("", unicodedata.normalize("NFC", text)).strip())


def trimmed(text: str) -> str:
    """The text without white space at its ends, composed; what shows nothing takes room all the same."""
    return unicodedata.normalize("NFC", text).strip()
