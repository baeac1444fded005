"""Calibrations: how far judge and people agreed on a rubric, and whether that is enough to train on."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Row, insert, select

from flywheel.store.kernel.bulk import rows_in
from flywheel.store.kernel.schema import calibrations, tasks
from flywheel.store.kernel.transitions import utcnow


def record(conn: Connection, /, **values: Any) -> int:
    """Store a calibration by its columns; its id."""
    added = insert(calibrations).values(**values, created_at=utcnow()).returning(calibrations.c.id)
    return int(conn.execute(added).scalar_one())


def newest(conn: Connection, rubric_hash: str, judge_hash: str) -> Row[Any] | None:
    """The last calibration of a rubric by a judge."""
    return conn.execute(
        select(calibrations)
        .where(calibrations.c.rubric_hash == rubric_hash, calibrations.c.judge_hash == judge_hash)
        .order_by(calibrations.c.id.desc())
        .limit(1)
    ).one_or_none()


def shortfall(conn: Connection, rubric_hash: str, judge_hash: str, min_kappa: float | None) -> str | None:
    """Why the rubric must not be trained on: its calibration is missing, of another version, or too low."""
    if min_kappa is None:
        return None
    bar = f"judge.min_kappa is {min_kappa:g}"
    row = newest(conn, rubric_hash, judge_hash)
    if row is None:
        return f"{bar}, but {_missing(conn, rubric_hash)}: run `flywheel rubric calibrate`"
    if row.kappa is None:
        return f"{bar}, but kappa of the calibration is not defined: its labels or verdicts are all alike"
    if row.kappa < min_kappa:
        return f"{bar}, but kappa of the rubric is {row.kappa:.2f} ({row.n} labels, {row.created_at[:10]})"
    return None


def _missing(conn: Connection, rubric_hash: str) -> str:
    other_judge = select(calibrations.c.id).where(calibrations.c.rubric_hash == rubric_hash).limit(1)
    if conn.execute(other_judge).one_or_none() is not None:
        return "the rubric is calibrated with another judge"
    if conn.execute(select(calibrations.c.id).limit(1)).one_or_none() is not None:
        return "the rubric is not what was calibrated"
    return "the rubric is not calibrated"


def lines_of(conn: Connection, keys: list[str]) -> dict[str, dict[str, Any]]:
    """The lines of tasks by their keys; unknown keys are left out."""
    rows = rows_in(conn, select(tasks.c.key, tasks.c.payload), tasks.c.key, keys)
    return {row.key: row.payload for row in rows}
