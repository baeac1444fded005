"""Every answer but the ordinary 200: what is wrong, in the client's encoding, and nothing stored."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from google.rpc import code_pb2
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from flywheel.sources.otlp.decoding import TooLargeError, UndecodableError, inflated
from flywheel.sources.otlp.receiver import LIMITS
from tests.sources.otlp.exporting import BEGAN, JSON, PROTOBUF, ids, request, span, stored

GOOD = request(span(1)).SerializeToString()


def json_span(**changed: Any) -> dict[str, Any]:
    return {
        "traceId": "5B8EFFF798038103D269B633813FC60C",
        "spanId": "EEE19B7EC3C1B174",
        "parentSpanId": "",
        "name": "by hand",
        "kind": 2,
        "startTimeUnixNano": str(BEGAN),
        "endTimeUnixNano": str(BEGAN + 5),
        "attributes": [
            {"key": "gen_ai.usage.input_tokens", "value": {"intValue": "12"}},
            {"key": "gen_ai.usage.output_tokens", "value": {"intValue": 3}},
            {"key": "ratio", "value": {"doubleValue": 0.5}},
        ],
        "status": {"code": 2, "message": "no"},
        **changed,
    }


def json_body(*spans: dict[str, Any]) -> bytes:
    return json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": list(spans)}]}]}).encode()


def nested(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {"intValue": 1}
    for _ in range(levels):
        value = {"kvlistValue": {"values": [{"key": "k", "value": value}]}}
    return value


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (b"\xff\xffnothing of the kind", PROTOBUF),
        (GOOD[:-3], PROTOBUF),
        (b"{", JSON),
        (b"[]", JSON),
        (b'{"resourceSpans": 5}', JSON),
        (b'{"resourceSpans": [{"scopeSpans": [{"spans": "x"}]}]}', JSON),
        (json_body(json_span(startTimeUnixNano="soon")), JSON),
        (json_body(json_span(attributes=[{"key": "a", "value": {"intValue": {}}}])), JSON),
        (json_body(json_span(traceId=5)), JSON),
        (b'{"resourceSpans": ' + b"[" * 5000 + b"]" * 5000 + b"}", JSON),
        (json_body(json_span(attributes=[{"key": "a", "value": nested(100)}])), JSON),
        (GOOD, {**PROTOBUF, "Content-Encoding": "gzip"}),
        (gzip.compress(GOOD, mtime=0)[:-4], {**PROTOBUF, "Content-Encoding": "gzip"}),
    ],
)
async def test_a_body_that_cannot_be_decoded_is_a_400(
    client: httpx2.AsyncClient, inbox: Path, caplog: pytest.LogCaptureFixture, body: bytes, headers: dict[str, str]
) -> None:
    answer = await client.post("/v1/traces", content=body, headers=headers)
    assert answer.status_code == 400
    status = answer.json() if headers is JSON else Status.FromString(answer.content)
    code, message = (status["code"], status["message"]) if headers is JSON else (status.code, status.message)
    assert code == code_pb2.INVALID_ARGUMENT
    assert message
    assert ids(inbox) == []
    (told,) = [record.getMessage() for record in caplog.records if record.name == "flywheel.sources.otlp.receiver"]
    assert told == f"answered 127.0.0.1 with 400: {message}"[: len(told)]


@pytest.mark.parametrize(
    ("headers", "word"),
    [
        ({"Content-Type": "text/plain"}, "text/plain"),
        ({}, "application/x-protobuf"),
        ({**PROTOBUF, "Content-Encoding": "br"}, "br"),
    ],
)
async def test_other_content_types_and_encodings_are_a_415(
    client: httpx2.AsyncClient, headers: dict[str, str], word: str
) -> None:
    answer = await client.post("/v1/traces", content=GOOD, headers=headers)
    assert answer.status_code == 415
    message = Status.FromString(answer.content).message if "Content-Encoding" in headers else answer.json()["message"]
    assert word in message


async def test_other_paths_and_methods(client: httpx2.AsyncClient) -> None:
    answer = await client.post("/v1/logs", content=b"", headers=PROTOBUF)
    assert answer.status_code == 404
    assert "/v1/traces" in Status.FromString(answer.content).message
    answer = await client.get("/v1/traces")
    assert answer.status_code == 405
    assert answer.headers["allow"] == "POST"
    assert answer.json()["code"] == code_pb2.UNIMPLEMENTED


async def in_pieces(body: bytes) -> AsyncIterator[bytes]:
    for first in range(0, len(body), 1 << 20):
        yield body[first : first + (1 << 20)]


async def test_a_body_above_the_limit_is_a_413_however_it_comes(client: httpx2.AsyncClient, inbox: Path) -> None:
    huge = b"\0" * (LIMITS.body_bytes + 1)
    packed = {**PROTOBUF, "Content-Encoding": "gzip"}
    for content, headers in ((huge, PROTOBUF), (in_pieces(huge), PROTOBUF), (gzip.compress(huge, 1), packed)):
        answer = await client.post("/v1/traces", content=content, headers=headers)
        assert answer.status_code == 413
        assert Status.FromString(answer.content).code == code_pb2.RESOURCE_EXHAUSTED
    assert (await client.post("/v1/traces", content=GOOD, headers=PROTOBUF)).status_code == 200
    assert ids(inbox) == [1]


async def test_spans_that_cannot_be_stored_are_counted_and_the_others_kept(
    client: httpx2.AsyncClient, inbox: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bad = [span(n) for n in range(10, 20)]
    bad[0].trace_id = b"short"
    bad[1].trace_id = bytes(16)
    bad[2].span_id = b""
    bad[3].span_id = b"far too long"
    bad[4].parent_span_id = b"short"
    bad[5].start_time_unix_nano = 0
    bad[6].end_time_unix_nano = 0
    bad[7].end_time_unix_nano = 2**64 - 1
    bad[8].attributes.add(key=".".join("a" * 1000)).value.int_value = 1
    bad[9].span_id = bytes(8)
    answer = await client.post(
        "/v1/traces", content=request(span(1), *bad, span(2)).SerializeToString(), headers=PROTOBUF
    )
    assert answer.status_code == 200
    partial = ExportTraceServiceResponse.FromString(answer.content).partial_success
    assert partial.rejected_spans == 10
    for words in ("span 000000000000000a (span 10): its trace id is not 16 bytes", "and 5 more"):
        assert words in partial.error_message
    assert ids(inbox) == [1, 2]
    assert "rejected 10 of 12 spans" in caplog.text

    answer = await client.post("/v1/traces", content=json_body(json_span(traceId="xyz")), headers=JSON)
    assert answer.json()["partialSuccess"]["rejectedSpans"] == "1"


async def test_json_by_hand(client: httpx2.AsyncClient, inbox: Path) -> None:
    body = json_body(json_span(unknownField={"a": 1}, links=[{"traceId": "0a" * 16, "spanId": "0b" * 8}]))
    answer = await client.post(
        "/v1/traces", content=body, headers={"Content-Type": "Application/JSON; charset=utf-8"}
    )
    assert answer.status_code == 200
    assert answer.json() == {}
    (row,) = stored(inbox)
    assert (row["id"], row["traceId"], row["parentSpanId"]) == (
        "eee19b7ec3c1b174",
        "5b8efff798038103d269b633813fc60c",
        "",
    )
    assert (json.loads(row["status"])["code"], row["endTimeUnixNano"]) == (2, str(BEGAN + 5))
    assert json.loads(row["attributes"])["gen_ai"]["usage"] == {"input_tokens": 12, "output_tokens": 3}
    assert row["conversationId"] == "unknown"


async def test_half_an_emoji_costs_no_span(client: httpx2.AsyncClient, inbox: Path) -> None:
    cut = json_span(spanId="0b" * 8, attributes=[{"key": "said", "value": {"stringValue": "so \ud83d"}}])
    answer = await client.post("/v1/traces", content=json_body(json_span(), cut), headers=JSON)
    assert (answer.status_code, answer.json()) == (200, {})
    whole, other = stored(inbox)
    assert whole["id"] == "eee19b7ec3c1b174"
    assert json.loads(other["attributes"]) == {"said": "so ?"}


async def test_a_parent_of_zeros_is_no_parent(client: httpx2.AsyncClient, inbox: Path) -> None:
    root = span(1)
    root.parent_span_id = bytes(8)
    body = request(root).SerializeToString()
    assert (await client.post("/v1/traces", content=body, headers=PROTOBUF)).content == b""
    answer = await client.post("/v1/traces", content=json_body(json_span(parentSpanId="0" * 16)), headers=JSON)
    assert answer.json() == {}
    assert [row["parentSpanId"] for row in stored(inbox)] == ["", ""]


def test_a_body_of_many_members_is_unpacked_in_linear_time(monkeypatch: pytest.MonkeyPatch) -> None:
    handed = 0
    make = zlib.decompressobj

    class Counting:
        def __init__(self, window: int) -> None:
            self._stream = make(window)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._stream, name)

        def decompress(self, data: bytes, most: int) -> bytes:
            nonlocal handed
            handed += len(data)
            return self._stream.decompress(data, most)

    monkeypatch.setattr(zlib, "decompressobj", Counting)
    for members in (1_000, 10_000):
        body = gzip.compress(b"") * members + gzip.compress(b"the end")
        handed = 0
        assert inflated(body, "gzip", 7) == b"the end"
        assert handed < 200 * len(body)
        with pytest.raises(TooLargeError):
            inflated(body, "gzip", 6)
        with pytest.raises(UndecodableError, match="cut off"):
            inflated(body[:-1], "gzip", 7)


@pytest.mark.parametrize(
    "packed", [gzip.compress(GOOD[:20], mtime=0) + gzip.compress(GOOD[20:], mtime=0), zlib.compress(GOOD)]
)
async def test_packed_bodies(client: httpx2.AsyncClient, inbox: Path, packed: bytes) -> None:
    encoding = "gzip" if packed[:2] == b"\x1f\x8b" else "deflate"
    headers = {**PROTOBUF, "Content-Encoding": encoding}
    assert (await client.post("/v1/traces", content=packed, headers=headers)).status_code == 200
    assert ids(inbox) == [1]


async def test_a_request_without_spans_is_fine(client: httpx2.AsyncClient, inbox: Path) -> None:
    assert (await client.post("/v1/traces", content=b"", headers=PROTOBUF)).status_code == 200
    assert ids(inbox) == []
