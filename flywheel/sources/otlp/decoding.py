"""Decodes OTLP/HTTP request bodies and encodes the responses: compression, protobuf or JSON, and size limits.

Limits are checked before a body is parsed. An empty protobuf message takes two bytes in a body and hundreds in
memory, so a limit in bytes is not enough: spans, values, fields and nesting levels are counted.
https://opentelemetry.io/docs/specs/otlp/#otlphttp
https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import zlib
from collections.abc import Iterator
from enum import StrEnum
from functools import cache
from typing import Any, Final, NamedTuple

import orjson
from google.protobuf.descriptor import Descriptor
from google.protobuf.json_format import MessageToJson, ParseDict, ParseError
from google.protobuf.message import DecodeError, Message
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from flywheel.system.files import json_line

MAX_SPANS: Final = 20_000
"""Spans of one request. An exporter sends 512 at once, a collector some thousands."""
MAX_VALUES: Final = 500_000
"""Values of one request. A span of an agent has about a hundred."""
MAX_FIELDS: Final = 2_000_000
"""Fields of one request, known or not; a value has two. Counting so many takes about half a second."""

_VARINT: Final = 0
_BYTES: Final = 2
_NUMBERS: Final = {1: 8, 5: 4}
"""Length in bytes of fixed-size numbers, by wire type."""
_ROOT: Final = ExportTraceServiceRequest.DESCRIPTOR
_STRINGS: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_PUNCTUATION: Final = (b"{", b"[", b",")


class TooLargeError(ValueError):
    """A body that exceeds a limit, as received or uncompressed."""


class WireError(ValueError):
    """Bytes that are not a protobuf message."""


class _Fields(NamedTuple):
    """The fields of a message type that are counted, by field number; 0 where there is no such field."""

    within: dict[int, Descriptor]
    """Fields with messages."""
    repeated: frozenset[int]
    keys: int
    """The attribute key, of which each dot is a nesting level."""
    spans: int


def check_wire(body: bytes | bytearray) -> None:
    """Count spans, values and fields of a protobuf body without parsing it. Raises TooLargeError and WireError."""
    spans = values = fields = 0
    waiting = [(0, len(body), _ROOT)]
    while waiting:
        at, end, descriptor = waiting.pop()
        within, repeated, keys, of_spans = _fields(descriptor)
        while at < end:
            fields += 1
            if fields > MAX_FIELDS:
                _check("fields", fields, MAX_FIELDS)
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
    """Raise TooLargeError if a JSON body has too many values; counts its punctuation."""
    if _punctuation(body) > MAX_VALUES:
        # Strings contain punctuation too; count again without them.
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
    """The end of a field with a number."""
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


WINDOWS: Final = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
"""Accepted content encodings, each with zlib's window size that selects the format."""
MAX_RATIO: Final = 250
"""Highest compression ratio. Histories that repeat in every span of a batch reach about a hundred."""
FREE_OF_RATIO: Final = 4 << 20
"""Uncompressed bytes up to which the ratio is not limited."""
Body = bytes | bytearray
_BLOCK: Final = 4096
_NESTING: Final = 100
_IDS: Final = ("traceId", "spanId", "parentSpanId", "trace_id", "span_id", "parent_span_id")


class Encoding(StrEnum):
    PROTOBUF = "application/x-protobuf"
    JSON = "application/json"


class UndecodableError(ValueError):
    """A body that does not match its headers."""


def inflated(body: Body, content_encoding: str, limit: int) -> Body:
    """The uncompressed body, of at most `limit` bytes. Raises UndecodableError or TooLargeError."""
    if content_encoding not in WINDOWS:
        return body
    by_ratio = max(MAX_RATIO * len(body), FREE_OF_RATIO)
    why = f"{limit:,} bytes" if limit <= by_ratio else f"{MAX_RATIO} times its size"
    limit = min(limit, by_ratio)
    whole = bytearray()
    stream = zlib.decompressobj(WINDOWS[content_encoding])
    try:
        # In blocks: zlib copies all data behind the end of a gzip member, for each of several members.
        for start in range(0, len(body), _BLOCK):
            rest = body[start : start + _BLOCK]
            while rest:
                if stream.eof:
                    stream = zlib.decompressobj(WINDOWS[content_encoding])
                whole += stream.decompress(rest, limit + 1 - len(whole))
                if len(whole) > limit:
                    raise TooLargeError(f"the body unpacks to more than {why}")
                rest = stream.unused_data
    except zlib.error as error:
        raise UndecodableError(f"the body is not {content_encoding}: {error}") from error
    if body and not stream.eof:
        raise UndecodableError(f"the {content_encoding} body is cut off")
    return whole


def request_of(body: Body, encoding: Encoding) -> ExportTraceServiceRequest:
    """Parse a body. Raises UndecodableError, and TooLargeError before objects beyond the limits are created."""
    request = ExportTraceServiceRequest()
    try:
        if encoding is Encoding.PROTOBUF:
            check_wire(body)
            request.ParseFromString(body)
        else:
            check_json(body)
            value = _json(body)
            if not isinstance(value, dict):
                raise UndecodableError(f"the body is a JSON {type(value).__name__}, not an object")
            for holder in _id_holders(value):
                _ids_to_base64(holder)
            ParseDict(value, request, ignore_unknown_fields=True, max_recursion_depth=_NESTING)
            check_wire(request.SerializeToString())
    except (WireError, DecodeError, ParseError, orjson.JSONDecodeError) as error:
        raise UndecodableError(f"the body is not an ExportTraceServiceRequest: {error}") from error
    return request


def _json(body: Body) -> Any:
    """Parse JSON. Lone surrogates, as a text cut within an emoji has them, become `?`."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as refused:
        try:
            return orjson.loads(json_line(json.loads(body)))
        except (ValueError, RecursionError):
            raise refused from None


def _id_holders(value: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for resource in _objects(value, "resourceSpans", "resource_spans"):
        for scope in _objects(resource, "scopeSpans", "scope_spans"):
            for span in _objects(scope, "spans"):
                yield span
                yield from _objects(span, "links")


def _objects(holder: dict[str, Any], *names: str) -> Iterator[dict[str, Any]]:
    for name in names:
        objects = holder.get(name)
        if isinstance(objects, list):
            yield from (item for item in objects if isinstance(item, dict))


def _ids_to_base64(holder: dict[str, Any]) -> None:
    for name in _IDS:
        value = holder.get(name)
        if isinstance(value, str):
            try:
                raw = binascii.unhexlify(value)
            except ValueError:
                # An invalid length, so that only this span is rejected. Empty would mean a root span.
                raw = b"?"
            holder[name] = base64.b64encode(raw).decode()


def accepted(encoding: Encoding, rejected: int = 0, why: str = "") -> bytes:
    """The body of a 200 response; `why` explains the rejected spans."""
    response = ExportTraceServiceResponse()
    if rejected:
        response.partial_success.rejected_spans = rejected
        response.partial_success.error_message = why
    return _encoded(response, encoding)


def refused(encoding: Encoding, code: int, why: str) -> bytes:
    """The body of an error response; `code` is a google.rpc.Code."""
    return _encoded(Status(code=code, message=why), encoding)


def _encoded(message: Message, encoding: Encoding) -> bytes:
    if encoding is Encoding.PROTOBUF:
        return bytes(message.SerializeToString())
    written: str = MessageToJson(message, indent=None)
    return written.encode()
