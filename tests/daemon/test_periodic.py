"""What the daemon does periodically happens in its event loop: what appears later is read without a restart."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from flywheel.config import Config
from flywheel.daemon import service
from flywheel.daemon.service import Service
from flywheel.errors import ServeError
from flywheel.serving.client.adapter_swap import ReplicaReport, SwapReport
from flywheel.store.kernel.database import Store
from tests.daemon.following import configuration, exported, until


@asynccontextmanager
async def running(config: Config) -> AsyncIterator[Service]:
    store = await Store.open(config.state_dir)
    daemon = Service(config, store)
    task = asyncio.create_task(daemon.run())
    try:
        yield daemon
    finally:
        daemon.stop()
        await task
        await store.close()


def write(path: Path, *questions: str) -> None:
    path.write_text("".join(json.dumps({"question": text, "answer": f"to {text}"}) + "\n" for text in questions))


@pytest.mark.parametrize("is_there_before", [False, True])
async def test_files_that_only_the_periodic_look_finds_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_there_before: bool
) -> None:
    monkeypatch.setattr(service, "RETRY_SECONDS", 0.2)
    lines, away = tmp_path / "lines", tmp_path / "away"
    if is_there_before:
        lines.mkdir()
        write(lines / "a.jsonl", "before")
    config = configuration(tmp_path, [lines])
    async with running(config) as daemon:
        await until(lambda: daemon._sources._stages, "the daemon to have begun")
        if is_there_before:
            await until(lambda: len(exported(config)) == 1, "the first task")
            lines.rename(tmp_path / "moved")
        away.mkdir()
        write(away / "b.jsonl", "one", "two")
        away.rename(lines)
        found = 2 + is_there_before
        await until(lambda: len(exported(config)) == found, "the tasks of a directory that came later")
        write(lines / "c.jsonl", "three")
        await until(lambda: len(exported(config)) == found + 1, "the task of one more file")
    assert not [record for record in caplog.records if record.exc_info]


async def test_every_periodic_job_runs_in_the_event_loop_and_late_rather_than_never(tmp_path: Path) -> None:
    config = configuration(tmp_path, [])
    config = config.model_copy(update={"trigger": config.trigger.model_copy(update={"cron": "0 3 * * *"})})
    store = await Store.open(config.state_dir)
    daemon = Service(config, store)
    scheduler = daemon._schedule()
    scheduler.start(paused=True)
    jobs = {job.id: job for job in scheduler.get_jobs()}
    stages = {
        "judge": daemon._judge,
        "rounds": daemon._round,
        "memory": daemon._memory,
        "prune": daemon._prune,
        "reconcile": daemon._reconcile,
        "retention": daemon._remove,
        "metrics": daemon._metrics,
        "requests": daemon._requests,
    }
    assert set(jobs) == {"poll", "sources", "cron", "memory", *stages}
    for name, job in jobs.items():
        # The scheduler takes every other function into a thread, where an asyncio.Event must not be set.
        assert asyncio.iscoroutinefunction(job.func), name
        assert (job.coalesce, job.misfire_grace_time) == (True, None), name
    for name, stage in stages.items():
        await jobs[name].func()
        assert stage.wake.is_set(), name
    scheduler.shutdown()
    await store.close()


async def test_what_a_periodic_job_cannot_do_is_told_once_and_one_under_way_is_ended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    config = configuration(tmp_path, [])
    config = config.model_copy(
        update={"daemon": config.daemon.model_copy(update={"reconcile_seconds": 0.1, "drain_seconds": 0.1})}
    )
    tries = 0
    ended = False

    async def reconcile() -> SwapReport:
        nonlocal tries, ended
        tries += 1
        if tries < 3:
            raise ServeError("reconcile", "the server is away", "Start it.")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0.1)
            ended = True
            raise
        raise AssertionError

    async with running(config) as daemon:
        daemon._deployer.reconcile = reconcile  # type: ignore[method-assign]
        await until(lambda: tries == 3, "the third try")
    assert ended
    assert [record.getMessage() for record in caplog.records if "server is away" in record.getMessage()] == [
        "reconcile: cannot reconcile: the server is away. Start it."
    ]
    assert not [record for record in caplog.records if record.exc_info]


async def test_a_replica_in_trouble_is_told_once_and_when_it_is_well(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    config = configuration(tmp_path, [])
    config = config.model_copy(update={"daemon": config.daemon.model_copy(update={"reconcile_seconds": 0.1})})
    looks = [("a is away",), ("a is away",), ("a is away", "b is away"), (), (), ("a is away",)]
    done = 0

    async def reconcile() -> SwapReport:
        nonlocal done
        errors = looks[min(done, len(looks) - 1)]
        done += 1
        return SwapReport("agent", "agent@r0001", tuple(ReplicaReport("http://x", error=each) for each in errors))

    async with running(config) as daemon:
        daemon._deployer.reconcile = reconcile  # type: ignore[method-assign]
        await until(lambda: done > len(looks), "all looks")
    told = [record.getMessage() for record in caplog.records if record.name == "flywheel.daemon.service"]
    assert [text for text in told if "away" in text or "recovered" in text] == [
        "a is away",
        "b is away",
        "all inference servers have recovered",
        "a is away",
    ]
