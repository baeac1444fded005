"""What a round asks of its rubric: any check may grade rollouts, and people must agree with the judge."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from flywheel.config.file import Config, load
from flywheel.daemon.checkup import Result, examine_rubric
from flywheel.daemon.deployer import Deployer
from flywheel.daemon.judging.judge_setup import rubric_of
from flywheel.daemon.rounds.rounds import Rounds
from flywheel.daemon.status import snapshot
from flywheel.errors import TrainError
from flywheel.judge.grader import Grader
from flywheel.judge.rubric.file import load_rubric
from flywheel.store import calibrations, rounds
from flywheel.store.kernel.database import Store
from tests.factories.config import BOXED_RUBRIC, write_config, write_rubric
from tests.factories.round import spec_again
from tests.factories.verdict import put_tasks

OF_STEPS: dict[str, dict[str, Any]] = {
    "tool-called": {"value": "search"},
    "tool-sequence": {"value": ["search", "read"]},
    "no-error-span": {},
    "call-format": {},
}


def made(folder: Path, **sections: Any) -> Config:
    """A state in which a round is due but for its rubric."""
    defaults = {
        "trigger": {"min_samples": 4, "cron_min_samples": 4, "min_held_out": 2},
        "gate": {"min_tasks": 2, "min_power": 0},
    }
    return load(write_config(folder, **defaults, **sections))


@pytest.mark.parametrize("kind", OF_STEPS)
async def test_a_round_is_planned_and_the_doctor_does_not_warn(tmp_path: Path, store: Store, kind: str) -> None:
    write_rubric(tmp_path, criteria=[{"id": "searched", "type": kind, **OF_STEPS[kind]}])
    judge = {"base_url": "http://127.0.0.1:9/v1", "model": "judge"}
    config = made(tmp_path, judge=judge, filter={"rubric": "rubric.yaml"})
    rubric = rubric_of(config)
    await store.write(put_tasks, 6, 4)
    assert await Rounds(store, config, rubric, Deployer(store, config)).start_due()
    assert (await spec_again(store, config)).rubric["criteria"][0]["type"] == kind
    assert examine_rubric(config).result is Result.OK


async def test_a_round_waits_for_a_calibration(tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    config = made(tmp_path, judge={"min_kappa": 0.6, "base_url": "http://127.0.0.1:9/v1", "model": "judge"})
    rubric = load_rubric(BOXED_RUBRIC)
    await store.write(put_tasks, 6, 4)
    wheel = Rounds(store, config, rubric, Deployer(store, config))
    assert not await wheel.start_due()
    waiting = (await store.read(snapshot, config))["waiting_for"]
    assert waiting == "judge.min_kappa is 0.6, but the rubric is not calibrated: run `flywheel rubric calibrate`"
    with pytest.raises(TrainError, match="the rubric is not calibrated"):
        await wheel.plan("by hand")
    with closing(Grader(rubric, config.judge)) as grader:
        judge_hash = grader.judge_hash
    for kappa, started in ((0.4, False), (0.8, True)):
        await store.write(
            calibrations.record,
            rubric_id=rubric.id, rubric_hash=rubric.hash, judge_hash=judge_hash, judge_model="judge",
            n=50, undecided=0, agreement=0.9, kappa=kappa, kappa_low=0.1, kappa_high=0.9,
        )  # fmt: skip
        assert await wheel.start_due() is started
        assert ((await store.read(rounds.live)) is not None) is started
