"""The Python reprs that AgentScope 1.x writes into spans: `Msg(id='…', content=[…], …)`, `ToolResponse(…)`.

They are read as Python literals: plain ones by `plain_literal`, all others through `ast`. Nothing in them is ever
evaluated, and no regular expression looks inside them: message texts hold quotes, brackets and whole other reprs.
"""

from __future__ import annotations

import ast
from functools import lru_cache
from typing import Any, Final

_MSG: Final = "Msg(id='"
_NAME: Final = "', name='"
_CONTENT: Final = "', content="


class ReprError(ValueError):
    """A text that begins like a repr but is none: cut off or garbled."""


def is_message(text: str) -> bool:
    """Whether a text presents itself as the repr of a message (it may still be cut off)."""
    return text.startswith("Msg(id=")


def is_result(text: str) -> bool:
    """Whether a text presents itself as the repr of a tool's or a model's response."""
    return text.startswith(("ToolResponse(content=", "ChatResponse(content="))


def is_block(value: object) -> bool:
    """Whether something presents itself as the repr of a block of a message."""
    return isinstance(value, str) and value.startswith(
        ("TextBlock(type=", "DataBlock(type=", "ThinkingBlock(type=", "HintBlock(type=")
    )


@lru_cache(maxsize=16)
def parse_call(text: str) -> dict[str, Any]:
    """The keyword arguments of a repr such as `Msg(…)`; the caller must not change them. Raises ReprError.

    What is no literal inside (other objects, dates, enums) becomes a dictionary of its own keywords or its source
    text. The last few are kept, because one reply asks for the same repr more than once.
    """
    if (plain := plain_call(text)) is not None:
        return plain
    text = _quoted_name(text)
    try:
        node = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        if isinstance(error, (MemoryError, RecursionError)):
            raise ReprError("it is nested too deeply") from error
        try:
            node = ast.parse(_without_objects(text), mode="eval").body
        except (SyntaxError, ValueError, MemoryError, RecursionError):
            raise ReprError(f"it is no Python repr: {text[:40]}… ({error})") from error
    if not isinstance(node, ast.Call):
        raise ReprError(f"it is no call: {text[:40]}…")
    try:
        return {keyword.arg: _value(keyword.value) for keyword in node.keywords if keyword.arg}
    except RecursionError as error:
        raise ReprError("it is nested too deeply") from error


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=str() | int() | float() | None):
            return node.value
        case ast.Dict():
            # A key of None stands for `**mapping`, which no repr has.
            return {_key(k): _value(v) for k, v in zip(node.keys, node.values, strict=True) if k is not None}
        case ast.List() | ast.Tuple() | ast.Set():
            return [_value(item) for item in node.elts]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.Call() if node.keywords and not node.args:
            return {keyword.arg: _value(keyword.value) for keyword in node.keywords if keyword.arg}
        case _:
            return ast.unparse(node)


def _key(node: ast.expr) -> str:
    value = _value(node)
    return value if isinstance(value, str) else str(value)


def _quoted_name(text: str) -> str:
    """AgentScope writes a message's name between quotes without escaping it: `name='O'Brien'`."""
    if not text.startswith(_MSG):
        return text
    start = text.find(_NAME)
    end = text.find(_CONTENT, start)
    if start < 0 or end < 0:
        return text
    name = text[start + len(_NAME) : end]
    return f"{text[:start]}', name={name!r}, content={text[end + len(_CONTENT) :]}"


def _without_objects(text: str) -> str:
    """Put every `<object at 0x…>` outside of string literals between quotes, so that the rest parses."""
    out: list[str] = []
    at = 0
    while at < len(text):
        char = text[at]
        end = at + 1
        if char in "'\"":
            while end < len(text) and text[end] != char:
                end += 2 if text[end] == "\\" else 1
            end += 1
            out.append(text[at:end])
        elif char == "<":
            depth = 1
            while end < len(text) and depth:
                depth += {"<": 1, ">": -1}.get(text[end], 0)
                end += 1
            out.append(repr(text[at:end]))
        else:
            out.append(char)
        at = end
    return "".join(out)


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
            found[name], at = _plain_value(text, end + 1)
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


def _plain_value(text: str, at: int) -> tuple[Any, int]:
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
        value, at = _plain_value(text, at)
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
        found[key], at = _plain_value(text, at + 2)
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
