"""A state that an earlier version judged: nothing is asked again, and its calibration counts."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from typing import Any

import sqlalchemy as sa

from flywheel.config.judge import JudgeSettings
from flywheel.judge.grader import Grader
from flywheel.judge.rubric.file import load_rubric
from flywheel.store import calibrations
from flywheel.store.kernel import schema
from tests.cli.filter_bench import Bench
from tests.factories.judged_before import BEFORE

STATE = BEFORE["state"]


def judged_before(bench: Bench) -> sa.Engine:
    """Its tasks, verdicts and calibrations, and the rubric that made them. Its judge has no server."""
    bench.settings |= BEFORE["judge"]
    bench.lines(*STATE["answers"])
    rubric(bench)
    assert bench("ingest").code == 0
    engine = sa.create_engine(f"sqlite:///{bench.folder / 'state' / 'state.db'}")
    with engine.begin() as conn:
        numbers = {row.key: row.id for row in conn.execute(sa.select(schema.tasks.c.key, schema.tasks.c.id))}
        for row in STATE["verdicts"]:
            values = {key: value for key, value in row.items() if key != "key"}
            conn.execute(sa.insert(schema.verdicts).values(task_id=numbers[row["key"]], **values))
        conn.execute(sa.insert(schema.calibrations).values(STATE["calibrations"]))
    return engine


def rubric(bench: Bench, **changed: Any) -> Grader:
    values = {**STATE["rubric"], **changed}
    path = bench.rubric(values.pop("criteria"), **{key: value for key, value in values.items() if key != "id"})
    return Grader(load_rubric(path), JudgeSettings(**BEFORE["judge"]))


def outcomes(ran: Any) -> dict[str, str]:
    return {verdict["task_id"]: verdict["outcome"] for verdict in ran["verdicts"]}


def test_verdicts_of_an_earlier_version_cost_no_call(bench: Bench) -> None:
    judged_before(bench).dispose()
    ran = bench.filter()
    assert (ran["usage"]["calls"], ran["undecided"]) == (0, 0)
    assert outcomes(ran) == {row["key"]: row["outcome"] for row in STATE["verdicts"]}
    rubric(bench, threshold=0.1)
    again = bench.filter("--rejudge")
    asked = sum(bool(row["judgements"]) for row in STATE["verdicts"])
    assert (again["reused"], again["usage"]["calls"], again["undecided"]) == (asked, 0, 0)
    criteria = [{**each, "weight": 2.0} for each in STATE["rubric"]["criteria"]]
    rubric(bench, criteria=criteria[::-1])
    assert bench.filter("--rejudge")["usage"]["calls"] == 0
    with closing(sqlite3.connect(bench.folder / "state" / "state.db")) as conn:
        assert conn.execute("SELECT count(*) FROM tasks WHERE state IN ('accepted', 'rejected')").fetchone() == (4,)


def test_the_calibration_of_an_earlier_version_counts(bench: Bench) -> None:
    engine = judged_before(bench)
    for changed, is_valid in (({}, True), ({"threshold": 0.1}, False)):
        grader = rubric(bench, **changed)
        with engine.connect() as conn:
            short = calibrations.shortfall(conn, grader.rubric.hash, grader.judge_hash, 0.9)
        assert (short is None) is is_valid, short
    engine.dispose()
