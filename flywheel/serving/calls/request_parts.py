"""Splits the JSON body of a model request into parts that the next request of the same conversation repeats.

A body ends a part after each top-level value and after each element of `messages` or `input`. A part begins with the
separator before it, so the last message of one request is the same part as that message in the middle of the next.
Joined, the parts are a JSON text with the same keys and values, each value as the bytes that were sent; white space
between them is not kept, and of a key that is there twice the last value is. A body that msgspec refuses (no UTF-8,
no object, half a surrogate pair) is one part, as it was sent.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Final, NamedTuple

import msgspec
from msgspec import Raw

MAX_PARTS: Final = 10_000
"""Maximum number of parts of a body. One with more is one part."""
LISTS: Final = ("messages", "input")
MAX_DEPTH: Final = 100
"""Maximum nesting depth of a body. vLLM and chat templates recurse through objects and lists, and fail with a 500 at
Python's recursion limit."""
MAX_CONTAINERS: Final = 50_000
"""Maximum number of objects and lists in a body. A message has two to five; vLLM takes up to a second to refuse
10,000 that are none."""

_key = json.JSONDecoder().raw_decode
_space = re.compile(r"[ \t\n\r]*").match
# The first alternative is for strings without an escaped quotation mark, and takes a tenth of the time.
_STRING: Final = r'(?:"[^"]*+"(?<!\\")|"[^"\\]*+(?:\\.[^"\\]*+)*+")'
_string = re.compile(_STRING, re.DOTALL).match
_scalar = re.compile(r'[^][{}",:\s]++').match
_to_bracket = re.compile(rf'(?:[^][{{}}"]++|{_STRING})*+[][{{}}]', re.DOTALL).match


class TooComplexError(ValueError):
    """A JSON text that is nested too deeply, or holds too many objects and lists."""


class JsonScan:
    """Finds where the values of a JSON text begin and end, without building them. Only brackets take steps of Python.

    Texts that are not JSON are not always noticed. The methods raise TooComplexError, and ValueError or IndexError
    for what cannot be JSON.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._containers = 0

    def members(self, at: int = 0) -> Iterator[tuple[str, int, int]]:
        """Key, start and end of the values of the object that begins there; none of another value."""
        at = self.skip_space(at)
        if self._text[at] != "{":
            self._end(at)
            return
        at = self.skip_space(at + 1)
        while self._text[at] != "}":
            if self._text[at] != '"':
                raise ValueError("expected a key")
            key, at = _key(self._text, at)
            at = self.skip_space(at)
            if self._text[at] != ":":
                raise ValueError("expected a colon")
            start = self.skip_space(at + 1)
            end = self._end(start)
            yield key, start, end
            at = self._next(end)

    def elements(self, at: int) -> Iterator[tuple[int, int]]:
        """Start and end of the elements of the list that begins there."""
        at = self.skip_space(at + 1)
        while self._text[at] != "]":
            end = self._end(at)
            yield at, end
            at = self._next(end)

    def skip_space(self, at: int) -> int:
        found = _space(self._text, at)
        return found.end() if found else at

    def _next(self, at: int) -> int:
        """The position after white space and a comma."""
        at = self.skip_space(at)
        return self.skip_space(at + 1) if self._text[at] == "," else at

    def _end(self, at: int) -> int:
        """Where the value that begins there ends."""
        if self._text[at] not in "[{":
            found = _string(self._text, at) or _scalar(self._text, at)
            if found is None:
                raise ValueError("expected a value")
            return found.end()
        depth = 1  # of the object around it
        while found := _to_bracket(self._text, at):
            at = found.end()
            if self._text[at - 1] in "[{":
                depth += 1
                self._containers += 1
                if depth > MAX_DEPTH:
                    raise TooComplexError(f"is nested more than {MAX_DEPTH} levels deep")
                if self._containers > MAX_CONTAINERS:
                    raise TooComplexError(f"has more than {MAX_CONTAINERS:,} objects and lists")
            else:
                depth -= 1
                if depth == 1:
                    return at
        raise ValueError("the text is cut off")


_members = msgspec.json.Decoder(dict[str, Raw]).decode
_elements = msgspec.json.Decoder(list[Raw]).decode


class Parts(NamedTuple):
    """The parts of a body, none of them empty, and which of them are its messages."""

    parts: list[bytes]
    messages: slice = slice(0)


def split(body: bytes) -> Parts:
    parts: list[bytes] = []
    messages, separator = slice(0), b"{"
    try:
        for key, value in _members(body).items():
            begin = separator + msgspec.json.encode(key) + b":"
            raw, separator = bytes(value), b","
            if key in LISTS and raw.startswith(b"[") and (elements := [bytes(each) for each in _elements(value)]):
                messages = messages if messages.stop else slice(len(parts), len(parts) + len(elements))
                parts += [begin + b"[" + elements[0], *(b"," + each for each in elements[1:])]
                separator = b"],"
            else:
                parts.append(begin + raw)
    except (msgspec.DecodeError, RecursionError):
        return Parts([body] if body else [])
    parts.append(separator.removesuffix(b",") + b"}")
    return Parts(parts, messages) if len(parts) <= MAX_PARTS else Parts([body])
