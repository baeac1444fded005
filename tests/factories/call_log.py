"""Recorded calls, logs of them, and what must hold in their files."""

from __future__ import annotations

import json
import random
import re
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from flywheel.serving.calls.call_log import CallLog, RecordedCall
from flywheel.serving.calls.stored_parts import runs, split


def call(request_id: str = "fw-1", request: bytes = b'{"model":"agent"}', **more: Any) -> RecordedCall:
    plain = RecordedCall(
        request_id=request_id,
        path="/v1/chat/completions",
        version="base",
        credential="c0ffee",
        retry=0,
        started_ns=1,
        ended_ns=2,
        status=200,
        is_complete=True,
        media_type="application/json",
        request=request,
        response=b'{"id": "chatcmpl-fw-1"}',
    )
    return replace(plain, **more)


def conversation(calls: int, seed: int = 0, **more: Any) -> list[RecordedCall]:
    """A conversation in which every call repeats all messages before it."""
    words = random.Random(seed)
    messages = [{"role": "system", "content": "You are an agent."}]
    told = []
    for at in range(calls):
        messages.append({"role": "user", "content": words.randbytes(1000).hex()})
        body = {"model": "agent", "messages": messages, "tools": [{"name": "t" * 4000}], "stream": True}
        told.append(call(f"fw-{seed}-{at}", compact(body), response=words.randbytes(50), **more))
        messages.append({"role": "assistant", "content": words.randbytes(1000).hex()})
    return told


def compact(body: Any) -> bytes:
    """JSON that comes back from a log byte for byte: there is no white space between values."""
    return json.dumps(body, separators=(",", ":")).encode()


def numbered(log: CallLog) -> list[tuple[int, RecordedCall]]:
    with log.reading() as connection:
        numbers = connection.execute("SELECT request_id, number FROM calls ORDER BY number").fetchall()
        calls = log.find(request_id for request_id, _ in numbers)
    return [(number, calls[request_id]) for request_id, number in numbers]


def stored(log: CallLog) -> list[RecordedCall]:
    return [call for _, call in numbered(log)]


def log_settings(path: Path, **more: float) -> dict[str, Any]:
    return {"path": str(path), "keep_days": 14, "max_bytes": 10**9, **more}


WINDOW = 12
"""So many bytes of random data occur elsewhere by chance never."""


def windows(content: bytes, step: int = 1) -> set[bytes]:
    return {content[at : at + WINDOW] for at in range(0, len(content) - WINDOW + 1, step)}


def bytes_of(path: Path) -> bytes:
    files = [path, path.with_name(path.name + "-wal")]
    return b"\n".join(each.read_bytes() for each in files if each.exists())


def inflated(content: bytes) -> Iterator[bytes]:
    """Every zlib stream, also one that is cut off."""
    for found in re.finditer(b"\x78", content):
        with_rest = zlib.decompressobj()
        try:
            yield with_rest.decompress(content[found.start() : found.start() + 50_000])
        except zlib.error:
            continue


def contents_of(calls: Iterable[RecordedCall]) -> set[bytes]:
    """Responses and parts of requests."""
    return {part for each in calls for part in [each.response, *split(each.request).parts]}


def only_of(erased: Iterable[RecordedCall], others: Iterable[RecordedCall]) -> list[bytes]:
    """The contents that only erased calls have."""
    return [each for each in contents_of(erased) - contents_of(others) if len(each) >= WINDOW]


def assert_gone(path: Path, contents: Collection[bytes], others: Iterable[RecordedCall]) -> None:
    """No piece of these contents is in the file or its write-ahead log, as it is or compressed."""
    found = bytes_of(path)
    texts = b"\n".join([found, *inflated(found)])
    for form, place in ((lambda each: each, texts), (lambda each: zlib.compress(each, 1)[2:], found)):
        kept = {window for content in contents_of(others) for window in windows(form(content))}
        for content in contents:
            assert not any(window in place for window in windows(form(content), WINDOW) - kept)


def assert_uses_are_right(log: CallLog) -> None:
    """Each part has the number of its uses by calls, and none has no use."""
    with log.reading() as connection:
        uses = dict(connection.execute("SELECT part, uses FROM part_uses").fetchall())
        parts = {part for (part,) in connection.execute("SELECT part FROM parts")}
        expected: Counter[int] = Counter()
        for (request,) in connection.execute("SELECT request FROM calls"):
            for first, last in runs(request):
                expected.update(range(first, last + 1))
    assert uses == expected
    assert parts == uses.keys()
