"""Parses the Python reprs that AgentScope 1.x writes into spans: `Msg(id='…', content=[…], …)`, `ToolResponse(…)`.

They are parsed with `ast` and never evaluated. No regular expression looks inside them, as message texts contain
quotes, brackets and whole other reprs.
"""

from __future__ import annotations

import ast
import threading
from functools import lru_cache
from typing import Any, Final

_MSG: Final = "Msg(id='"
_NAME: Final = "', name='"
_CONTENT: Final = "', content="
_PARSING: Final = threading.Lock()
"""Before CPython 3.11.8, `ast.parse` in several threads at once can raise SystemError (cpython issue 106905)."""


class ReprError(ValueError):
    """A text that begins like a repr but is cut off or garbled."""


def is_message(text: str) -> bool:
    """Whether a text begins like the repr of a message."""
    return text.startswith("Msg(id=")


def is_result(text: str) -> bool:
    """Whether a text begins like the repr of a tool's or a model's response."""
    return text.startswith(("ToolResponse(content=", "ChatResponse(content="))


def is_block(value: object) -> bool:
    """Whether a value is a text that begins like the repr of a block of a message."""
    return isinstance(value, str) and value.startswith(
        ("TextBlock(type=", "DataBlock(type=", "ThinkingBlock(type=", "HintBlock(type=")
    )


@lru_cache(maxsize=16)
def parse_call(text: str) -> dict[str, Any]:
    """The keyword arguments of a repr such as `Msg(…)`; callers must not change them. Raises ReprError.

    A value that is not a literal (other objects, dates, enums) becomes a dictionary of its keywords, or its source
    text. The last few results are cached, because one reply needs the same repr more than once.
    """
    text = _quoted_name(text)
    try:
        node = _expression(text)
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        if isinstance(error, (MemoryError, RecursionError)):
            raise ReprError("it is nested too deeply") from error
        try:
            node = _expression(_without_objects(text))
        except (SyntaxError, ValueError, MemoryError, RecursionError):
            raise ReprError(f"it is no Python repr: {text[:40]}… ({error})") from error
    if not isinstance(node, ast.Call):
        raise ReprError(f"it is no call: {text[:40]}…")
    try:
        return {keyword.arg: _value(keyword.value) for keyword in node.keywords if keyword.arg}
    except RecursionError as error:
        raise ReprError("it is nested too deeply") from error


def _expression(text: str) -> ast.expr:
    with _PARSING:
        return ast.parse(text, mode="eval").body


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=str() | int() | float() | None):
            return node.value
        case ast.Dict():
            # A key of None stands for `**mapping`, which no repr has.
            return {str(_value(k)): _value(v) for k, v in zip(node.keys, node.values, strict=True) if k is not None}
        case ast.List() | ast.Tuple() | ast.Set():
            return [_value(item) for item in node.elts]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.Call() if node.keywords and not node.args:
            return {keyword.arg: _value(keyword.value) for keyword in node.keywords if keyword.arg}
        case _:
            return ast.unparse(node)


def _quoted_name(text: str) -> str:
    """Escape a message's name, which AgentScope writes between quotes as it is: `name='O'Brien'`."""
    if not text.startswith(_MSG):
        return text
    start = text.find(_NAME)
    end = text.find(_CONTENT, start)
    if start < 0 or end < 0:
        return text
    name = text[start + len(_NAME) : end]
    return f"{text[:start]}', name={name!r}, content={text[end + len(_CONTENT) :]}"


def _without_objects(text: str) -> str:
    """Quote every `<object at 0x…>` outside of string literals, so that the rest can be parsed."""
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
