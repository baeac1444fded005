"""Texts as checks and filters read them: in normal forms, as prose without code, searched for users' patterns."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Final, NamedTuple

import regex

from flywheel.system.limited_call import CostlyCallError, Limits, call_in_child

TIMEOUT_SECONDS: Final = 2.0
"""Longest search of one pattern in one text. A pattern can backtrack without end, which would block its thread."""
PATTERN_BYTES: Final = 32 << 20
"""Memory that a compiled pattern may take; usual ones take thousands of bytes."""
_MAY_BE_COSTLY: Final = re.compile(r"\{\d|.{1000}", re.DOTALL)
"""Patterns that repeat a number of times, which are written out when compiled, and long ones."""
_INVISIBLE: Final = regex.compile(r"[\p{Default_Ignorable_Code_Point}\p{Cf}\u2800]|[^\s\P{Cc}]")
"""Zero-width and other characters that show nothing; white space is none of them."""
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


class PatternError(ValueError):
    """An invalid pattern; `pos` is the offset of the error in characters."""

    def __init__(self, message: str, pos: int | None) -> None:
        super().__init__(message)
        self.pos = pos


def check_pattern(pattern: str) -> None:
    """Raises PatternError for an invalid pattern, and for one whose compilation exceeds limits."""
    if (problem := _problem_of(pattern)) is not None:
        raise PatternError(*problem)


@lru_cache(maxsize=1024)
def _problem_of(pattern: str) -> tuple[str, int | None] | None:
    if _MAY_BE_COSTLY.search(pattern) is None:
        return compilation_problem(pattern)
    try:
        found = call_in_child(compilation_problem, pattern, Limits(memory=PATTERN_BYTES))
    except CostlyCallError as error:
        return f"cannot be used as a regular expression: compiling it {error}", None
    return tuple(found) if found else None


def compilation_problem(pattern: str) -> tuple[str, int | None] | None:
    """Why a pattern does not compile, and the position of the error where it is known; None if it does."""
    try:
        re.compile(pattern)
        regex.compile(pattern)
    except (re.error, regex.error) as error:
        return f"is no regular expression: {error}", error.pos
    except (RecursionError, OverflowError) as error:
        return f"is no regular expression: {error}", None
    return None


def search(pattern: str, texts: Iterable[str], flags: int = 0) -> bool:
    """Whether the pattern matches in one of the texts. Raises TimeoutError after TIMEOUT_SECONDS on one of them.

    Uses `regex` and not `re`, which has no timeout and would block all threads; `concurrent` lets the others run.
    """
    for text in texts:
        try:
            if regex.search(pattern, text, flags, timeout=TIMEOUT_SECONDS, concurrent=True):
                return True
        except TimeoutError:
            message = f"ran longer than {TIMEOUT_SECONDS:g} s on an answer of {len(text)} characters"
            raise TimeoutError(message) from None
    return False


def normal_forms(text: str) -> Iterator[str]:
    """The text, and its NFC form with `\\n` line ends if that differs.

    An é can be one character or two, and a line can end in two ways: they look alike, and a pattern means both.
    """
    yield text
    composed = unicodedata.normalize("NFC", text).replace("\r\n", "\n")
    if composed != text:
        yield composed


def visible(text: str) -> str:
    """The text in NFC without invisible characters and without white space at its ends."""
    return str(_INVISIBLE.sub("", unicodedata.normalize("NFC", text)).strip())


def trimmed(text: str) -> str:
    """The text in NFC without white space at its ends. Invisible characters stay: they count towards a maximum."""
    return unicodedata.normalize("NFC", text).strip()


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
