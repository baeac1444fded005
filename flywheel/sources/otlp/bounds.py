"""How much a body may hold, found out before anything is made of it.

A protobuf message without content takes two bytes of a body and hundreds of memory: a limit of bytes is not enough.
What becomes an object is counted: messages, repeated values, and the levels that the dots of a key stand for.
The wire format of protobuf is walked for that; of JSON the punctuation outside of strings is counted.
https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

import re
from functools import cache
from typing import Final, NamedTuple

from google.protobuf.descriptor import Descriptor
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

MAX_SPANS: Final = 20_000
"""Spans of one request. An exporter sends 512 at once, a collector some thousand."""
MAX_VALUES: Final = 500_000
"""Values of one request: a span of an agent has about a hundred."""

_VARINT: Final = 0
_BYTES: Final = 2
_NUMBERS: Final = {1: 8, 5: 4}
"""Bytes of numbers of fixed length, by wire type."""
_ROOT: Final = ExportTraceServiceRequest.DESCRIPTOR
_STRINGS: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_PUNCTUATION: Final = (b"{", b"[", b",")


class TooLargeError(ValueError):
    """A body that holds, or unpacks to, more than is accepted."""


class WireError(ValueError):
    """Bytes that are no protobuf message."""


class _Fields(NamedTuple):
    """What is counted of a message, by numbers of fields; `keys` and `spans` are 0 where there is no such field."""

    within: dict[int, Descriptor]
    """The fields that are messages."""
    repeated: frozenset[int]
    keys: int
    """The field whose dots are levels."""
    spans: int


def check_wire(body: bytes | bytearray) -> None:
    """Raises TooLargeError, and WireError for what no parser would take."""
    spans = values = 0
    waiting = [(0, len(body), _ROOT)]
    while waiting:
        at, end, descriptor = waiting.pop()
        within, repeated, keys, of_spans = _fields(descriptor)
        while at < end:
            tag, at = _varint(body, at)
            kind, number = tag & 7, tag >> 3
            if kind != _BYTES:
                at = _skipped(body, at, kind)
                continue
            length, at = _varint(body, at)
            if at + length > end:
                raise WireError("a field is longer than its message")
            if (inner := within.get(number)) is not None:
                values += 1
                spans += number == of_spans
                if length:
                    waiting.append((at, at + length, inner))
            elif number == keys:
                values += body.count(b".", at, at + length)
            else:
                values += number in repeated
            at += length
            _check("spans", spans, MAX_SPANS)
            _check("values", values, MAX_VALUES)
        if at != end:
            raise WireError("a message ends within a field")


def check_json(body: bytes | bytearray) -> None:
    """Raises TooLargeError for a JSON text of too many values."""
    if _punctuation(body) > MAX_VALUES:
        # Texts have punctuation too. Without them only values are left.
        _check("values", _punctuation(_STRINGS.sub(b"", body)), MAX_VALUES)


def _check(name: str, count: int, most: int) -> None:
    if count > most:
        raise TooLargeError(f"the body holds more than {most:,} {name}")


def _punctuation(text: bytes | bytearray) -> int:
    return sum(map(text.count, _PUNCTUATION))


def _varint(body: bytes | bytearray, at: int) -> tuple[int, int]:
    try:
        value = body[at]
        at += 1
        if value < 128:
            return value, at
        value &= 127
        for shift in range(7, 70, 7):
            byte = body[at]
            at += 1
            value |= (byte & 127) << shift
            if byte < 128:
                return value, at
    except IndexError:
        raise WireError("the body is cut off") from None
    raise WireError("a number of more than ten bytes")


def _skipped(body: bytes | bytearray, at: int, kind: int) -> int:
    """Where a field ends that holds a number."""
    if kind == _VARINT:
        return _varint(body, at)[1]
    if kind not in _NUMBERS:
        raise WireError(f"a field of wire type {kind}")
    return at + _NUMBERS[kind]


@cache
def _fields(descriptor: Descriptor) -> _Fields:
    within = {field.number: field.message_type for field in descriptor.fields if field.message_type is not None}
    return _Fields(
        within,
        frozenset(field.number for field in descriptor.fields if field.default_value == []),
        KeyValue.KEY_FIELD_NUMBER if descriptor.full_name == KeyValue.DESCRIPTOR.full_name else 0,
        next((number for number, inner in within.items() if inner.full_name == Span.DESCRIPTOR.full_name), 0),
    )
