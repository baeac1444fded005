"""Which of the tasks that rounds and gates may still use are left out, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

from sqlalchemy import Connection, func, select

from flywheel.records.exclusion import NONE_SELECTED, Exclusion, TaskScopes
from flywheel.records.states import Split, TaskState
from flywheel.store.kernel.schema import tasks
from flywheel.store.samples import TaskKind

_MAY_BE_USED: Final = (
    TaskState.PENDING, TaskState.JUDGING, TaskState.UNDECIDED, TaskState.HELD, TaskState.ACCEPTED, TaskState.RESERVED,
    TaskState.REJECTED,
)  # fmt: skip
"""States of tasks that no promoted round was trained on. Rejected ones are for the gate, and for rounds with
`training.prompts: decided`."""


def count_kinds(conn: Connection) -> Counter[TaskKind]:
    """How many tasks of each kind rounds or gates may still use. Fast: an index covers the query."""
    kind = tasks.c.excluded, tasks.c.split, tasks.c.state, tasks.c.target
    rows = conn.execute(select(*kind, func.count()).where(tasks.c.state.in_(_MAY_BE_USED)).group_by(*kind))
    return Counter({TaskKind(*values): number for *values, number in rows})


def still_used(kinds: Counter[TaskKind], takes: TaskScopes) -> Iterator[tuple[Split, list[Exclusion], int]]:
    """The tasks that rounds with such scopes may still use, by kind: split, what leaves them out, and number."""
    for kind, number in kinds.items():
        split, is_rejected = Split(kind.split), kind.state == TaskState.REJECTED
        is_of_use = split is Split.HELD_OUT or not is_rejected or takes.train.rejected_uses > 0
        if kind.state in _MAY_BE_USED and is_of_use and takes.train.target in (None, kind.target):
            yield split, takes.leaving_out(kind.excluded, split, is_rejected=is_rejected), number


def count_left_out(conn: Connection, takes: TaskScopes = NONE_SELECTED) -> dict[Exclusion, int]:
    """How many tasks that rounds or gates could take otherwise are left out, by reason; a task may have several."""
    found: Counter[Exclusion] = Counter()
    for _, reasons, number in still_used(count_kinds(conn), takes):
        found.update(dict.fromkeys(reasons, number))
    return {each: found[each] for each in Exclusion if found[each]}
