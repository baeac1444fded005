"""While a promotion is watched: the next candidate waits, and a rollback ends the round that goes on from it."""

from __future__ import annotations

import asyncio
from contextlib import closing
from pathlib import Path

import pytest

from flywheel.config.deploy import DeploySettings, WatchSettings
from flywheel.config.file import Config
from flywheel.daemon.promotion_watch import PromotionWatch
from flywheel.daemon.rounds.rounds import Rounds
from flywheel.daemon.rounds.waiting import waits_for
from flywheel.records.states import RoundState
from flywheel.serving.calls.call_log import call_log_copy_path
from flywheel.sources.call_puller import OFF, CallLogCopy
from flywheel.store import deployments
from tests.daemon.rounds.workers import works
from tests.factories.verdict import put_more_tasks
from tests.factories.watched import BAD, GOOD, Watched
from tests.factories.wheel import Wheel, leave_result
from tests.waiting import until


def config_of(wheel: Wheel) -> Config:
    watch = DeploySettings(watch=WatchSettings(new_share=0.5, until_units=10_000))
    return wheel.config.model_copy(update={"deploy": watch})


@pytest.fixture
async def watched(wheel: Wheel) -> Rounds:
    """Rounds whose first candidate was promoted, and is watched."""
    leave_result(wheel, await wheel.started())
    own = wheel.others(config_of(wheel))
    assert await own.finish_live() is RoundState.PROMOTED
    return own


async def test_a_promoted_candidate_shares_the_traffic_with_the_version_before(wheel: Wheel, watched: Rounds) -> None:
    active = await wheel.active()
    assert (active.adapter, active.ab_test["other"], active.ab_test["share"]) == ("r0001", None, 0.5)
    assert len(active.ab_test["salt"]) == 32
    assert await wheel.store.read(deployments.watched, "agent") == "r0001"


async def test_the_next_candidate_waits_until_the_watch_is_decided(wheel: Wheel, watched: Rounds) -> None:
    await wheel.store.write(put_more_tasks, 6)
    directory = await wheel.started()
    leave_result(wheel, directory)
    assert await watched.finish_live() is RoundState.PASSED
    row = await wheel.row("r0002")
    assert await wheel.store.read(waits_for, config_of(wheel), row) == "the watch of r0001, which is undecided"
    await watched.promote_passed()
    assert await wheel.state("r0002") == "passed"
    await wheel.deployer.end_ab_test("no loss was shown")
    await watched.promote_passed()
    assert await wheel.state("r0002") == "promoted"
    active = await wheel.active()
    assert (active.adapter, active.ab_test["other"]) == ("r0002", "r0001")


@pytest.mark.slow
async def test_a_rollback_ends_the_round_that_goes_on_from_the_adapter(
    wheel: Wheel, watched: Rounds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await wheel.store.write(put_more_tasks, 6)
    works(tmp_path, monkeypatch, "exec sleep 600")
    await watched.plan("test")
    going = asyncio.create_task(watched.finish_live())
    await until(lambda: wheel.trains("r0002"), "the worker")
    watch = PromotionWatch(wheel.store, config_of(wheel), wheel.deployer)
    traffic = Watched(wheel.store, config_of(wheel), replies=1000)
    for _ in range(15):
        await traffic.answered("old", GOOD, version="base")
        await traffic.answered("new", BAD, version="agent@r0001")
    assert await watched.cancel_rolled_back() is None
    await watch.look()
    assert await watched.cancel_rolled_back() == "r0002"
    assert await going is RoundState.FAILED
    row = await wheel.row("r0002")
    assert row.reason.startswith("its parent r0001 was rolled back: worse in traffic: r0001 0 % of 15")
    active = await wheel.active()
    assert (active.adapter, active.ab_test) == (None, None)
    assert active.reason.startswith("rollback: worse in traffic")
    assert (await wheel.books()).get("reserved", 0) == 0


async def test_a_rollback_by_hand_ends_it_too_and_no_other_round(wheel: Wheel, watched: Rounds) -> None:
    await wheel.store.write(put_more_tasks, 6)
    await watched.plan("test")
    assert (await wheel.row("r0002")).parent == "r0001"
    await wheel.deployer.rollback()
    assert await watched.cancel_rolled_back() == "r0002"
    row = await wheel.row("r0002")
    assert (row.state, row.reason) == ("failed", "its parent r0001 was rolled back")
    await watched.plan("test")  # from what serves now
    assert await watched.cancel_rolled_back() is None
    assert (await wheel.row("r0003")).state == "planned"


@pytest.mark.parametrize("setting", ["share", "no calls", "off"])
async def test_what_cannot_be_watched_answers_alone(wheel: Wheel, setting: str) -> None:
    config = config_of(wheel)
    if setting == "share":
        config = config.model_copy(update={"deploy": DeploySettings(watch=WatchSettings(new_share=1))})
    elif setting == "no calls":
        config = config.model_copy(update={"serving": config.serving.model_copy(update={"call_log": None})})
    else:
        with closing(CallLogCopy(call_log_copy_path(config.state_dir))) as copy:
            copy.note(config.serving.urls[0], OFF)
    leave_result(wheel, await wheel.started())
    assert await wheel.others(config).finish_live() is RoundState.PROMOTED
    assert (await wheel.active()).ab_test is None
