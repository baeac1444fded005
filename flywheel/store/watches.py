"""Watches of promotions: the units of both versions, their outcomes in the order in which they became known, and the
sequential test on them.

A unit is a conversation, or what else the server takes for one. It keeps the arm of its first call and counts once,
by the reply that its first call belongs to (intention to treat).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from enum import StrEnum
from statistics import median
from typing import Any, Final, NamedTuple

from msgspec import Struct, to_builtins
from sqlalchemy import Connection, Row, case, delete, func, select, update
from sqlalchemy.dialects.sqlite import insert

from flywheel.records.request_id import BASE_VERSION
from flywheel.records.skipping import AWAITS_TOOLS
from flywheel.records.states import ReplyState, SkipReason, TaskState, WatchState
from flywheel.store import deployments as deployed
from flywheel.store.kernel.bulk import rows_in
from flywheel.store.kernel.schema import (
    deployments,
    duplicates,
    replies,
    reply_calls,
    rounds,
    tasks,
    verdicts,
    watch_units,
    watches,
)
from flywheel.store.kernel.transitions import create, move, utcnow

LIVE: Final = (WatchState.WATCHING, WatchState.ROLLING_BACK)
NEW: Final = "new"
OLD: Final = "old"
FALLBACK: Final = "fallback"
"""The kind of a unit that no header names."""
_OF_THE_QUESTION: Final = "filter rules: the question "
"""How the reason of a verdict begins by which the filter `rules` rejects a task for its question."""


class Result(StrEnum):
    """What became of a unit."""

    SUCCESS = "success"
    FAILURE = "failure"
    MISSING = "missing"
    """there is no whole reply: the client gave up, the server refused, or the trace did not end"""
    NO_UNIT = "no_unit"
    """the request alone decides that nothing is judged, or its texts were erased"""


class Outcome(NamedTuple):
    result: Result
    why: str


class UnitCall(NamedTuple):
    """A recorded call of a unit; `number` is its number in the copy of the call logs."""

    number: int
    request_id: str
    unit: str
    arm: str
    kind: str
    version: str
    started_ns: int
    ended_ns: int


class ArmFigures(Struct, frozen=True):
    """Units of one version: all, those with a success or failure, and those whose outcome is missing for good.

    `answered` is the share, 0…1, of the units that this version answered: a server that lacks it lets the other one
    answer. `rate` is successes / outcomes; `median_delay_seconds` is from the end of a call to its outcome.
    """

    version: str
    units: int
    outcomes: int
    successes: int
    missing: int
    waiting: int
    answered: float | None
    rate: float | None
    median_delay_seconds: float | None
    reasons: Mapping[str, int]

    @property
    def failures(self) -> int:
        return self.outcomes - self.successes


def version_of(alias: str, adapter: str | None) -> str:
    """How a call names the version that answered it; None is the base model."""
    return f"{alias}@{adapter}" if adapter else BASE_VERSION


def current(conn: Connection, alias: str) -> Row[Any] | None:
    """The watch of the alias that has not ended; None without one."""
    live = watches.c.state.in_([state.value for state in LIVE])
    return conn.execute(select(watches).where(watches.c.alias == alias, live)).one_or_none()


def follow(conn: Connection, alias: str) -> Row[Any] | None:
    """The watch of the alias that has not ended. It begins with the A/B test of the active deployment, and ends where
    that is not the watched one any more, or the A/B test has ended."""
    active, watch = deployed.active(conn, alias), current(conn, alias)
    if watch is not None and active is not None and active.id != watch.deployment_id:
        serves = active.adapter or "the base model"
        if watch.state == WatchState.ROLLING_BACK and active.adapter == watch.other:
            end(conn, watch, WatchState.ROLLED_BACK, watch.reason)
        else:
            end(conn, watch, WatchState.REPLACED, f"{serves} was deployed meanwhile: {active.reason}")
        watch = None
    elif watch is not None and watch.state == WatchState.WATCHING and active is not None and active.ab_test is None:
        end(conn, watch, WatchState(watch.ends_as or WatchState.KEPT), watch.reason)
        watch = None
    if watch is None and active is not None and active.ab_test is not None and of_deployment(conn, active.id) is None:
        create(
            conn,
            WatchState.WATCHING,
            deployment_id=active.id,
            alias=alias,
            adapter=active.adapter,
            other=active.ab_test["other"],
            share=active.ab_test["share"],
        )
        watch = current(conn, alias)
    return watch


def activated_ns(conn: Connection, watch: Row[Any]) -> int:
    """When the new version was active on the last replica, in nanoseconds since 1970."""
    query = select(deployments.c.activated_at).where(deployments.c.id == watch.deployment_id)
    return round(datetime.fromisoformat(conn.execute(query).scalar_one()).timestamp() * 1e9)


def first_calls(conn: Connection, watch_id: int, calls: Iterable[UnitCall]) -> list[UnitCall]:
    """Those of these calls that `enter` would make the first ones of their units, of units that are tested and have
    no outcome."""
    earliest: dict[str, UnitCall] = {}
    for call in calls:
        if call.unit not in earliest or call.started_ns < earliest[call.unit].started_ns:
            earliest[call.unit] = call
    query = select(watch_units).where(watch_units.c.watch_id == watch_id)
    for row in rows_in(conn, query, watch_units.c.unit, list(earliest)):
        if row.place is not None or row.arm == "" or earliest[row.unit].started_ns >= row.started_ns:
            del earliest[row.unit]
    return [call for call in earliest.values() if call.arm]


def enter(
    conn: Connection,
    watch_id: int,
    calls: Iterable[UnitCall],
    found: Mapping[str, Outcome],
    read_to: int,
    now_ns: int,
) -> None:
    """Enter calls of units with the outcomes that were `found` by unit, and note how far the calls were read: all at
    once, so that a crash loses no outcome.

    A call that began before the known first one, on a replica whose log was read later, takes its place while the
    unit has no outcome.
    """
    for call in calls:
        names = ("request_id", "version", "started_ns", "ended_ns")
        values = {name: getattr(call, name) for name in names}
        added = insert(watch_units).values(
            watch_id=watch_id, unit=call.unit, arm=call.arm, kind=call.kind, calls=1, entered_ns=now_ns, **values
        )
        is_open = watch_units.c.place.is_(None)
        is_earlier = (added.excluded.started_ns < watch_units.c.started_ns) & is_open
        first = {name: case((is_earlier, added.excluded[name]), else_=watch_units.c[name]) for name in names}
        # One answered outside of its arm, as what follows a response of the other version, takes the unit out.
        arm = case(((added.excluded.arm == "") & is_open, ""), else_=watch_units.c.arm)
        conn.execute(added.on_conflict_do_update(set_={**first, "arm": arm, "calls": watch_units.c.calls + 1}))
    decide(conn, watch_id, found, now_ns)
    conn.execute(update(watches).where(watches.c.id == watch_id).values(read_to=read_to))


def undecided(conn: Connection, watch_id: int) -> list[Row[Any]]:
    """The tested units without an outcome, by the start of their first calls."""
    own = watch_units.c.watch_id == watch_id, watch_units.c.place.is_(None), watch_units.c.arm != ""
    return list(conn.execute(select(watch_units).where(*own).order_by(watch_units.c.started_ns, watch_units.c.unit)))


def decide(conn: Connection, watch_id: int, found: Mapping[str, Outcome], now_ns: int) -> None:
    """Store outcomes by unit, in their order; one that is known stays."""
    own = watch_units.c.watch_id == watch_id
    place = int(conn.execute(select(func.coalesce(func.max(watch_units.c.place), 0)).where(own)).scalar_one())
    for unit, outcome in found.items():
        place += 1
        values = {
            "place": place,
            "outcome": outcome.result.value,
            "why": outcome.why,
            "delay_seconds": func.max(0.0, (now_ns - watch_units.c.ended_ns) / 1e9),
        }
        if outcome.result is Result.NO_UNIT:
            values["arm"] = ""
        is_own = own, watch_units.c.unit == unit, watch_units.c.place.is_(None)
        conn.execute(update(watch_units).where(*is_own).values(values))


def outcomes_of(conn: Connection, request_ids: Sequence[str], late: Collection[str] = ()) -> dict[str, Outcome]:
    """The outcomes of those of these calls whose reply has one, by request id. The reply of a `late` one
    must have ended by now."""
    query = (
        select(
            reply_calls.c.request_id,
            replies.c.state.label("reply"),
            replies.c.skip_reason,
            replies.c.detail,
            tasks.c.id.label("task_id"),
            tasks.c.state.label("task"),
            duplicates.c.task_id.label("repeated"),
        )
        .join(replies, replies.c.id == reply_calls.c.reply_id)
        .outerjoin(tasks, tasks.c.id == replies.c.task_id)
        .outerjoin(duplicates, duplicates.c.task_id == tasks.c.id)
        .order_by(replies.c.task_id.is_(None), replies.c.id)
    )
    found: dict[str, Outcome | None] = {}
    for row in rows_in(conn, query, reply_calls.c.request_id, request_ids):
        # A call can belong to the same reply in several sources: the one with a task comes first.
        if found.get(row.request_id) is None:
            outcome = _outcome(conn, row)
            if outcome is not None or not _may_never_end(row):
                found[row.request_id] = outcome
    known = {request_id: outcome for request_id, outcome in found.items() if outcome is not None}
    return known | {request_id: _NEVER_ENDED for request_id in late if request_id not in found}


_SKIPPED: Final[Mapping[SkipReason, Outcome | None]] = {
    SkipReason.ERROR: Outcome(Result.FAILURE, "the agent ended with an error"),
    SkipReason.NO_ANSWER: Outcome(Result.FAILURE, "an empty answer"),
    SkipReason.INTERRUPTED: Outcome(Result.MISSING, "interrupted by the user"),
    SkipReason.TRUNCATED: Outcome(Result.MISSING, "a cut trace"),
    SkipReason.UNFINISHED: None,
    SkipReason.RECORDED: None,
}
"""The request alone decides the other reasons."""
_NEVER_ENDED: Final = Outcome(Result.MISSING, "the reply never ended")
_ERASED: Final = Outcome(Result.NO_UNIT, "its texts were erased")
_TASKS: Final = {
    TaskState.ACCEPTED: Outcome(Result.SUCCESS, "accepted"),
    TaskState.RESERVED: Outcome(Result.SUCCESS, "accepted"),
    TaskState.CONSUMED: Outcome(Result.SUCCESS, "accepted"),
    TaskState.ERASED: _ERASED,
}


def _may_never_end(row: Row[Any]) -> bool:
    """Whether the trace of a reply has not ended. A reply that waits for a person has, for the time being."""
    is_unfinished = row.skip_reason == SkipReason.UNFINISHED and not row.detail.startswith(AWAITS_TOOLS)
    return row.task is None and (row.reply == ReplyState.OPEN or (row.reply == ReplyState.SKIPPED and is_unfinished))


def _outcome(conn: Connection, row: Row[Any]) -> Outcome | None:
    """None while it is not known: what waits for the judge, a budget or a person (a dead letter) is not missing."""
    if row.task is None:
        if row.reply == ReplyState.ERASED:
            return _ERASED
        if row.reply != ReplyState.SKIPPED:
            return None
        return _SKIPPED.get(SkipReason(row.skip_reason), Outcome(Result.NO_UNIT, f"not judged ({row.skip_reason})"))
    state = TaskState(row.task)
    if state is not TaskState.REJECTED:
        return _TASKS.get(state)
    if row.repeated is not None:
        return Outcome(Result.NO_UNIT, "the question repeats another one")
    current = select(verdicts.c.reason).join(tasks, tasks.c.verdict_id == verdicts.c.id)
    reason = conn.execute(current.where(tasks.c.id == row.task_id)).scalar_one_or_none() or ""
    if reason.startswith(_OF_THE_QUESTION):
        return Outcome(Result.NO_UNIT, "the question was filtered out")
    return Outcome(Result.FAILURE, "rejected")


def results(conn: Connection, watch_id: int) -> list[tuple[bool, Result]]:
    """Whether the new version's arm, and the outcome, of each unit in the order in which outcomes became known."""
    query = (
        select(watch_units.c.arm, watch_units.c.outcome)
        .where(watch_units.c.watch_id == watch_id, watch_units.c.place.is_not(None), watch_units.c.arm != "")
        .order_by(watch_units.c.place)
    )
    return [(arm == NEW, Result(outcome)) for arm, outcome in conn.execute(query)]


def by_arm(conn: Connection, watch: Row[Any]) -> tuple[ArmFigures, ArmFigures]:
    """The figures of the old and of the new version."""
    own = watch_units.c.watch_id == watch.id
    query = select(watch_units).where(own)
    names = {OLD: watch.other, NEW: watch.adapter}
    of_arms: dict[str, list[Row[Any]]] = {arm: [] for arm in ("", *names)}
    for row in conn.execute(query):
        of_arms[row.arm].append(row)
    old, new = (_of_arm(name, version_of(watch.alias, name), of_arms[arm]) for arm, name in names.items())
    return old, new


def _of_arm(adapter: str | None, version: str, rows: Sequence[Row[Any]]) -> ArmFigures:
    answered = sum(row.version == version for row in rows)
    counts = Counter(row.outcome for row in rows)
    successes, failures, missing = (counts[each] for each in (Result.SUCCESS, Result.FAILURE, Result.MISSING))
    outcomes = successes + failures
    delays = [row.delay_seconds for row in rows if row.outcome in (Result.SUCCESS, Result.FAILURE)]
    reasons: dict[str, int] = {}
    for row in rows:
        if row.outcome in (Result.FAILURE, Result.MISSING):
            reasons[row.why] = reasons.get(row.why, 0) + 1
    return ArmFigures(
        adapter or BASE_VERSION,
        len(rows),
        outcomes,
        successes,
        missing,
        len(rows) - outcomes - missing,
        round(answered / len(rows), 4) if rows else None,
        round(successes / outcomes, 4) if outcomes else None,
        round(median(delays), 1) if delays else None,
        dict(sorted(reasons.items(), key=lambda each: -each[1])),
    )


class CallShares(NamedTuple):
    """Units in all, those of them that are not tested, the share of units that no header names, and the share of the
    calls that the unit with most of them has."""

    units: int
    untested: int
    fallback: float
    largest: float


def call_shares(conn: Connection, watch_id: int) -> CallShares:
    counted = select(
        func.count(),
        func.count().filter(watch_units.c.arm == ""),
        func.count().filter(watch_units.c.kind == FALLBACK),
        func.coalesce(func.max(watch_units.c.calls), 0),
        func.coalesce(func.sum(watch_units.c.calls), 0),
    ).where(watch_units.c.watch_id == watch_id)
    units, untested, fallback, most, calls = conn.execute(counted).one()
    return CallShares(units, untested, fallback / units if units else 0.0, most / calls if calls else 0.0)


def unmatched(conn: Connection, watch: Row[Any]) -> int:
    """How many tasks were made since the watch began of replies without a recorded call: their unit is unknown."""
    has_call = select(reply_calls.c.reply_id).where(reply_calls.c.reply_id == replies.c.id).exists()
    names = [watch.alias, *(version_of(watch.alias, name) for name in (watch.adapter, watch.other) if name)]
    query = (
        select(func.count())
        .select_from(replies.join(tasks, tasks.c.id == replies.c.task_id))
        .where(replies.c.created_at >= watch.created_at, ~has_call)
        .where(tasks.c.model.in_(names) | tasks.c.adapter.in_(names))
    )
    return int(conn.execute(query).scalar_one())


def note(conn: Connection, watch: Row[Any], state: WatchState, reason: str, figures: Struct) -> None:
    """Store what a watch has found, in which state it is to end, and why."""
    values = {"ends_as": state.value, "reason": reason, "figures": to_builtins(figures)}
    conn.execute(update(watches).where(watches.c.id == watch.id).values(values))


def end(conn: Connection, watch: Row[Any], state: WatchState, reason: str) -> None:
    """End a watch, and remove its units. The round of an adapter that was rolled back says so."""
    conn.execute(delete(watch_units).where(watch_units.c.watch_id == watch.id))
    if state is WatchState.ROLLED_BACK:
        told = rounds.c.reason + f"; rolled back since: {reason}"
        conn.execute(update(rounds).where(rounds.c.name == watch.adapter).values(reason=told))
    move(conn, watch.id, WatchState(watch.state), state, reason[:500], reason=reason, ended_at=utcnow())


def begin_rollback(conn: Connection, watch: Row[Any], reason: str, figures: Struct) -> None:
    note(conn, watch, WatchState.ROLLED_BACK, reason, figures)
    move(conn, watch.id, WatchState.WATCHING, WatchState.ROLLING_BACK, reason[:500])


def of_adapters(conn: Connection, adapters: Iterable[str]) -> list[Row[Any]]:
    """The watches of promotions of these adapters, the first one first."""
    return list(rows_in(conn, select(watches).order_by(watches.c.id), watches.c.adapter, list(adapters)))


def of_deployment(conn: Connection, deployment: int) -> Row[Any] | None:
    """The watch of a deployment; None without one."""
    return conn.execute(select(watches).where(watches.c.deployment_id == deployment)).one_or_none()


def as_json(watch: Row[Any]) -> dict[str, Any]:
    """A watch for `--json`; `figures` are those of its end."""
    return {
        "state": watch.state,
        "alias": watch.alias,
        "adapter": watch.adapter,
        "other": watch.other,
        "share": watch.share,
        "began_at": watch.created_at,
        "ended_at": watch.ended_at,
        "reason": watch.reason,
        "figures": watch.figures,
    }
