"""Counts of tasks by everything that lists of them are filtered by, and the criteria that replies miss.

One query groups all tasks. Filters and shares are sums over its groups, so that a count is the length of the list
that it leads to.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import compress
from typing import Any, Final, NamedTuple

from sqlalchemy import Connection, func, select

from flywheel.records.exclusion import EVERY_TARGET, Scope
from flywheel.records.states import TaskState
from flywheel.store.kernel.schema import replies, rubrics, sources, tasks, verdicts
from flywheel.store.views.acceptance import ACCEPTED, JUDGED, Share, stages
from flywheel.store.views.task_list import ADAPTER, AGENT, JUDGE, MODEL, RUBRIC, WEEK

FILTERS: Final = (
    "state", "split", "target", "adapter", "agent", "model", "week", "rubric", "judge", "stage", "criterion",
    "source",
)  # fmt: skip
"""What tasks are counted by, named as in `task_list.conditions`."""
_ADAPTER: Final = FILTERS.index("adapter")


class TaskGroup(NamedTuple):
    """Tasks that are alike. `values` are what they have of each of FILTERS: mostly one text, but each stage that they
    reached, each criterion that they missed and each source that shows them. `results` are the criteria of the
    current verdict and whether they were met, `judged_at` is the time of the newest one."""

    number: int
    judged_at: str
    values: tuple[tuple[str, ...], ...]
    results: tuple[tuple[str, bool], ...]

    def of(self, name: str) -> tuple[str, ...]:
        return self.values[FILTERS.index(name)]

    def has(self, place: int, value: str) -> bool:
        """Whether the filter at this place selects the tasks by `value`."""
        own = self.values[place]
        return value in own or (place == _ADAPTER and own[0].endswith(f"@{value}"))


class RubricVersion(NamedTuple):
    """A version of a rubric by which tasks were decided. `name` is empty if the state does not know it; `decided` is
    the share of accepted tasks; `judged_at` is when the newest of its verdicts was given."""

    judged_at: str
    hash: str
    name: str
    decided: Share


class TaskCounts(NamedTuple):
    """All tasks in groups, and the rubrics that decided them, the one with the newest verdict first."""

    groups: Sequence[TaskGroup]
    rubrics: Sequence[RubricVersion]

    def by_filter(self, chosen: Mapping[str, str]) -> dict[str, Counter[str]]:
        """How many tasks each value of each filter would select beside the other `chosen` values."""
        wanted = [(FILTERS.index(name), value) for name, value in chosen.items()]
        found: list[Counter[str]] = [Counter() for _ in FILTERS]
        for each in self.groups:
            others = [place for place, value in wanted if not each.has(place, value)]
            if len(others) <= 1:
                for place in others or range(len(FILTERS)):
                    for value in each.values[place]:
                        found[place][value] += each.number
        return dict(zip(FILTERS, found, strict=True))

    def misses(self, rubric: str, by: str) -> dict[str, dict[str, Share]]:
        """For each value of a filter the share of replies that missed each criterion, of those that this rubric
        decided and whose verdict has a result for the criterion."""
        found: dict[str, dict[str, Counter[bool]]] = {}
        for each in self.groups:
            for value in each.of(by) if each.of("rubric") == (rubric,) else ():
                for criterion, is_met in each.results:
                    found.setdefault(value, {}).setdefault(criterion, Counter())[is_met] += each.number
        return {
            value: {name: Share(results[False], results.total()) for name, results in by_criterion.items()}
            for value, by_criterion in found.items()
        }


def task_counts(conn: Connection, scope: Scope = EVERY_TARGET) -> TaskCounts:
    """All tasks; `scope` as in `acceptance.stages`. Of a state with 100,000 tasks it takes about two seconds."""
    result = func.json_each(verdicts.c.results).table_valued("value")
    pair = func.json_extract(result.c.value, "$.criterion", "$.passed")
    results = select(func.json_group_array(pair)).select_from(result).correlate(verdicts).scalar_subquery()
    shown = select(func.group_concat(replies.c.source_id.distinct())).where(replies.c.task_id == tasks.c.id)
    columns = (
        tasks.c.state, tasks.c.split, tasks.c.target, ADAPTER, AGENT, MODEL, WEEK, RUBRIC, JUDGE,
        stages(scope)["usable"], results, shown.correlate(tasks).scalar_subquery(),
    )  # fmt: skip
    labelled = [column.label(f"by_{place}") for place, column in enumerate(columns)]
    query = (
        select(func.count(), func.max(verdicts.c.created_at), *labelled)
        .select_from(tasks)
        .outerjoin(verdicts, verdicts.c.id == tasks.c.verdict_id)
        .group_by(*labelled)
    )
    paths = {str(number): path for number, path in conn.execute(select(sources.c.id, sources.c.path))}
    names = {row.hash: row.name for row in conn.execute(select(rubrics))}
    groups = [_group(paths, *row) for row in conn.execute(query)]
    return TaskCounts(groups, sorted(_versions(groups, names), reverse=True))


def _group(paths: Mapping[str, str], number: int, judged_at: str | None, *found: Any) -> TaskGroup:
    *values, is_usable, given, shown = found
    results, state = _results(given), values[0]
    # In the order of `acceptance.stages`.
    reached = (True, state in JUDGED, state in ACCEPTED, is_usable, is_usable and state != TaskState.ACCEPTED.value)
    several = (
        tuple(compress(stages(), reached)),
        tuple(criterion for criterion, is_met in results if not is_met),
        tuple(paths[each] for each in (shown or "").split(",") if each),
    )
    return TaskGroup(number, judged_at or "", (*map(_one, values), *several), results)


@lru_cache(maxsize=10_000)
def _one(value: str | None) -> tuple[str, ...]:
    return (value,) if value else ()


@lru_cache(maxsize=10_000)
def _results(found: str) -> tuple[tuple[str, bool], ...]:
    return tuple((criterion, bool(is_met)) for criterion, is_met in json.loads(found))


def _versions(groups: Sequence[TaskGroup], names: Mapping[str, str]) -> Iterator[RubricVersion]:
    by_rubric: dict[str, list[TaskGroup]] = {}
    for each in groups:
        for rubric in each.of("rubric"):
            by_rubric.setdefault(rubric, []).append(each)
    for rubric, own in by_rubric.items():
        accepted = sum(each.number for each in own if "accepted" in each.of("stage"))
        decided = Share(accepted, sum(each.number for each in own))
        yield RubricVersion(max(each.judged_at for each in own), rubric, names.get(rubric, ""), decided)
