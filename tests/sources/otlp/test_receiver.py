"""The receiver's life: where it may listen, what it leaves alone, and how it ends."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest

from flywheel.config.ingest import host_and_port
from flywheel.errors import ReceiverError
from flywheel.sources.otlp.inbox import Row, inbox_path
from flywheel.sources.otlp.receiver import LIMITS, Receiver, TracesEndpoint
from flywheel.system.server_limits import ServerLimits
from tests.sources.otlp.exporting import PROTOBUF, ids, request, span
from tests.sources.studio.reading import read_all
from tests.waiting import until

GOOD = request(span(1)).SerializeToString()


async def test_an_address_in_use_is_said_and_may_be_tried_again(receiver: Receiver, tmp_path: Path) -> None:
    port = httpx2.URL(receiver.url).port
    second = Receiver(f"127.0.0.1:{port}", tmp_path / "second.sqlite")
    with pytest.raises(
        ReceiverError, match=rf"cannot receive spans at 127\.0\.0\.1:{port}: .*in use.*port"
    ) as caught:
        await second.start()
    assert caught.value.retryable
    await second.stop()
    await receiver.stop()
    await second.start()
    assert (await post(second)).status_code == 200
    await second.stop()


@pytest.mark.parametrize(
    "listen",
    [
        "4318",
        ":4318",
        "127.0.0.1:",
        "127.0.0.1:http",
        "127.0.0.1:70000",
        "",
        "::",
        "http://127.0.0.1:4318",
        "//127.0.0.1:4318",
        "http://[::1]:4318",
    ],
)
def test_what_is_no_address_is_said(listen: str) -> None:
    with pytest.raises(ValueError, match=r"HOST:PORT.*127\.0\.0\.1:4318"):
        host_and_port(listen)


@pytest.mark.parametrize("host", ["a..b", "x" * 300])
async def test_a_name_that_no_machine_can_have_is_said(host: str, tmp_path: Path) -> None:
    with pytest.raises(ReceiverError, match="the host is not known"):
        await Receiver(f"{host}:0", tmp_path / "inbox.sqlite").start()


async def test_an_address_of_another_machine_is_said(tmp_path: Path) -> None:
    with pytest.raises(ReceiverError, match="address of this machine"):
        await Receiver("192.0.2.1:0", tmp_path / "inbox.sqlite").start()


async def test_an_inbox_that_cannot_be_made_is_said_and_the_port_is_free_again(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    receiver = Receiver("127.0.0.1:0", tmp_path / "file" / "inbox.sqlite")
    with pytest.raises(ReceiverError, match="cannot open the inbox"):
        await receiver.start()


async def test_an_inbox_is_readable_before_the_first_span(inbox: Path, receiver: Receiver) -> None:
    assert read_all(inbox)[:2] == ([], [])
    await receiver.stop()
    assert read_all(inbox)[:2] == ([], [])


@pytest.mark.skipif(not socket.has_ipv6 or not Path("/proc/net/if_inet6").exists(), reason="no IPv6 here")
async def test_ipv6(tmp_path: Path) -> None:
    receiver = Receiver("[::1]:0", tmp_path / "inbox.sqlite")
    await receiver.start()
    assert receiver.url.startswith("http://[::1]:")
    assert (await post(receiver)).status_code == 200
    await receiver.stop()


async def test_clients_that_stall_in_their_bodies_keep_nobody_waiting(inbox: Path, receiver: Receiver) -> None:
    stalled = [await half_sent(receiver, number) for number in range(1, 21)]
    async with asyncio.timeout(LIMITS.body_seconds / 2):
        assert (await post(receiver)).status_code == 200
    assert ids(inbox) == [1]
    for _, writer in stalled:
        writer.close()


async def test_what_there_is_no_room_for_may_be_sent_again() -> None:
    kept: list[Row] = []

    async def store(rows: Sequence[Row], private: Collection[str]) -> None:
        kept.extend(rows)

    go_on = asyncio.Event()

    async def slowly() -> AsyncIterator[bytes]:
        yield GOOD[:-1]
        await go_on.wait()
        yield GOOD[-1:]

    with ThreadPoolExecutor(1) as thread:
        service = TracesEndpoint(store, thread, ServerLimits(body_bytes=len(GOOD) * 3 // 2, bodies=1))
        transport = httpx2.ASGITransport(service.app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
            first = asyncio.create_task(client.post("/v1/traces", content=slowly(), headers=PROTOBUF))
            async with asyncio.timeout(60):
                while not service.app._held:
                    await asyncio.sleep(0)
            refused = await client.post("/v1/traces", content=GOOD, headers=PROTOBUF)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
            go_on.set()
            assert (await first).status_code == 200
            for _ in range(3):
                assert (await client.post("/v1/traces", content=GOOD, headers=PROTOBUF)).status_code == 200
    assert len(kept) == 4


async def test_stopping_finishes_the_request_in_flight_and_frees_the_port(inbox: Path) -> None:
    receiver = Receiver("127.0.0.1:0", inbox)
    await receiver.start()
    url = receiver.url
    reader, writer = await half_sent(receiver)
    server = receiver._server
    stopping = asyncio.create_task(receiver.stop())
    while not server._server.should_exit:  # type: ignore[union-attr]
        await asyncio.sleep(0)
    writer.write(GOOD[10:])
    assert b" 200 " in await reader.readline()
    await stopping
    writer.close()
    assert ids(inbox) == [1]
    assert not list(inbox.parent.glob("*-wal"))
    with pytest.raises(httpx2.ConnectError):
        await post(receiver, url)


@pytest.mark.slow
async def test_a_client_that_never_ends_does_not_hold_up_the_end(
    inbox: Path, caplog: pytest.LogCaptureFixture
) -> None:
    receiver = Receiver("127.0.0.1:0", inbox)
    await receiver.start()
    _, writer = await half_sent(receiver)
    await asyncio.wait_for(receiver.stop(), 20)
    writer.close()
    assert "Traceback" not in caplog.text


async def test_signals_stay_the_daemon_s(inbox: Path) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    receiver = Receiver("127.0.0.1:0", inbox)
    await receiver.start()
    during = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    await receiver.stop()
    await receiver.stop()
    assert during == before


@pytest.mark.slow
def test_a_daemon_without_a_receiver_loads_no_web_server() -> None:
    code = (
        "import sys, flywheel.daemon.source_supervisor; "
        "print([n for n in ('uvicorn', 'starlette', 'google.protobuf', 'opentelemetry') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_each_address_has_an_inbox_of_its_own(tmp_path: Path) -> None:
    assert inbox_path(tmp_path, "127.0.0.1:4318") == tmp_path / "otlp" / "127.0.0.1-4318.sqlite"
    assert inbox_path(tmp_path, "../../x:1").parent == tmp_path / "otlp"
    others = ["[::1]:4318", "[1::]:4318", "[::1:4318]:1", "1:4318", "my-host:1", "my_host:1", "localhost:4318"]
    assert len({inbox_path(tmp_path, listen) for listen in others}) == len(others)


async def half_sent(receiver: Receiver, number: int = 1) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection whose request, the receiver's `number`th in flight, has arrived but for most of its body."""
    url = httpx2.URL(receiver.url)
    assert url.host and url.port
    reader, writer = await asyncio.open_connection(url.host, url.port)
    lines = (
        "POST /v1/traces HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/x-protobuf",
        f"Content-Length: {len(GOOD)}",
    )
    writer.write("".join(f"{line}\r\n" for line in (*lines, "")).encode() + GOOD[:10])
    await writer.drain()
    server = receiver._server
    assert server is not None
    await until(lambda: len(server._server.server_state.tasks) >= number, "the request to be in flight")
    return reader, writer


async def post(receiver: Receiver, url: str = "") -> httpx2.Response:
    async with httpx2.AsyncClient(timeout=30) as client:
        return await client.post(url or receiver.url.replace("0.0.0.0", "127.0.0.1"), content=GOOD, headers=PROTOBUF)
