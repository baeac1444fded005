"""Deployments: which adapter an alias stands for, since when, and which one before; and the state of each replica."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple

from sqlalchemy import ColumnElement, Connection, Row, case, func, or_, select

from flywheel.errors import StoreError
from flywheel.records.states import DeploymentState
from flywheel.store.kernel import database
from flywheel.store.kernel.bulk import rows_in
from flywheel.store.kernel.schema import deployments, events
from flywheel.store.kernel.transitions import create, move, record, utcnow

_AB_TEST: Final = "ab_test"
"""The old state in the event that ends an A/B test."""
_NEVER: Final = datetime.max.replace(tzinfo=UTC)
UNFINISHED: Final = (DeploymentState.REQUESTED, DeploymentState.LOADING, DeploymentState.PROBING)


def all_active(conn: Connection) -> Sequence[Row[Any]]:
    """The active deployment of each alias."""
    query = select(deployments).where(deployments.c.active_alias.is_not(None))
    return conn.execute(query.order_by(deployments.c.alias)).all()


def active(conn: Connection, alias: str) -> Row[Any] | None:
    """The active deployment of an alias; None before the first swap, when the base model serves."""
    return conn.execute(select(deployments).where(deployments.c.active_alias == alias)).one_or_none()


def watched(conn: Connection, alias: str) -> str:
    """The version that answers a share of the units until its watch ends; empty without an A/B test."""
    now = active(conn, alias)
    return now.adapter or "the base model" if now is not None and now.ab_test is not None else ""


def history(conn: Connection, alias: str, limit: int) -> Sequence[Row[Any]]:
    """The last deployments, the newest first."""
    return conn.execute(
        select(deployments).where(deployments.c.alias == alias).order_by(deployments.c.id.desc()).limit(limit)
    ).all()


def listed(conn: Connection, adapter: str | None, limit: int, before: int | None = None) -> Sequence[Row[Any]]:
    """Deployments of an adapter, or of the base model, the newest first; only those before the one with number
    `before`."""
    query = select(deployments).where(deployments.c.adapter == adapter).order_by(deployments.c.id.desc()).limit(limit)
    return conn.execute(query if before is None else query.where(deployments.c.id < before)).all()


def by_number(conn: Connection, number: int) -> Row[Any] | None:
    return conn.execute(select(deployments).where(deployments.c.id == number)).one_or_none()


ROLLBACK: Final = "rollback"
BY_HAND: Final = "by hand"
"""The reasons of deployments that are a rollback, to which a cause may be added, and that a person asked for."""


def outcomes(conn: Connection, alias: str) -> dict[str, int]:
    """How many swaps of an alias were done, were rollbacks, and failed."""
    is_failed = deployments.c.state == DeploymentState.FAILED.value
    outcome = case((is_failed, "failed"), (_is_rollback(), "rolled_back"), else_="done")
    ended = or_(is_failed, deployments.c.activated_at.is_not(None))
    query = select(outcome, func.count()).where(deployments.c.alias == alias, ended).group_by(outcome)
    return {"done": 0, "rolled_back": 0, "failed": 0} | dict(list(conn.execute(query)))


def in_use(conn: Connection, alias: str, drain_seconds: float) -> set[str]:
    """Adapters that must stay loaded: the active one, the other one of an A/B test, the one to roll back to, and
    those only just replaced."""
    since = (datetime.now(UTC) - timedelta(seconds=drain_seconds)).isoformat(timespec="milliseconds")
    now = active(conn, alias)
    names = conn.execute(
        select(deployments.c.adapter).where(deployments.c.alias == alias, deployments.c.retired_at > since)
    ).scalars()
    active_names = (now.adapter, now.previous, (now.ab_test or {}).get("other")) if now else ()
    return {name for name in (*names, *active_names) if name}


@dataclass(frozen=True, slots=True)
class ServingPeriod:
    """One time that an alias stood for an adapter. `retired_at` is None while it does."""

    deployment: int
    alias: str
    reason: str
    activated_at: str
    retired_at: str | None


def services(conn: Connection, adapters: Sequence[str]) -> dict[str, list[ServingPeriod]]:
    """When each of these adapters served, the first time first."""
    found: dict[str, list[ServingPeriod]] = {name: [] for name in adapters}
    query = (
        select(deployments)
        .where(deployments.c.activated_at.is_not(None))
        .order_by(deployments.c.activated_at, deployments.c.id)
    )
    for row in rows_in(conn, query, deployments.c.adapter, adapters):
        found[row.adapter].append(ServingPeriod(row.id, row.alias, row.reason, row.activated_at, row.retired_at))
    return found


class AliasVersion(NamedTuple):
    """From `since` on, an alias stood for `version`, such as `my-agent@r0007`, empty for the base model.

    From `requested` until `since` it was about to change. Until `ab_test_until` another version answered a share.
    """

    requested: datetime
    since: datetime
    version: str
    ab_test_until: datetime | None = None


def periods(conn: Connection, alias: str) -> list[AliasVersion]:
    """The versions that an alias stood for, the first deployment first."""
    rows = conn.execute(
        select(deployments)
        .where(deployments.c.alias == alias, deployments.c.activated_at.is_not(None))
        .order_by(deployments.c.activated_at, deployments.c.id)
    )
    ended = select(events.c.subject, events.c.at).where(events.c.kind == deployments.name, events.c.old == _AB_TEST)
    ends = {int(subject): datetime.fromisoformat(at) for subject, at in conn.execute(ended)}
    return [
        AliasVersion(
            datetime.fromisoformat(row.created_at),
            datetime.fromisoformat(row.activated_at),
            f"{alias}@{row.adapter}" if row.adapter else "",
            _NEVER if row.ab_test else ends.get(row.id),
        )
        for row in rows
    ]


def answering(known: Sequence[AliasVersion], start: datetime, end: datetime) -> str | None:
    """The version that answered a request from `start` to `end`; None where it changed meanwhile, or was one of two.

    Before the first deployment that is the base model, as the alias stands for it until then.
    """
    if any(period.requested <= end and start <= period.since for period in known):
        return None
    for period in reversed(known):
        if period.since < start:
            return None if period.ab_test_until and start <= period.ab_test_until else period.version
    return ""


def has_served(conn: Connection, alias: str, adapter: str) -> bool:
    """Whether the alias ever stood for the adapter, which was verified then."""
    found = select(deployments.c.id).where(
        deployments.c.alias == alias, deployments.c.adapter == adapter, deployments.c.activated_at.is_not(None)
    )
    return conn.execute(found.limit(1)).first() is not None


def newest_rollback(conn: Connection) -> int:
    """The number of the last rollback that was asked for, of any alias; 0 before the first."""
    asked = select(func.max(deployments.c.id)).where(_is_rollback())
    return conn.execute(asked).scalar_one() or 0


def request_rollback(conn: Connection, alias: str, endpoints: list[str], adapter: str | None, why: str = "") -> int:
    """Request that `adapter` (None: the base model) serves again, and end the unfinished swaps, of other aliases too:
    their process may not go on. Rollbacks of other aliases do. `why` is recorded. The number of the deployment."""
    fail_unfinished(conn, f"a rollback of {alias} was asked for", but=(deployments.c.alias != alias) & _is_rollback())
    return request(conn, alias, endpoints, adapter, f"{ROLLBACK}: {why}" if why else ROLLBACK)


def _is_rollback() -> ColumnElement[bool]:
    return deployments.c.reason.startswith(ROLLBACK)


def rollback_cause(reason: str) -> str | None:
    """What a deployment's reason adds to `ROLLBACK`, such as `: worse in traffic`, empty if nothing; None if it is no
    rollback."""
    return reason.removeprefix(ROLLBACK) if reason.startswith(ROLLBACK) else None


def check_unfinished(conn: Connection, deployment: int) -> None:
    """Raises StoreError if the deployment has ended."""
    _unfinished_state(conn, deployment)


def request(
    conn: Connection,
    alias: str,
    endpoints: list[str],
    adapter: str | None,
    reason: str,
    ab_test: dict[str, Any] | None = None,
) -> int:
    """Request that `adapter` (None: the base model) serves, with `ab_test` beside another one; the number of the
    deployment."""
    now = active(conn, alias)
    # A rollback skips an adapter that is deployed once more.
    previous = (now.previous if now.adapter == adapter else now.adapter) if now else None
    values = {"alias": alias, "endpoints": endpoints, "adapter": adapter, "previous": previous, "reason": reason}
    return create(conn, DeploymentState.REQUESTED, reason, ab_test=ab_test, **values)


def advance(conn: Connection, deployment: int, new: DeploymentState) -> None:
    """Move a swap to `loading` or `probing`. Raises StoreError if it has ended."""
    if (old := _unfinished_state(conn, deployment)) is not new:
        move(conn, deployment, old, new)


def activate(conn: Connection, deployment: int, alias: str, report: dict[str, Any]) -> None:
    """Make a deployment active and retire the one before. Raises StoreError if it has ended."""
    now = utcnow()
    state = _unfinished_state(conn, deployment)
    before = active(conn, alias)
    if before is not None:
        move(conn, before.id, DeploymentState.ACTIVE, DeploymentState.DRAINING, active_alias=None)
        move(conn, before.id, DeploymentState.DRAINING, DeploymentState.RETIRED, retired_at=now)
    steps = [DeploymentState.REQUESTED, DeploymentState.LOADING, DeploymentState.PROBING]
    for old, new in itertools.pairwise(steps[steps.index(state) :]):
        move(conn, deployment, old, new)
    values: dict[str, Any] = {"active_alias": alias, "report": report, "activated_at": now}
    move(conn, deployment, DeploymentState.PROBING, DeploymentState.ACTIVE, **values)


def end_ab_test(conn: Connection, deployment: int, reason: str) -> None:
    """The deployment's adapter answers everything."""
    conn.execute(deployments.update().where(deployments.c.id == deployment).values(ab_test=None))
    record(conn, deployments.name, [str(deployment)], _AB_TEST, DeploymentState.ACTIVE, reason)


def _state(conn: Connection, deployment: int) -> DeploymentState:
    found = conn.execute(select(deployments.c.state).where(deployments.c.id == deployment))
    return DeploymentState(found.scalar_one())


def _unfinished_state(conn: Connection, deployment: int) -> DeploymentState:
    state = _state(conn, deployment)
    if state not in UNFINISHED:
        raise StoreError(
            f"go on with deployment {deployment}",
            f"it is {state}: another process has ended it",
            "See with `flywheel status` what serves, and deploy again.",
        )
    return state


def fail(conn: Connection, deployment: int, error: str) -> None:
    """Mark a swap as failed: the deployment before still serves. One that has ended stays as it is."""
    old = _state(conn, deployment)
    if old in UNFINISHED:
        move(conn, deployment, old, DeploymentState.FAILED, error[:500], error=error)


def fail_unfinished(conn: Connection, why: str, but: ColumnElement[bool] | None = None) -> int:
    """Mark unfinished swaps as failed, `but` some; reconciliation corrects the servers. Returns how many.

    For a holder of `swap.lock` who began none: those that a dead process left.
    """
    query = select(deployments.c.id).where(deployments.c.state.in_([state.value for state in UNFINISHED]))
    ids = conn.execute(query if but is None else query.where(~but)).scalars().all()
    for deployment in ids:
        fail(conn, deployment, why)
    return len(ids)


_REPLICAS: Final = "replicas"
"""The kind of events about replicas, and the key of notes."""


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """`condition` says how a replica was found, `serves` what the alias stands for there, empty if unknown; `error`
    says what is wrong and what to do."""

    condition: str
    serves: str
    error: str
    since: str | None = None
    looked_at: str | None = None


def note_replicas(conn: Connection, alias: str, states: Mapping[str, ReplicaState]) -> None:
    """Store the state of every replica by its URL, with the times; a changed condition is an event."""
    before, now = replica_states(conn, alias), utcnow()
    stored = {}
    for url, state in states.items():
        last = before.get(url)
        condition = last.condition if last is not None else None
        if condition != state.condition:
            record(conn, _REPLICAS, [url], condition, state.condition, state.error)
        is_as_before = last is not None and (last.condition, last.serves) == (state.condition, state.serves)
        since = last.since if last is not None and is_as_before else now
        stored[url] = asdict(replace(state, since=since, looked_at=now))
    database.note(conn, _key(alias), json.dumps(stored))


def replica_states(conn: Connection, alias: str) -> dict[str, ReplicaState]:
    """The stored state of each replica by its URL."""
    stored = json.loads(database.noted(conn, _key(alias)) or "{}")
    return {url: ReplicaState(**state) for url, state in stored.items()}


def _key(alias: str) -> str:
    return f"{_REPLICAS} of {alias}"
