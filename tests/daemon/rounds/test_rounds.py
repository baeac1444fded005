"""A round is brought to its end from whatever state a crash has left it in."""

from __future__ import annotations

import asyncio
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select, update

from flywheel import __version__
from flywheel.config.file import Config
from flywheel.daemon.deployer import Deployer
from flywheel.daemon.rounds import rounds as rounds_module
from flywheel.daemon.rounds import worker_process, worker_watch
from flywheel.daemon.rounds.planner import due
from flywheel.errors import ServeError, StoreError, TrainError
from flywheel.records.round import DecisionReason
from flywheel.records.states import RoundState
from flywheel.store import deployments, gate_tests, rounds, samples
from flywheel.store.kernel import database, schema
from flywheel.store.views import lineage
from flywheel.system.files import write_json
from flywheel.system.signals import StopReason
from flywheel.training.data import rollout_file
from flywheel.training.data.round_directory import FORMAT, FORMAT_NUMBER
from tests.daemon.rounds import workers
from tests.daemon.rounds.moments import MOMENTS, Moment
from tests.daemon.rounds.workers import REFUSES, stray_worker, works
from tests.factories.config import with_settings
from tests.factories.rollout import IN_ONE_FILE
from tests.factories.verdict import put_more_tasks
from tests.factories.wheel import Wheel, leave_result
from tests.waiting import until


@pytest.mark.parametrize("early", ["", "three steps had nothing to train"])
async def test_a_better_candidate_is_swapped_in_and_its_samples_are_consumed(wheel: Wheel, early: str) -> None:
    leave_result(wheel, await wheel.started(), reason=early)
    assert await wheel.rounds.finish_live() is RoundState.PROMOTED
    assert (await wheel.books())["consumed"] == 6
    active = await wheel.active()
    assert (active.adapter, active.previous) == ("r0001", None)
    assert active.report["replicas"][0]["probe"] is not None
    assert wheel.server.loaded == {"agent@r0001": str(wheel.config.state_dir / "rounds/r0001/adapter")}
    decision = await wheel.store.read(gate_tests.decision_of, 1)
    assert (decision.reason_code, decision.min_tasks) == (DecisionReason.BETTER, 2)
    assert (await wheel.row()).reason == (f"{decision.reason}; {early}" if early else decision.reason)


REFUSED = {"outcome": "refused", "adapter": None, "comparison": None, "reason": "no spread"}


@pytest.mark.parametrize(("values", "reason"), [({"lower": -0.1}, "not shown to be better"), (REFUSED, "no spread")])
async def test_a_candidate_that_is_not_shown_to_be_better_changes_nothing_on_the_server(
    wheel: Wheel, values: dict[str, Any], reason: str
) -> None:
    leave_result(wheel, await wheel.started(), **values)
    assert await wheel.rounds.finish_live() is RoundState.REJECTED
    assert await wheel.active() is None
    assert wheel.server.loaded == {}
    assert reason in (await wheel.row()).reason
    assert (await wheel.books())["accepted"] == 6 + 2, "two more rounds may use them"


async def test_each_change_of_the_supply_is_noted_once_and_a_planned_round_waits_for_nothing(wheel: Wheel) -> None:
    await wheel.store.write(database.note, database.ROUND_NOTE, "3 of 4 samples are free")
    assert await wheel.rounds.start_due()
    assert not await wheel.store.read(database.noted, database.ROUND_NOTE)
    for _ in range(3):
        assert not await wheel.rounds.start_due()
    noted = [(row.usable, row.waits_for) for row in reversed(await wheel.store.read(samples.newest_available))]
    first, second = noted
    assert first[0] > second[0] and first[1].startswith("min_samples: ") and second[1] == "r0001 is planned"


async def test_a_round_whose_worker_died_gives_its_samples_back_and_waits(wheel: Wheel) -> None:
    directory = await wheel.started()
    (directory / "worker.log").write_text("Out of memory\n")
    assert await wheel.rounds.finish_live() is RoundState.FAILED
    assert (await wheel.books())["accepted"] == 6 + 2
    assert "Out of memory" in (await wheel.row()).reason
    wanted = await wheel.store.read(due, wheel.config)
    assert not wanted.start
    assert "r0001 failed" in wanted.reason


async def test_an_adapter_that_does_not_answer_as_it_was_measured_is_not_deployed(wheel: Wheel) -> None:
    leave_result(wheel, await wheel.started(), weights="wrong")
    state = await wheel.rounds.finish_live()
    assert state is RoundState.FAILED
    assert await wheel.active() is None
    [failed] = await wheel.store.read(deployments.history, "agent", 5)
    assert failed.state == "failed"
    assert failed.error


async def test_files_that_changed_after_the_evaluation_are_not_deployed(wheel: Wheel) -> None:
    directory = await wheel.started()
    leave_result(wheel, directory)
    (directory / "adapter" / "weights").write_text("tampered")
    assert await wheel.rounds.finish_live() is RoundState.FAILED
    assert wheel.server.loaded == {}


async def test_files_that_cannot_be_read_just_now_delay_the_decision(
    wheel: Wheel, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_result(wheel, await wheel.started())

    def denied(_: Path) -> str:
        raise OSError(5, "Input/output error", "weights")

    with monkeypatch.context() as patch:
        patch.setattr(rounds_module, "tree_sha256", denied)
        with pytest.raises(TrainError, match=r"weights: Input/output error") as caught:
            await wheel.rounds.finish_live()
    assert caught.value.retryable
    assert await wheel.state() == "evaluating"
    assert "Input/output error" in await wheel.store.read(database.noted, database.ROUND_NOTE)
    assert await wheel.rounds.finish_live() is RoundState.PROMOTED
    assert await wheel.store.read(database.noted, database.ROUND_NOTE) == ""


@pytest.mark.parametrize(
    ("path", "status", "why"),
    [
        ("/v1/models", 401, "refuses the key"),
        ("/v1/models", 302, "HTTP 302"),
        ("/v1/load_lora_adapter", 404, "does not load adapters at run time"),
        ("/v1/load_lora_adapter", 400, "LoRA is not enabled"),
        ("/v1/load_lora_adapter", 503, "HTTP 503"),
    ],
)
async def test_a_server_that_can_load_no_adapter_just_now_delays_the_swap_until_it_is_mended(
    wheel: Wheel, path: str, status: int, why: str
) -> None:
    leave_result(wheel, await wheel.started())
    wheel.server.faults[path] = (status, "LoRA is not enabled" if status == 400 else "no such place")
    for _ in range(2):
        with pytest.raises(ServeError, match=why) as caught:
            await wheel.rounds.finish_live()
        assert caught.value.retryable or status != 503
        assert await wheel.state() == "evaluating"
    wheel.server.faults.clear()
    assert await wheel.rounds.finish_live() is RoundState.PROMOTED
    await wheel.books()


@pytest.mark.parametrize(
    ("serving", "why"),
    [
        ({"admin_key_env": "MY_KEY"}, "MY_KEY, which is not set"),
        ({"urls": ["http://127.0.0.1:9"]}, "cannot be reached"),
    ],
)
async def test_a_swap_that_cannot_be_tried_is_delayed_and_leaves_no_deployment(
    wheel: Wheel, monkeypatch: pytest.MonkeyPatch, serving: dict[str, Any], why: str
) -> None:
    monkeypatch.delenv("MY_KEY", raising=False)
    leave_result(wheel, await wheel.started())
    deployer = Deployer(wheel.store, with_settings(wheel.config, serving=serving))
    for _ in range(3):
        with pytest.raises(ServeError, match=why):
            await wheel.others(wheel.config, deployer).finish_live()
        assert await wheel.state() == "evaluating"
    assert list(await wheel.store.read(deployments.history, "agent", 9)) == []
    assert await wheel.rounds.finish_live() is RoundState.PROMOTED


async def test_a_rollback_before_the_promotion_was_written_down_is_not_undone(
    wheel: Wheel, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_result(wheel, await wheel.started())

    def full(*_: object, **__: object) -> None:
        raise StoreError("use the state database", "the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(rounds, "finish", full)
        with pytest.raises(StoreError):
            await wheel.rounds.finish_live()
    assert await wheel.state() == "evaluating"
    assert (await wheel.deployer.rollback())[0] is None
    assert await wheel.rounds.finish_live() is RoundState.PROMOTED
    assert (await wheel.active()).adapter is None, "it was rolled back meanwhile"
    assert "rolled back since" in (await wheel.row()).reason
    assert (await wheel.books())["consumed"] == 6


@pytest.mark.parametrize("mode", ["auto", "manual"])
async def test_a_candidate_neither_waits_nor_is_promoted_over_what_it_was_not_compared_with(
    wheel: Wheel, mode: str
) -> None:
    own = wheel.others(with_settings(wheel.config, gate={"mode": mode}))
    leave_result(wheel, await wheel.started(), lower=-0.1)
    assert await wheel.rounds.finish_live() is RoundState.REJECTED
    await wheel.store.write(put_more_tasks, 6)
    directory = await wheel.started()
    leave_result(wheel, directory)
    await wheel.deployer.deploy("r0001", "by hand")
    assert await own.finish_live() is RoundState.FAILED
    assert (await wheel.active()).adapter == "r0001"
    assert "compared with the base model, and r0001 serves now" in (await wheel.row("r0002")).reason
    assert (await wheel.books())["accepted"] == 12 + 2
    # It is there to be deployed by hand, by who knows better.
    await wheel.deployer.deploy("r0002", "by hand")


async def test_a_planned_round_whose_base_model_was_changed_fails_and_gives_its_samples_back(wheel: Wheel) -> None:
    leave_result(wheel, await wheel.started())
    assert await wheel.rounds.finish_live() is RoundState.PROMOTED
    await wheel.store.write(put_more_tasks, 6)
    await wheel.rounds.plan("test")
    changed = wheel.others(with_settings(wheel.config, model={"base": "another/model"}))
    assert await changed.finish_live() is RoundState.FAILED
    assert "model.base is another/model" in (await wheel.row("r0002")).reason
    assert (await wheel.books())["accepted"] == 6 + 2


async def test_rollback_goes_back_to_what_served_before_and_forth_again(wheel: Wheel) -> None:
    with pytest.raises(ServeError, match="nothing was deployed yet"):
        await wheel.deployer.rollback()
    leave_result(wheel, await wheel.started())
    await wheel.rounds.finish_live()
    target, _ = await wheel.deployer.rollback()
    assert target is None
    assert ((active := await wheel.active()).adapter, active.previous) == (None, "r0001")
    target, _ = await wheel.deployer.rollback()
    assert target == "r0001"


async def test_the_trigger_counts_what_a_round_can_use(wheel: Wheel) -> None:
    def with_trigger(**values: int) -> Config:
        return with_settings(wheel.config, trigger=values)

    assert (await wheel.store.read(due, wheel.config)).start
    few = await wheel.store.read(due, with_trigger(min_samples=7))
    assert (few.start, few.reason) == (False, "6 of 7 samples are free")
    assert (await wheel.store.read(due, with_trigger(min_samples=7), window=True)).start
    untested = await wheel.store.read(due, with_trigger(min_held_out=5))
    assert (untested.start, untested.reason) == (False, "4 of 5 held-out tasks are judged")
    few_for_the_gate = with_settings(wheel.config, gate={"min_tasks": 5}, trigger={"min_held_out": None})
    unproven = await wheel.store.read(due, few_for_the_gate)
    assert (unproven.start, unproven.reason) == (False, "4 of 5 held-out tasks are judged")
    await wheel.rounds.plan("test")
    assert "r0001 is planned" in (await wheel.store.read(due, wheel.config)).reason
    with pytest.raises(TrainError, match="r0001 is planned"):
        await wheel.rounds.plan("another")


async def test_why_tells_which_conversations_made_an_adapter(wheel: Wheel) -> None:
    leave_result(wheel, await wheel.started())
    await wheel.rounds.finish_live()
    story = await wheel.store.read(lineage.why, "agent@r0001")
    assert story["state"] == "promoted"
    assert len(story["conversations"]) == len(story["samples"]) == 6
    assert story["comparison"]["gain"] == 0.7
    assert story["deployments"][0]["state"] == "active"
    task = await wheel.store.read(lineage.why, story["samples"][0]["task_id"])
    [told] = task["replies"]
    assert told["task"]["rounds"] == [{"round": "r0001", "state": "promoted", "split": "train", "replayed": False}]
    assert [step["new"] for step in told["task"]["history"]] == [
        "pending", "judging", "accepted", "reserved", "consumed",
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("number", MOMENTS)
async def test_a_stop_at_any_moment_leaves_a_planned_round_and_no_worker(
    wheel: Wheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(worker_watch, "WATCH_SECONDS", 0.05)
    works(tmp_path, monkeypatch, f"echo $$ >> {tmp_path}/pids; exec sleep 600")
    await wheel.rounds.plan("test")
    moment = Moment(wheel.rounds.finish_live(), number, monkeypatch)
    await moment.has_come((tmp_path / "pids").exists)
    wheel.rounds._stop.ask(StopReason.SIGNAL)
    # The daemon cancels at its end what still runs.
    moment.task.cancel()
    moment.go_on()
    await asyncio.wait([moment.task])
    row = await wheel.store.read(rounds.live)
    assert (row.state, row.attempt, row.pid) == ("planned", 1, None)
    assert (await wheel.books())["reserved"] == 6
    pids = (tmp_path / "pids").read_text().split() if (tmp_path / "pids").exists() else []
    assert [pid for pid in pids if Path("/proc", pid).exists()] == []


@pytest.mark.slow
@pytest.mark.parametrize("number", MOMENTS)
@pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")
async def test_a_stop_at_any_moment_that_leaves_the_worker_leaves_one_that_is_adopted(
    wheel: Wheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(worker_watch, "WATCH_SECONDS", 0.05)
    monkeypatch.setattr(worker_process, "ADOPTED_POLL_SECONDS", 0.05)
    going_on, pids = tmp_path / "go-on", tmp_path / "pids"
    script = f"while [ ! -e {going_on} ]; do sleep 0.05; done"
    works(tmp_path, monkeypatch, f"echo $$ >> {pids}; {script}; {REFUSES}")
    await wheel.rounds.plan("test")
    moment = Moment(wheel.rounds.finish_live(), number, monkeypatch)
    await moment.has_come((tmp_path / "pids").exists)
    wheel.rounds._stop.detaches = True
    wheel.rounds._stop.ask(StopReason.SIGNAL)
    moment.go_on()
    assert await moment.task is None
    row = await wheel.row()
    assert (row.state, row.attempt) == (("training", 1) if row.pid else ("planned", 1))
    going = asyncio.create_task(wheel.others(wheel.config).finish_live())
    going_on.touch()
    assert await going is RoundState.REJECTED
    # Neither stopped nor started a second time.
    started = [int(pid) for pid in pids.read_text().split()]
    assert started == ([row.pid] if row.pid else started[:1])


@pytest.mark.slow
@pytest.mark.parametrize(("end", "state"), [(REFUSES, "evaluating"), ("kill -TERM $$", "planned")])
async def test_a_stop_that_comes_just_after_the_end_of_a_worker_loses_no_result(
    wheel: Wheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, state: str
) -> None:
    """A worker may also have ended of the signal that the daemon has got."""
    works(tmp_path, monkeypatch, end)
    await wheel.rounds.plan("test")
    follow = worker_watch.WorkerWatch.follow

    async def followed(*args: Any) -> int | None:
        code = await follow(*args)
        wheel.rounds._stop.ask(StopReason.SIGNAL)
        return code

    monkeypatch.setattr(worker_watch.WorkerWatch, "follow", followed)
    assert await wheel.rounds.finish_live() is None
    row = await wheel.row()
    assert (row.state, row.attempt, row.pid) == (state, 1, None)


@pytest.mark.slow
async def test_a_worker_that_a_killed_daemon_had_just_started_is_stopped(
    wheel: Wheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The round is still planned: nobody knows of it, and its lock would make every other worker fail."""
    name = await wheel.rounds.plan("test")
    with stray_worker(wheel.config.state_dir / "rounds" / name) as stray:
        works(tmp_path, monkeypatch, REFUSES)
        assert await wheel.rounds.finish_live() is RoundState.REJECTED
        assert stray.wait(120) == -signal.SIGTERM


@pytest.mark.slow
async def test_a_worker_that_cannot_be_recorded_does_not_go_on(
    wheel: Wheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody would stop it with the daemon."""
    works(tmp_path, monkeypatch, "exec sleep 600")
    await wheel.rounds.plan("test")
    workers: list[subprocess.Popen[bytes]] = []

    def started(*args: Any, **named: Any) -> subprocess.Popen[bytes]:
        workers.append(popen(*args, **named))
        return workers[-1]

    def full(*_: object, **__: object) -> None:
        raise StoreError("use the state database", "the disk is full")

    with monkeypatch.context() as patch:
        popen = subprocess.Popen
        patch.setattr(worker_process.subprocess, "Popen", started)
        patch.setattr(rounds_module, "move", full)
        with pytest.raises(StoreError):
            await wheel.rounds.finish_live()
    [worker] = workers
    try:
        assert await wheel.state() == "planned"
        assert worker.poll() == -signal.SIGTERM
    finally:
        worker.kill()


async def test_a_sample_that_could_not_be_asked_has_made_no_adapter_and_is_told_why(wheel: Wheel) -> None:
    directory = await wheel.started()
    trained = select(schema.tasks.c.key).where(schema.tasks.c.state == "reserved")
    first, *_ = await wheel.store.read(lambda conn: conn.execute(trained).scalars().all())
    leave_result(wheel, directory, left_out={first: "its prompt has 9000 tokens"})
    assert await wheel.rounds.finish_live() is RoundState.PROMOTED
    story = await wheel.store.read(lineage.why, "r0001")
    assert first not in [sample["task_id"] for sample in story["samples"]]
    assert (len(story["samples"]), story["held_out"]) == (5, 4)
    assert story["left_out"] == {first: "its prompt has 9000 tokens"}
    task = await wheel.store.read(lineage.why, first)
    told = [(step["new"], step["detail"]) for step in task["replies"][0]["task"]["history"]]
    assert ("left out", "of r0001: its prompt has 9000 tokens") in told
    await wheel.books()


async def test_a_prompt_that_the_worker_found_not_to_be_exact_is_never_taken_again(wheel: Wheel) -> None:
    directory = await wheel.started()
    first, *others = await wheel.store.read(
        lambda conn: conn.execute(select(schema.tasks.c.key).order_by(schema.tasks.c.id)).scalars().all()
    )
    why = "its prompt has 28 tokens, and the model was sent 256"
    leave_result(wheel, directory, left_out={first: why}, inexact={first: why})
    await wheel.rounds.finish_live()
    told = await wheel.store.read(lineage.why, first)
    assert told["replies"][0]["task"]["left_out"] == [{"reason": "inexact", "why": f"{why} (found by r0001)"}]
    rows = await wheel.store.read(
        lambda conn: conn.execute(select(schema.tasks.c.key, schema.tasks.c.excluded, schema.tasks.c.payload)).all()
    )
    assert {row.key for row in rows if row.excluded} == {first}
    (about,) = (row.payload["metadata"] for row in rows if row.key == first)
    assert (about["prompt_exact"], about["prompt_reason"]) == (False, f"{why} (found by r0001)")
    assert all(row.payload["metadata"]["prompt_exact"] for row in rows if row.key in others)


@pytest.mark.slow
@pytest.mark.parametrize(("version", "ends"), [(__version__, False), ("0.0.1", True)])
async def test_an_adopted_worker_of_another_version_ends_at_its_next_checkpoint(
    wheel: Wheel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    version: str,
    *,
    ends: bool,
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(worker_watch, "WATCH_SECONDS", 0.05)
    monkeypatch.setattr(worker_process, "ADOPTED_POLL_SECONDS", 0.05)
    directory = await wheel.started()
    write_json(directory / "identity.json", {"version": version, FORMAT: FORMAT_NUMBER})
    write_json(directory / "progress.json", {"phase": "training", "paused": ""})
    with stray_worker(directory) as left:
        await wheel.store.write(lambda conn: conn.execute(update(schema.rounds).values(pid=left.pid)))
        going = asyncio.create_task(wheel.rounds.finish_live())
        # A worker is watched once it has been asked to end.
        await until(lambda: "r0001: training" in caplog.text, "its progress in the log")
        assert f"r0001: resuming with the worker of an earlier daemon (process {left.pid})" in caplog.messages
        assert (directory / "end-at-checkpoint").exists() is ends
        error = {"error": "cannot go on with the round: it was asked to end", "hint": "", "retryable": ends}
        write_json(directory / "error.json", error)
        works(tmp_path, monkeypatch, f"rm $3/end-at-checkpoint; {REFUSES}")
    ended = await going
    # It costs no attempt: the round is planned again as after a stop.
    assert (ended, (await wheel.row()).attempt) == ((RoundState.REJECTED if ends else RoundState.FAILED), 1)


@pytest.mark.slow
async def test_an_adopted_worker_whose_files_have_an_earlier_format_is_left_to_end(
    wheel: Wheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A further worker could not go on with them, so that the work would be lost."""
    caplog.set_level("INFO")
    monkeypatch.setattr(worker_watch, "WATCH_SECONDS", 0.05)
    monkeypatch.setattr(worker_process, "ADOPTED_POLL_SECONDS", 0.05)
    directory = await wheel.started()
    write_json(directory / "identity.json", {"tasks": "0" * 64, "version": "0.0.1"})
    write_json(directory / "progress.json", {"phase": "training", "paused": ""})
    with stray_worker(directory) as left:
        works(tmp_path, monkeypatch, "echo started > $3/started-again")
        await wheel.store.write(lambda conn: conn.execute(update(schema.rounds).values(pid=left.pid)))
        going = asyncio.create_task(wheel.rounds.finish_live())
        await until(lambda: "r0001: training" in caplog.text, "its progress in the log")
        shutil.copy(IN_ONE_FILE / "rollouts.jsonl", directory)
        shutil.copy(IN_ONE_FILE / "rollouts.index.jsonl", directory)
        assert not (directory / "end-at-checkpoint").exists()
        (directory / "result.json").write_text(workers.REFUSED)
    assert await going is RoundState.REJECTED
    assert "its worker of version 0.0.1 keeps running: its files have another format" in caplog.text
    assert not (directory / "started-again").exists()
    assert {each["step"] for each in rollout_file.rollouts(directory)} == {1, 2}


@pytest.mark.slow
async def test_a_pause_does_not_count_as_work(wheel: Wheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that is paused longer than it may work is left to go on; one that works so long is stopped."""
    monkeypatch.setattr(worker_watch, "WATCH_SECONDS", 0.05)
    rounds_of = wheel.others(with_settings(wheel.config, daemon={"round_timeout_seconds": 3.0}))
    paused = '{"phase": "training", "paused": "the judge is away"}'
    works(tmp_path, monkeypatch, f"echo '{paused}' > $3/progress.json; sleep 6; {REFUSES}")
    await rounds_of.plan("test")
    assert await rounds_of.finish_live() is RoundState.REJECTED
    working = '{"phase": "training", "paused": ""}'
    works(tmp_path, monkeypatch, f"echo '{working}' > $3/progress.json; exec sleep 600")
    await wheel.store.write(put_more_tasks, 6)
    await rounds_of.plan("test")
    assert await rounds_of.finish_live() is RoundState.FAILED
    assert "ran longer than 3 s" in (await wheel.row("r0002")).reason
