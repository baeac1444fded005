"""Servers that lie about their call logs: the error is theirs and named, and the logs of others are pulled."""

from __future__ import annotations

import json
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from flywheel.config.file import parse
from flywheel.serving.calls.call_log import MAX_PAGE_BYTES, CallLog
from flywheel.serving.calls.call_log_page import fits_a_page, page_json, read_page
from flywheel.serving.calls.stored_parts import MAX_PARTS
from flywheel.sources.call_puller import OK, CallPuller
from flywheel.sources.calls.parsing import parse as parsed
from flywheel.store.kernel.database import Store
from tests.factories.local_server import JsonHandler, LocalServer
from tests.sources.calls.log_server import LogServer
from tests.sources.calls.recorded import assistant, chat, completion, recorded, user

NOW = time.time_ns()
TEXT = '{"model":"agent","messages":[{"role":"user","content":"hello"}]}'


def call(number: Any = 1, **values: Any) -> dict[str, Any]:
    known = {
        "number": number, "request_id": f"fw-0123456789abcdef-base-{number}", "path": "/v1/chat/completions",
        "version": "base", "credential": "", "retry": 0, "started_ns": NOW - 10**9, "ended_ns": NOW, "status": 200,
        "is_complete": True, "media_type": "application/json", "request": [0], "response": "{}",
    }  # fmt: skip
    return known | values


def page(*calls: Any, **values: Any) -> bytes:
    newest = calls[-1]["number"] if calls and isinstance(calls[-1], dict) else 0
    known = {"log": "a", "oldest": 1, "newest": newest, "dropped": 0, "texts": [TEXT], "calls": calls}
    return json.dumps(known | values).encode()


LIES: dict[str, bytes] = {
    "no JSON": b"<html>",
    "nested lists": b"[" * 1_000_000,
    "nested in what is not read": b'{"more": ' + b"[" * 1_000_000,
    "brackets": b'{"texts": [' + b"[]," * 3_000_000 + b"[]]}",
    "NaN": page().replace(b'"oldest": 1', b'"oldest": NaN'),
    "Infinity": page().replace(b'"newest": 0', b'"newest": Infinity'),
    "a number of 5,000 digits": page().replace(b'"oldest": 1', b'"oldest": ' + b"9" * 5_000),
    "a fraction": page(call(1.5)),
    "a text named 3,000 times": page(call(request=[0] * 3_000), texts=["x" * (1 << 20)]),
    "texts named by many": page(*(call(n, request=[0] * 9) for n in range(1, 900)), texts=["x" * (1 << 16)]),
    "too many parts": page(call(request=[0] * (MAX_PARTS + 1)), texts=["x"]),
    "newest": page(newest=2**62),
    "newest that are not there": page(newest=9),
    "an older newest": page(call(5), newest=3),
    "the same call": page(call(1), call(1)),
    "backwards": page(call(5), call(3), newest=9),
    "negative": page(call(-5), newest=-5, oldest=-9),
    "a huge number": page(call(2**70), newest=2**70),
    "a huge time": page(call(started_ns=2**70)),
    "a negative time": page(call(ended_ns=-1)),
    "a time as text": page(call(started_ns="x")),
    "no time": page(call(ended_ns=None)),
    "a status as text": page(call(status="a")),
    "a list as a number": page(call(retry=[])),
    "a number as a text": page(call(version=1)),
    "no path": page(call(path=None)),
    "a call that is a list": page([1]),
    "a negative place": page(call(request=[-1])),
    "a place that is not there": page(call(request=[1])),
    "a lone surrogate": page(call(version="\ud800")),
    "a text of lone surrogates": page(call(), texts=["\ud800\udc80\udfff"]),
    "bytes beyond 255": page(call(), texts=[["\u0100"]]),
    "a long name": page(call(), log="x" * 5_000_000),
    "no texts": page(call(), texts=None),
}
ODD: dict[str, dict[str, Any]] = {
    "the far future": {"started_ns": 2**63 - 1, "ended_ns": 2**63 - 1},
    "an end before the begin": {"started_ns": NOW, "ended_ns": 1},
    "zero bytes": {"request_id": "a\0b", "version": "\0"},
    "other keys": {"more": 1},
    "bytes": {"response": ["\xff\xfe"]},
}


class Liar(LocalServer):
    """Answers with the pages that `tell` makes of the number that is asked for and of the number of requests."""

    def __init__(self, tell: Callable[[int, int], bytes]) -> None:
        self.requests = 0
        liar = self

        class Handler(JsonHandler):
            def get(self) -> None:
                liar.requests += 1
                after = int(parse_qs(urlsplit(self.path).query).get("after", ["0"])[0])
                self.send(200, tell(after, liar.requests))

        super().__init__(Handler)

    @property
    def url(self) -> str:
        return self.base_url.removesuffix("/v1")


async def pulled(
    folder: Path, tell: Callable[[int, int], bytes], times: int = 1, seconds: float = 60.0
) -> tuple[str, str, CallPuller]:
    """Condition and error of a liar beside a server that is none, whose calls are there."""
    with Liar(tell) as liar, LogServer(folder / "honest.db") as honest:
        honest.log.append([recorded(chat([user("1 + 1?")]), completion(assistant("2")))])
        serving = {"urls": [liar.url, honest.url], "call_log": {"keep_days": 100_000}}
        raw = {"state": {"dir": "state"}, "sources": [], "serving": serving}
        config = parse(raw, "test", folder)
        store = await Store.open(config.state_dir)
        puller = CallPuller(store, config)
        try:
            for _ in range(times):
                await puller.pull(at_once=True, seconds=seconds)
            servers = puller.call_log_copy.servers()
            assert (servers[honest.url].calls, servers[honest.url].condition) == (1, OK)
            return servers[liar.url].condition, servers[liar.url].error, puller
        finally:
            await puller.close()
            await store.close()


@pytest.mark.parametrize("body", LIES.values(), ids=LIES)
async def test_a_lie_is_the_error_of_its_server(body: bytes, tmp_path: Path) -> None:
    tracemalloc.start()
    condition, error, puller = await pulled(tmp_path, lambda *_: body)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert condition == "misconfigured"
    assert "its answer is not what vLLM answers and no page of a call log: " in error
    assert len(error) < 1000
    assert len(puller.call_log_copy.ids_after(0, 10)) == 1, "of the other server"
    puller.call_log_copy.close()
    assert peak < 150_000_000


@pytest.mark.parametrize("values", ODD.values(), ids=ODD)
async def test_what_is_odd_is_pulled_as_far_as_it_can_be(values: dict[str, Any], tmp_path: Path) -> None:
    def tell(after: int, _: int) -> bytes:
        return page(newest=1) if after else page(call(1, **values))

    condition, error, puller = await pulled(tmp_path, tell, times=2)
    assert (condition, error) == (OK, "")
    found = puller.call_log_copy.find([each for _, each in puller.call_log_copy.ids_after(0, 10)])
    assert len(found) == 2
    for each in found.values():
        assert 0 <= each.started_ns <= each.ended_ns <= time.time_ns()
        assert parsed(each).request_id == each.request_id
    puller.call_log_copy.close()


async def test_a_log_that_changes_with_each_page_ends_the_pull(tmp_path: Path) -> None:
    def tell(after: int, request: int) -> bytes:
        return page(call(after + 1, request_id=f"fw-{request}"), newest=10**9, log=str(request))

    condition, error, puller = await pulled(tmp_path, tell)
    assert (condition, "its log changes while it is read" in error) == ("failing", True)
    puller.call_log_copy.close()


async def test_a_page_that_is_repeated_ends_the_pull(tmp_path: Path) -> None:
    condition, error, puller = await pulled(tmp_path, lambda *_: page(call(1), newest=10**9))
    assert (condition, "not those after number 1" in error) == ("misconfigured", True)
    puller.call_log_copy.close()


async def test_a_log_without_an_end_is_left_for_the_others(tmp_path: Path) -> None:
    def tell(after: int, _: int) -> bytes:
        return page(call(after + 1), newest=after + 10**9)

    condition, _, puller = await pulled(tmp_path, tell, seconds=0.3)
    assert condition == OK
    assert puller.has_pulled
    assert puller._complete_ns == 0, "not everything was pulled"
    puller.call_log_copy.close()


def test_values_of_many_brackets_are_not_built() -> None:
    bodies = [b'{"messages": [' + b"[]," * 2_000_000 + b"[]]}", b"[" * 2_000_000]
    for body in bodies:
        tracemalloc.start()
        parsed(recorded(body, completion(assistant("a"))))
        parsed(recorded(chat([user("q")]), body))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 5 * len(body)


@pytest.mark.slow
def test_what_is_recorded_fits_a_page_that_is_read(tmp_path: Path) -> None:
    long = MAX_PAGE_BYTES - 5_000_000
    calls = [
        (recorded(b"x" * long, b""), True),
        (recorded(b"\0" * (long // 6 - 100), b""), True),
        (recorded(b"\0" * (long // 5), b""), False),
        (recorded(b"\xff" * long, b""), False),
        (recorded("ä".encode() * (long // 2), b""), True),
        (recorded(b"x" * long, b"y" * 1_000_000), False),
    ]
    assert [fits_a_page(each) for each, _ in calls] == [fits for _, fits in calls]
    with CallLog(tmp_path / "calls.db") as log:
        kept = [each for each, fits in calls if fits]
        log.append(kept)
        for after, each in enumerate(kept):
            told = page_json(log, after, 1, 10)
            assert len(told) <= MAX_PAGE_BYTES
            assert read_page(told, after).calls[0][1] == each
