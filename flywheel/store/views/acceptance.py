"""Acceptance by adapter: what became of the tasks that each version of the alias answered."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from datetime import datetime, timedelta
from statistics import NormalDist
from typing import Any, Final

from sqlalchemy import Connection, func, select

from flywheel.records.exclusion import TrainedModels
from flywheel.records.request_id import UNRECORDED
from flywheel.records.states import TaskState
from flywheel.store.kernel.schema import tasks

CONFIDENCE: Final = 0.95
_ACCEPTED = [TaskState.ACCEPTED.value, TaskState.RESERVED.value, TaskState.CONSUMED.value]


def by_adapter(conn: Connection, models: TrainedModels) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Counts of the tasks that each adapter answered, by outcome; "" is the base model, UNRECORDED no known model.

    `acceptance` is the share of accepted tasks among accepted and rejected ones. Tasks of other models than the
    alias, its versions and its base are counted apart, by the name of the model, the most first.
    """
    counts: dict[str, dict[str, int]] = {}
    others: Counter[str] = Counter()
    columns = tasks.c.adapter, tasks.c.model, tasks.c.state
    for adapter, model, state, number in conn.execute(select(*columns, func.count()).group_by(*columns)):
        if not models.is_own(model, adapter):
            others[model] += number
            continue
        entry = counts.setdefault(_name(adapter, model), {"accepted": 0, "rejected": 0, "undecided": 0, "other": 0})
        kind = "accepted" if state in _ACCEPTED else state if state in ("rejected", "undecided") else "other"
        entry[kind] += number
    own = []
    for adapter, entry in sorted(counts.items()):
        judged = entry["accepted"] + entry["rejected"]
        own.append({"adapter": adapter, **entry, "acceptance": entry["accepted"] / judged if judged else None})
    return own, dict(others.most_common())


def _name(adapter: str, model: str) -> str:
    return adapter or ("" if model else UNRECORDED)


@dataclass(frozen=True, slots=True)
class Period:
    """Accepted ones of the judged replies that an adapter gave between two times, with the bounds of their share."""

    adapter: str
    begin: datetime
    end: datetime
    accepted: int
    judged: int
    lower: float
    upper: float

    @property
    def share(self) -> float:
        return self.accepted / self.judged


def over_time(conn: Connection, models: TrainedModels, periods: int) -> list[Period]:
    """The acceptance of each adapter of the alias in about so many periods of equal length, in order of time. Times
    that sources refuse today are left out."""
    judged = tasks.c.state.in_([*_ACCEPTED, TaskState.REJECTED.value]) & tasks.c.started_at.between("1970", "2286")
    first, last = conn.execute(select(func.min(tasks.c.started_at), func.max(tasks.c.started_at)).where(judged)).one()
    if first is None:
        return []
    begin, end = datetime.fromisoformat(first), datetime.fromisoformat(last)
    length = max((end - begin) / periods, timedelta(seconds=1))
    seconds = func.unixepoch(tasks.c.started_at) - int(begin.timestamp())
    number = func.floor(seconds / length.total_seconds()).label("number")
    columns = number, tasks.c.adapter, tasks.c.model
    accepted = func.count().filter(tasks.c.state.in_(_ACCEPTED))
    rows = conn.execute(select(*columns, accepted, func.count()).where(judged).group_by(*columns)).all()
    counts: dict[tuple[int, str], tuple[int, int]] = {}
    for at, adapter, model, good, every in rows:
        if models.is_own(model, adapter):
            name = _name(adapter, model)
            before = counts.get((int(at), name), (0, 0))
            counts[int(at), name] = before[0] + good, before[1] + every
    return [
        Period(adapter, begin + at * length, begin + (at + 1) * length, good, every, *wilson(good, every))
        for (at, adapter), (good, every) in sorted(counts.items())
    ]


def wilson(successes: int, trials: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """The score interval of a share (E. B. Wilson, 1927), for independent trials."""
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    share = successes / trials
    middle = (share + z**2 / (2 * trials)) / (1 + z**2 / trials)
    half = z / (1 + z**2 / trials) * math.sqrt(share * (1 - share) / trials + z**2 / (4 * trials**2))
    return max(0.0, middle - half), min(1.0, middle + half)
