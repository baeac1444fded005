"""The rubrics: their versions, and one version with what it changed in text, agreement with people, and outcomes."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any, Final

from sqlalchemy import Connection, Row
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from flywheel.records.verdict import Outcome
from flywheel.store.views import rubric_versions
from flywheel.store.views.rubric_versions import FLIPS, Version
from flywheel.web import forest_plot
from flywheel.web.site import site_of

FLIPS_SHOWN: Final = 100
OUTCOMES: Final = tuple(each.value for each in Outcome)
CONTEXT: Final = 3
"""Unchanged lines around each change that are shown."""


async def show_list(request: Request) -> Response:
    """All versions by rubric, the last used first, and all calibrations."""
    site = site_of(request)
    every = await site.read(rubric_versions.versions)
    rubrics: dict[str, list[tuple[Version, tuple[int, int] | None]]] = {}
    for version in every:
        rubrics.setdefault(version.rubric_id, []).append(
            (version, _size(rubric_versions.before(version, every), version))
        )
    rows = [row for version in every for row in version.calibrations]
    return site.page(
        "rubrics.html",
        rubrics=rubrics,
        in_use=next((version.hash for version in every if version.verdicts), None),
        axis=kappa_axis(rows, site.config.judge.min_kappa),
        min_kappa=site.config.judge.min_kappa,
        range_of=range_of,
    )


async def show(request: Request) -> Response:
    """One version, compared with the one before or with the one that is asked for."""
    site, wanted = site_of(request), request.path_params["hash"]
    found = await site.read(partial(_version, wanted, request.query_params.get("with", "")))
    bar = site.config.judge.min_kappa
    shown: Version = found["rubric"]
    return site.page(
        "rubric.html",
        **found,
        axis=kappa_axis(shown.calibrations, bar),
        min_kappa=bar,
        range_of=range_of,
        outcomes_named=OUTCOMES,
        flips_named=FLIPS,
    )


def _version(wanted: str, compared: str, conn: Connection) -> dict[str, Any]:
    every = rubric_versions.versions(conn)
    by_hash = {version.hash: version for version in every}
    for name in filter(None, (wanted, compared)):
        if name not in by_hash:
            raise HTTPException(HTTPStatus.NOT_FOUND, f"There is no version {name[:100]} of a rubric.")
    version = by_hash[wanted]
    old = by_hash[compared] if compared else rubric_versions.before(version, every)
    if old is not None and old.hash == version.hash:
        old = None
    uses = rubric_versions.uses(conn, version.hash)
    return {
        "rubric": version,
        "old": old,
        "others": [each for each in every if each.hash != version.hash],
        "uses": uses,
        "outcomes": {name: sum(use.outcomes.get(name, 0) for use in uses) for name in OUTCOMES},
        "rounds": rubric_versions.trained(conn, version.hash),
        "lines": difference(old.text, version.text)
        if old is not None and old.text is not None and version.text is not None
        else None,
        "changes": rubric_versions.changes(conn, old.hash, version.hash, FLIPS_SHOWN) if old is not None else None,
    }


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a difference: `same`, `added`, `removed`, or `left out`, whose text counts the lines."""

    kind: str
    text: str
    old: int | None = None
    new: int | None = None


def difference(old: str, new: str) -> list[Line]:
    """The changed lines with some around them; empty if nothing differs."""
    before, after = old.splitlines(), new.splitlines()
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    found: list[Line] = []
    shown = 0
    for group in matcher.get_grouped_opcodes(CONTEXT):
        _leave_out(found, group[0][1] - shown)
        for kind, a, b, c, d in group:
            if kind == "equal":
                found += [Line("same", before[a + n], a + n + 1, c + n + 1) for n in range(b - a)]
            else:
                found += [Line("removed", before[n], n + 1) for n in range(a, b)]
                found += [Line("added", after[n], None, n + 1) for n in range(c, d)]
        shown = group[-1][2]
    if found:
        _leave_out(found, len(before) - shown)
    return found


def _leave_out(lines: list[Line], number: int) -> None:
    if number:
        lines.append(Line("left out", f"{number} unchanged {'line' if number == 1 else 'lines'}"))


def _size(old: Version | None, new: Version) -> tuple[int, int] | None:
    """How many lines were added and removed; None if that is not known."""
    if old is None or old.text is None or new.text is None:
        return None
    kinds = [line.kind for line in difference(old.text, new.text)]
    return kinds.count("added"), kinds.count("removed")


def kappa_axis(rows: Sequence[Row[Any]], bar: float | None) -> forest_plot.Axis:
    """An axis for the intervals of calibrations."""
    return forest_plot.axis_of([1.0, *_kappas(rows), *([bar] if bar is not None else [])])


def _kappas(rows: Iterable[Row[Any]]) -> list[float]:
    values = (value for row in rows for value in (row.kappa, row.kappa_low, row.kappa_high))
    return [value for value in values if value is not None]


def range_of(row: Row[Any], bar: float | None) -> tuple[dict[str, float], str]:
    """The interval of a calibration as a row of a forest plot, and its kind: whether kappa is high enough."""
    low = row.kappa_low if row.kappa_low is not None else row.kappa
    high = row.kappa_high if row.kappa_high is not None else row.kappa
    kind = "open" if bar is None else "better" if row.kappa >= bar else "missed"
    return {"gain": row.kappa, "lower": low, "upper": high}, kind
