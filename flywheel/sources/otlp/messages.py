"""What travels over OTLP/HTTP: bodies to protobuf messages and back, in the encoding that the client chose.

It owns the two encodings and the compressions, and must not know what becomes of a request. The JSON encoding is
protobuf's own with one difference: ids are hexadecimal.
https://opentelemetry.io/docs/specs/otlp/#otlphttp
"""

from __future__ import annotations

import base64
import binascii
import json
import zlib
from collections.abc import Iterator
from enum import StrEnum
from typing import Any, Final

import orjson
from google.protobuf.json_format import MessageToJson, ParseDict, ParseError
from google.protobuf.message import DecodeError, Message
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from flywheel.files import json_line
from flywheel.sources.otlp.bounds import TooLargeError, WireError, check_json, check_wire

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
