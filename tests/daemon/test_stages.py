"""How the stages of a daemon do, what the state says of it, when they are tried again, and that one that hangs is
known."""

from __future__ import annotations

import asyncio
import errno
import sqlite3
import threading
from collections.abc import Awaitable, Callable
from contextlib import closing
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import pytest
from apscheduler.schedulers import base
from apscheduler.triggers import interval
from sqlalchemy import func, select, update

from flywheel.config.crontab import cron_trigger
from flywheel.daemon import stage as stage_module
from flywheel.daemon.erasure import Eraser
from flywheel.daemon.judging.judging import CLAIMED_PER_THREAD, TaskJudging
from flywheel.daemon.promotion_watch import PromotionWatch
from flywheel.daemon.rounds.rounds import Rounds
from flywheel.daemon.rounds.worker_process import WorkerProcess
from flywheel.daemon.rounds.worker_watch import WorkerWatch
from flywheel.daemon.service import Service
from flywheel.daemon.stage import Intervals, Stage, in_turn
from flywheel.errors import CallLogError, FlywheelError, NotifyError, StoreError
from flywheel.records.states import TaskState
from flywheel.sources.ingestion import Ingestion
from flywheel.store import claims, erasures, notices, stages
from flywheel.store.erasures import ErasureState, Kind
from flywheel.store.kernel import schema
from flywheel.store.kernel.database import Store
from flywheel.store.stages import Pass, StageRecord
from flywheel.system import clock, heartbeat
from flywheel.system.heartbeat import PATIENCE_SECONDS, Heartbeat
from flywheel.system.purge import purge
from flywheel.system.signals import Stop, StopReason
from tests.daemon.following import configuration
from tests.factories.config import with_settings
from tests.factories.daemon import running
from tests.factories.judge_server import JudgeServer
from tests.factories.judging import RUBRIC, config, tell
from tests.factories.state import running_daemon
from tests.factories.trace import put_replies, reply, write_lines
from tests.waiting import until

AWAY = FlywheelError("send it", "nobody answers", "It is sent again.")


class Clock:
    """A monotonic clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


class CountingHeartbeat(Heartbeat):
    """Counts beats, by the limits of the steps."""

    def __init__(self) -> None:
        self.limits: list[float] = []

    def beat(self, limit: float) -> None:
        self.limits.append(limit)
        super().beat(limit)


@pytest.fixture
def beats() -> CountingHeartbeat:
    return CountingHeartbeat()


def acting(*results: object) -> Callable[[], Awaitable[object]]:
    """An action with these results, of which errors are raised."""
    left = list(results)

    async def act() -> object:
        result = left.pop(0)
        if isinstance(result, Exception):
            raise result
        return result

    return act


async def record_of(store: Store, name: str) -> StageRecord:
    return (await store.read(stages.records)).get(name, StageRecord())


@pytest.mark.parametrize(("result", "logged"), [(Pass.WORKED, "s: recovered"), (Pass.IDLE, "s: recovered, as")])
async def test_what_failed_is_well_when_its_work_has_succeeded_or_is_gone(
    store: Store, caplog: pytest.LogCaptureFixture, result: Pass, logged: str
) -> None:
    caplog.set_level("INFO")
    stage = Stage("s", acting(Pass.WORKED, AWAY, Pass.WAITING, AWAY, Pass.WAITING, result), store=store)
    await stage.attempt()
    worked = await record_of(store, "s")
    assert (bool(worked.last_ok), worked.failing_since, worked.error) == (True, "", "")
    seen = []
    for _ in range(4):
        await stage.attempt()
        seen.append(await record_of(store, "s"))
    assert {each.failing_since for each in seen} == {seen[0].failing_since} and seen[0].failing_since
    assert {(each.error, each.last_ok) for each in seen} == {(str(AWAY), worked.last_ok)}
    assert not [text for text in caplog.messages if "recovered" in text], "nothing was due"
    await stage.attempt()
    after = await record_of(store, "s")
    assert (after.failing_since, after.waits_until, after.error) == ("", "", "")
    assert [text for text in caplog.messages if text.startswith(logged)]
    assert len([text for text in caplog.messages if "nobody answers" in text]) == 1, "it is logged once"


async def test_a_new_process_goes_on_with_what_the_last_one_noted(store: Store) -> None:
    await Stage("s", acting(AWAY), store=store).attempt()
    failing = await record_of(store, "s")
    again = Stage("s", acting(Pass.WAITING, AWAY, Pass.IDLE), store=store)
    for expected in (failing.failing_since, failing.failing_since, ""):
        await again.attempt()
        assert (await record_of(store, "s")).failing_since == expected
    await store.write(stages.note, "gone", AWAY)
    await store.write(stages.forget_others, ["s"])
    assert set(await store.read(stages.records)) == {"s"}


async def test_after_a_failure_one_attempt_decides_when_its_time_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    time, attempts = Clock(), []
    monkeypatch.setattr(stage_module, "monotonic", time.monotonic)
    asks_for_a_minute = NotifyError("send it", "it is busy")
    asks_for_a_minute.retry_after = 60.0
    results = [AWAY, AWAY, asks_for_a_minute, AWAY, *[AWAY] * 8, Pass.WORKED, AWAY]

    async def act() -> object:
        attempts.append(time.now)
        return await acting(results.pop(0))()

    stage = Stage("s", act, waits=(5.0, 3600.0))
    stage.begin(Stop())

    async def woken() -> None:
        stage.wake()
        await until(lambda: stage.task is None, "the end of the pass")

    waits = []
    for number in range(1, 15):
        await woken()
        assert len(attempts) == number
        if results:
            waits.append(max(stage._not_before - time.now, 0.0))
            time.now += waits[-1] - 1 if waits[-1] and number != 13 else 0
            await woken()
            assert len(attempts) == number + (number == 13), "it waits, whatever wakes it"
            if number == 13:
                break
            time.now += 1
    assert waits[:4] == [5.0, 10.0, 60.0, 40.0]
    assert waits[11] == 3600.0
    assert stage._not_before - time.now == 5.0, "after a success, the waits begin anew"
    stage._action = acting(Pass.WORKED)
    stage.retry_now()
    await until(lambda: stage.error is None, "an attempt before its time")


async def test_a_dead_judge_has_not_recovered_while_nothing_is_due(store: Store, tmp_path: Path) -> None:
    await tell(store, 3)
    events = select(func.count()).where(schema.events.c.kind == notices.JUDGE)
    with JudgeServer(lambda *_: True, behaviour="500") as judge:
        judging = TaskJudging(store, config(tmp_path, judge, max_attempts=1, max_thread=4))
        assert (await judging.run()).error is not None
        failing = await record_of(store, "judge")
        assert failing.failing_since and "in a row" in failing.error
        retry_at = await store.read(lambda conn: conn.execute(select(func.min(schema.tasks.c.retry_at))).scalar_one())
        due, said = map(datetime.fromisoformat, (retry_at, failing.waits_until))
        assert abs(said - due) < timedelta(seconds=60), "it is asked again when a task is due"
        assert ((await judging.run()).result, judge.calls) == (Pass.WAITING, 3)
        assert await record_of(store, "judge") == failing
        for _ in range(2):
            await store.write(lambda conn: conn.execute(update(schema.tasks).values(retry_at="2020")))
            await judging.run()
            await judging.run()
        assert (await record_of(store, "judge")).failing_since == failing.failing_since
        assert await store.read(lambda conn: conn.execute(events).scalar_one()) == 1, "one notice, and not each time"
        judge.behave("good")
        await store.write(lambda conn: conn.execute(update(schema.tasks).values(retry_at="2020")))
        assert (await judging.run()).result is Pass.WORKED
        record = await record_of(store, "judge")
        assert record.last_ok and (record.failing_since, record.error) == ("", "")
        assert (await judging.run()).result is Pass.IDLE


async def test_what_needs_no_judge_says_nothing_of_one_that_is_down(store: Store, tmp_path: Path) -> None:
    rubric = {"id": "r", "criteria": [{"id": "sound", "type": "degenerate", "required": True}, *RUBRIC["criteria"]]}
    await tell(store, 3)
    with JudgeServer(lambda *_: True, behaviour="500") as judge:
        settings = config(tmp_path, judge, rubric, max_attempts=1)
        assert (await TaskJudging(store, settings).run()).error is not None
        failing = await record_of(store, "judge")
        await store.write(put_replies, reply(7, answer="and again " * 500))
        report = await TaskJudging(store, settings).run()
        assert (report.rejected, report.calls, report.result) == (1, 0, Pass.WAITING)
        assert await record_of(store, "judge") == failing


async def test_a_judge_without_work_is_idle(store: Store, tmp_path: Path) -> None:
    await tell(store, 3)
    with JudgeServer(lambda *_: True, behaviour="500") as judge:
        judging = TaskJudging(store, config(tmp_path, judge, max_attempts=1))
        assert (await judging.run()).error is not None
        gone = update(schema.tasks).values(state=TaskState.ERASED.value)
        await store.write(lambda conn: conn.execute(gone))
        assert (await judging.run()).result is Pass.IDLE
    assert (await record_of(store, "judge")).failing_since == ""


async def health(client: httpx2.AsyncClient, status: int, text: str) -> None:
    """Wait for this answer. While the clock is moved, a stage may just be at work."""

    async def is_so() -> bool:
        answer = await client.get("/healthz")
        return (answer.status_code, answer.text) == (status, text)

    await until(is_so, f"{status} {text}")


async def test_a_stage_that_hangs_makes_the_daemon_unhealthy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    time, hangs, goes_on = Clock(), asyncio.Event(), asyncio.Event()
    monkeypatch.setattr(heartbeat, "monotonic", time.monotonic)
    settings = with_settings(configuration(tmp_path, []), daemon={"metrics": "127.0.0.1:0"})

    async def hang() -> None:
        hangs.set()
        await goes_on.wait()

    async with running(settings) as (service, client):
        memory = service._stages["memory"]
        memory._action = hang
        memory.wake()
        await hangs.wait()
        time.now += PATIENCE_SECONDS
        await health(client, 200, "ok\n")
        time.now += 1
        await health(client, 503, "hangs: memory; restart the daemon\n")
        memory.heartbeat.beat(3600)
        time.now += 3600 + PATIENCE_SECONDS
        await health(client, 200, "ok\n")  # what it waits for may take an hour
        time.now += 1
        await health(client, 503, "hangs: memory; restart the daemon\n")
        goes_on.set()
        await until(lambda: memory.heartbeat.overdue_seconds == 0, "the end of the pass")
        time.now += 1e6
        await health(client, 200, "ok\n")  # a stage that has nothing to do does not hang


async def test_a_judge_may_take_its_own_time_limit_and_its_stage_hangs_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    time = Clock()
    monkeypatch.setattr(heartbeat, "monotonic", time.monotonic)
    lines = write_lines(tmp_path / "lines.jsonl", {"question": "1+1?", "answer": "\\boxed{2}"})
    with JudgeServer() as judge:
        judge.hold()
        settings = with_settings(
            configuration(tmp_path, [lines]),
            judge={
                "base_url": judge.base_url,
                "model": "j",
                "timeout_seconds": 3600,
                "max_attempts": 1,
                "max_thread": 1,
            },
            daemon={"metrics": "127.0.0.1:0", "drain_seconds": 1},
        )
        async with running(settings) as (service, client):
            await until(lambda: judge.in_flight, "a call")
            time.now += 3600 + PATIENCE_SECONDS
            await health(client, 200, "ok\n")
            time.now += 1
            await health(client, 503, "hangs: judge; restart the daemon\n")
            judge.behave("500")
            judge.let_go()
            await until(lambda: service._stages["judge"].heartbeat.overdue_seconds == 0, "the answer")
            time.now += 1e6
            await health(client, 200, "ok\n")  # a judge that is down is no hang


async def test_each_attempt_of_a_call_beats_in_the_threads_that_judge(
    store: Store, tmp_path: Path, beats: CountingHeartbeat
) -> None:
    await tell(store, 4)
    with JudgeServer(lambda *_: True, behaviour="500") as judge:
        beats.begin()
        await TaskJudging(store, config(tmp_path, judge, max_attempts=2, timeout_seconds=77)).run()
        assert beats.limits.count(77.0) == judge.calls > 4


async def test_a_long_round_beats_at_each_look(
    store: Store, tmp_path: Path, beats: CountingHeartbeat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flywheel.daemon.rounds.worker_watch.WATCH_SECONDS", 0.01)
    monkeypatch.setattr("flywheel.daemon.rounds.worker_process.POLL_SECONDS", 60)

    class Endless:
        def poll(self) -> None: ...

    worker: Any = WorkerProcess(tmp_path, 0, Endless())  # type: ignore[arg-type]
    beats.begin()
    stop = Stop()
    following = asyncio.create_task(WorkerWatch("r0001", worker).follow(1e9, stop))
    await until(lambda: len(beats.limits) > 10, "beats")
    stop.ask(StopReason.FINISHED)
    assert await following is None


async def test_an_ingestion_beats_with_each_batch(store: Store, tmp_path: Path, beats: CountingHeartbeat) -> None:
    lines = ({"question": f"{n}+1?", "answer": str(n + 1), "x": "y" * 1000} for n in range(5_000))
    settings = configuration(tmp_path, [write_lines(tmp_path / "lines.jsonl", *lines)])
    ingestion = Ingestion(store, settings)
    batches: list[int] = []
    [source] = ingestion.sources()
    record = source._record

    async def counted(*values: Any) -> None:
        batches.append(len(beats.limits))
        await record(*values)

    source._record = counted
    beats.begin()
    try:
        await source.read(final=True)
    finally:
        await ingestion.close()
    assert len(batches) > 1
    assert len(set(batches)) == len(batches), "it beat before each batch"


def test_sqlite_beats_within_one_statement(
    tmp_path: Path, beats: CountingHeartbeat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "INSTRUCTIONS", 1_000)
    path = tmp_path / "large.sqlite"
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("CREATE TABLE t (x TEXT)")
        connection.execute(
            "WITH n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 20000) INSERT INTO t SELECT i FROM n"
        )
    beats.begin()
    assert purge(path, 60.0, rewrite=True)
    assert len(beats.limits) > 10


async def test_the_state_beats_within_one_statement(
    tmp_path: Path, beats: CountingHeartbeat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "INSTRUCTIONS", 1_000)
    store = await Store.open(tmp_path)
    counting = "WITH n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 20000) SELECT count(*) FROM n"
    beats.begin()
    for run in (store.read, store.write):
        before = len(beats.limits)
        await run(lambda conn: conn.exec_driver_sql(counting).scalar_one())
        assert len(beats.limits) - before > 10
    await store.close()


async def spent(store: Store, tmp_path: Path, judge: JudgeServer, **values: Any) -> Service:
    """A daemon whose budget of the day is spent, with tasks that are left."""
    await tell(store, 40)
    settings = config(tmp_path, judge, budget={"tokens_per_day": 1}, max_thread=1, daemon={"metrics": None}, **values)
    return Service(settings.model_copy(update={"sources": []}), store)


async def ask_for_erasure(store: Store, conversation: str) -> int:
    return await store.write(erasures.begin, Kind.CONVERSATION, conversation, {conversation}, blocks=False)


async def state_of(store: Store, number: int) -> str:
    return str((await store.read(erasures.with_id, number)).state)


async def test_an_erasure_does_not_wait_for_the_next_day_s_budget(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flywheel.daemon.service.ERASURE_SECONDS", 0.1)
    finish, failures = Eraser.finish, [CallLogError("erase calls", "the disk is away", "")] * 2

    async def fails_twice(self: Eraser, seconds: float) -> bool:
        if failures:
            raise failures.pop()
        return await finish(self, seconds)

    monkeypatch.setattr(Eraser, "finish", fails_twice)
    with JudgeServer(lambda *_: True) as judge:
        service = await spent(store, tmp_path, judge)
        running = asyncio.create_task(service.run())
        try:
            await until(lambda: service._stages["judge"].error, "the spent budget")
            number = await ask_for_erasure(store, "c1")

            async def is_done() -> bool:
                return await state_of(store, number) == ErasureState.PURGED

            await until(is_done, "the erasure")
            assert failures == []
            assert service._stages["judge"].error is not None, "judging waits still"
        finally:
            service.stop()
            await running


async def test_each_step_of_a_stage_is_done_and_has_its_own_error(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    trouble: dict[str, Exception] = {}
    done: list[str] = []

    async def step(name: str) -> None:
        done.append(name)
        if name in trouble:
            raise trouble[name]

    stage = Stage("retention", partial(in_turn, partial(step, "spans"), partial(step, "rounds")), store=store)
    spans, old = CallLogError("delete spans", "the disk is full", "Free space."), StoreError("remove r1", "no right")
    for failing, said in (
        ({"spans": spans}, [str(spans)]),
        ({"rounds": old}, [str(old)]),
        ({"spans": spans, "rounds": old}, [str(spans), str(old)]),
        ({}, []),
    ):
        trouble, done[:] = failing, []
        await stage.attempt()
        error = (await store.read(stages.record_of, "retention")).error
        assert done == ["spans", "rounds"]
        assert [each for each in (str(spans), str(old)) if each in error] == said
    full = OSError(errno.ENOSPC, "No space left on device")
    for first, second, traces in (
        (full, old, 0),
        (old, full, 0),
        (ValueError("a defect"), old, 1),
        (full, ValueError("a defect"), 1),
        (ValueError("a defect"), KeyError("another"), 2),
    ):
        trouble = {}
        await stage.attempt()
        trouble, done[:] = {"spans": first, "rounds": second}, []
        caplog.clear()
        await stage.attempt()
        assert done == ["spans", "rounds"]
        found = [record.exc_info for record in caplog.records if record.exc_info]
        assert len(found) == traces
        told = caplog.text.lower()
        assert all(str(each.strerror if each is full else each).lower() in told for each in (first, second)), told


async def test_only_the_first_attempt_ends_a_pass_and_later_ones_wait_for_a_batch(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped: list[bool] = []

    async def fails(self: Eraser, seconds: float) -> bool:
        stopped.append(service._pass.is_set())
        assert await store.read(in_work) == [], "nothing is in work"
        raise CallLogError("erase calls", "the disk is away", "")

    def in_work(conn: Any) -> Any:
        judging = schema.tasks.c.state == TaskState.JUDGING.value
        return conn.execute(select(schema.tasks.c.id).where(judging)).all()

    monkeypatch.setattr(Eraser, "finish", fails)
    await tell(store, 40)
    with JudgeServer(lambda *_: True) as judge:
        settings = config(tmp_path, judge, max_thread=2, daemon={"metrics": None})
        service = Service(settings.model_copy(update={"sources": []}), store)
        judge.hold(after=3)
        judging = asyncio.create_task(service._stages["judge"].attempt())
        # The first ones are answered, and a pass of nothing else could end before it is asked to.
        await until(lambda: len(judge.requests) == 5, "calls that are held")
        await ask_for_erasure(store, "c1")
        erasing = asyncio.create_task(service._stages["erasures"].attempt())
        await until(service._pass.is_set, "the end of the pass to be asked for")
        assert stopped == []
        judge.let_go()
        await asyncio.gather(judging, erasing)
        assert stopped == [True]
        left = await store.read(claims.count_due)
        assert 0 < left < 40
        judge.hold()
        judging = asyncio.create_task(service._stages["judge"].attempt())
        await until(lambda: judge.in_flight, "the next pass")
        erasing = asyncio.create_task(service._stages["erasures"].attempt())
        await until(lambda: len(service._judging._waiters or ()) == 1, "the erasure to wait")
        judge.let_go()
        await asyncio.gather(judging, erasing)
        assert stopped == [True, False]
        assert left - await store.read(claims.count_due) == 2 * CLAIMED_PER_THREAD
        assert service._stages["judge"].is_due, "judging goes on"
        await service._ingestion.close()


async def test_an_error_in_the_watch_skips_no_other_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: Store
) -> None:
    done: set[str] = set()

    async def fails(self: PromotionWatch) -> None:
        raise CallLogError("read the call log", "it is damaged", "")

    def notes(name: str) -> Callable[[Rounds], Awaitable[None]]:
        async def note(self: Rounds) -> None:
            done.add(name)

        return note

    monkeypatch.setattr(PromotionWatch, "look", fails)
    steps = {"cancel_rolled_back", "cancel_erased", "promote_passed"}
    for name in steps:
        monkeypatch.setattr(Rounds, name, notes(name))
    async with running_daemon(configuration(tmp_path, [])) as service:
        await until(lambda: done == steps, "the other steps")

        async def failing() -> list[str]:
            records = await service._store.read(stages.records)
            return [name for name, each in records.items() if each.failing_since]

        await until(failing, "the error of the watch")
        assert await failing() == ["promotion watch"]
    assert isinstance(await Service(configuration(tmp_path, []), store).once(0), CallLogError)


class Wall(datetime):
    """The clock of the machine, which can be set."""

    moved = 0.0

    @classmethod
    def now(cls, tz: Any = None) -> Any:
        return datetime.now(tz) + timedelta(seconds=cls.moved)


@pytest.mark.parametrize("by", [-3600.0, 3600.0])
async def test_intervals_go_on_while_the_clock_of_the_machine_is_set(
    monkeypatch: pytest.MonkeyPatch, by: float
) -> None:
    monkeypatch.setattr(Wall, "moved", 0.0)
    monkeypatch.setattr(base, "datetime", Wall)
    monkeypatch.setattr(interval, "datetime", Wall)
    monkeypatch.setattr(stage_module, "moved_seconds", lambda: Wall.moved)
    calls, told, threads = [0, 0], [], set()
    intervals = Intervals(lambda: told.append(1))

    def often() -> None:
        calls[0] += 1
        threads.add(threading.current_thread())

    intervals.every(0.02, "often", often)
    intervals.every(1800.0, "seldom", lambda: calls.__setitem__(1, calls[1] + 1))
    intervals.start()
    try:
        await until(lambda: calls[0] > 2, "calls")
        Wall.moved += by
        calls[0] = 0
        await until(lambda: calls[0] > 5, "calls after the clock was set")
        assert (calls[1], told) == (0, [1])
        assert threads == {threading.main_thread()}, "stages must be woken in the event loop"
        left = intervals.get_job("seldom").next_run_time - Wall.now(intervals.timezone)
        assert timedelta(minutes=20) < left < timedelta(minutes=31)
    finally:
        intervals.shutdown()


async def test_a_crontab_goes_by_the_clock_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Wall, "moved", 9 * 365 * 86_400.0)
    monkeypatch.setattr(base, "datetime", Wall)
    monkeypatch.setattr(stage_module, "moved_seconds", lambda: Wall.moved)
    intervals = Intervals(lambda: None)
    intervals.at(cron_trigger("0 3 * * *"), "cron", lambda: None)
    intervals.start()
    try:
        assert intervals.get_job("cron").next_run_time - datetime.now(intervals.timezone) > timedelta(days=3000)
        Wall.moved = 0.0
        intervals.wakeup()
        soon = timedelta(days=1)
        await until(
            lambda: intervals.get_job("cron").next_run_time - datetime.now(intervals.timezone) <= soon,
            "the next night",
        )
    finally:
        intervals.shutdown()


async def test_after_the_clock_was_set_all_stages_are_tried_and_no_task_waits_for_the_wrong_time(
    store: Store, tmp_path: Path
) -> None:
    await tell(store, 3)
    with JudgeServer(lambda *_: True) as judge:
        settings = config(tmp_path, judge, retry_undecided_seconds=900, daemon={"metrics": None})
        service = Service(settings.model_copy(update={"sources": []}), store)
        of_2035 = update(schema.tasks).values(
            state=TaskState.UNDECIDED.value, retry_at="2035-01-01T00:00:00.000+00:00"
        )
        await store.write(lambda conn: conn.execute(of_2035))
        service._stages["judge"]._not_before = float("inf")
        service._after_clock_set()
        assert service._stages["judge"].is_due and service._stages["judge"]._not_before < 0
        await service._stages["judge"].attempt()
        latest = await store.read(lambda conn: conn.execute(select(func.max(schema.tasks.c.retry_at))).scalar_one())
        soon = datetime.fromisoformat(latest) - datetime.now(tz=datetime.fromisoformat(latest).tzinfo)
        assert timedelta(0) < soon <= timedelta(seconds=900)
        await store.write(lambda conn: conn.execute(of_2035))
        await service.recover()
        assert await store.read(claims.next_due) < "2035", "the next start does the same"
        await service._ingestion.close()


def test_the_clock_of_timers_does_not_follow_the_machine_s(monkeypatch: pytest.MonkeyPatch) -> None:
    before, real = clock.steady(), clock.time.time
    monkeypatch.setattr(clock.time, "time", lambda: real() - 3600)
    assert clock.steady() >= before
    assert clock.moved_seconds() == pytest.approx(-3600, abs=60)


async def test_a_poll_that_is_overdue_makes_the_daemon_unready(tmp_path: Path) -> None:
    async with running_daemon(configuration(tmp_path, [], poll_seconds=30)) as service:
        await until(lambda: service._unready() == "", "the start")
        service._sources._polled_at -= 1000
        assert service._unready().startswith("a poll is overdue by ")
        service._sources.poll()
        assert service._unready() == ""


async def test_a_store_that_cannot_be_written_ends_no_stage(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        async def write(self, *_: object) -> None:
            raise StoreError("use the state", "the disk is full")

    stage = Stage("s", acting(AWAY, Pass.WORKED), store=Broken())  # type: ignore[arg-type]
    await stage.attempt()
    await stage.attempt()
    assert "the disk is full" in caplog.text


async def test_a_stage_has_a_task_only_while_it_runs_and_goes_on_where_it_is_woken_meanwhile() -> None:
    passes, stop, goes_on = [], Stop(), asyncio.Event()

    async def act() -> None:
        passes.append(1)
        await goes_on.wait()

    stage = Stage("s", act)
    stage.wake()
    assert stage.task is None, "it has not begun"
    stage.begin(stop)
    await until(lambda: passes, "the pass that it was woken for")
    for _ in range(3):
        stage.wake()
    goes_on.set()
    await until(lambda: stage.task is None, "the end")
    assert len(passes) == 2, "one more pass, however often it was woken"
    stop.ask(StopReason.FINISHED)
    stage.wake()
    assert stage.task is None
