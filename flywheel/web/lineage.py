"""Lineage in both directions: from an alias back to conversations, and from a conversation to what it became."""

from __future__ import annotations

from functools import partial
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import urlencode

from sqlalchemy import Connection, Row
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from flywheel.daemon.watch_figures import last_figures
from flywheel.records.states import Split
from flywheel.store import deployments, rounds, watches
from flywheel.store.views import erased_samples, lineage
from flywheel.store.views.lineage import Subject
from flywheel.web.site import is_number, position, site_of

ADAPTERS: Final = 15
DEPLOYMENTS: Final = 15
PER_PAGE: Final = 50
"""How many adapters, deployments, and conversations or replies one page lists."""
SHOWN: Final = 30
"""The most ancestors and descendants that are listed."""


async def show(request: Request) -> Response:
    """All adapters and deployments, or the lineage of what `id` names."""
    site, query = site_of(request), request.query_params
    wanted = query.get("id", "").strip()
    if not wanted:
        found = await site.read(partial(_index, position(query, "adapters"), position(query, "deployments")))
        return site.page("lineage.html", address=address, **found)
    template, found = await site.read(partial(_lineage, wanted, position(query, "after") or 0))
    if not template:
        raise HTTPException(
            HTTPStatus.NOT_FOUND, f"No adapter, round, task, conversation, trace or span has the id {wanted}."
        )
    if template == ALIAS:
        return RedirectResponse("/lineage#deployments", HTTPStatus.SEE_OTHER)
    return site.page(template, address=address, **found)


ALIAS: Final = "alias"


def address(name: str = "", **parts: object) -> str:
    """The address of a lineage, and of a part of its list."""
    query = urlencode({key: value for key, value in {"id": name, **parts}.items() if value})
    return f"/lineage?{query}" if query else "/lineage"


def _index(adapters_before: int | None, deployments_before: int | None, conn: Connection) -> dict[str, Any]:
    adapters = lineage.listed(conn, ADAPTERS + 1, adapters_before)
    deployed = deployments.listed(conn, DEPLOYMENTS + 1, deployments_before)
    shown = adapters[:ADAPTERS]
    active = deployments.all_active(conn)
    return {
        "active": [(row, _line(conn, row.adapter) if row.adapter else []) for row in active],
        "adapters": shown,
        "samples": lineage.samples(conn, [row.round_id for row in shown]),
        "services": deployments.services(conn, [row.name for row in shown]),
        "older_adapters": shown[-1].id if len(adapters) > ADAPTERS else None,
        "deployments": deployed[:DEPLOYMENTS],
        "older_deployments": deployed[DEPLOYMENTS - 1].id if len(deployed) > DEPLOYMENTS else None,
        "adapters_before": adapters_before,
        "deployments_before": deployments_before,
    }


def _line(conn: Connection, adapter: str) -> list[str]:
    """An adapter and what it goes back to."""
    return [adapter, *lineage.ancestors(conn, adapter)]


def _lineage(wanted: str, after: int, conn: Connection) -> tuple[str, dict[str, Any]]:
    """The template for what an id names, and its values; an empty template if it names nothing."""
    row = rounds.by_name(conn, wanted.rpartition("@")[2])
    if row is not None:
        return "lineage_round.html", _of_round(conn, row, after)
    found = lineage.subject(conn, wanted)
    if found is not None:
        return "lineage_subject.html", _of_subject(conn, found, after)
    return ALIAS if deployments.history(conn, wanted, 1) else "", {}


def _of_round(conn: Connection, row: Row[Any], after: int) -> dict[str, Any]:
    adapter = rounds.adapter(conn, row.name)
    held_out = len(rounds.samples_of(conn, row.id, Split.HELD_OUT))
    # Without samples, the round has only compared another trainer's adapter with its parent.
    goes_on = row.parent and (not held_out or rounds.samples_of(conn, row.id, Split.TRAIN))
    line = [row.name, *(_line(conn, row.parent) if goes_on else [])]
    ids = {each.name: each.round_id for name in line[:SHOWN] if (each := rounds.adapter(conn, name)) is not None}
    ids[row.name] = row.id
    samples = lineage.samples(conn, list(ids.values()))
    younger = lineage.descendants(conn, [row.name])
    conversations = lineage.conversations_of(conn, row.id, PER_PAGE + 1, after)
    return {
        "round": row,
        "adapter": adapter,
        "line": [(name, samples[ids[name]] if name in ids else None) for name in line[:SHOWN]],
        "hidden": max(0, len(line) - SHOWN),
        "samples": samples[row.id],
        "held_out": held_out,
        "younger": list(younger.items())[:SHOWN],
        "hidden_younger": max(0, len(younger) - SHOWN),
        "services": deployments.services(conn, [row.name])[row.name],
        "erased": [each.sentence for each in erased_samples.affected(conn) if each.adapter == row.name],
        "conversations": conversations[:PER_PAGE],
        "next": conversations[PER_PAGE - 1].number if len(conversations) > PER_PAGE else None,
        "after": after,
    }


def _of_subject(conn: Connection, found: Subject, after: int) -> dict[str, Any]:
    replies = lineage.replies_of(conn, found, PER_PAGE + 1, after)
    uses = lineage.uses(conn, found)
    trained = [use.adapter for use in uses if use.adapter and use.split == Split.TRAIN and use.tasks > use.left_out]
    younger = {name: parent for name, parent in lineage.descendants(conn, trained).items() if name not in trained}
    adapters = [(name, None) for name in trained] + list(younger.items())
    return {
        "subject": found,
        "replies": replies[:PER_PAGE],
        "next": replies[PER_PAGE - 1].id if len(replies) > PER_PAGE else None,
        "after": after,
        "uses": uses,
        "adapters": adapters[:SHOWN],
        "hidden": max(0, len(adapters) - SHOWN),
        "services": deployments.services(conn, [name for name, _ in adapters[:SHOWN]]),
    }


async def show_deployment(request: Request) -> Response:
    """One deployment with the report of its swap."""
    site, number = site_of(request), request.path_params["number"]
    found = await site.read(partial(_deployment, int(number))) if is_number(number) else None
    if found is None:
        raise HTTPException(HTTPStatus.NOT_FOUND, f"There is no deployment {number[:100]}.")
    replicas = (found["deployment"].report or {}).get("replicas", ())
    return site.page("deployment.html", **found, replicas=replicas, address=address)


def _deployment(number: int, conn: Connection) -> dict[str, Any] | None:
    """A deployment, and the watch of its promotion with what was found."""
    if (row := deployments.by_number(conn, number)) is None:
        return None
    watch = watches.of_deployment(conn, number)
    return {"deployment": row, "watch": watch, "figures": last_figures(conn, watch) if watch is not None else None}
