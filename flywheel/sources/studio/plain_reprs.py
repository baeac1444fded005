"""Reprs of the plainest kind: strings, numbers, None, lists and dictionaries, spelled as Python itself spells them.

Making a syntax tree takes longer than everything else about a reply, and nearly every repr holds nothing else. What
is spelled in any other way is not read here at all: `literal` has a parser for it.
"""

from __future__ import annotations

from typing import Any, Final

_QUOTES: Final = "'\""
_ESCAPES: Final = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"'}
_WORDS: Final = (("None", None), ("True", True), ("False", False))


class _UnusualError(Exception):
    """Something else is here."""


def plain_call(text: str) -> dict[str, Any] | None:
    """The keyword arguments of a repr such as `Msg(…)`; None if there is anything unusual about it."""
    try:
        found: dict[str, Any] = {}
        at = text.index("(") + 1
        if not text[: at - 1].isidentifier():
            return None
        while True:
            end = text.index("=", at)
            name = text[at:end]
            if name in found:
                return None
            found[name], at = _value(text, end + 1)
            if name == "name" and ("\\" in text[end:at] or not text.startswith(", content=", at)):
                # Names are written as they are, without escapes: this one may end elsewhere.
                return None
            if text.startswith(", ", at):
                at += 2
            elif text[at] == ")" and at == len(text) - 1:
                return found if all(map(str.isidentifier, found)) else None
            else:
                return None
    except (_UnusualError, IndexError, ValueError, RecursionError):
        return None


def _value(text: str, at: int) -> tuple[Any, int]:
    """The value that begins at a place, and the place behind it."""
    char = text[at]
    if char in _QUOTES:
        return _string(text, at, char)
    if char == "[":
        return _list(text, at + 1)
    if char == "{":
        return _dict(text, at + 1)
    for word, value in _WORDS:
        if text.startswith(word, at):
            return value, at + len(word)
    end = at + 1
    while text[end] not in ",)]}":
        end += 1
    digits = text[at:end]
    if not digits.isdecimal() or not digits.isascii() or (len(digits) > 1 and char == "0"):
        raise _UnusualError
    return int(digits), end


def _list(text: str, at: int) -> tuple[list[Any], int]:
    found: list[Any] = []
    if text[at] == "]":
        return found, at + 1
    while True:
        value, at = _value(text, at)
        found.append(value)
        if text[at] == "]":
            return found, at + 1
        at = _next(text, at)


def _dict(text: str, at: int) -> tuple[dict[str, Any], int]:
    found: dict[str, Any] = {}
    if text[at] == "}":
        return found, at + 1
    while True:
        char = text[at]
        if char not in _QUOTES:
            raise _UnusualError
        key, at = _string(text, at, char)
        if not text.startswith(": ", at):
            raise _UnusualError
        found[key], at = _value(text, at + 2)
        if text[at] == "}":
            return found, at + 1
        at = _next(text, at)


def _next(text: str, at: int) -> int:
    if not text.startswith(", ", at):
        raise _UnusualError
    return at + 2


def _string(text: str, at: int, quote: str) -> tuple[str, int]:
    end = text.index(quote, at + 1)
    found = text[at + 1 : end]
    if "\\" in found:
        return _escaped(text, at + 1, quote)
    if not found.isprintable() or (not found and text.startswith(quote, end + 1)):
        # Python escapes what cannot be printed, and writes no text between three quotes.
        raise _UnusualError
    return found, end + 1


def _escaped(text: str, at: int, quote: str) -> tuple[str, int]:
    parts: list[str] = []
    while True:
        slash = text.find("\\", at)
        end = text.index(quote, at)
        is_last = slash < 0 or end < slash
        plain = text[at:end] if is_last else text[at:slash]
        char = "" if is_last else _ESCAPES.get(text[slash + 1])
        if char is None or not plain.isprintable():
            raise _UnusualError
        parts += (plain, char)
        if is_last:
            return "".join(parts), end + 1
        at = slash + 2
