"""A rubric with checks of steps may grade rollouts, which have steps of their own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flywheel.cli.doctor import Result
from flywheel.cli.doctor.judge import check_judge
from flywheel.config import Config, parse
from flywheel.daemon.deployer import Deployer
from flywheel.daemon.judging.judge_setup import rubric_of
from flywheel.daemon.rounds import planner
from flywheel.daemon.rounds.rounds import Rounds
from flywheel.store import rounds
from flywheel.store.kernel.database import Store
from tests.daemon.rounds.test_rounds import put_tasks

OF_STEPS = {
    "tool-called": "{id: searched, type: tool-called, value: search}",
    "tool-sequence": "{id: searched, type: tool-sequence, value: [search, read]}",
    "no-error-span": "{id: searched, type: no-error-span}",
    "call-format": "{id: searched, type: call-format}",
}


def configured(folder: Path, criterion: str) -> Config:
    (folder / "rubric.yaml").write_text(f"version: 1\nid: mine\ncriteria:\n  - {criterion}\n")
    raw = {
        "state": {"dir": "state"},
        "filter": {"rubric": "rubric.yaml"},
        "trigger": {"min_samples": 4, "cron_min_samples": 4, "min_held_out": 2},
        "gate": {"min_tasks": 2, "min_power": 0},
        "judge": {"base_url": "http://127.0.0.1:9/v1", "model": "judge"},
    }
    (folder / "flywheel.yaml").write_text(json.dumps(raw))
    return parse(raw, "test", folder)


@pytest.mark.parametrize("kind", OF_STEPS)
async def test_a_round_is_planned_and_the_doctor_does_not_warn(tmp_path: Path, kind: str) -> None:
    config = configured(tmp_path, OF_STEPS[kind])
    rubric = rubric_of(config)
    store = await Store.open(config.state_dir)
    try:
        await store.write(put_tasks, 6, 4)
        assert await Rounds(store, config, rubric, Deployer(store, config)).start_due()
        row = await store.read(rounds.live)
        assert row is not None
        assert (await store.read(planner.spec_of, row, config, rubric)).rubric["criteria"][0]["type"] == kind
    finally:
        await store.close()
    assert next(check for check in check_judge(config) if check.name == "rubric").result is Result.OK
