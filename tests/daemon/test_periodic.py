"""What the daemon does periodically: polls, retries, the cron window, reconciling, and memory returned when idle."""

from __future__ import annotations

import asyncio
import logging
import threading
from datetime import UTC, datetime
from pathlib import Path

import pytest

from flywheel.daemon import service
from flywheel.daemon.service import CHECKS_PER_RELEASE, IDLE_CHECKS, MemoryRelease, Service
from flywheel.errors import ServeError
from flywheel.judge.rubric.checks import language
from flywheel.serving.client.adapter_swap import ReplicaReport, SwapReport
from flywheel.store import requests
from flywheel.store.kernel.database import Store, version_of
from flywheel.store.kernel.schema import SCHEMA_VERSION
from flywheel.store.requests import RequestKind
from tests.daemon.following import configuration, exported
from tests.factories.config import with_settings
from tests.factories.state import running_daemon
from tests.factories.trace import write_lines
from tests.waiting import until


def question(text: str) -> dict[str, str]:
    return {"question": text, "answer": f"to {text}"}


@pytest.mark.parametrize("is_there_before", [False, True])
async def test_files_that_only_the_periodic_look_finds_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_there_before: bool
) -> None:
    monkeypatch.setattr(service, "RETRY_SECONDS", 0.2)
    lines, away = tmp_path / "lines", tmp_path / "away"
    if is_there_before:
        lines.mkdir()
        write_lines(lines / "a.jsonl", *map(question, ["before"]))
    config = configuration(tmp_path, [lines])
    async with running_daemon(config) as daemon:
        await until(lambda: daemon._sources._stages, "the daemon to have begun")
        if is_there_before:
            await until(lambda: len(exported(config)) == 1, "the first task")
            lines.rename(tmp_path / "moved")
        away.mkdir()
        write_lines(away / "b.jsonl", *map(question, ["one", "two"]))
        away.rename(lines)
        found = 2 + is_there_before
        await until(lambda: len(exported(config)) == found, "the tasks of a directory that came later")
        write_lines(lines / "c.jsonl", *map(question, ["three"]))
        await until(lambda: len(exported(config)) == found + 1, "the task of one more file")
    assert not [record for record in caplog.records if record.exc_info]


async def test_every_periodic_job_runs_in_the_event_loop_and_late_rather_than_never(
    tmp_path: Path, store: Store
) -> None:
    config = with_settings(configuration(tmp_path, []), trigger={"cron": "0 3 * * 0"})
    daemon = Service(config, store)
    windows: list[bool] = []

    async def start_due(*, window: bool = False) -> bool:
        windows.append(window)
        return False

    daemon._rounds.start_due = start_due
    scheduler = daemon._schedule()
    scheduler.start(paused=True)
    jobs = {job.id: job for job in scheduler.get_jobs()}
    assert set(jobs) == {"poll", "sources", "cron", "lock", *daemon._stages}
    for name, job in jobs.items():
        assert (job.coalesce, job.misfire_grace_time) == (True, None), name
    for name, stage in daemon._stages.items():
        jobs[name].func()
        assert stage.is_due, name
    night = jobs["cron"].trigger.get_next_fire_time(None, datetime(2026, 1, 1, 12, tzinfo=UTC))
    assert night == datetime(2026, 1, 4, 3, tzinfo=UTC), "a Sunday"
    daemon._stages["rounds"].is_due = False
    jobs["cron"].func()
    assert daemon._stages["rounds"].is_due
    await daemon._do_round()
    await daemon._do_round()
    assert windows == [True, False], "the window wakes the rounds once"
    scheduler.shutdown()
    await daemon._ingestion.close()


async def test_what_people_ask_for_wakes_its_stage(tmp_path: Path, store: Store) -> None:
    daemon = Service(configuration(tmp_path, []), store)
    for kind, arguments, woken in (
        (RequestKind.DEPLOY, {"round": "r0001", "max_uses": 3}, {"promotions"}),
        (RequestKind.RELEASE, {"tasks": []}, {"judge"}),
        (RequestKind.RETRY, {"letters": []}, {"judge"}),
    ):
        for stage in daemon._stages.values():
            stage.is_due = False
        await store.write(requests.submit, kind, arguments, "alice")
        await daemon._do_requests()
        assert {name for name, stage in daemon._stages.items() if stage.is_due} == woken
    await daemon._ingestion.close()


async def test_requests_are_looked_for_each_minute_whatever_the_files_of_the_state_say(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit is seen only when its disk has synced it, which may be long after its files were written."""
    now = 0.0
    monkeypatch.setattr(service, "steady", lambda: now)
    monkeypatch.setattr(Store, "version", lambda _: "the same")
    daemon = Service(configuration(tmp_path, []), store)
    await daemon._do_requests()
    await store.write(requests.submit, RequestKind.RELEASE, {"tasks": []}, "alice")
    await daemon._do_requests()
    assert not daemon._stages["judge"].is_due
    now += service.RETRY_SECONDS
    await daemon._do_requests()
    assert daemon._stages["judge"].is_due
    await daemon._ingestion.close()


async def test_what_a_periodic_job_cannot_do_is_told_once_and_one_under_way_is_ended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    times = {"reconcile_seconds": 0.1, "drain_seconds": 0.1}
    config = with_settings(configuration(tmp_path, []), daemon=times)
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

    async with running_daemon(config) as daemon:
        daemon._deployer.reconcile = reconcile
        await until(lambda: tries == 3, "the third try")
    assert ended
    assert [record.getMessage() for record in caplog.records if "server is away" in record.getMessage()] == [
        "reconcile: cannot reconcile: the server is away. Start it."
    ]
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.slow
async def test_a_replica_in_trouble_is_told_once_and_when_it_is_well(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    config = with_settings(configuration(tmp_path, []), daemon={"reconcile_seconds": 0.1})
    looks = [("a is away",), ("a is away",), ("a is away", "b is away"), (), (), ("a is away",)]
    done = 0

    async def reconcile() -> SwapReport:
        nonlocal done
        errors = looks[min(done, len(looks) - 1)]
        done += 1
        return SwapReport("agent", "agent@r0001", tuple(ReplicaReport("http://x", error=each) for each in errors))

    async with running_daemon(config) as daemon:
        daemon._deployer.reconcile = reconcile
        await until(lambda: done > len(looks), "all looks")
    told = [record.getMessage() for record in caplog.records if record.name == "flywheel.daemon.service"]
    assert [text for text in told if "away" in text or "recovered" in text] == [
        "a is away",
        "b is away",
        "all inference servers have recovered",
        "a is away",
    ]


async def test_memory_is_released_once_after_work_and_again_after_a_long_idle_time(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    released: list[int] = []
    monkeypatch.setattr(service, "trim_malloc", lambda: released.append(1))
    release = MemoryRelease(store, asyncio.Lock())
    for _ in range(3 * IDLE_CHECKS):
        release.note_work()
        await release.check()
    assert not released
    for _ in range(CHECKS_PER_RELEASE - 1):
        await release.check()
    assert len(released) == 1
    for _ in range(IDLE_CHECKS):
        await release.check()
    assert len(released) == 2
    assert await store.read(version_of) == await store.write(version_of) == SCHEMA_VERSION


@pytest.mark.parametrize("has_judged", [True, False])
async def test_no_memory_is_released_in_the_middle_of_judging(
    store: Store, monkeypatch: pytest.MonkeyPatch, has_judged: bool
) -> None:
    threads: list[threading.Thread] = []
    monkeypatch.setattr(language, "forget_model", lambda: threads.append(threading.current_thread()))
    judging = asyncio.Lock()
    release = MemoryRelease(store, judging)
    for _ in range(IDLE_CHECKS - 1):
        await release.check()
    async with judging:
        check = asyncio.create_task(release.check())
        # Whatever the check does at once or in a thread is done before this.
        for _ in range(5):
            await store.read(version_of)
            await asyncio.to_thread(lambda: None)
        assert (threads, check.done()) == ([], False)
        if has_judged:
            release.note_work()
    await check
    assert len(threads) == (not has_judged)
    assert threading.main_thread() not in threads, "another thread may load the model, which takes a second"
