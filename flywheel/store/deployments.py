"""Deployments: which adapter answers under an alias, since when, and what answered before."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import Connection, Row, insert, select

from flywheel.states import DeploymentState
from flywheel.store.schema import deployments
from flywheel.store.transitions import move, record, utcnow


def active(conn: Connection, alias: str) -> Row[Any] | None:
    """What serves the alias now; None before the first swap (the base model does)."""
    return conn.execute(select(deployments).where(deployments.c.active_alias == alias)).one_or_none()


def history(conn: Connection, alias: str, limit: int) -> Sequence[Row[Any]]:
    """The last deployments, the newest first."""
    return conn.execute(
        select(deployments).where(deployments.c.alias == alias).order_by(deployments.c.id.desc()).limit(limit)
    ).all()


def in_use(conn: Connection, alias: str, drain_seconds: float) -> set[str]:
    """Adapters that must stay loaded: the active one, the one to roll back to, and those only just replaced."""
    since = (datetime.now(UTC) - timedelta(seconds=drain_seconds)).isoformat(timespec="milliseconds")
    now = active(conn, alias)
    names = conn.execute(
        select(deployments.c.adapter).where(deployments.c.alias == alias, deployments.c.retired_at > since)
    ).scalars()
    return {name for name in (*names, *((now.adapter, now.previous) if now else ())) if name}


def request(conn: Connection, alias: str, endpoints: list[str], adapter: str | None, reason: str) -> int:
    """Write down that `adapter` (None: the base model) shall serve; the number of the deployment."""
    now = active(conn, alias)
    row = conn.execute(
        insert(deployments)
        .values(
            alias=alias,
            endpoints=endpoints,
            adapter=adapter,
            previous=now.adapter if now else None,
            state=DeploymentState.REQUESTED.value,
            reason=reason,
            created_at=utcnow(),
        )
        .returning(deployments.c.id)
    ).scalar_one()
    record(conn, deployments.name, [str(row)], None, DeploymentState.REQUESTED, reason)
    return int(row)


def advance(conn: Connection, deployment: int, new: DeploymentState) -> None:
    """Follow a swap through `loading` and `probing`."""
    old = DeploymentState(
        conn.execute(select(deployments.c.state).where(deployments.c.id == deployment)).scalar_one()
    )
    if old is not new:
        move(conn, deployment, old, new)


def activate(conn: Connection, deployment: int, alias: str, report: dict[str, Any]) -> None:
    """The alias points at it now: it is active, and what was drains."""
    now = utcnow()
    before = active(conn, alias)
    if before is not None:
        move(conn, before.id, DeploymentState.ACTIVE, DeploymentState.DRAINING, active_alias=None)
        move(conn, before.id, DeploymentState.DRAINING, DeploymentState.RETIRED, retired_at=now)
    state = DeploymentState(
        conn.execute(select(deployments.c.state).where(deployments.c.id == deployment)).scalar_one()
    )
    if state is DeploymentState.REQUESTED:
        move(conn, deployment, state, DeploymentState.LOADING)
        state = DeploymentState.LOADING
    if state is DeploymentState.LOADING:
        move(conn, deployment, state, DeploymentState.PROBING)
    move(
        conn,
        deployment,
        DeploymentState.PROBING,
        DeploymentState.ACTIVE,
        active_alias=alias,
        report=report,
        activated_at=now,
    )


def fail(conn: Connection, deployment: int, error: str) -> None:
    """The swap did not happen; what served before still does."""
    old = DeploymentState(
        conn.execute(select(deployments.c.state).where(deployments.c.id == deployment)).scalar_one()
    )
    move(conn, deployment, old, DeploymentState.FAILED, error[:500], error=error)


def fail_unfinished(conn: Connection, why: str) -> int:
    """Swaps that a dead process left half done; reconciling puts the servers right."""
    half = [DeploymentState.REQUESTED.value, DeploymentState.LOADING.value, DeploymentState.PROBING.value]
    ids = conn.execute(select(deployments.c.id).where(deployments.c.state.in_(half))).scalars().all()
    for deployment in ids:
        fail(conn, deployment, why)
    return len(ids)
