"""What got a 200 is in the file: after kill -9, on a full disk, with many clients at once."""

from __future__ import annotations

import asyncio
import json
import os
import random
import resource
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest

from flywheel.sources.otlp.receiver import Receiver
from tests import warm
from tests.sources.otlp.exporting import PROTOBUF, ids, request, span, stored

ROOT = Path(__file__).parents[3]


@contextmanager
def process(inbox: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A receiver in a process, and where it listens; it is killed at the end if it still lives."""
    command = [sys.executable, "-m", "tests.sources.otlp.serve", str(inbox)]
    with warm.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as running:
        try:
            assert running.stdout is not None
            yield running, running.stdout.readline().strip()
        finally:
            running.kill()


def whole(path: Path) -> None:
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    connection.close()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_what_was_answered_with_200_survives_kill_9(inbox: Path, seed: int) -> None:
    """Requests of many spans are whole or absent."""
    chosen = random.Random(seed)
    answered: list[int] = []
    number = 0
    for _ in range(2):
        with process(inbox) as (running, url), httpx2.Client(timeout=30) as client:
            left = chosen.randrange(3, 25)
            killer = None
            try:
                while True:
                    batch = range(number + 1, number + 1 + chosen.randrange(1, 40))
                    number = batch[-1]
                    body = request(*(span(n, {"text": "x" * 3000}) for n in batch)).SerializeToString()
                    if left == 0:
                        # From another process, so that it strikes at any point of the request.
                        killer = subprocess.Popen(["kill", "-9", str(running.pid)])
                    left -= 1
                    assert client.post(url, content=body, headers=PROTOBUF).status_code == 200
                    answered += batch
            except httpx2.TransportError:
                assert killer is not None, "the receiver went away by itself"
            finally:
                if killer is not None:
                    killer.wait()
            assert running.wait(timeout=30) == -signal.SIGKILL
    whole(inbox)
    assert len(answered) > 3
    assert set(answered) <= set(ids(inbox))


@pytest.mark.slow
def test_a_full_disk_is_answered_with_503_and_nothing_is_half_stored(inbox: Path) -> None:
    big = [span(n, {"text": os.urandom(1500).hex()}) for n in range(100, 400)]
    with process(inbox) as (running, url), httpx2.Client(timeout=30) as client:

        def send(*spans: object) -> httpx2.Response:
            return client.post(url, content=request(*spans).SerializeToString(), headers=PROTOBUF)  # type: ignore[arg-type]

        assert send(span(1)).status_code == 200
        _, hard = resource.prlimit(running.pid, resource.RLIMIT_FSIZE)
        log = inbox.with_name(inbox.name + "-wal")
        resource.prlimit(running.pid, resource.RLIMIT_FSIZE, (log.stat().st_size + 100_000, hard))
        refusals = [send(*big) for _ in range(3)]
        for refusal in refusals:
            assert refusal.status_code == 503
            assert int(refusal.headers["retry-after"]) > 0
        assert set(ids(inbox)) == {1}

        resource.prlimit(running.pid, resource.RLIMIT_FSIZE, (hard, hard))
        assert send(*big).status_code == 200
        assert set(ids(inbox)) == {1, *range(100, 400)}
    whole(inbox)


async def test_an_inbox_that_somebody_locks_is_answered_with_503_until_it_is_free(
    client: httpx2.AsyncClient, inbox: Path
) -> None:
    body = request(span(1)).SerializeToString()
    other = sqlite3.connect(inbox, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    refusal = await client.post("/v1/traces", content=body, headers=PROTOBUF)
    assert refusal.status_code == 503
    assert int(refusal.headers["retry-after"]) > 0
    other.execute("ROLLBACK")
    other.close()
    assert (await client.post("/v1/traces", content=body, headers=PROTOBUF)).status_code == 200
    assert ids(inbox) == [1]


async def test_spans_go_to_the_file_that_is_there_now(client: httpx2.AsyncClient, inbox: Path) -> None:
    assert (
        await client.post("/v1/traces", content=request(span(1)).SerializeToString(), headers=PROTOBUF)
    ).is_success
    for path in inbox.parent.iterdir():
        path.unlink()
    assert (
        await client.post("/v1/traces", content=request(span(2)).SerializeToString(), headers=PROTOBUF)
    ).is_success
    assert ids(inbox) == [2]


async def test_an_inbox_that_is_no_database_takes_nothing_and_says_so(
    client: httpx2.AsyncClient, inbox: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for path in inbox.parent.iterdir():
        path.unlink()
    inbox.write_text("no database" * 1000)
    answers = [
        await client.post("/v1/traces", content=request(span(1)).SerializeToString(), headers=PROTOBUF)
        for _ in range(3)
    ]
    assert [answer.status_code for answer in answers] == [503] * 3
    assert sum("not a database" in record.message for record in caplog.records) == 1


@pytest.mark.slow
async def test_concurrent_clients_lose_nothing(receiver: Receiver, inbox: Path) -> None:
    async def one(client: int) -> None:
        async with httpx2.AsyncClient(timeout=60) as sender:
            for turn in range(10):
                numbers = [client * 1000 + turn * 10 + n for n in range(1, 6)]
                body = request(*(span(n) for n in numbers)).SerializeToString()
                answer = await sender.post(receiver.url, content=body, headers=PROTOBUF)
                assert answer.status_code == 200, answer.text

    await asyncio.gather(*(one(client) for client in range(20)))
    assert sorted(ids(inbox)) == sorted(
        c * 1000 + t * 10 + n for c in range(20) for t in range(10) for n in range(1, 6)
    )


async def test_a_span_sent_again_updates_its_row_in_place(client: httpx2.AsyncClient, inbox: Path) -> None:
    await client.post("/v1/traces", content=request(span(1), span(2)).SerializeToString(), headers=PROTOBUF)
    again = request(span(1, {"late": True})).SerializeToString()
    assert (await client.post("/v1/traces", content=again, headers=PROTOBUF)).status_code == 200
    assert ids(inbox) == [1, 2]
    assert json.loads(stored(inbox)[0]["attributes"]) == {"late": True}
