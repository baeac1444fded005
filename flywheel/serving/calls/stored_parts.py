"""The parts of requests in the file of a call log: their numbers, their contents, and which calls repeat them.

The standard library and msgspec only, because the server uses it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import sqlite3
import zlib
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any, Final

import msgspec

from flywheel.serving.calls.request_parts import LISTS, split

HASHES_PER_QUERY: Final = 500
_MARK: Final = b"\x01"
"""Begins packed numbers. Those of earlier versions begin with an even byte."""
_numbers = msgspec.json.Decoder(list[int]).decode


def hash_of(part: bytes) -> bytes:
    return hashlib.sha256(part).digest()[:16]


def packed(numbers: Sequence[int]) -> bytes:
    """Part numbers as the first and the last of each run of consecutive ones: the differences between these."""
    ends: list[int] = []
    for number in numbers:
        if ends and number == ends[-1] + 1:
            ends[-1] = number
        else:
            ends += [number, number]
    steps = [later - earlier for earlier, later in itertools.pairwise([0, *ends])]
    return _MARK + zlib.compress(msgspec.json.encode(steps), 1)


def runs(packed: bytes) -> list[tuple[int, int]]:
    """The first and the last number of each run."""
    is_new = packed.startswith(_MARK)
    steps: Iterable[int] = _numbers(zlib.decompress(packed[1:])) if is_new else _older_steps(packed)
    ends = list(itertools.accumulate(steps))
    return list(zip(ends[::2], ends[1::2], strict=True))


def _older_steps(packed: bytes) -> Iterator[int]:
    """The same differences from what earlier versions packed, where the second one is that of the ends of the run
    plus 1: signed numbers (zigzag) and counts in turn, seven bits a byte, the lowest first, to a byte below 128."""
    value = shift = 0
    is_count = False
    for byte in packed:
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            yield value - 1 if is_count else (value >> 1) ^ -(value & 1)
            is_count = not is_count
            value = shift = 0


def numbers_of(connection: sqlite3.Connection, hashes: Sequence[bytes]) -> dict[bytes, int]:
    """The numbers of those parts that are stored, by hash."""
    known: dict[bytes, int] = {}
    for start in range(0, len(hashes), HASHES_PER_QUERY):
        asked = hashes[start : start + HASHES_PER_QUERY]
        query = f"SELECT hash, part FROM parts WHERE hash IN ({', '.join('?' * len(asked))})"  # noqa: S608 - numbers
        known.update(connection.execute(query, asked).fetchall())
    return known


def contents_of(
    connection: sqlite3.Connection, request: bytes, known: Container[int] = ()
) -> tuple[list[int], dict[int, bytes]]:
    """The part numbers of a packed request, and the contents of those parts that are not `known`."""
    parts: list[int] = []
    contents: dict[int, bytes] = {}
    for first, last in runs(request):
        run = range(first, last + 1)
        parts += run
        if any(part not in known for part in run):
            query = "SELECT part, content FROM parts WHERE part BETWEEN ? AND ?"
            for part, content in connection.execute(query, (first, last)):
                if part not in known:
                    contents[part] = zlib.decompress(content)
    if missing := [part for part in parts if part not in known and part not in contents]:
        raise sqlite3.DatabaseError(f"part {missing[0]} of a request is missing")
    return parts, contents


def body_of(connection: sqlite3.Connection, request: bytes) -> bytes:
    """The body of a packed request."""
    parts, contents = contents_of(connection, request)
    return b"".join(contents[part] for part in parts)


def resending(connection: sqlite3.Connection, calls: Iterable[tuple[int, str, bytes]]) -> dict[str, list[str]]:
    """The request ids of later calls whose messages begin with all messages of a call, by that call's request id.
    `calls` have number, request id and packed request.

    A message is the same if it was sent as the same bytes. Where the later request is kept as it was sent, because
    msgspec refuses it, values are compared.
    """
    # A history is looked for by its last part.
    by_end: dict[int, list[tuple[int, str, list[int]]]] = defaultdict(list)
    by_value: list[tuple[int, str, list[Any]]] = []
    for number, request_id, request in calls:
        parts, contents = contents_of(connection, request)
        body = b"".join(contents[part] for part in parts)
        own = split(body)
        hashes = [hash_of(part) for part in own.parts[own.places]]
        known = numbers_of(connection, hashes)
        # As the call itself has them, and as later ones do: a call of an earlier version has white space in them.
        histories = [parts[own.places], [known[each] for each in hashes if each in known]]
        for history in histories[: 1 if histories[0] == histories[1] else 2]:
            if len(history) == len(hashes) > 0:
                by_end[history[-1]].append((number, request_id, history))
        if messages := _messages_of(body):
            by_value.append((number, request_id, messages))
    found: dict[str, list[str]] = defaultdict(list)
    query = "SELECT number, request_id, request FROM calls WHERE number > ? ORDER BY number"
    for later, later_id, request in connection.execute(query, (min((each[0] for each in by_value), default=0),)):
        ends = runs(request)
        if sum(last - first + 1 for first, last in ends) == 1:
            sent_values = _messages_of(body_of(connection, request))
            for number, request_id, messages in by_value:
                if number < later and sent_values[: len(messages)] == messages:
                    found[request_id].append(later_id)
        if not any(first <= end <= last for first, last in ends for end in by_end):
            continue
        sent = [part for first, last in ends for part in range(first, last + 1)]
        for at, part in enumerate(sent, 1):
            for number, request_id, history in by_end.get(part, ()):
                if number < later and len(history) <= at and sent[at - len(history) : at] == history:
                    found[request_id].append(later_id)
    return dict(found)


def _messages_of(body: bytes) -> list[Any]:
    try:
        request = json.loads(body, parse_constant=str)
    except (ValueError, RecursionError):
        return []
    values = [request.get(key) for key in LISTS] if isinstance(request, dict) else []
    return next((each for each in values if isinstance(each, list)), [])
