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

_value = json.JSONDecoder().raw_decode
_space = re.compile(r"[ \t\n\r]*").match


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
    at = _skip(text, 0)
    if text[at] != "{":
        return
    at = _skip(text, at + 1)
    while text[at] != "}":
        key, at = _value(text, at)
        at = _skip(text, at)
        if text[at] != ":":
            raise ValueError("expected a colon")
        at = _skip(text, at + 1)
        if key in LISTS and text[at] == "[":
            at = _skip(text, at + 1)
            while text[at] != "]":
                _, at = _value(text, at)
                yield at
                at = _next(text, at)
            at += 1  # The bracket is in the part of the next value.
        else:
            _, at = _value(text, at)
            yield at
        at = _next(text, at)


def _next(text: str, at: int) -> int:
    """The position after white space and a comma."""
    at = _skip(text, at)
    return _skip(text, at + 1) if text[at] == "," else at


def _skip(text: str, at: int) -> int:
    found = _space(text, at)
    return found.end() if found else at


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
