"""A round whose rubric holds checks of steps is refused before anything starts: its rollouts are single messages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flywheel import worker
from flywheel.config import Config, parse
from flywheel.daemon import planner
from flywheel.daemon.deployer import Deployer
from flywheel.daemon.judge_setup import rubric_of
from flywheel.daemon.rounds import Rounds
from flywheel.daemon.status import snapshot
from flywheel.diagnostics.doctor.finding import Result
from flywheel.diagnostics.doctor.judge import JudgeChecks
from flywheel.errors import TrainError
from flywheel.round import RoundSpec
from flywheel.states import RoundState
from flywheel.store import rounds
from flywheel.store.database import Store
from tests.daemon.test_rounds import put_tasks

OF_STEPS = {
    "tool-called": "{id: searched, type: tool-called, value: search}",
    "tool-sequence": "{id: searched, type: tool-sequence, value: [search, read]}",
    "no-error-span": "{id: searched, type: no-error-span}",
    "call-format": "{id: searched, type: call-format}",
}
SINGLE = "{id: present, type: regex, value: '[a-z0-9]'}"


def configured(folder: Path, criterion: str) -> Config:
    (folder / "rubric.yaml").write_text(f"version: 1\nid: mine\ncriteria:\n  - {SINGLE}\n  - {criterion}\n")
    raw = {
        "state": {"dir": "state"},
        "filter": {"rubric": "rubric.yaml"},
        "trigger": {"min_samples": 4, "cron_min_samples": 4, "min_held_out": 2},
        "gate": {"min_tasks": 2, "min_power": 0},
        "daemon": {"round_attempts": 1},
        "judge": {"base_url": "http://127.0.0.1:9/v1", "model": "judge"},
    }
    (folder / "flywheel.yaml").write_text(json.dumps(raw))
    return parse(raw, "test", folder)


@pytest.mark.parametrize("kind", OF_STEPS)
async def test_no_round_is_planned_and_status_says_why(tmp_path: Path, kind: str) -> None:
    config = configured(tmp_path, OF_STEPS[kind])
    rubric = rubric_of(config)
    store = await Store.open(config.state_dir)
    try:
        await store.write(put_tasks, 6, 4)
        wheel = Rounds(store, config, rubric, Deployer(store, config))
        assert not await wheel.start_due()
        waiting = (await store.read(snapshot, config))["waiting_for"]
        assert f"searched ({kind}) of the rubric mine looks at tool calls" in waiting
        with pytest.raises(TrainError, match=rf"searched \({kind}\).*Take those criteria out of the rubric"):
            await wheel.plan("by hand")
        with pytest.raises(TrainError, match=rf"try a round: searched \({kind}\)"):
            await store.read(planner.debug_spec, config, rubric)
        assert await store.read(rounds.live) is None
    finally:
        await store.close()


async def test_a_round_that_was_planned_with_another_rubric_fails_before_its_worker_starts(tmp_path: Path) -> None:
    fit, unfit = configured(tmp_path, "{id: long, type: min-length, value: 1}"), tmp_path / "unfit"
    unfit.mkdir()
    store = await Store.open(fit.state_dir)
    try:
        await store.write(put_tasks, 6, 4)
        name = await Rounds(store, fit, rubric_of(fit), Deployer(store, fit)).plan("test")
        rubric = rubric_of(configured(unfit, OF_STEPS["tool-called"]))
        later = Rounds(store, fit, rubric, Deployer(store, fit))
        assert await later.finish_live() is RoundState.FAILED
        row = await store.read(rounds.by_name, name)
        assert row is not None
        assert "searched (tool-called)" in row.reason
        assert not Path(row.dir).exists()
    finally:
        await store.close()


def test_a_worker_refuses_it_before_it_starts_an_engine(tmp_path: Path) -> None:
    config = configured(tmp_path, OF_STEPS["tool-called"])
    spec = RoundSpec(
        round_id="r0001", attempt=1, seed=1, debug=False, base_model="/nowhere", parent=None, held_out=[],
        train=[{"task_id": "t-1", "query": "?", "answer": "", "prompt": []}],  # type: ignore[list-item]
        rubric=rubric_of(config).model_dump(mode="json"), settings=config.model_dump(mode="json"),
    )  # fmt: skip
    (tmp_path / "spec.json").write_text(spec.model_dump_json())
    with pytest.raises(TrainError, match=r"train r0001: searched \(tool-called\)"):
        worker.run_round(spec, tmp_path, worker.build_grade)


def test_the_doctor_says_that_no_round_can_be_graded_by_it(tmp_path: Path) -> None:
    def found(criterion: str) -> tuple[Result, str]:
        finding = next(
            each for each in JudgeChecks(configured(tmp_path, criterion)).findings() if each.name == "rubric"
        )
        return finding.result, finding.found

    assert found("{id: long, type: min-length, value: 1}")[0] is Result.OK
    result, text = found(OF_STEPS["no-error-span"])
    assert result is Result.WARNING
    assert "no round can be graded with it: searched (no-error-span)" in text
