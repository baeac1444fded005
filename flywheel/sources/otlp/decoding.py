"""Decodes OTLP/HTTP request bodies and encodes the responses: compression, protobuf or JSON, and size limits.

Limits are checked before a body is parsed. An empty protobuf message takes two bytes in a body and hundreds in
memory, so a limit in bytes is not enough: spans, values and nesting levels are counted.
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

from flywheel.files import json_line

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


WINDOWS: Final = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
"""The content encodings that are understood, each with the window that tells zlib its framing."""
MAX_RATIO: Final = 250
"""Bytes that one byte may unpack to. Histories that repeat in every span of a batch reach about a hundred."""
FREE_OF_RATIO: Final = 4 << 20
"""Bytes that any body may unpack to."""
Body = bytes | bytearray
_PIECE: Final = 4096
_NESTING: Final = 100
_IDS: Final = ("traceId", "spanId", "parentSpanId", "trace_id", "span_id", "parent_span_id")


class Encoding(StrEnum):
    PROTOBUF = "application/x-protobuf"
    JSON = "application/json"


class UndecodableError(ValueError):
    """A body that is not what its headers say."""


def inflated(body: Body, content_encoding: str, limit: int) -> Body:
    """The body without its compression. Raises UndecodableError or TooLargeError."""
    if content_encoding not in WINDOWS:
        return body
    by_ratio = max(MAX_RATIO * len(body), FREE_OF_RATIO)
    why = f"{limit:,} bytes" if limit <= by_ratio else f"{MAX_RATIO} times its size"
    limit = min(limit, by_ratio)
    whole = bytearray()
    stream = zlib.decompressobj(WINDOWS[content_encoding])
    try:
        # A piece at a time: what is behind the end of one of several gzip members is copied for each of them.
        for start in range(0, len(body), _PIECE):
            rest = body[start : start + _PIECE]
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
    """The spans in a body. Raises UndecodableError, and TooLargeError before more is made of it than is accepted."""
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
    """Lone surrogates, which a text cut within an emoji ends in, become `?`, as they do everywhere."""
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
        found = holder.get(name)
        if isinstance(found, list):
            yield from (item for item in found if isinstance(item, dict))


def _ids_to_base64(holder: dict[str, Any]) -> None:
    for name in _IDS:
        value = holder.get(name)
        if isinstance(value, str):
            try:
                raw = binascii.unhexlify(value)
            except ValueError:
                # Not empty, which would be a root's parent, and of no id's length: this span alone is refused.
                raw = b"?"
            holder[name] = base64.b64encode(raw).decode()


def accepted(encoding: Encoding, rejected: int = 0, why: str = "") -> bytes:
    """The body of a 200."""
    response = ExportTraceServiceResponse()
    if rejected:
        response.partial_success.rejected_spans = rejected
        response.partial_success.error_message = why
    return _encoded(response, encoding)


def refused(encoding: Encoding, code: int, why: str) -> bytes:
    """The body of every other answer; `code` is a google.rpc.Code."""
    return _encoded(Status(code=code, message=why), encoding)


def _encoded(message: Message, encoding: Encoding) -> bytes:
    if encoding is Encoding.PROTOBUF:
        return bytes(message.SerializeToString())
    written: str = MessageToJson(message, indent=None)
    return written.encode()
