"""Retention: which rounds' files are no longer needed, and the record of their removal. Touches no file.

A removal is recorded before the first file is removed and after the last one: one that a crash interrupts is
continued, and an adapter with half of its files is known to be removed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, FromClause, Row, Select, Text, and_, cast, exists, func, or_, select

from flywheel.records.states import AdapterState
from flywheel.store.deployments import UNFINISHED
from flywheel.store.kernel.schema import adapters, deployments, events, rounds
from flywheel.store.kernel.transitions import move, record

REMOVING: Final = "removing files"
REMOVED: Final = "files removed"
"""Events of a round about its files."""


@dataclass(frozen=True, slots=True)
class Old:
    """A round that ended long ago.

    `adapter` is the path of its adapter, empty if it has none; `requested` whether a server was ever asked to load
    it; `needed` why its files must stay, empty if they need not.
    """

    id: int
    name: str
    state: str
    finished_at: str
    dir: str
    adapter: str
    requested: bool
    needed: str = ""


def old(conn: Connection, keep_days: float, keep_served: int) -> list[Old]:
    """Rounds that ended more than `keep_days` ago and still have files, the oldest first."""
    before = (datetime.now(UTC) - timedelta(days=keep_days)).isoformat(timespec="milliseconds")
    needed = _needed(conn, keep_served)
    removed = and_(_has_adapter, adapters.c.state == AdapterState.REMOVED.value)
    rows = conn.execute(
        _rounds()
        .where(rounds.c.live.is_(None), rounds.c.finished_at <= before)
        .where(~removed, or_(_has_adapter, ~exists().where(_of_round(events, REMOVING))))
    )
    return [_old(row, needed.get(row.name, "")) for row in rows]


def begin(conn: Connection, names: Sequence[str], keep_days: float, keep_served: int, why: str) -> list[Old]:
    """Record that the files of these rounds are being removed; returns those that may be.

    The caller holds `swap.lock`.
    """
    may_go = [each for each in old(conn, keep_days, keep_served) if each.name in names and not each.needed]
    for each in may_go:
        record(conn, rounds.name, [str(each.id)], each.state, REMOVING, why)
        row = conn.execute(
            select(adapters.c.id, adapters.c.state).where(adapters.c.round_id == each.id)
        ).one_or_none()
        if row is not None:
            move(conn, row.id, AdapterState(row.state), AdapterState.REMOVED, why)
    return may_go


def begun(conn: Connection) -> list[Old]:
    """Rounds whose removal was interrupted. An adapter that was restored since stays."""
    begin, end = events.alias(), events.alias()
    ended = exists().where(
        end.c.kind == begin.c.kind, end.c.subject == begin.c.subject, end.c.new == REMOVED, end.c.id > begin.c.id
    )
    unfinished = exists().where(_of_round(begin, REMOVING), ~ended)
    gone = or_(~_has_adapter, adapters.c.state == AdapterState.REMOVED.value)
    return [_old(row) for row in conn.execute(_rounds().where(unfinished, gone))]


def end(conn: Connection, round_id: int, state: str, size: int) -> None:
    """Record that all files of a round are removed; `size` is their number of bytes."""
    record(conn, rounds.name, [str(round_id)], state, REMOVED, f"{size} bytes")


_has_adapter: Final = adapters.c.id.is_not(None)


def _of_round(told: FromClause, what: str) -> ColumnElement[bool]:
    return and_(told.c.kind == rounds.name, told.c.subject == cast(rounds.c.id, Text), told.c.new == what)


def _rounds() -> Select[Any]:
    requested = exists().where(deployments.c.adapter == rounds.c.name).label("requested")
    columns = (rounds.c.id, rounds.c.name, rounds.c.state, rounds.c.finished_at, rounds.c.dir)
    return (
        select(*columns, adapters.c.path, requested)
        .outerjoin(adapters, adapters.c.round_id == rounds.c.id)
        .order_by(rounds.c.id)
    )


def _old(row: Row[Any], needed: str = "") -> Old:
    return Old(row.id, row.name, row.state, row.finished_at, row.dir, row.path or "", bool(row.requested), needed)


def _needed(conn: Connection, keep_served: int) -> dict[str, str]:
    """Why the files of rounds must stay, whatever their age, by the round's name."""
    served = deployments.c.adapter
    lately = conn.execute(
        select(served)
        .where(served.is_not(None), deployments.c.activated_at.is_not(None))
        .group_by(served)
        .order_by(func.max(deployments.c.activated_at).desc(), func.max(deployments.c.id).desc())
        .limit(keep_served)
    ).scalars()
    needed = {str(name): f"one of the last {keep_served} that served" for name in lately}
    # For every alias: the state may have served another one before.
    active = conn.execute(select(deployments).where(deployments.c.active_alias.is_not(None))).all()
    needed |= {str(row.previous): f"{row.alias} can be rolled back to it" for row in active}
    needed |= {str(row.adapter): f"it serves as {row.alias}" for row in active}
    half = deployments.c.state.in_([state.value for state in UNFINISHED])
    needed |= {str(name): "it is being deployed" for name in conn.execute(select(served).where(half)).scalars()}
    for row in conn.execute(select(rounds).where(rounds.c.live == 1)):
        needed.setdefault(str(row.parent), f"{row.name} goes on from it")
    return needed
