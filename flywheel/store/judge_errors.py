"""Why the judge left tasks undecided, by hour."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from sqlalchemy import Connection, func, insert, select, update

from flywheel.records.batch import storable
from flywheel.store.kernel.schema import judge_errors

LONGEST: Final = 300
"""Characters of an error that are kept."""
MOST_AN_HOUR: Final = 20
"""Different errors of an hour that are told apart."""
OTHER: Final = "other errors"
NO_REASON: Final = "no reason was given"


def add(conn: Connection, error: str) -> None:
    """Count an undecided verdict."""
    hour = f"{datetime.now(UTC):%Y-%m-%dT%H}:00:00+00:00"
    text = storable(" ".join(error.split())[:LONGEST]) or NO_REASON
    if _counted(conn, hour, text):
        return
    different = select(func.count()).select_from(judge_errors).where(judge_errors.c.hour == hour)
    if conn.execute(different).scalar_one() >= MOST_AN_HOUR:
        text = OTHER
        if _counted(conn, hour, text):
            return
    conn.execute(insert(judge_errors).values(hour=hour, error=text, count=1))


def _counted(conn: Connection, hour: str, error: str) -> bool:
    """Count an error that is there already; whether it was."""
    same = judge_errors.c.hour == hour, judge_errors.c.error == error
    return bool(conn.execute(update(judge_errors).where(*same).values(count=judge_errors.c.count + 1)).rowcount)


def recent(conn: Connection, hours: int, limit: int) -> Sequence[Any]:
    """The errors of the last hours (`error`, `number`, `first`, `last`), the most frequent first."""
    begin = f"{datetime.now(UTC) - timedelta(hours=hours):%Y-%m-%dT%H}"
    number = func.sum(judge_errors.c.count).label("number")
    first, last = func.min(judge_errors.c.hour).label("first"), func.max(judge_errors.c.hour).label("last")
    query = select(judge_errors.c.error, number, first, last).where(judge_errors.c.hour >= begin)
    grouped = query.group_by(judge_errors.c.error).order_by(number.desc(), judge_errors.c.error)
    return conn.execute(grouped.limit(limit)).all()


def by_hour(conn: Connection, hours: int) -> dict[str, int]:
    """How many verdicts were undecided in each of the last hours, zero included, the oldest first."""
    now = datetime.now(UTC)
    names = [f"{now - timedelta(hours=ago):%Y-%m-%dT%H}:00:00+00:00" for ago in reversed(range(hours))]
    query = select(judge_errors.c.hour, func.sum(judge_errors.c.count)).where(judge_errors.c.hour >= names[0])
    found = {row[0]: int(row[1]) for row in conn.execute(query.group_by(judge_errors.c.hour))}
    return {name: found.get(name, 0) for name in names}
