"""Why replies fail: the share that misses each criterion of a rubric, also by adapter, agent, model and week."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime, timedelta
from http import HTTPStatus
from typing import Final

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from flywheel.store.views.acceptance import JUDGED, Share, SharePeriod
from flywheel.store.views.task_counts import RubricVersion, TaskCounts
from flywheel.web import plots
from flywheel.web.figures import Figures
from flywheel.web.site import site_of

ROWS: Final = {"adapter": 12, "agent": 12, "model": 12, "week": 26}
"""How many values of each filter are shown: the newest weeks, and of others those with the most replies."""


async def show(request: Request) -> Response:
    """A version of a rubric; without one in the address, that of the newest verdict."""
    figures: Figures[TaskCounts] = request.app.state.counts
    counts, asked = await figures.get(), request.path_params.get("rubric")
    found = next((each for each in counts.rubrics if asked in (None, each.hash)), None)
    if found is None and asked is not None:
        raise HTTPException(HTTPStatus.NOT_FOUND, f"No rubric {asked} decided a task.")
    ranked = _ranked(counts, found.hash) if found else []
    by = {name: counts.misses(found.hash, name) for name in ROWS} if found else {}
    return site_of(request).page(
        "criteria.html",
        rubric=found,
        criteria=ranked,
        tables={name: _sorted(name, shares) for name, shares in by.items()},
        rows=ROWS,
        plot=plots.TimePlot(_by_week(by.get("week", {}), [name for name, _ in ranked[: plots.SERIES]]), []),
        versions=counts.rubrics,
        title_of=title,
        not_counted=_not_counted(counts),
        counted_at=figures.counted_at,
        axis=plots.SHARES,
        drawn=plots.SERIES,
    )


def _ranked(counts: TaskCounts, rubric: str) -> list[tuple[str, Share]]:
    """The criteria of a rubric, the one that is missed most first."""
    # Every task has reached this stage.
    found = counts.misses(rubric, "stage").get("tasks", {})
    return sorted(found.items(), key=lambda each: (-each[1].value, each[0]))


def _sorted(name: str, found: dict[str, dict[str, Share]]) -> list[tuple[str, dict[str, Share]]]:
    """The newest weeks first, of others those with the most replies."""
    if name == "week":
        return sorted(found.items(), reverse=True)
    # A criterion that was not looked at, because another one had decided, has fewer replies.
    return sorted(found.items(), key=lambda each: (-max(share.whole for share in each[1].values()), each[0]))


def _by_week(found: dict[str, dict[str, Share]], criteria: list[str]) -> list[SharePeriod]:
    """The shares of these criteria in the newest weeks, in order of time."""
    begins = [(week, datetime.fromisoformat(week).replace(tzinfo=UTC)) for week in sorted(found)[-ROWS["week"] :]]
    return [
        SharePeriod(name, begin, begin + timedelta(days=7), found[week][name])
        for name in criteria
        for week, begin in begins
        if name in found[week]
    ]


def _not_counted(counts: TaskCounts) -> dict[str, int]:
    """How many tasks no rubric has decided, by state; those that a filter or a person decided have none here."""
    found: Counter[str] = Counter()
    for each in counts.groups:
        (state,) = each.of("state")
        if not each.of("rubric"):
            found["" if state in JUDGED else state] += each.number
    return dict(found.most_common())


def title(rubric: RubricVersion) -> str:
    """The name of a rubric with the beginning of its hash, which tells its versions apart."""
    return f"{rubric.name} {rubric.hash[:8]}".strip()


def missed_most(counts: TaskCounts) -> list[tuple[RubricVersion, str, Share]]:
    """The criterion missed most of the newest version of each rubric; none of a rubric whose criteria are all met."""
    newest: dict[str, RubricVersion] = {}
    for each in counts.rubrics:
        newest.setdefault(each.name or each.hash, each)
    first = [(each, *one) for each in newest.values() for one in _ranked(counts, each.hash)[:1]]
    return [each for each in first if each[2].part]
