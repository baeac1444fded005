"""Spans that agents send to the daemon become the same tasks as those that Studio keeps."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from pathlib import Path

import httpx2
import pytest

from flywheel.config.file import parse
from flywheel.daemon.service import Service
from flywheel.errors import ConfigError, ReceiverError
from flywheel.sources.ingestion import Ingestion
from flywheel.store.kernel.database import Store
from tests.daemon.following import Following, exported, status
from tests.factories.config import make_config
from tests.sources.otlp.exporting import PROTOBUF, fixture, request, request_of, span
from tests.sources.studio.writer import labels
from tests.waiting import until

LISTEN = "127.0.0.1:0"


async def test_spans_are_received_closed_and_made_into_tasks(tmp_path: Path) -> None:
    config = parse(
        {
            "state": {"dir": "state"},
            "sources": [{"type": "otlp", "listen": LISTEN}],
            "ingest": {"settle_seconds": 0},
        },
        "test",
        tmp_path,
    )
    wanted = {
        label["span_id"]
        for label in labels("new_v2")
        if label["user_visible"] and label["answer_in_span"] and label["kind"] != "interrupted"
    }
    rows = fixture("new_v2")
    async with Following(config) as following:
        url = following._sources._receivers[0].url
        async with httpx2.AsyncClient() as client:
            for first in range(0, len(rows), 40):
                content = request_of(rows[first : first + 40]).SerializeToString()
                # Sent twice, as an exporter does that did not hear the answer.
                for _ in range(2):
                    answer = await client.post(url, content=content, headers=PROTOBUF)
                    assert answer.status_code == 200
        await until(lambda: wanted <= set(exported(config)), "the tasks of what was sent")
    lines = exported(config)
    assert sorted(lines) == sorted(wanted)
    (source,) = (await status(config))["sources"]
    assert (source["type"], source["condition"]) == ("otlp", "ok")


async def test_a_daemon_stores_nothing_of_private_traces_but_their_number(tmp_path: Path) -> None:
    raw = {
        "state": {"dir": "state"},
        "sources": [{"type": "otlp", "listen": LISTEN}],
        "ingest": {"settle_seconds": 0},
        "privacy": {"exclude": {"conversations": ["secret-talk"]}},
    }
    config = parse(raw, "test", tmp_path)
    messages = [{"role": "user", "parts": [{"type": "text", "content": "swordfish?"}]}]
    asked = {"gen_ai.operation.name": "invoke_agent", "gen_ai.input.messages": messages}
    answered = asked | {"gen_ai.output.messages": [{**messages[0], "role": "assistant"}]}
    async with Following(config) as following:
        url = following._sources._receivers[0].url
        async with httpx2.AsyncClient() as client:
            for spans in (
                [span(1, {**answered, "flywheel.record": False}, trace=1)],
                [span(2, {**answered, "session.id": "secret-talk"}, trace=2)],
                [span(3, answered, trace=3)],
            ):
                await client.post(url, content=request(*spans).SerializeToString(), headers=PROTOBUF)
        await until(lambda: len(exported(config)) == 1, "the task of what may be stored")
    (source,) = (await status(config))["sources"]
    assert (source["replies"], source["private_traces"]) == (1, 2)


async def test_an_address_where_nothing_was_received_yet_is_no_trouble(tmp_path: Path) -> None:
    raw = {"state": {"dir": "state"}, "sources": [{"type": "otlp", "listen": LISTEN}]}
    config = parse(raw, "test", tmp_path)
    store = await Store.open(config.state_dir)
    ingestion = Ingestion(store, config)
    assert await ingestion.run(final=True) == []
    await ingestion.close()
    await store.close()


@pytest.mark.parametrize("signals", [1, 2])
async def test_a_daemon_that_receives_leaves_nothing_behind_however_great_the_hurry(
    tmp_path: Path, signals: int
) -> None:
    config = make_config(tmp_path, sources=[{"type": "otlp", "listen": LISTEN}])
    threads, tasks = left_running(), asyncio.all_tasks()
    store = await Store.open(config.state_dir)
    daemon = Service(config, store)
    running = asyncio.create_task(daemon.run())
    await until(lambda: daemon._sources._stages, "the receiver to have begun")
    assert left_running() - threads
    for _ in range(signals):
        daemon._stop._hear(signal.SIGTERM)
    await running
    # One more signal, while the state is being closed, does not kill the process either.
    assert signal.SIG_DFL not in (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT))
    assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    await store.close()
    assert not left_running() - threads
    assert asyncio.all_tasks() == tasks


def left_running() -> set[threading.Thread]:
    """The threads that keep a process from ending once its event loop has. Those of an earlier test's server may end
    at any moment: compare only what was added."""
    return {thread for thread in threading.enumerate() if not thread.name.startswith("asyncio_")}


async def test_a_second_receiver_that_cannot_have_its_address_leaves_nothing_of_the_first(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        sources = [{"type": "otlp", "listen": LISTEN}, {"type": "otlp", "listen": listen}, {"path": "lines"}]
        config = make_config(tmp_path, sources=sources)
        threads, tasks = left_running(), asyncio.all_tasks()
        store = await Store.open(config.state_dir)
        with pytest.raises(ReceiverError, match="in use"):
            await Service(config, store).run()
        await store.close()
        assert not left_running() - threads
        assert asyncio.all_tasks() == tasks


async def test_a_daemon_that_cannot_have_its_address_ends_in_order_and_says_so(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        config = make_config(tmp_path, sources=[{"type": "otlp", "listen": listen}])
        store = await Store.open(config.state_dir)
        before = asyncio.all_tasks()
        with pytest.raises(ReceiverError, match=f"receive spans at {listen}.*in use"):
            await Service(config, store).run()
        assert asyncio.all_tasks() == before
        await store.close()


@pytest.mark.parametrize("listen", ["nonsense", ":4318", "127.0.0.1:", "127.0.0.1:65536", f"127.0.0.1:{'9' * 5000}"])
def test_an_address_that_is_none_is_a_wrong_configuration(tmp_path: Path, listen: str) -> None:
    with pytest.raises(ConfigError, match=r"sources\.0\.listen.*not HOST:PORT"):
        parse({"sources": [{"type": "otlp", "listen": listen}]}, "test", tmp_path)


@pytest.mark.parametrize("listen", ["localhost:0", "[::1]:4318", "0.0.0.0:65535"])
def test_an_address_that_is_one_is_taken(tmp_path: Path, listen: str) -> None:
    raw = {"sources": [{"type": "otlp", "listen": listen, "token_env": "TOKEN"}]}
    [source] = parse(raw, "test", tmp_path).sources
    assert source.listen == listen  # type: ignore[union-attr]
