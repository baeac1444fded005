"""Splits the JSON body of a model request into parts that the next request of the same conversation repeats.

A body ends a part after each top-level value and after each element of `messages` or `input`. A part begins with the
separator before it, so the last message of one request is the same part as that message in the middle of the next.
Joined, the parts are the body, byte for byte. Standard library only, because the server uses it.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

MAX_PARTS: Final = 10_000
"""Maximum number of parts of a body. The last one holds the rest."""
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


def parts_of(body: bytes) -> list[bytes]:
    """The parts of a body, none of them empty. A body that is not a JSON object in UTF-8 is one part."""
    try:
        text = body.decode()
        ends = list(itertools.islice(_ends(text), MAX_PARTS - 1))
    except (ValueError, IndexError, RecursionError):
        return [body] if body else []
    cuts = itertools.pairwise([0, *ends, len(text)])
    return [text[start:end].encode() for start, end in cuts if start < end]


def _ends(text: str) -> Iterator[int]:
    """Where parts end. Raises ValueError or IndexError if the text is not a JSON object."""
    scan, within = JsonScan(text), JsonScan(text)
    for key, start, end in scan.members():
        if key in LISTS and text[start] == "[":
            yield from (last for _, last in within.elements(start))  # The bracket is in the part of the next value.
        else:
            yield end


def messages_in(body: bytes) -> slice:
    """Which of the parts of a body are the elements of its list of messages; none if it has no list, or has more
    elements than parts."""
    at = 0
    try:
        text = body.decode()
        scan = JsonScan(text)
        for key, start, _ in scan.members():
            if key in LISTS and text[start] == "[":
                end = at + sum(1 for _ in scan.elements(start))
                return slice(at, end) if end < MAX_PARTS else slice(0)
            at += 1
    except (ValueError, IndexError, RecursionError):
        pass
    return slice(0)


def packed(numbers: Sequence[int]) -> bytes:
    """Part numbers as run lengths: `first, count` of each run of consecutive numbers, as integers of varying length.

    The first number of a run is stored as its distance from the end of the run before it.
    """
    packed = bytearray()
    last = 0
    # Within a run, the distance between a number and its position is the same.
    for _, run in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        distance = members[0] - last
        packed += _coded(distance * 2 if distance >= 0 else -distance * 2 - 1) + _coded(len(members))
        last = members[-1]
    return bytes(packed)


def runs(packed: bytes) -> list[tuple[int, int]]:
    """The first and the last number of each run."""
    values = _integers(packed)
    found: list[tuple[int, int]] = []
    last = 0
    for coded, count in zip(values, values, strict=True):
        first = last + (-(coded + 1) // 2 if coded & 1 else coded // 2)
        last = first + count - 1
        found.append((first, last))
    return found


def _coded(value: int) -> bytes:
    """Seven bits a byte, the lowest first; the last byte is below 128."""
    coded = bytearray()
    while value > 127:
        coded.append(value & 127 | 128)
        value >>= 7
    return bytes([*coded, value])


def _integers(packed: Iterable[int]) -> Iterator[int]:
    value = shift = 0
    for byte in packed:
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            yield value
            value = shift = 0
