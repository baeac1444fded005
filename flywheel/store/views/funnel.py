"""How far replies came: from reply to task, verdict, sample and round, by source and by agent."""

from __future__ import annotations

from dataclasses import dataclass, fields

from sqlalchemy import ColumnElement, Connection, and_, func, select

from flywheel.records.exclusion import EVERY_TARGET, Scope
from flywheel.records.states import Split, TaskState
from flywheel.store.kernel.schema import replies, sources, tasks
from flywheel.store.samples import allowed

_ACCEPTED = (TaskState.ACCEPTED.value, TaskState.RESERVED.value, TaskState.CONSUMED.value)
_JUDGED = (*_ACCEPTED, TaskState.REJECTED.value)
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
    usable = and_(tasks.c.state.in_(_ACCEPTED), tasks.c.split == Split.TRAIN.value, allowed(scope))
    return {
        "tasks": tasks.c.id.is_not(None),
        "judged": tasks.c.state.in_(_JUDGED),
        "accepted": tasks.c.state.in_(_ACCEPTED),
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
