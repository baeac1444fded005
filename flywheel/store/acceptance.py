"""Acceptance by adapter: what became of the tasks that each version of the alias answered."""

from __future__ import annotations

from collections import Counter
from typing import Any

from sqlalchemy import Connection, func, select

from flywheel.exclusion import TrainedModels
from flywheel.states import TaskState
from flywheel.store.schema import tasks

_ACCEPTED = [TaskState.ACCEPTED.value, TaskState.RESERVED.value, TaskState.CONSUMED.value]


def by_adapter(conn: Connection, models: TrainedModels) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Counts of the tasks that each adapter answered, by outcome; "" is the base model.

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
        entry = counts.setdefault(adapter, {"accepted": 0, "rejected": 0, "undecided": 0, "other": 0})
        kind = "accepted" if state in _ACCEPTED else state if state in ("rejected", "undecided") else "other"
        entry[kind] += number
    own = []
    for adapter, entry in sorted(counts.items()):
        judged = entry["accepted"] + entry["rejected"]
        own.append({"adapter": adapter, **entry, "acceptance": entry["accepted"] / judged if judged else None})
    return own, dict(others.most_common())
