"""Acceptance of replies: how many came how far, by source and agent, and what became of each adapter's answers."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from statistics import NormalDist
from typing import Final

from sqlalchemy import ColumnElement, Connection, and_, func, select

from flywheel.records import states
from flywheel.records.exclusion import EVERY_TARGET, Scope, TrainedModels
from flywheel.records.request_id import UNRECORDED
from flywheel.records.states import Split, TaskState
from flywheel.store.kernel.schema import replies, sources, tasks
from flywheel.store.samples import allowed

CONFIDENCE: Final = 0.95
ACCEPTED, JUDGED = (tuple(state.value for state in some) for some in (states.ACCEPTED, states.JUDGED))
_IN_ROUNDS = (TaskState.RESERVED.value, TaskState.CONSUMED.value)


@dataclass(slots=True)
class Funnel:
    """Each is a part of the one before it. `usable` are accepted tasks of the training split that nothing excludes
    from rounds; `used` are those that a round has taken."""

    replies: int = 0
    tasks: int = 0
    judged: int = 0
    accepted: int = 0
    usable: int = 0
    used: int = 0

    def add(self, other: Funnel) -> None:
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


def stages(scope: Scope = EVERY_TARGET) -> dict[str, ColumnElement[bool]]:
    """What a task has to be for each stage after the first. Exclusions in the scope do not count."""
    usable = and_(tasks.c.state.in_(ACCEPTED), tasks.c.split == Split.TRAIN.value, allowed(scope))
    return {
        "tasks": tasks.c.id.is_not(None),
        "judged": tasks.c.state.in_(JUDGED),
        "accepted": tasks.c.state.in_(ACCEPTED),
        "usable": usable,
        "used": and_(usable, tasks.c.state.in_(_IN_ROUNDS)),
    }


def funnels(conn: Connection, scope: Scope = EVERY_TARGET) -> tuple[Funnel, dict[str, Funnel], dict[str, Funnel]]:
    """All replies together, by the path of their source, and by agent; `scope` as in `stages`.

    A reply that several sources show is in the funnel of each.
    """
    query = (
        select(
            sources.c.path,
            replies.c.agent,
            func.count().label("replies"),
            *(func.count().filter(condition).label(name) for name, condition in stages(scope).items()),
        )
        .select_from(replies.join(sources).outerjoin(tasks, tasks.c.id == replies.c.task_id))
        .group_by(sources.c.path, replies.c.agent)
    )
    total, by_source, by_agent = Funnel(), dict[str, Funnel](), dict[str, Funnel]()
    for path, agent, *numbers in conn.execute(query):
        found = Funnel(*numbers)
        for each in (total, by_source.setdefault(path, Funnel()), by_agent.setdefault(agent, Funnel())):
            each.add(found)
    return total, by_source, by_agent


@dataclass(frozen=True, slots=True)
class AdapterAcceptance:
    """Counts of the tasks that an adapter answered, by outcome; "" is the base model, UNRECORDED no known model.

    `acceptance` is the share of accepted tasks among accepted and rejected ones; None without any.
    """

    adapter: str
    accepted: int
    rejected: int
    undecided: int
    other: int
    acceptance: float | None


def by_adapter(conn: Connection, models: TrainedModels) -> tuple[list[AdapterAcceptance], dict[str, int]]:
    """The acceptance of each adapter. Tasks of other models than the alias, its versions and its base are counted
    apart, by the name of the model, the most first."""
    counts: dict[str, dict[str, int]] = {}
    others: Counter[str] = Counter()
    columns = tasks.c.adapter, tasks.c.model, tasks.c.state
    for adapter, model, state, number in conn.execute(select(*columns, func.count()).group_by(*columns)):
        if not models.is_own(model, adapter):
            others[model] += number
            continue
        entry = counts.setdefault(_name(adapter, model), {"accepted": 0, "rejected": 0, "undecided": 0, "other": 0})
        kind = "accepted" if state in ACCEPTED else state if state in ("rejected", "undecided") else "other"
        entry[kind] += number
    own = []
    for adapter, entry in sorted(counts.items()):
        judged = entry["accepted"] + entry["rejected"]
        own.append(AdapterAcceptance(adapter, **entry, acceptance=entry["accepted"] / judged if judged else None))
    return own, dict(others.most_common())


def _name(adapter: str, model: str) -> str:
    return adapter or ("" if model else UNRECORDED)


@dataclass(frozen=True, slots=True)
class Share:
    """So many replies of a whole, which is not 0."""

    part: int
    whole: int

    @property
    def value(self) -> float:
        return self.part / self.whole

    @property
    def interval(self) -> tuple[float, float]:
        """The bounds of the share, as if replies were independent (`wilson`)."""
        return wilson(self.part, self.whole)


@dataclass(frozen=True, slots=True)
class SharePeriod:
    """A share of the replies between two times. `name` is the adapter, criterion or else whose share it is."""

    name: str
    begin: datetime
    end: datetime
    share: Share


def over_time(conn: Connection, models: TrainedModels, periods: int) -> list[SharePeriod]:
    """The acceptance of each adapter of the alias in about so many periods of equal length, in order of time. Times
    that sources refuse today are left out."""
    judged = tasks.c.state.in_(JUDGED) & tasks.c.started_at.between("1970", "2286")
    first, last = conn.execute(select(func.min(tasks.c.started_at), func.max(tasks.c.started_at)).where(judged)).one()
    if first is None:
        return []
    begin, end = datetime.fromisoformat(first), datetime.fromisoformat(last)
    length = max((end - begin) / periods, timedelta(seconds=1))
    seconds = func.unixepoch(tasks.c.started_at) - int(begin.timestamp())
    number = func.floor(seconds / length.total_seconds()).label("number")
    columns = number, tasks.c.adapter, tasks.c.model
    accepted = func.count().filter(tasks.c.state.in_(ACCEPTED))
    rows = conn.execute(select(*columns, accepted, func.count()).where(judged).group_by(*columns)).all()
    counts: dict[tuple[int, str], tuple[int, int]] = {}
    for at, adapter, model, good, every in rows:
        if models.is_own(model, adapter):
            name = _name(adapter, model)
            before = counts.get((int(at), name), (0, 0))
            counts[int(at), name] = before[0] + good, before[1] + every
    return [
        SharePeriod(adapter, begin + at * length, begin + (at + 1) * length, Share(good, every))
        for (at, adapter), (good, every) in sorted(counts.items())
    ]


def wilson(successes: int, trials: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """The score interval of a share (E. B. Wilson, 1927), for independent trials."""
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    share = successes / trials
    middle = (share + z**2 / (2 * trials)) / (1 + z**2 / trials)
    half = z / (1 + z**2 / trials) * math.sqrt(share * (1 - share) / trials + z**2 / (4 * trials**2))
    # Rounded, so that the bound of none or all is 0 or 1.
    return max(0.0, round(middle - half, 12)), min(1.0, round(middle + half, 12))
