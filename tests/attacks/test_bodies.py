"""Bodies that are small to send and costly to read, or that hold what cannot be stored."""

from __future__ import annotations

import gzip
import json

import httpx2
import pytest

from flywheel.sources.otlp.decoding import MAX_FIELDS, Encoding, TooLargeError, UndecodableError, inflated, request_of
from flywheel.sources.otlp.receiver import LIMITS
from tests.serving.fake_vllm import FakeVllm, replica

MANY = MAX_FIELDS + 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "field",
    [b"\xf8\x7f\x01", b"\xfa\x7f\x00", b"\xfd\x7f0000"],
    ids=["unknown numbers", "unknown texts", "unknown fixed numbers"],
)
def test_fields_are_counted_whether_known_or_not(field: bytes) -> None:
    request_of(field * 100, Encoding.PROTOBUF)
    with pytest.raises(TooLargeError, match="more than 2,000,000 fields"):
        request_of(field * MANY, Encoding.PROTOBUF)


@pytest.mark.parametrize("body", [b"\x0b\x0c", b"\x0b" * 1000, b"\x0a\x02\x0b\x0c", b"\xff" * 100, b"\x07"])
def test_groups_and_unknown_wire_types_are_refused(body: bytes) -> None:
    with pytest.raises(UndecodableError):
        request_of(body, Encoding.PROTOBUF)


def test_a_body_that_was_packed_twice_is_unpacked_once() -> None:
    twice = gzip.compress(gzip.compress(bytes(1_000_000)))
    with pytest.raises(UndecodableError):
        request_of(inflated(twice, "gzip", LIMITS.body_bytes), Encoding.PROTOBUF)


@pytest.mark.parametrize("value", ["\ud800", "\udfff\ud800", "a\udc80"])
def test_half_of_a_surrogate_pair_is_a_wrong_request(value: str) -> None:
    good = {"alias": "agent", "target": "agent@r0001", "path": "/a", "sha256": "b", "expected": "tiny"}
    with replica(FakeVllm()) as url:
        for name in good:
            body = json.dumps({**good, name: value}).encode()
            refused = httpx2.put(f"{url}/flywheel/alias", content=body)
            assert (refused.status_code, "surrogate" in refused.text) == (400, True)
        for name in ("lora_name", "lora_path"):
            body = json.dumps({"lora_name": "a", "lora_path": "/a", name: value}).encode()
            assert httpx2.post(f"{url}/v1/load_lora_adapter", content=body).status_code == 400
        for path in ("/v1/chat/completions", "/v1/embeddings"):
            body = json.dumps({"model": value, "messages": []}).encode()
            headers = {"content-type": "application/json"}
            assert httpx2.post(f"{url}{path}", content=body, headers=headers).status_code < 500
