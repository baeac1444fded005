"""Tasks whose traces have results of tool calls: recordings for the rollouts of other tasks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, Final

import orjson
from sqlalchemy import Connection, LargeBinary, cast, exists, func, or_, select

from flywheel.records.exclusion import Exclusion, parsed
from flywheel.records.states import Split, TaskState
from flywheel.store.kernel.schema import duplicates, tasks
from flywheel.store.samples import stands

_OF_TOOLS: Final = frozenset({Exclusion.TOOLS, Exclusion.UNCALLED, Exclusion.UNRECORDED})
_PAGE: Final = 100
"""Lines in memory at a time: each may have megabytes."""
_DECIDED: Final = (TaskState.ACCEPTED, TaskState.REJECTED, TaskState.RESERVED, TaskState.CONSUMED)


def count_with_tools(conn: Connection) -> dict[Exclusion, int]:
    """How many tasks with tools there are, by what of their calls is recorded."""
    counts: Counter[Exclusion] = Counter()
    query = select(tasks.c.excluded, func.count()).where(tasks.c.state != TaskState.WITHDRAWN.value)
    for text, number in conn.execute(query.group_by(tasks.c.excluded)):
        counts.update(dict.fromkeys(_OF_TOOLS.intersection(parsed(text)), number))
    return {each: counts[each] for each in Exclusion if counts[each]}


def recorded_lines(
    conn: Connection, which: Iterable[Exclusion] = (Exclusion.TOOLS,), *, newest: int | None = None
) -> Iterator[tuple[Split, dict[str, Any]]]:
    """The lines of decided tasks with recorded results, each with its split in the ledger; the newest first. `which`
    may name other tasks with tools, too.

    A rejected answer says nothing against the results of its tools. What a filter or a person has set aside is left
    out, except repeated questions, of which nothing is wrong.
    """
    repeats = exists().where(duplicates.c.task_id == tasks.c.id)
    # Numbers first: sorting lines would copy them all.
    ids = (
        conn.execute(
            select(tasks.c.id)
            .where(
                tasks.c.state.in_([state.value for state in _DECIDED]),
                or_(*(tasks.c.excluded.contains(each.value) for each in which)),
                or_(tasks.c.state != TaskState.REJECTED.value, stands(), repeats),
            )
            .order_by(tasks.c.id.desc())
            .limit(newest)
        )
        .scalars()
        .all()
    )
    lines = select(tasks.c.split, cast(tasks.c.payload, LargeBinary)).order_by(tasks.c.id.desc())
    for start in range(0, len(ids), _PAGE):
        some = conn.execute(lines.where(tasks.c.id.in_(ids[start : start + _PAGE]))).all()
        yield from ((Split(split), orjson.loads(line)) for split, line in some)
