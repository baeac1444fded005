"""Requests: actions that people ask for, with who asked and when, and what became of them.

A request is stored before it is carried out, and carried out in one transaction with its change of state: kill -9
neither loses one nor does it twice. Most are carried out in the transaction that stores them, beside a running
daemon. Those that change where sources are read next wait for the process that holds the instance lock.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, Row, case, func, select

from flywheel.errors import FlywheelError, StoreError
from flywheel.records.states import Label, RequestState, TaskState
from flywheel.records.task import storable
from flywheel.store import claims, dead_letters, labels, rounds
from flywheel.store.dead_letters import DeadLetter
from flywheel.store.kernel.schema import requests, tasks
from flywheel.store.kernel.transitions import create, move, utcnow

log = logging.getLogger(__name__)

LONGEST_NAME: Final = 200


class RequestKind(StrEnum):
    """What can be asked for."""

    LABEL = "label"
    """say whether a reply is good"""
    RELEASE = "release"
    """pass held tasks on to the filters and the judge"""
    REJECT = "reject"
    """reject held tasks"""
    RETRY = "retry"
    """process the units of dead letters again"""
    DROP = "drop"
    """close dead letters for good"""
    DEPLOY = "deploy"
    """deploy the waiting candidate of a round"""
    REFUSE = "refuse"
    """reject the waiting candidate of a round"""


@dataclass(frozen=True, slots=True)
class Request:
    """One request. `result` is what was done, or of a failed one the parts of the error."""

    id: int
    kind: RequestKind
    state: RequestState
    requested_by: str
    created_at: str
    result: Any

    @property
    def error(self) -> StoreError | None:
        """Why it failed."""
        return StoreError(**self.result) if self.state is RequestState.FAILED else None


def submit(conn: Connection, kind: RequestKind, arguments: Mapping[str, Any], by: str) -> int:
    """Store a request, and carry it out at once unless it needs the instance lock; its number."""
    who = storable(by)[:LONGEST_NAME] or "unknown"
    number = create(
        conn, RequestState.OPEN, f"{kind} by {who}", kind=kind.value, arguments=arguments, requested_by=who
    )
    if kind is not RequestKind.RETRY:
        _carry_out(conn, number, kind, arguments, who)
    return number


def carry_out(conn: Connection) -> int:
    """Carry out all open requests in their order; how many. The caller holds the instance lock."""
    is_open = requests.c.state == RequestState.OPEN.value
    rows = conn.execute(select(requests).where(is_open).order_by(requests.c.id)).all()
    for row in rows:
        _carry_out(conn, row.id, row.kind, row.arguments, row.requested_by)
    return len(rows)


def with_id(conn: Connection, number: int) -> Request:
    """The request of this number."""
    return _request(conn.execute(select(requests).where(requests.c.id == number)).one())


def find(conn: Connection, number: int) -> Request | None:
    """The request of this number, if there is one."""
    row = conn.execute(select(requests).where(requests.c.id == number)).one_or_none()
    return _request(row) if row is not None and row.kind in list(RequestKind) else None


def recent(conn: Connection, kinds: Collection[RequestKind], limit: int) -> list[tuple[Request, int]]:
    """The newest requests of these kinds, and of how many units each did something; without results, which may be
    long."""
    counts = [func.json_array_length(requests.c.result, f"$.{name}") for name in ("retried", "dropped")]
    failed = requests.c.state == RequestState.FAILED.value
    columns: list[ColumnElement[Any]] = [
        *(requests.c[name] for name in ("id", "kind", "state", "requested_by", "created_at")),
        case((failed, requests.c.result)).label("result"),
        func.coalesce(*counts, 0).label("units"),
    ]
    rows = conn.execute(
        select(*columns)
        .where(requests.c.kind.in_([kind.value for kind in kinds]))
        .order_by(requests.c.id.desc())
        .limit(limit)
    )
    return [(_request(row), row.units) for row in rows]


def since(conn: Connection, number: int) -> tuple[int, frozenset[RequestKind]]:
    """The number of the newest request, and the kinds of those after `number`."""
    rows = conn.execute(
        select(requests.c.kind, func.max(requests.c.id).label("newest"))
        .where(requests.c.id > number)
        .group_by(requests.c.kind)
    ).all()
    known = frozenset(RequestKind(row.kind) for row in rows if row.kind in list(RequestKind))
    return max((row.newest for row in rows), default=number), known


def _request(row: Row[Any]) -> Request:
    state = RequestState(row.state)
    return Request(row.id, RequestKind(row.kind), state, row.requested_by, row.created_at, row.result)


def _carry_out(conn: Connection, number: int, kind: str, arguments: Mapping[str, Any], by: str) -> None:
    """Carry out one request. One that fails changes nothing, and its error is stored."""
    savepoint = conn.begin_nested()
    try:
        result = _ACTIONS[RequestKind(kind)](conn, arguments, by)
    except FlywheelError as error:
        savepoint.rollback()
        failure = error
    except (LookupError, TypeError, ValueError) as error:
        # A row of another version, or of another program.
        savepoint.rollback()
        log.exception("request %d", number)
        failure = StoreError(f"carry out request {number}", f"it is not understood ({type(error).__name__})")
    else:
        savepoint.commit()
        move(conn, number, RequestState.OPEN, RequestState.DONE, result=result, finished_at=utcnow())
        return
    parts = {"attempted": failure.attempted, "why": failure.why, "hint": failure.hint}
    move(
        conn, number, RequestState.OPEN, RequestState.FAILED, failure.why[:500],
        result=parts, error=str(failure), finished_at=utcnow(),
    )  # fmt: skip


def _label(conn: Connection, arguments: Mapping[str, Any], by: str) -> dict[str, Any]:
    number = labels.add(
        conn,
        str(arguments["task_id"]),
        Label(arguments["label"]),
        by,
        criterion=str(arguments.get("criterion", "")),
        comment=str(arguments.get("comment", "")),
        is_blind=bool(arguments.get("is_blind", False)),
    )
    return {"label": number}


def _decide(conn: Connection, arguments: Mapping[str, Any], by: str, verb: str) -> dict[str, Any]:
    """Release or reject held tasks: these, or all without `tasks`."""
    keys: Sequence[str] | None = arguments["tasks"]
    is_held = tasks.c.state == TaskState.HELD.value
    held = {
        row.key: row.id for row in conn.execute(select(tasks.c.key, tasks.c.id).where(is_held).order_by(tasks.c.id))
    }
    if unknown := [key for key in keys or () if key not in held]:
        raise StoreError(
            f"{verb} {', '.join(unknown[:5])}",
            "no held task has this id" if len(unknown) == 1 else "no held tasks have these ids",
            "`flywheel tasks --state held` lists them.",
        )
    decide = claims.release_held if verb == "release" else claims.reject_held
    done = set(decide(conn, [held[key] for key in (held if keys is None else keys)], by))
    past = "released" if verb == "release" else "rejected"
    return {past: [key for key, number in held.items() if number in done]}


def _named(letter: DeadLetter) -> dict[str, Any]:
    return {"id": letter.id, "kind": letter.kind, "subject": letter.subject}


def _retry(conn: Connection, arguments: Mapping[str, Any], by: str) -> dict[str, Any]:
    done = dead_letters.retry(conn, arguments["ids"])
    return {"retried": [{**_named(letter), "next": then.value} for letter, then in done]}


def _drop(conn: Connection, arguments: Mapping[str, Any], by: str) -> dict[str, Any]:
    return {"dropped": [_named(letter) for letter in dead_letters.drop(conn, arguments["ids"], by)]}


def _deploy(conn: Connection, arguments: Mapping[str, Any], by: str) -> dict[str, Any]:
    """The process that runs rounds makes the swap."""
    rounds.approve(conn, arguments["round"], by)
    return {"deploys": arguments["round"]}


def _refuse(conn: Connection, arguments: Mapping[str, Any], by: str) -> dict[str, Any]:
    rounds.refuse(conn, arguments["round"], by, int(arguments["max_uses"]))
    return {"refused": [arguments["round"]]}


_ACTIONS: Final[Mapping[RequestKind, Callable[[Connection, Mapping[str, Any], str], dict[str, Any]]]] = {
    RequestKind.LABEL: _label,
    RequestKind.RELEASE: lambda conn, arguments, by: _decide(conn, arguments, by, "release"),
    RequestKind.REJECT: lambda conn, arguments, by: _decide(conn, arguments, by, "reject"),
    RequestKind.RETRY: _retry,
    RequestKind.DROP: _drop,
    RequestKind.DEPLOY: _deploy,
    RequestKind.REFUSE: _refuse,
}
