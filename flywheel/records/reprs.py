"""Parses the Python reprs that AgentScope 1.x writes into spans: `Msg(id='…', content=[…], …)`, `ToolResponse(…)`.

They are never evaluated. Nearly all of them become JSON when their strings and names are spelled as JSON spells them,
which takes a third of the time of a syntax tree; the others are parsed with `ast`. Message texts contain quotes,
brackets and whole other reprs: regular expressions look for whole strings and at what is between them.
"""

from __future__ import annotations

import ast
import re
import threading
from functools import lru_cache
from typing import Any, Final

import msgspec

_MSG: Final = "Msg(id='"
_NAME: Final = "', name='"
_CONTENT: Final = "', content="
_TOKEN: Final = re.compile(r"""('[^'\\]*(?:\\.[^'\\]*)*'|"[^"\\]*(?:\\.[^"\\]*)*"|(?<![a-z_])[a-z_]+=)""")
"""A string, or the name of a keyword argument."""
_UNLIKE_JSON: Final = ("\\u", "\\/", '\\"')
"""Escapes that mean something else in JSON, or that no repr has."""
_decode: Final = msgspec.json.Decoder(dict[str, Any]).decode
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
    if (found := as_json(text)) is not None:
        return found
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


def as_json(text: str) -> dict[str, Any] | None:
    """The keyword arguments of a call whose values can be spelled as JSON; None for any other text."""
    if not text.isprintable() or any(escape in text for escape in _UNLIKE_JSON):
        return None
    parts = _TOKEN.split(text)
    between = "\n".join(parts[::2]).replace("None", "null").replace("True", "true").replace("False", "false")
    parts[::2] = between.split("\n")
    parts[1::2] = map(_respelled, parts[1::2])
    name, _, rest = "".join(parts).partition("(")
    try:
        found = _decode(f"{{{rest[:-1]}}}")
    except (ValueError, RecursionError):
        return None
    return found if name.isidentifier() and rest.endswith(")") else None


def _respelled(token: str) -> str:
    """A Python string, or a name and `=`, as JSON. A string between double quotes is JSON as it is."""
    if token[0] == "'":
        return '"' + token[1:-1].replace("\\'", "'").replace('"', '\\"') + '"'
    return token if token[0] == '"' else f'"{token[:-1]}":'


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
