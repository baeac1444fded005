"""Lineage in both directions, for the pages of rounds and tasks: from an alias back to samples, and from a
conversation to what it became. Deployments, and the page that an id leads to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from http import HTTPStatus
from typing import Any, Final

from sqlalchemy import Connection, Row
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from flywheel.daemon.watch_figures import last_figures
from flywheel.records.states import Split
from flywheel.records.task import NO_CONVERSATION
from flywheel.store import deployments, rounds, watches
from flywheel.store.views import erased_samples, lineage
from flywheel.store.views.round_list import RoundFacts
from flywheel.web.site import is_number, quoted, site_of

PER_PAGE: Final = 50
"""How many deployments or replies one page lists."""
SHOWN: Final = 30
"""The most ancestors and descendants that are listed."""


async def find(request: Request) -> Response:
    """Lead to the page of what `id` names: a round, an adapter, an alias, or the first task of a reply."""
    wanted = request.query_params.get("id", "").strip()
    address, missing = await site_of(request).read(partial(_find, wanted))
    if not address:
        raise HTTPException(HTTPStatus.NOT_FOUND, missing)
    return RedirectResponse(address, HTTPStatus.SEE_OTHER)


def _find(wanted: str, conn: Connection) -> tuple[str, str]:
    """The address of the page of what an id names; without one it is empty, and the text says what there is."""
    if not wanted or deployments.history(conn, wanted, 1):
        return "/rounds#serving", ""
    if (row := rounds.by_name(conn, wanted.rpartition("@")[2])) is not None:
        return f"/rounds/{quoted(row.name)}#lineage", ""
    if (named := lineage.subject(conn, wanted)) is None:
        return "", f"No adapter, round, task, conversation, trace or span has the id {wanted}."
    if (key := lineage.first_task(conn, named)) is not None:
        return f"/tasks/{quoted(key)}#lineage", ""
    replies = lineage.replies_of(conn, named, SHOWN)
    why = "; ".join(dict.fromkeys(": ".join(filter(None, (each.skip_reason, each.detail))) for each in replies))
    return "", f"The {named.kind} {wanted} has no task: {why}."


def of_aliases(conn: Connection, before: int | None) -> dict[str, Any]:
    """What each alias stands for, and the deployments of the base model, which belong to no round."""
    active = [(row, _line(conn, row.adapter)) for row in deployments.all_active(conn)]
    return {"active": active, **_deployments_of(conn, None, before)}


def _deployments_of(conn: Connection, adapter: str | None, before: int | None) -> dict[str, Any]:
    """A page of the deployments of an adapter, or of the base model."""
    found = deployments.listed(conn, adapter, PER_PAGE + 1, before)
    return {
        "deployments": found[:PER_PAGE],
        "older_deployments": found[PER_PAGE - 1].id if len(found) > PER_PAGE else None,
    }


def _line(conn: Connection, adapter: str | None) -> list[str]:
    """An adapter and what it goes back to."""
    return [adapter, *lineage.ancestors(conn, adapter)] if adapter else []


def of_round(conn: Connection, found: RoundFacts, before: int | None, *, trains: bool) -> dict[str, Any]:
    """What the weights of a round's adapter come from, what was trained from them, and the adapter's deployments
    `before` a number. Those of a round that `trains` nothing do not come from its parent's."""
    adapter = rounds.adapter(conn, found.name)
    line = [found.name, *(_line(conn, found.parent) if trains else [])]
    ids = {each.name: each.round_id for name in line[:SHOWN] if (each := rounds.adapter(conn, name)) is not None}
    samples = lineage.samples(conn, [*ids.values()])
    younger = lineage.descendants(conn, [found.name])
    return {
        "adapter": adapter,
        "line": [(name, samples[ids[name]] if name in ids else None) for name in line[:SHOWN]],
        "hidden": max(0, len(line) - SHOWN),
        "younger": list(younger.items())[:SHOWN],
        "hidden_younger": max(0, len(younger) - SHOWN),
        "erased": [each.sentence for each in erased_samples.affected(conn) if each.adapter == found.name],
        **_deployments_of(conn, found.name, before),
    }


def of_task(conn: Connection, task: Mapping[str, Any], after: int) -> dict[str, Any]:
    """What became of a task's conversation: the rounds and adapters that used it, and its replies."""
    conversation = task["conversation_id"]
    named = lineage.subject(conn, task["task_id"] if conversation in NO_CONVERSATION else conversation)
    uses: Sequence[Row[Any]] = lineage.uses(conn, named) if named is not None else ()
    replies: Sequence[Row[Any]] = lineage.replies_of(conn, named, PER_PAGE + 1, after) if named is not None else ()
    trained = [use.adapter for use in uses if use.adapter and use.split == Split.TRAIN and use.tasks > use.left_out]
    younger = {name: parent for name, parent in lineage.descendants(conn, trained).items() if name not in trained}
    adapters = [*dict.fromkeys(trained).items(), *younger.items()]
    return {
        "uses": uses,
        "adapters": adapters[:SHOWN],
        "hidden": max(0, len(adapters) - SHOWN),
        "services": deployments.services(conn, [name for name, _ in adapters[:SHOWN]]),
        "replies": replies[:PER_PAGE],
        "next": replies[PER_PAGE - 1].id if len(replies) > PER_PAGE else None,
        "after": after,
    }


async def show_deployment(request: Request) -> Response:
    """One deployment with the report of its swap."""
    site, number = site_of(request), request.path_params["number"]
    found = await site.read(partial(_deployment, int(number))) if is_number(number) else None
    if found is None:
        raise HTTPException(HTTPStatus.NOT_FOUND, f"There is no deployment {number[:100]}.")
    replicas = (found["deployment"].report or {}).get("replicas", ())
    return site.page("deployment.html", **found, replicas=replicas)


def _deployment(number: int, conn: Connection) -> dict[str, Any] | None:
    """A deployment, and the watch of its promotion with what was found."""
    if (row := deployments.by_number(conn, number)) is None:
        return None
    watch = watches.of_deployment(conn, number)
    return {"deployment": row, "watch": watch, "figures": last_figures(conn, watch) if watch is not None else None}
