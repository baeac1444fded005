"""What the middleware records of requests to the alias, what it does not, and that it never gets in their way."""

from __future__ import annotations

import asyncio
import http.client
import itertools
import json
import logging
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any
from urllib.parse import urlsplit

import httpx2
import openai
import pytest

from flywheel.conversations import as_header
from flywheel.records.request_id import BASE_VERSION, mark_of
from flywheel.serving.calls.call_log import CallLog, RecordedCall
from flywheel.serving.calls.call_log_page import read_page
from flywheel.serving.client.replica_client import Replica
from flywheel.serving.server import call_recorder
from flywheel.serving.server.call_recorder import CallRecorder
from flywheel.system.server_limits import Message, Receive, Scope, Send
from tests.factories.call_log import log_settings, numbered, stored
from tests.factories.scripted_vllm import EVENTS, Scripted
from tests.serving.fake_vllm import BASE, running, server_environment, with_middleware
from tests.waiting import SOON, wait_for

CHAT = {"model": "agent", "messages": [{"role": "user", "content": "¿Qué? \U0001f600"}]}


class Server:
    def __init__(self, app: Scripted, path: Path, url: str, middleware: Any) -> None:
        self.app, self.path, self.url, self.middleware = app, path, url, middleware

    def ask(self, body: object = CHAT, path: str = "/v1/chat/completions", **headers: str) -> httpx2.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return httpx2.post(
            f"{self.url}{path}", content=content, headers={"content-type": "application/json", **headers}
        )

    def recorded(self, count: int) -> list[RecordedCall]:
        with CallLog(self.path) as log:
            wait_for(lambda: log.state().newest >= count, f"{count} calls", seconds=60)
            found = stored(log)
        assert len(found) == count
        return found


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(call_recorder, "GATHER_SECONDS", 0.01)
    app, path = Scripted(), tmp_path / "serving" / "calls.db"
    middleware = with_middleware(app, call_log=log_settings(path))
    with running(middleware) as url:
        yield Server(app, path, url, middleware)
    middleware._recorder.close()


def test_a_request_to_the_alias_is_recorded_with_its_values_as_they_were_sent(server: Server) -> None:
    body = b' {"messages" : [{"role":"user","content":"\xc3\xa9\\u00e9"}] ,\n"model":"agent", "n":1.0}'
    before = time.time_ns()
    answer = server.ask(body, **{"Authorization": "Bearer k", "X-Stainless-Retry-Count": "2"})
    (call,) = server.recorded(1)
    assert call.request == b'{"messages":[{"role":"user","content":"\xc3\xa9\\u00e9"}],"model":"agent","n":1.0}'
    assert call.response == answer.content
    assert answer.json()["id"] == f"chatcmpl-{call.request_id}"
    mark = mark_of(call.request_id)
    assert mark is not None
    assert mark.version == call.version == BASE_VERSION
    assert (call.path, call.status, call.retry) == ("/v1/chat/completions", 200, 2)
    assert (call.is_complete, call.media_type) == (True, "application/json")
    assert before <= call.started_ns <= call.ended_ns <= time.time_ns()
    assert b"k" not in call.credential.encode()
    assert len(call.credential) == 16


def test_streams_are_recorded_as_they_were_sent(server: Server) -> None:
    answer = server.ask({**CHAT, "stream": True})
    (call,) = server.recorded(1)
    assert call.response == answer.content
    assert call.response.endswith(EVENTS[-1])
    assert (call.media_type, call.is_complete, call.status) == ("text/event-stream", True, 200)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses", "/v1/chat/completions"])
def test_all_kinds_of_requests_to_the_alias_are_recorded(server: Server, path: str) -> None:
    server.ask({"model": "agent", "prompt": "x"}, path)
    (call,) = server.recorded(1)
    assert call.path == path


def test_what_agents_did_not_ask_the_alias_is_not_recorded(server: Server) -> None:
    httpx2.put(f"{server.url}/flywheel/alias", json={"alias": "agent", "target": "agent@r0001"})
    for model in (BASE, "agent@r0001", "other"):
        server.ask({**CHAT, "model": model})
        server.ask({"model": model, "prompt": [1, 2], "max_tokens": 1}, "/v1/completions")
    server.ask({"model": "agent", "input": "x"}, "/v1/embeddings")
    server.ask({"model": "agent", "messages": []}, "/tokenize")
    server.ask(b"no JSON")
    server.ask()
    (call,) = server.recorded(1)
    assert call.version == "agent@r0001"
    assert json.loads(call.request)["model"] == "agent"


@pytest.mark.parametrize("stream", [False, True])
def test_the_id_of_a_response_is_ours_on_every_path(server: Server, stream: bool) -> None:
    asked = {"model": "agent", "input": "x", "stream": stream}
    ours = []
    for more in ({}, {"request_id": "mine", "a": {"request_id": 1}}, {"request_id": 1, "model": "agent"}):
        server.ask({**asked, **more}, "/v1/responses", **{"X-Request-Id": "mine"})
        seen = json.loads(server.app.bodies[-1])
        assert seen == {**asked, **more, "model": BASE, "request_id": seen["request_id"]}
        ours.append(seen["request_id"])
    server.ask({**CHAT, "request_id": "mine"}, **{"X-Request-Id": "mine"})
    *responses, chat = server.recorded(4)
    assert ours == [f"resp_{call.request_id}" for call in responses]
    assert all(identity.encode() in call.response for identity, call in zip(ours, responses, strict=True))
    assert json.loads(server.app.bodies[-1])["request_id"] == "mine"
    assert f"chatcmpl-{chat.request_id}".encode() in chat.response
    server.ask({**asked, "model": BASE, "request_id": "mine"}, "/v1/responses")
    assert json.loads(server.app.bodies[-1])["request_id"] == "mine"


def test_of_two_request_ids_in_a_body_none_is_the_clients(server: Server) -> None:
    server.ask(b'{"request_id": "a", "model": "agent", "request_id": "b"}', "/v1/responses")
    assert json.loads(server.app.bodies[-1])["request_id"].startswith("resp_fw-")


def test_credentials_are_told_apart_and_not_shown(server: Server) -> None:
    for key in ("Bearer one", "Bearer two", "Bearer one"):
        server.ask(Authorization=key)
    server.ask()
    one, two, again, none = (call.credential for call in server.recorded(4))
    assert one == again != two
    assert none == ""


def test_a_client_that_disconnects_leaves_an_incomplete_call(server: Server) -> None:
    server.app.hold.clear()
    place = urlsplit(server.url)
    client = http.client.HTTPConnection(place.netloc)
    body = json.dumps({**CHAT, "stream": True})
    client.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
    assert client.getresponse().read1()
    client.close()
    (call,) = server.recorded(1)
    assert not call.is_complete
    assert call.status == 200
    assert call.response.startswith(b"data: chatcmpl-fw-")
    assert not call.response.endswith(EVENTS[-1])


def test_a_client_that_leaves_before_the_end_of_its_request_is_not_recorded(server: Server) -> None:
    place = urlsplit(server.url)
    client = http.client.HTTPConnection(place.netloc)
    client.putrequest("POST", "/v1/chat/completions")
    client.putheader("content-type", "application/json")
    client.putheader("content-length", "100")
    client.endheaders(b'{"model": "agent"')
    client.close()
    server.ask()
    server.recorded(1)


@pytest.mark.parametrize("stream", [False, True])
def test_an_exception_of_the_server_is_recorded(server: Server, stream: bool) -> None:
    def fail() -> None:
        raise ValueError("of the engine")

    server.app.fails = fail
    with pytest.raises(httpx2.RemoteProtocolError):
        server.ask({**CHAT, "stream": stream})
    (call,) = server.recorded(1)
    assert (call.status, call.is_complete) == (200, False)


def test_an_error_of_the_server_is_recorded(server: Server) -> None:
    server.app.status = 503
    server.ask()
    (call,) = server.recorded(1)
    assert (call.status, call.is_complete) == (503, True)


def test_openais_client_says_its_retries(server: Server) -> None:
    server.app.status = 500
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=1)
    with pytest.raises(openai.InternalServerError):
        client.chat.completions.create(**CHAT)  # type: ignore[call-overload]
    assert [call.retry for call in server.recorded(2)] == [0, 1]


# The endpoint


def pages(server: Server, query: str = "") -> httpx2.Response:
    return httpx2.get(f"{server.url}/flywheel/calls{query}")


def test_the_log_is_read_in_pages(server: Server) -> None:
    for at in range(5):
        server.ask({**CHAT, "seed": at})
    told = server.recorded(5)
    page = read_page(pages(server, "?after=1&limit=2").content, 1)
    assert page.calls == [(2, told[1]), (3, told[2])]
    assert page.state[1:] == (1, 5, 0, 0)
    assert [number for number, _ in read_page(pages(server).content, 0).calls] == [1, 2, 3, 4, 5]
    assert read_page(pages(server, "?after=5").content, 5).calls == []
    assert pages(server).json()["calls"][0]["number"] == 1


@pytest.mark.parametrize("query", ["?after=x", "?after=-1", "?limit=", "?limit=1.5", "?after=" + "9" * 30])
def test_a_wrong_page_is_refused(server: Server, query: str) -> None:
    refused = pages(server, query)
    assert refused.status_code in (200, 400) if query == "?limit=" else refused.status_code == 400
    assert httpx2.post(f"{server.url}/flywheel/calls").status_code == 405


def test_reading_calls_takes_the_admin_key(tmp_path: Path) -> None:
    keys = {"FLYWHEEL_API_KEY": "agents", "FLYWHEEL_ADMIN_KEY": "admin"}
    with running(with_middleware(Scripted(), **keys, call_log=log_settings(tmp_path / "c.db"))) as url:
        asked = [
            httpx2.get(f"{url}/flywheel/calls", headers={"authorization": f"Bearer {key}"}).status_code
            for key in ("agents", "wrong", "admin")
        ]
    assert asked == [403, 401, 200]


def test_nothing_is_recorded_when_it_is_off(tmp_path: Path) -> None:
    app = Scripted()
    before = {thread.ident for thread in threading.enumerate()}
    with running(with_middleware(app)) as url:
        answer = httpx2.post(f"{url}/v1/chat/completions", json=CHAT)
        assert mark_of(answer.json()["id"]) is not None
        refused = httpx2.get(f"{url}/flywheel/calls")
        assert refused.status_code == 404
        assert "serving.call_log is false" in refused.json()["error"]["message"]
    assert "flywheel-call-log" not in {thread.name for thread in threading.enumerate() if thread.ident not in before}
    assert list(tmp_path.iterdir()) == []


# What cannot be recorded


def test_a_full_queue_drops_and_counts(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    writing, go_on = threading.Event(), threading.Event()
    append = CallLog.append

    def slow(log: CallLog, *arguments: Any) -> int:
        writing.set()
        assert go_on.wait(60)
        return append(log, *arguments)

    monkeypatch.setattr(CallLog, "append", slow)
    monkeypatch.setattr(call_recorder, "MAX_QUEUED_CALLS", 3)
    server.ask()
    assert writing.wait(60)
    for _ in range(5):
        assert server.ask().status_code == 200  # nobody waits for the log
    assert server.middleware._recorder.uncounted == 2
    go_on.set()
    server.recorded(4)
    server.ask()
    server.recorded(5)
    assert pages(server).json()["dropped"] == 2
    assert server.middleware._recorder.uncounted == 0


def test_the_queue_is_bounded_in_bytes(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_recorder, "MAX_QUEUED_BYTES", 3000)
    assert server.ask({**CHAT, "user": "x" * 4000}).status_code == 200
    streamed = server.ask({**CHAT, "stream": True})  # its response is longer than the queue
    assert streamed.content.endswith(EVENTS[-1])
    server.ask()
    server.recorded(1)
    assert wait_for(lambda: pages(server).json()["dropped"], "the count", seconds=60) == 2


def test_a_log_that_cannot_be_written_stops_no_request(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server.path.parent.mkdir()
    server.path.mkdir()
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            assert server.ask().status_code == 200
            wait_for(lambda: not server.middleware._recorder._queue, "an attempt", seconds=60)
        wait_for(lambda: server.middleware._recorder.uncounted == 3, "the count", seconds=60)
        assert pages(server).status_code == 503
        server.path.rmdir()
        server.ask()
        server.recorded(1)
    assert pages(server).json()["dropped"] == 3
    (line,) = [record.message for record in caplog.records if record.name == call_recorder.__name__]
    assert "requests are served, but not recorded: cannot write to the call log" in line


class Moment(threading.Event):
    """What wakes the thread of a recorder. The thread stands still before its n-th line, or its second wait."""

    def __init__(self, line: int) -> None:
        super().__init__()
        self.is_last = False
        self.has_come, self.may_go_on = threading.Event(), threading.Event()
        self._lines_left, self._waits = line, 0

    def trace(self, frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename != call_recorder.__file__:
            return None
        if event == "line":
            self._lines_left -= 1
            if self._lines_left == 0:
                self._stand_still()
        return self.trace

    def wait(self, timeout: float | None = None) -> bool:
        self._waits += 1
        if self._waits == 2 and not self.has_come.is_set():
            self.is_last = True
            self._stand_still()
        return super().wait(timeout)

    def _stand_still(self) -> None:
        self.has_come.set()
        self.may_go_on.wait(SOON)


def test_a_stop_at_any_moment_ends_the_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_recorder, "GATHER_SECONDS", 0.001)

    async def ask(recorder: CallRecorder) -> None:
        async def ignore(_: Message) -> None: ...

        async def receive() -> Message:
            return {"type": "http.disconnect"}

        call = RecordedCall("fw-1", "/v1/completions", "base", started_ns=1, request=b"{}")
        scope = {"type": "http", "path": "/v1/completions", "headers": []}
        await recorder.recorded(call, answer, scope, b"{}", receive, ignore)

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body"})

    traced, lines = threading.gettrace(), itertools.count(1)
    moment = None
    while moment is None or not moment.is_last:
        line = next(lines)
        recorder = CallRecorder(tmp_path / f"{line}.db", 1, 10**9)
        moment = Moment(line)
        recorder._awake = moment
        threading.settrace(moment.trace)
        try:
            asyncio.run(ask(recorder))
        finally:
            threading.settrace(traced)
        assert moment.has_come.wait(SOON)
        closing = threading.Thread(target=recorder.close)
        closing.start()
        wait_for(lambda: recorder._is_closing and moment.is_set(), "the stop")  # noqa: B023
        moment.may_go_on.set()
        closing.join()
        assert recorder._thread is not None
        assert not recorder._thread.is_alive()
        with CallLog(recorder.path) as log:
            ((_, call),) = numbered(log)
        assert (call.is_complete, call.media_type, call.response) == (True, "", b"")
    assert line > 20


def test_a_locked_log_delays_no_request(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.middleware._recorder._log._busy_seconds = 0.2
    server.ask()
    server.recorded(1)
    server.middleware._recorder._log.close()  # the time above counts from the next connection on
    with CallLog(server.path) as other, other.transaction():
        for _ in range(3):
            assert server.ask().status_code == 200
        wait_for(lambda: server.middleware._recorder.uncounted == 3, "the count", seconds=60)
    server.ask()
    server.recorded(2)
    assert pages(server).json()["dropped"] == 3


SERVE = """
import asyncio, json, resource, signal, sys
import uvicorn
from tests.serving.fake_vllm import with_middleware
from tests.factories.scripted_vllm import Scripted
if limit := int(sys.argv[1]):
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))

class Told(uvicorn.Server):
    async def startup(self, sockets=None):
        await super().startup(sockets)
        print(self.servers[0].sockets[0].getsockname()[1], flush=True)

app = Scripted()
async def whole(scope, receive, send):
    if scope["type"] != "lifespan":
        return await app(scope, receive, send)
    for _ in range(2):
        kind = (await receive())["type"]
        await send({"type": kind + ".complete"})
Told(uvicorn.Config(with_middleware(whole), port=0, log_level="warning")).run()
"""


class Process(Server):
    """The same in a process of its own."""

    def __init__(self, path: Path, limit: int = 0) -> None:
        environment = {**os.environ, **server_environment(call_log=log_settings(path))}
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVE, str(limit)], stdout=subprocess.PIPE, text=True, env=environment
        )
        assert self.process.stdout is not None
        super().__init__(Scripted(), path, f"http://127.0.0.1:{int(self.process.stdout.readline())}", None)

    def end(self, signal_number: int) -> None:
        self.process.send_signal(signal_number)
        self.process.wait(60)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.mark.slow
def test_a_stop_writes_what_is_queued(tmp_path: Path) -> None:
    server = Process(tmp_path / "calls.db")
    try:
        for at in range(20):
            server.ask({**CHAT, "seed": at})
    finally:
        server.end(15)
    assert [json.loads(call.request)["seed"] for call in server.recorded(20)] == list(range(20))


@pytest.mark.slow
def test_what_a_killed_server_has_recorded_is_whole(tmp_path: Path) -> None:
    before = 0
    for _ in range(2):
        server = Process(tmp_path / "calls.db")
        stopped = threading.Event()

        def ask(server: Process = server, stopped: threading.Event = stopped) -> None:
            while not stopped.is_set():
                try:
                    server.ask({**CHAT, "user": "x" * 100_000})
                except httpx2.HTTPError:
                    return

        clients = [threading.Thread(target=ask) for _ in range(4)]
        try:
            for client in clients:
                client.start()
            with CallLog(server.path) as log:
                wait_for(lambda: log.state().newest > before + 30, "calls", seconds=60)  # noqa: B023
        finally:
            server.end(9)
            stopped.set()
            for client in clients:
                client.join()
        with CallLog(server.path) as log:
            calls = numbered(log)
            before = log.state().newest
        assert [number for number, _ in calls] == list(range(1, before + 1))
        assert all(json.loads(call.request) == {**CHAT, "user": "x" * 100_000} for _, call in calls)
        assert all(call.is_complete and call.request_id.encode() in call.response for _, call in calls)


@pytest.mark.slow
def test_serving_goes_on_when_the_disk_is_full(tmp_path: Path) -> None:
    server = Process(tmp_path / "calls.db", 200_000)
    try:
        server.ask()
        server.recorded(1)
        for at in range(29):
            answered = server.ask({**CHAT, "seed": at, "user": os.urandom(20_000).hex()})
            assert answered.status_code == 200
        dropped = wait_for(lambda: pages(server).json()["dropped"], "dropped calls", seconds=60)
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        server.ask(CHAT)
        wait_for(lambda: pages(server).json()["calls"][-1]["response"], "the page", seconds=60)
        found = wait_for(
            lambda: (page := read_page(pages(server).content, 0)).state.newest + page.state.dropped == 31 and page,
            "all calls recorded or counted",
            seconds=60,
        )
        assert found.state.dropped >= dropped
        assert json.loads(found.calls[-1][1].request) == CHAT
    finally:
        server.end(15)
    with CallLog(server.path) as log:
        assert log.state() == found.state


async def test_old_calls_are_pruned_by_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_recorder, "GATHER_SECONDS", 0.01)
    monkeypatch.setattr(call_recorder, "PRUNE_SECONDS", 0.05)
    monkeypatch.setattr(call_recorder, "PRUNED_AT_ONCE", 1)
    path = tmp_path / "calls.db"
    old = RecordedCall("a", "p", "base", "", 0, 1, 2, 200, True, request=b"{}")
    with CallLog(path) as log:
        log.append([old])
    middleware = with_middleware(Scripted(), call_log=log_settings(path))
    with running(middleware) as url:
        httpx2.post(f"{url}/v1/chat/completions", json=CHAT)
        with CallLog(path) as log:
            wait_for(lambda: log.state()[1:3] == (2, 2), "the old one is gone", seconds=60)
    middleware._recorder.close()


def test_the_log_keeps_its_limit_however_fast_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = 3_000_000
    sizes: list[int] = []
    append = CallLog.append

    def measured(log: CallLog, *arguments: Any) -> int:
        stored = append(log, *arguments)
        sizes.append(log.live_bytes())
        return stored

    monkeypatch.setattr(CallLog, "append", measured)
    middleware = with_middleware(Scripted(), call_log=log_settings(tmp_path / "calls.db", max_bytes=limit))
    with running(middleware) as url, httpx2.Client(base_url=url) as client:
        # Small calls first: the large ones after them need the room of many.
        bodies = ["y"] * 200 + [os.urandom(150_000).hex() for _ in range(40)] + [os.urandom(2_000_000).hex()]
        for body in [*bodies, "the last"]:
            client.post("/v1/chat/completions", json={**CHAT, "user": body})
        with CallLog(tmp_path / "calls.db") as log:
            wait_for(lambda: log.state().newest == len(bodies), "all but the one that is larger", seconds=60)
            assert httpx2.get(f"{url}/flywheel/calls?after=9999").json()["dropped"] == 1
            assert stored(log)[-1].request.endswith(b'"the last"}')
            assert log.state().oldest > 200
    middleware._recorder.close()
    assert max(sizes) <= limit


# Erasing and refusing


def erase(server: Server, *ids: str, **headers: str) -> httpx2.Response:
    return httpx2.post(f"{server.url}/flywheel/calls/erase", json={"request_ids": list(ids)}, headers=headers)


def test_calls_are_erased_while_requests_are_answered(server: Server) -> None:
    for at in range(4):
        server.ask({**CHAT, "seed": at})
    told = server.recorded(4)
    with CallLog(server.path) as other, ThreadPoolExecutor(1) as threads:
        with other.transaction():
            # Another process writes: the erasure waits for it, and no request waits for the erasure.
            waiting = threads.submit(erase, server, told[1].request_id, "nobody")
            assert server.ask().status_code == 200
        answered = waiting.result()
    assert (answered.status_code, answered.json()) == (200, {"erased": 1, "purged": True})
    with CallLog(server.path) as log:
        wait_for(lambda: log.state().newest == 5, "the last call", seconds=60)
        assert [number for number, _ in numbered(log)] == [1, 3, 4, 5]
    assert read_page(pages(server, "?after=1&limit=1").content, 1).erased == 1


def test_a_call_that_is_erased_before_it_ends_is_never_recorded(server: Server) -> None:
    server.app.hold.clear()
    with httpx2.stream("POST", f"{server.url}/v1/chat/completions", json={**CHAT, "stream": True}) as stream:
        texts = stream.iter_text()
        request_id = next(texts).split("chatcmpl-")[1].split()[0]
        assert erase(server, request_id).json() == {"erased": 0, "purged": True}
        server.app.hold.set()
        assert len(list(texts)) > 0
    server.ask()
    assert [call.request_id == request_id for call in server.recorded(1)] == [False]


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{}", b'{"request_ids": "fw-1"}', b'{"request_ids": [1]}', b'{"request_ids": [""]}']
)
def test_what_names_no_calls_erases_none(server: Server, body: bytes) -> None:
    assert httpx2.post(f"{server.url}/flywheel/calls/erase", content=body).status_code == 400
    assert erase(server, "x" * 201).status_code == 400
    assert erase(server, *["x" * 200] * 400).status_code == 413
    assert httpx2.get(f"{server.url}/flywheel/calls/erase").status_code == 405


async def test_the_client_erases_in_parts_and_knows_servers_without_a_log(server: Server) -> None:
    for at in range(3):
        server.ask({**CHAT, "seed": at})
    told = [call.request_id for call in server.recorded(3)]
    async with Replica(server.url) as client:
        assert await client.erase_calls([*(f"no-{at}" for at in range(600)), *told[:2], "é", ""])
    with CallLog(server.path) as log:
        assert [call.request_id for call in stored(log)] == told[2:]
    with running(with_middleware(Scripted())) as url:
        async with Replica(url) as client:
            assert await client.erase_calls(told)


@pytest.mark.parametrize("value", ["no", "No", "false", "FALSE", "0"])
def test_a_request_that_refuses_is_answered_and_only_counted(server: Server, value: str) -> None:
    assert server.ask(**{"X-Flywheel-Record": value}).json()["model"] == BASE
    assert server.ask(**{"X-Flywheel-Record": "yes"}).status_code == 200
    server.recorded(1)
    with CallLog(server.path) as log:
        wait_for(lambda: log.state().refused == 1, "the count", seconds=60)
        assert log.state().dropped == 0
    assert read_page(pages(server).content, 0).state.refused == 1


MESSAGES = {"model": "agent", "max_tokens": 9, "messages": CHAT["messages"]}


@pytest.mark.parametrize(
    ("path", "body", "headers"),
    [
        ("/v1/chat/completions", {**CHAT, "user": "ana"}, {}),
        ("/v1/messages", {**MESSAGES, "metadata": {"x": 1, "user_id": "ana"}}, {}),
        ("/v1/chat/completions", CHAT, {"x-flywheel-conversation": "c-1"}),
        ("/v1/chat/completions", CHAT, {"x-flywheel-conversation": as_header("ça")}),
    ],
)
def test_nothing_of_excluded_users_and_conversations_is_recorded(
    tmp_path: Path, path: str, body: object, headers: dict[str, str]
) -> None:
    log, excluded = log_settings(tmp_path / "calls.db"), {"users": ["ana"], "conversations": ["c-1", "ça"]}
    middleware = with_middleware(Scripted(), call_log=log, not_recorded=excluded)
    with running(middleware) as url:
        server = Server(Scripted(), tmp_path / "calls.db", url, middleware)
        assert server.ask(body, path, **headers).status_code == 200
        named = {**CHAT, "user": "anabel", "metadata": {"user_id": "ana"}}
        assert server.ask(named, **{"x-flywheel-conversation": "c-11"}).status_code == 200
        (call,) = server.recorded(1)
        assert (call.user, call.conversation) == ("anabel", "c-11")
        with CallLog(server.path) as log:
            wait_for(lambda: log.state().refused == 1, "the count", seconds=60)
    middleware._recorder.close()


@pytest.mark.parametrize("user", [7, None, "x" * 2000, {"a": 1}])
def test_a_user_that_is_no_short_text_is_none(server: Server, user: object) -> None:
    server.ask({**CHAT, "user": user})
    server.ask({**CHAT, "user": "\ud800a"})
    assert [call.user for call in server.recorded(2)] == ["", "?a"]
