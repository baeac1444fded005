"""A state as tables, beside a daemon and in a notebook's event loop."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import flywheel as package
from flywheel.errors import StoreError
from flywheel.notebook import state
from flywheel.records.verdict import CriterionResult, Outcome, Verdict
from flywheel.store.kernel.database import Store
from flywheel.training.data.rollout_file import rollout_line, step_file, write_step
from tests.cli.filter_bench import Bench
from tests.factories.round import comparison, put_adapter, put_round
from tests.training.data.rollouts import rollout

GOOD, BAD = "good: \\boxed{1}", "bad: \\boxed{0}"


def test_tasks_and_verdicts_are_flat_rows(tmp_path: Path, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.chain = [{"type": "rules", "params": {"min_answer_length": 5}}]
    bench.lines(GOOD, BAD, "x", GOOD)
    bench.filter()
    monkeypatch.setattr(state, "PAGE", 3)  # several pages
    found = package.open_state(tmp_path / "state")
    rows = list(found.tasks())
    assert [(row["answer"], row["state"]) for row in rows] == [
        (GOOD, "accepted"), (BAD, "rejected"), ("x", "rejected"), (GOOD, "accepted"),
    ]  # fmt: skip
    assert rows[0]["question"] == "What is 0 plus 1?"
    verdicts = {row["task_id"]: row for row in found.verdicts()}
    assert [verdicts[row["task_id"]]["by"] for row in rows] == ["judge", "judge", "filter", "judge"]
    first, second, third, _ = (verdicts[row["task_id"]] for row in rows)
    assert (first["outcome"], first["score"], first["judge"], first["passed.correct"]) == (
        "accepted",
        1.0,
        "judge",
        True,
    )
    assert (second["passed.boxed"], second["passed.correct"], second["value.correct"]) == (True, False, 0.0)
    assert third["reason"] == "filter rules: the answer is too short"
    assert not any(isinstance(value, dict | list) for row in (*rows, *verdicts.values()) for value in row.values())


async def test_rounds_and_their_rollouts_are_flat_rows_beside_a_process_that_writes(
    tmp_path: Path, store: Store
) -> None:
    def put(conn: Any) -> None:
        result = {"comparison": comparison(gain=0.25).model_dump(mode="json")}
        put_round(conn, 1, dir=str(tmp_path / "state" / "rounds" / "r0001"), result=result)
        put_adapter(conn, 1)
        put_round(conn, 2)

    await store.write(put)
    directory = tmp_path / "state" / "rounds" / "r0001"
    directory.mkdir(parents=True)
    results = (CriterionResult("correct", "yes", 1.0, True),)
    graded = [replace(rollout(0, each), verdict=Verdict(Outcome.ACCEPTED, each, results)) for each in (0.5, 1.0)]
    write_step(step_file(directory, 1), [rollout_line(each, 1, 0.0) for each in graded])
    found = package.open_state(str(tmp_path / "state"))
    first, second = found.rounds()
    assert (first["round"], first["adapter"], first["gain"]) == ("r0001", "r0001", 0.25)
    assert (second["round"], second["adapter"], second["gain"]) == ("r0002", None, None)
    rows = list(found.rollouts("r0001"))
    assert [row["reward"] for row in rows] == [0.5, 1.0]
    assert rows[0]["passed.correct"] is True
    assert list(found.rollouts("r0002")) == []
    with pytest.raises(StoreError, match=r"there is no such round\. The last rounds: r0001, r0002"):
        list(found.rollouts("r0009"))


def test_what_is_no_state_is_said(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"there is no state\.db"):
        package.open_state(tmp_path)
