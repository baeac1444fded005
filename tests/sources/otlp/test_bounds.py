"""Small bodies that would become many objects: they are refused before anything is made of them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from flywheel.sources.otlp import decoding, rows
from flywheel.sources.otlp.decoding import (
    FREE_OF_RATIO,
    MAX_RATIO,
    MAX_SPANS,
    MAX_VALUES,
    Encoding,
    TooLargeError,
    WireError,
    check_json,
    check_wire,
    inflated,
    request_of,
)
from flywheel.sources.otlp.receiver import LIMITS
from flywheel.sources.otlp.rows import rows_of
from tests.sources.otlp.exporting import JSON, PROTOBUF, fixture, ids, request, span, stored
from tests.sources.otlp.exporting import request_of as request_from

GZIP = {**PROTOBUF, "Content-Encoding": "gzip"}


def field(number: int, content: bytes) -> bytes:
    """A field with a length, as protobuf writes it."""
    head, length = bytearray([number << 3 | 2]), len(content)
    while length > 127:
        head.append(length & 127 | 128)
        length >>= 7
    return bytes((*head, length)) + content


def within(*path: int, content: bytes) -> bytes:
    for number in reversed(path):
        content = field(number, content)
    return content


SPAN = (1, 2, 2)
"""The numbers of the fields that lead to a span."""
ATTRIBUTE = (*SPAN, 9)
TOO_MANY = MAX_VALUES + 1
BOMBS = {
    "spans": within(1, 2, content=b"\x12\x00" * (MAX_SPANS + 1)),
    "resources": b"\x0a\x00" * TOO_MANY,
    "scopes": within(1, content=b"\x12\x00" * TOO_MANY),
    "attributes": within(*SPAN, content=b"\x4a\x00" * TOO_MANY),
    "events": within(*SPAN, content=b"\x5a\x00" * TOO_MANY),
    "links": within(*SPAN, content=b"\x6a\x00" * TOO_MANY),
    "a status again and again": within(*SPAN, content=b"\x7a\x00" * TOO_MANY),
    "values of a list": within(*ATTRIBUTE, 2, 5, content=b"\x0a\x00" * TOO_MANY),
    "pairs of a mapping": within(*ATTRIBUTE, 2, 6, content=b"\x0a\x00" * TOO_MANY),
    "levels of a key": within(*ATTRIBUTE, 1, content=b"." * TOO_MANY),
    "levels of many keys": b"".join([within(*ATTRIBUTE, 1, content=b"." * 1000)] * (TOO_MANY // 1000 + 1)),
    "keys of entities": within(1, 1, 3, content=b"\x1a\x00" * TOO_MANY),
}


def unread(*_: object) -> None:
    raise AssertionError("the body was read")


@pytest.mark.parametrize("kind", BOMBS)
def test_what_would_be_too_many_objects_is_not_read(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ExportTraceServiceRequest.FromString(BOMBS[kind])  # it would be taken
    monkeypatch.setattr(decoding, "ExportTraceServiceRequest", lambda: SimpleNamespace(ParseFromString=unread))
    with pytest.raises(TooLargeError, match=r"more than [\d,]+ (spans|values)"):
        request_of(BOMBS[kind], Encoding.PROTOBUF)


async def test_millions_of_empty_spans_in_a_small_body_are_a_413(client: httpx2.AsyncClient, inbox: Path) -> None:
    packed = gzip.compress(within(1, 2, content=b"\x12\x00" * 15_000_000))
    assert len(packed) < 30_000
    assert (await client.post("/v1/traces", content=packed, headers=GZIP)).status_code == 413
    fewer = gzip.compress(within(1, 2, content=b"\x12\x00" * 1_000_000))
    answer = await client.post("/v1/traces", content=fewer, headers=GZIP)
    assert answer.status_code == 413
    assert b"20,000 spans. Send smaller batches." in answer.content
    assert ids(inbox) == []


def json_with(spans: bytes) -> bytes:
    return b'{"resourceSpans":[{"scopeSpans":[{"spans":[' + spans + b"]}]}]}"


JSON_BOMBS = {
    "spans": json_with(b",".join([b"{}"] * TOO_MANY)),
    "lists": json_with(b'{"unknown":[' + b",".join([b"[]"] * TOO_MANY) + b"]}"),
    "levels": json_with(b"[" * TOO_MANY),
    "numbers": json_with(b"0," * TOO_MANY),
    "numbers in a text that never ends": json_with(b"0," * TOO_MANY) + b'"' + b'\\"' * 2_000_000,
}


@pytest.mark.parametrize("kind", JSON_BOMBS)
def test_a_json_body_of_too_many_values_is_not_read(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "_json", unread)
    with pytest.raises(TooLargeError, match="500,000 values"):
        request_of(JSON_BOMBS[kind], Encoding.JSON)


@pytest.mark.parametrize(
    "spans",
    [
        b",".join([b"{}"] * (MAX_SPANS + 1)),
        b'{"attributes":[{"key":"' + b"." * TOO_MANY + b'"}]}',
    ],
)
def test_json_has_the_limits_of_protobuf_too(spans: bytes) -> None:
    with pytest.raises(TooLargeError):
        request_of(json_with(spans), Encoding.JSON)


async def test_punctuation_within_texts_is_not_counted(client: httpx2.AsyncClient, inbox: Path) -> None:
    """An answer that is code has as much of it as it likes."""
    code = 'x = [{"a", "\\"}]\n' * 200_000
    sent: dict[str, Any] = {
        "traceId": "0a" * 16,
        "spanId": "0b" * 8,
        "name": "by hand",
        "startTimeUnixNano": "1795238600000000000",
        "endTimeUnixNano": "1795238600000000001",
        "attributes": [{"key": "said", "value": {"stringValue": code}}],
    }
    body = json_with(json.dumps(sent).encode())
    assert sum(body.count(mark) for mark in (b"{", b"[", b",")) > MAX_VALUES
    answer = await client.post("/v1/traces", content=body, headers=JSON)
    assert (answer.status_code, answer.json()) == (200, {})
    (row,) = stored(inbox)
    assert json.loads(row["attributes"]) == {"said": code}


def test_a_text_that_never_ends_is_looked_through_once() -> None:
    check_json(b'"' + b'\\",' * (LIMITS.body_bytes // 3))


@pytest.mark.parametrize("spans", [b"", b'{"a":"b', b'"\\'])
def test_what_is_no_json_is_left_to_the_parser(spans: bytes) -> None:
    check_json(json_with(spans))


def test_what_agents_send_is_far_below_the_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "MAX_VALUES", MAX_VALUES // 5)
    monkeypatch.setattr(decoding, "MAX_SPANS", MAX_SPANS // 20)
    rows = fixture("new_v2")
    batch = request_from(rows * (512 // len(rows) + 1))
    assert len(batch.resource_spans) >= 512
    check_wire(batch.SerializeToString())


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text(max_size=20) | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)


def put(target: Any, value: Any) -> None:
    match value:
        case None:
            pass
        case bool():
            target.bool_value = value
        case int():
            target.int_value = value
        case str():
            target.string_value = value.encode("utf-8", "replace").decode()
        case bytes():
            target.bytes_value = value
        case list():
            target.array_value.SetInParent()
            for item in value:
                put(target.array_value.values.add(), item)
        case dict():
            target.kvlist_value.SetInParent()
            for key, item in value.items():
                pair = target.kvlist_value.values.add(key=key.encode("utf-8", "replace").decode())
                put(pair.value, item)


@given(st.lists(VALUES, max_size=5), st.integers(0, 10_000))
def test_what_the_parser_takes_is_walked_to_its_end(values: list[Any], cut: int) -> None:
    sent = request(span(1), span(2, parent=1))
    for number, value in enumerate(values):
        put(sent.resource_spans[0].scope_spans[0].spans[0].attributes.add(key=f"a.{number}").value, value)
    body = sent.SerializeToString()
    check_wire(body)
    cut_off = body[: cut % (len(body) + 1)]
    try:
        ExportTraceServiceRequest.FromString(cut_off)
    except DecodeError:
        return
    check_wire(cut_off)


@given(st.binary(max_size=60))
def test_what_is_no_message_for_the_walk_is_none_for_the_parser(body: bytes) -> None:
    """Groups are the exception: nobody sends them, and they are refused."""
    try:
        check_wire(body)
    except WireError as error:
        if "wire type 3" not in str(error):
            with pytest.raises(DecodeError):
                ExportTraceServiceRequest.FromString(body)


def test_the_ratio_of_compression_is_bounded() -> None:
    whole = bytes(3 * FREE_OF_RATIO)
    packed = gzip.compress(whole)
    assert len(packed) * MAX_RATIO < len(whole)
    with pytest.raises(TooLargeError, match="250 times its size"):
        inflated(packed, "gzip", LIMITS.body_bytes)
    some = bytes(FREE_OF_RATIO)
    assert inflated(gzip.compress(some), "gzip", LIMITS.body_bytes) == some


def test_a_batch_of_one_history_again_and_again_is_below_the_ratio() -> None:
    history = json.dumps([{"role": "user", "parts": [{"type": "text", "content": f"line {n}"}]} for n in range(300)])
    body = request(*(span(n, {"gen_ai.input.messages": history}) for n in range(1, 600))).SerializeToString()
    assert len(body) > 2 * FREE_OF_RATIO
    assert inflated(gzip.compress(body), "gzip", LIMITS.body_bytes) == body


def test_texts_of_json_become_no_more_values_than_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "MAX_VALUES", 1000)
    large, small = json.dumps([[]] * 1000), json.dumps([1, 2])
    sent = request(
        span(1, {"large": large, "small": small}), *(span(n, {"l": json.dumps([0] * 300)}) for n in range(2, 9))
    )
    made = [json.loads(dict(zip(rows.COLUMNS, row, strict=True))["attributes"]) for row in rows_of(sent).accepted]
    assert made[0] == {"large": large, "small": [1, 2]}
    assert [isinstance(each["l"], list) for each in made[1:]] == [True] * 3 + [False] * 4
