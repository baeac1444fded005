"""The parts of request bodies, which later requests of the same conversation repeat, in the file of a call log.

Each is stored once, with the number of its uses, until no call has it. The standard library and msgspec only, because
the server uses it.
"""

from __future__ import annotations

import hashlib
import itertools
import sqlite3
import zlib
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import msgspec
from msgspec import Raw

TABLES: Final = (
    "CREATE TABLE IF NOT EXISTS parts (part INTEGER PRIMARY KEY, hash BLOB NOT NULL UNIQUE, content BLOB NOT NULL)",
    # Apart from the contents, because each call writes here for all of its parts.
    "CREATE TABLE IF NOT EXISTS part_uses (part INTEGER PRIMARY KEY, uses INTEGER NOT NULL)",
    "CREATE INDEX IF NOT EXISTS unused_parts ON part_uses (part) WHERE uses = 0",
)
LISTS: Final = ("messages", "input")
MAX_PARTS: Final = 10_000
"""Maximum number of parts of a body. One with more is one part."""
HASHES_PER_QUERY: Final = 500
_MARK: Final = b"\x01"
"""Begins packed numbers. Those of format 1 begin with an even byte."""
_numbers = msgspec.json.Decoder(list[int]).decode
_members = msgspec.json.Decoder(dict[str, Raw]).decode
_elements = msgspec.json.Decoder(list[Raw]).decode


class Parts(NamedTuple):
    """The parts of a body, none of them empty, and which of them are its messages."""

    parts: list[bytes]
    messages: slice = slice(0)


def split(body: bytes) -> Parts:
    """A part ends after each top-level value and after each element of `messages` or `input`. It begins with the
    separator before it: the last message of one request is the same part as that message in the middle of the next.

    Joined, the parts are a JSON text with the same keys and values, each value as the bytes that were sent. White
    space between them is not kept, and of a key that is there twice the last value is. A body that msgspec refuses
    (no object, no UTF-8, half a surrogate pair) is one part, as it was sent.
    """
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


def add(connection: sqlite3.Connection, parts: Sequence[bytes]) -> bytes:
    """Store those parts of a request that are not there, and count its uses. Returns their numbers, packed."""
    hashes = [hash_of(part) for part in parts]
    known = numbers_of(connection, hashes)
    (last,) = connection.execute("SELECT coalesce(max(part), 0) FROM parts").fetchone()
    new = {digest: part for digest, part in zip(hashes, parts, strict=True) if digest not in known}
    known |= {digest: number for number, digest in enumerate(new, last + 1)}
    rows = [(known[digest], digest, zlib.compress(part, 1)) for digest, part in new.items()]
    connection.executemany("INSERT INTO parts VALUES (?, ?, ?)", rows)
    connection.executemany("INSERT INTO part_uses VALUES (?, 0)", [(known[digest],) for digest in new])
    request = packed([known[digest] for digest in hashes])
    connection.executemany("UPDATE part_uses SET uses = uses + 1 WHERE part BETWEEN ? AND ?", runs(request))
    return request


def remove(connection: sqlite3.Connection, requests: Iterable[bytes]) -> None:
    """Take back the uses by packed requests, and remove the parts that no call has any more."""
    taken = (run for request in requests for run in runs(request))
    connection.executemany("UPDATE part_uses SET uses = uses - 1 WHERE part BETWEEN ? AND ?", taken)
    connection.execute("DELETE FROM parts WHERE part IN (SELECT part FROM part_uses WHERE uses = 0)")
    connection.execute("DELETE FROM part_uses WHERE uses = 0")


def convert(connection: sqlite3.Connection) -> None:
    """In a file of format 1, count the uses of parts in place of their last use. Requests stay as they are."""
    changes: Counter[int] = Counter()
    for (request,) in connection.execute("SELECT request FROM calls"):
        for first, last in runs(request):
            changes[first] += 1
            changes[last + 1] -= 1
    connection.execute("DROP TABLE part_uses")
    for table in TABLES:
        connection.execute(table)
    numbers = range(min(changes, default=0), max(changes, default=0))
    counts = itertools.accumulate(changes[number] for number in numbers)
    rows = ((number, uses) for number, uses in zip(numbers, counts, strict=True) if uses)
    connection.executemany("INSERT INTO part_uses VALUES (?, ?)", rows)


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
            rows = connection.execute(query, (first, last))
            contents |= {part: zlib.decompress(content) for part, content in rows if part not in known}
    if missing := [part for part in parts if part not in known and part not in contents]:
        raise sqlite3.DatabaseError(f"part {missing[0]} of a request is missing")
    return parts, contents


def body_of(connection: sqlite3.Connection, request: bytes) -> bytes:
    """The body of a packed request."""
    parts, contents = contents_of(connection, request)
    return b"".join(contents[part] for part in parts)


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
    """The same differences from what format 1 packed, where the second one is that of the ends of the run plus 1:
    signed numbers (zigzag) and counts in turn, seven bits a byte, the lowest first, to a byte below 128."""
    value = shift = 0
    is_count = False
    for byte in packed:
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            yield value - 1 if is_count else (value >> 1) ^ -(value & 1)
            is_count = not is_count
            value = shift = 0


def hash_of(part: bytes) -> bytes:
    return hashlib.sha256(part).digest()[:16]


def numbers_of(connection: sqlite3.Connection, hashes: Sequence[bytes]) -> dict[bytes, int]:
    """The numbers of those parts that are stored, by hash."""
    known: dict[bytes, int] = {}
    for start in range(0, len(hashes), HASHES_PER_QUERY):
        asked = hashes[start : start + HASHES_PER_QUERY]
        query = f"SELECT hash, part FROM parts WHERE hash IN ({', '.join('?' * len(asked))})"  # noqa: S608 - numbers
        known.update(connection.execute(query, asked).fetchall())
    return known
