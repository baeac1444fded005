"""No round starts on a rubric that people and judge do not agree on."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from flywheel.config import parse
from flywheel.daemon.deployer import Deployer
from flywheel.daemon.rounds.rounds import Rounds
from flywheel.daemon.status import snapshot
from flywheel.errors import TrainError
from flywheel.judge.grader import Grader
from flywheel.judge.rubric.file import load_rubric
from flywheel.store import calibrations, rounds
from flywheel.store.kernel.database import Store
from flywheel.system import files
from tests.daemon.rounds.test_rounds import put_tasks


async def test_a_round_waits_for_a_calibration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    raw = {
        "state": {"dir": str(tmp_path / "state")},
        "trigger": {"min_samples": 4, "cron_min_samples": 4, "min_held_out": 2},
        "gate": {"min_tasks": 2, "min_power": 0},
        "judge": {"min_kappa": 0.6, "base_url": "http://127.0.0.1:9/v1", "model": "judge"},
    }
    config = parse(raw, "test", tmp_path)
    rubric = load_rubric(files.shipped_folder() / "rubrics" / "math-boxed.yaml")
    store = await Store.open(config.state_dir)
    try:
        await store.write(put_tasks, 6, 4)
        wheel = Rounds(store, config, rubric, Deployer(store, config))
        assert not await wheel.start_due()
        waiting = (await store.read(snapshot, config)).waiting_for
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
    finally:
        await store.close()
