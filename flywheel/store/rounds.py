"""Rounds and adapters: what was planned with which samples, the outcome, and whose files can be removed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

from sqlalchemy import (
    ColumnElement,
    Connection,
    FromClause,
    Row,
    Select,
    Text,
    and_,
    cast,
    delete,
    exists,
    func,
    insert,
    or_,
    select,
    true,
    update,
)

from flywheel.errors import StoreError, TrainError
from flywheel.records import exclusion
from flywheel.records.exclusion import Exclusion
from flywheel.records.round import AdapterRef, GateTest, RoundResult
from flywheel.records.states import AdapterState, RoundState, Split, TaskState
from flywheel.store import gate_tests
from flywheel.store.deployments import UNFINISHED
from flywheel.store.deployments import active as active_deployment
from flywheel.store.kernel.bulk import chunks, count_rows, first_free, rows_in
from flywheel.store.kernel.schema import adapters, deployments, events, round_samples, rounds, tasks
from flywheel.store.kernel.schema import gate_tests as gate_tests_table
from flywheel.store.kernel.transitions import create, move, move_all, record, utcnow
from flywheel.store.ledger import rewrite_lines
from flywheel.store.samples import LEFT_OUT

REMOVING: Final = "removing files"
REMOVED: Final = "files removed"
"""Events of a round about its files."""
APPROVED: Final = "approved"
"""The event of a round whose candidate a person wants to be deployed."""
HAS_ERASED: Final = "texts of its tasks were erased; the next round is planned without them"
"""The reason of a live round that was ended for that. The next one need not wait."""
UNPROVABLE: Final = "unprovable"
"""The event of an adapter whose probe was removed."""


def old(conn: Connection, keep_days: float, keep_served: int) -> list[tuple[Row[Any], str]]:
    """Rounds that ended more than `keep_days` ago and still have files, the oldest first, each with why these have to
    stay, empty if they need not.

    They have `id`, `name`, `state`, `finished_at`, `dir`, the path of their `adapter`, empty if they have none, and
    `requested`, whether a server was ever asked to load it.
    """
    before = (datetime.now(UTC) - timedelta(days=keep_days)).isoformat(timespec="milliseconds")
    needed = _needed(conn, keep_served)
    removed = and_(_has_adapter, adapters.c.state == AdapterState.REMOVED.value)
    rows = conn.execute(
        _rounds()
        .where(rounds.c.live.is_(None), rounds.c.finished_at <= before)
        .where(~removed, or_(_has_adapter, ~exists().where(_of_round(events, REMOVING))))
    )
    return [(row, needed.get(row.name, "")) for row in rows]


def begin(conn: Connection, names: Sequence[str], keep_days: float, keep_served: int, why: str) -> None:
    """Record that the files of these rounds are being removed, as far as they may be.

    The caller holds `swap.lock`.
    """
    for each, needed in old(conn, keep_days, keep_served):
        if each.name not in names or needed:
            continue
        record(conn, rounds.name, [str(each.id)], each.state, REMOVING, why)
        row = conn.execute(
            select(adapters.c.id, adapters.c.state).where(adapters.c.round_id == each.id)
        ).one_or_none()
        if row is not None:
            move(conn, row.id, AdapterState(row.state), AdapterState.REMOVED, why)


def begun(conn: Connection) -> Sequence[Row[Any]]:
    """Rounds, as in `old`, whose removal was interrupted. An adapter that was restored since stays."""
    begin, end = events.alias(), events.alias()
    ended = exists().where(
        end.c.kind == begin.c.kind, end.c.subject == begin.c.subject, end.c.new == REMOVED, end.c.id > begin.c.id
    )
    unfinished = exists().where(_of_round(begin, REMOVING), ~ended)
    gone = or_(~_has_adapter, adapters.c.state == AdapterState.REMOVED.value)
    return conn.execute(_rounds().where(unfinished, gone)).all()


def end(conn: Connection, round_id: int, state: str, size: int) -> None:
    """Record that all files of a round are removed; `size` is their number of bytes."""
    record(conn, rounds.name, [str(round_id)], state, REMOVED, f"{size} bytes")


_has_adapter: Final = adapters.c.id.is_not(None)


def _of_round(event: FromClause, what: str) -> ColumnElement[bool]:
    return and_(event.c.kind == rounds.name, event.c.subject == cast(rounds.c.id, Text), event.c.new == what)


def _rounds() -> Select[Any]:
    requested = exists().where(deployments.c.adapter == rounds.c.name).label("requested")
    columns = (rounds.c.id, rounds.c.name, rounds.c.state, rounds.c.finished_at, rounds.c.dir)
    return (
        select(*columns, func.coalesce(adapters.c.path, "").label("adapter"), requested)
        .outerjoin(adapters, adapters.c.round_id == rounds.c.id)
        .order_by(rounds.c.id)
    )


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
    needed |= {str(row.ab_test["other"]): f"it answers a share of {row.alias}" for row in active if row.ab_test}
    needed |= {str(row.adapter): f"it serves as {row.alias}" for row in active}
    half = deployments.c.state.in_([state.value for state in UNFINISHED])
    needed |= {str(name): "it is being deployed" for name in conn.execute(select(served).where(half)).scalars()}
    for row in conn.execute(select(rounds).where(rounds.c.finished_at.is_(None))):
        needed.setdefault(str(row.parent), f"{row.name} goes on from it")
    return needed


def live(conn: Connection) -> Row[Any] | None:
    """The unfinished round, if there is one."""
    return conn.execute(select(rounds).where(rounds.c.live == 1)).one_or_none()


def by_name(conn: Connection, name: str) -> Row[Any] | None:
    return conn.execute(select(rounds).where(rounds.c.name == name)).one_or_none()


def newest(conn: Connection, limit: int, target: str | None = None) -> Sequence[Row[Any]]:
    """The last rounds of a target (None: of all), the oldest of them first."""
    query = select(rounds).where(_of_target(target)).order_by(rounds.c.id.desc()).limit(limit)
    return list(reversed(conn.execute(query).all()))


def _of_target(target: str | None) -> ColumnElement[bool]:
    return true() if target is None else rounds.c.target == target


def last_by_target(conn: Connection) -> dict[str, int]:
    """The number of the last round of each target that had one."""
    return dict(list(conn.execute(select(rounds.c.target, func.max(rounds.c.id)).group_by(rounds.c.target))))


def plan(
    conn: Connection,
    rounds_dir: Path,
    samples: Sequence[int],
    held_out: Sequence[int],
    test: GateTest,
    *,
    trigger: str,
    seed: int,
    more: Sequence[int] = (),
    replayed: Sequence[int] = (),
    place: Callable[[Path], None] | None = None,
    **values: Any,
) -> Row[Any]:
    """Plan a round and reserve its `samples`; those that are not free any more are left out, and erased ones
    everywhere. Rejected ones among them, `more` tasks for training, and those that are `replayed` keep their states.

    Its gate `test` asks the tasks `held_out`; `values` are further columns. A round without samples compares an
    adapter, which `place` puts into its directory. Raises TrainError when another round is unfinished or there is no
    sample.
    """
    if (other := live(conn)) is not None:
        raise TrainError("plan a round", f"{other.name} is {other.state}", "Wait until it has finished.")
    if not samples and place is None:
        raise TrainError("plan a round", "no accepted sample is free", "Collect and judge more traces first.")
    number = first_free(conn, rounds.c.id)
    name = f"r{number:04d}"
    values |= {"id": number, "name": name, "live": 1, "seed": next_seed(conn, seed), "dir": str(rounds_dir / name)}
    if place is not None:
        # Before the round is stored. Of a number that is not, nobody reads the files.
        place(rounds_dir / name)
    create(conn, RoundState.PLANNED, trigger, trigger=trigger, **values)
    reserved = move_all(conn, samples, TaskState.ACCEPTED, TaskState.RESERVED, name)
    prompts = rows_in(conn, select(tasks.c.id).where(tasks.c.state == TaskState.REJECTED.value), tasks.c.id, samples)
    more = [*(row.id for row in prompts), *more]
    erased = select(tasks.c.id).where(tasks.c.state == TaskState.ERASED.value)
    gone = {row.id for row in rows_in(conn, erased, tasks.c.id, [*more, *replayed, *held_out])}
    rows = [
        {"round_id": number, "task_id": task, "split": split.value, "replayed": some is replayed}
        for some, split in (
            (reserved, Split.TRAIN), (more, Split.TRAIN), (replayed, Split.TRAIN), (held_out, Split.HELD_OUT)
        )
        for task in some
        if task not in gone
    ]  # fmt: skip
    conn.execute(insert(round_samples), rows)
    gate_tests.plan(conn, number, test)
    planned = by_name(conn, name)
    assert planned is not None
    return planned


def next_seed(conn: Connection, seed: int) -> int:
    """The seed of the round that is planned next: `seed` and its number."""
    return seed + first_free(conn, rounds.c.id)


def payloads(conn: Connection, ids: Sequence[int]) -> list[dict[str, Any]]:
    """The lines of these tasks, in the order of their numbers."""
    query = select(tasks.c.payload).order_by(tasks.c.id)
    return [dict(row.payload) for row in rows_in(conn, query, tasks.c.id, sorted(ids))]


def rejected(conn: Connection, ids: Sequence[int]) -> set[str]:
    """The keys of those of these tasks whose traced answer was rejected."""
    query = select(tasks.c.key).where(tasks.c.state == TaskState.REJECTED.value)
    return {row.key for row in rows_in(conn, query, tasks.c.id, ids)}


def samples_of(conn: Connection, round_id: int, split: Split) -> list[int]:
    return list(
        conn.execute(
            select(round_samples.c.task_id)
            .where(round_samples.c.round_id == round_id, round_samples.c.split == split.value)
            .order_by(round_samples.c.task_id)
        ).scalars()
    )


def go_on_from(conn: Connection, name: str, **values: Any) -> Row[Any]:
    """Set what a round is trained from and compared with: columns of `parent`, configuration and rubric."""
    return conn.execute(update(rounds).where(rounds.c.name == name).values(**values).returning(rounds)).one()


def retry(conn: Connection, round_id: int, old: RoundState, why: str, attempts: int = 1) -> None:
    """Plan a round again whose worker died, with one attempt more, or was stopped, with none."""
    if old is not RoundState.ABANDONED:
        move(conn, round_id, old, RoundState.ABANDONED, why, pid=None)
    move(conn, round_id, RoundState.ABANDONED, RoundState.PLANNED, why, attempt=rounds.c.attempt + attempts)


def has_erased(conn: Connection, round_id: int, names: Collection[str]) -> bool:
    """Whether a round uses an erased task, or one of the tasks with these keys is erased."""
    is_erased = tasks.c.state == TaskState.ERASED.value
    own = select(round_samples.c.task_id).join(tasks, tasks.c.id == round_samples.c.task_id)
    if conn.execute(own.where(round_samples.c.round_id == round_id, is_erased).limit(1)).first() is not None:
        return True
    return any(rows_in(conn, select(tasks.c.id).where(is_erased), tasks.c.key, sorted(names)))


def passed(conn: Connection, target: str | None = None) -> Sequence[Row[Any]]:
    """The rounds of a target (None: of all) whose candidates wait, the oldest first."""
    waiting = select(rounds).where(rounds.c.state == RoundState.PASSED.value, _of_target(target))
    return conn.execute(waiting.order_by(rounds.c.id)).all()


def let_wait(conn: Connection, row: Row[Any], alias: str, reason: str, waits_for: str, max_uses: int) -> None:
    """Let the candidate of a round wait that the gate passed. It fails at once if it was compared with something else
    than what serves."""
    old, why = RoundState(row.state), f"waits for {waits_for}"
    if move(conn, row.id, old, RoundState.PASSED, why, reason=reason, live=None, pid=None):
        decide_passed(conn, row.target, alias, max_uses)


def decide_passed(conn: Connection, target: str, alias: str, max_uses: int) -> None:
    """End the waiting rounds of a target about which what serves now has decided: the one whose adapter it is is
    promoted, and those that were compared with another one fail. For the transaction that changes what serves."""
    active = active_deployment(conn, alias)
    serves = active.adapter if active is not None else None
    for row in passed(conn, target):
        if row.name == serves:
            finish(conn, row.id, RoundState.PASSED, RoundState.PROMOTED, row.reason, max_uses=max_uses)
        elif row.parent != serves:
            why = f"{row.reason}; but {other_serves(row.parent, serves)}"
            finish(conn, row.id, RoundState.PASSED, RoundState.FAILED, why)


def other_serves(parent: str | None, serves: str | None) -> str:
    """Why a candidate that was compared with `parent` cannot be promoted over what serves."""
    compared, now = (name or "the base model" for name in (parent, serves))
    return f"it was compared with {compared}, and {now} serves now"


def approve(conn: Connection, name: str, by: str) -> None:
    """Note that a person wants the waiting candidate of a round deployed. Raises StoreError if it does not wait."""
    record(conn, rounds.name, [str(_waiting(conn, name, "deploy").id)], RoundState.PASSED, APPROVED, f"by {by}")


def refuse(conn: Connection, name: str, by: str, max_uses: int) -> None:
    """Reject the waiting candidate of a round. Raises StoreError if it does not wait."""
    row = _waiting(conn, name, "refuse")
    why = f"{row.reason}; but {by} refused it"
    finish(conn, row.id, RoundState.PASSED, RoundState.REJECTED, why, max_uses=max_uses)


def _waiting(conn: Connection, name: str, verb: str) -> Row[Any]:
    row = by_name(conn, name)
    if row is None or row.state != RoundState.PASSED:
        why = "there is no such round" if row is None else f"it is {row.state}, and does not wait"
        raise StoreError(f"{verb} {name}", why, "`flywheel status` lists the rounds.")
    return row


def is_approved(conn: Connection, round_id: int) -> bool:
    """Whether a person wants the candidate of a round deployed."""
    return conn.execute(select(exists().where(_of_round_id(round_id, APPROVED)))).scalar_one()


def waits_since(conn: Connection, round_id: int) -> str | None:
    """When the candidate of a round passed the gate; None if it has not waited."""
    return conn.execute(select(events.c.at).where(_of_round_id(round_id, RoundState.PASSED))).scalar_one_or_none()


def _of_round_id(round_id: int, what: str) -> ColumnElement[bool]:
    return and_(events.c.kind == rounds.name, events.c.subject == str(round_id), events.c.new == str(what))


def finish(conn: Connection, round_id: int, old: RoundState, new: RoundState, why: str, *, max_uses: int = 1) -> None:
    """End a round, unless it is no longer in the state `old`. A failed round returns its samples.

    A rejected one returns those that fewer than `max_uses` compared rounds have used (a refused round does not
    count), a promoted one those of them that gave no gradient.
    """
    if not move(conn, round_id, old, new, why, reason=why, live=None, pid=None, finished_at=utcnow()):
        return
    used = samples_of(conn, round_id, Split.TRAIN)
    spent: set[int] = set()
    if new in (RoundState.PROMOTED, RoundState.REJECTED):
        spent = _used_in(conn, used, max_uses)
    if new is RoundState.PROMOTED:
        flat = round_samples.c.round_id == round_id, round_samples.c.without_gradient
        spent |= set(used) - set(conn.execute(select(round_samples.c.task_id).where(*flat)).scalars())
    move_all(conn, sorted(spent), TaskState.RESERVED, TaskState.CONSUMED, why[:200])
    move_all(conn, (task for task in used if task not in spent), TaskState.RESERVED, TaskState.ACCEPTED, why[:200])


def _used_in(conn: Connection, ids: Sequence[int], times: int) -> set[int]:
    """Those of these samples that were used in `times` compared rounds or more."""
    query = (
        select(round_samples.c.task_id)
        .join(gate_tests_table, gate_tests_table.c.round_id == round_samples.c.round_id)
        .where(round_samples.c.split == Split.TRAIN.value, gate_tests_table.c.conversations.is_not(None))
        .group_by(round_samples.c.task_id)
        .having(func.count() >= times)
    )
    return {row.task_id for row in rows_in(conn, query, round_samples.c.task_id, ids)}


def without_promotion(conn: Connection, target: str | None = None) -> int:
    """How many rounds of a target (None: of all) were rejected or refused since the last one that was promoted."""
    of = _of_target(target)
    promoted = select(func.max(rounds.c.id)).where(rounds.c.state == RoundState.PROMOTED.value, of).scalar_subquery()
    where = rounds.c.state == RoundState.REJECTED.value, rounds.c.id > func.coalesce(promoted, 0)
    return count_rows(conn, rounds, *where, of)


def store_result(conn: Connection, round_id: int, result: RoundResult) -> None:
    """Store the result of a worker; events of the tasks that it left out say why.

    Compared held-out answers spend the test of the round, whatever its outcome.
    """
    conn.execute(update(rounds).where(rounds.c.id == round_id).values(result=result.model_dump(mode="json")))
    if result.comparison is not None:
        gate_tests.spend(conn, round_id, result.comparison)
    of_keys = select(tasks.c.id, tasks.c.key, tasks.c.state)
    for row in list(rows_in(conn, of_keys, tasks.c.key, list(result.left_out))):
        why = f"of {result.round_id}: {result.left_out[row.key]}"
        record(conn, tasks.name, [str(row.id)], row.state, LEFT_OUT, why)
    _mark(conn, round_id, result.left_out, left_out=True)
    _mark(conn, round_id, result.without_gradient, without_gradient=True)
    _release(conn, round_id, result)
    of_tasks = select(tasks.c.id, tasks.c.key, tasks.c.excluded, tasks.c.payload)
    for row in list(rows_in(conn, of_tasks, tasks.c.key, list(result.inexact))):
        _mark_inexact(conn, row, f"{result.inexact[row.key]} (found by {result.round_id})")


def _mark(conn: Connection, round_id: int, keys: Iterable[str], **values: bool) -> None:
    """Set columns of the samples of a round that have these keys."""
    for some in chunks(list(keys)):
        own = round_samples.c.task_id.in_(select(tasks.c.id).where(tasks.c.key.in_(some)))
        conn.execute(update(round_samples).where(round_samples.c.round_id == round_id, own).values(**values))


def _release(conn: Connection, round_id: int, result: RoundResult) -> None:
    """Take the tasks that a worker did not choose out of the round. They are free, as if it had not had them."""
    free = [row.id for row in rows_in(conn, select(tasks.c.id), tasks.c.key, result.released)]
    move_all(conn, free, TaskState.RESERVED, TaskState.ACCEPTED, f"{result.round_id} chose others of its pool")
    for some in chunks(free):
        own = round_samples.c.round_id == round_id, round_samples.c.task_id.in_(some)
        conn.execute(delete(round_samples).where(*own))


def _mark_inexact(conn: Connection, row: Row[Any], why: str) -> None:
    """Exclude a task from later rounds; its line in the task file stays."""
    line = dict(row.payload)
    known = line["metadata"]["prompt_reason"]
    reason = "; ".join(filter(None, (known, why)))
    rewrite_lines(
        conn, {row.id: line | {"metadata": line["metadata"] | {"prompt_exact": False, "prompt_reason": reason}}}
    )
    excluded = exclusion.column({*exclusion.parsed(row.excluded), Exclusion.INEXACT})
    conn.execute(update(tasks).where(tasks.c.id == row.id).values(excluded=excluded))


def add_adapter(conn: Connection, round_row: Row[Any], result: RoundResult, base_model: str) -> None:
    """Store the adapter of a finished round, unless an earlier attempt stored it."""
    assert result.adapter is not None
    if adapter(conn, result.adapter.name) is not None:
        return
    row = create(
        conn,
        AdapterState.STAGED,
        name=result.adapter.name,
        round_id=round_row.id,
        # Another trainer's adapter does not go back to what it was compared with.
        parent=round_row.parent if result.candidate is None else None,
        base_model=base_model,
        path=result.adapter.path,
        sha256=result.adapter.sha256,
        probe=result.probe and result.probe.model_dump(mode="json"),
    )
    move(conn, row, AdapterState.STAGED, AdapterState.READY, "its files are whole")


def adapter(conn: Connection, name: str) -> Row[Any] | None:
    return conn.execute(select(adapters).where(adapters.c.name == name)).one_or_none()


def make_unprovable(conn: Connection, row: Row[Any], why: str) -> None:
    """Remove the probe of an adapter; a deployment says `why` it cannot be proven."""
    conn.execute(update(adapters).where(adapters.c.id == row.id).values(probe=None))
    record(conn, adapters.name, [str(row.id)], row.state, UNPROVABLE, why)


def why_unprovable(conn: Connection, adapter_id: int) -> str:
    """Why an adapter has no probe any more; empty if its round left none."""
    own = events.c.kind == adapters.name, events.c.subject == str(adapter_id), events.c.new == UNPROVABLE
    return conn.execute(select(events.c.detail).where(*own).order_by(events.c.id.desc())).scalars().first() or ""


def adapter_ref(conn: Connection, name: str | None) -> AdapterRef | None:
    row = adapter(conn, name) if name else None
    return AdapterRef(name=row.name, path=row.path, sha256=row.sha256) if row else None


def count_by_state(conn: Connection) -> dict[str, int]:
    """How many rounds are in each state."""
    found = conn.execute(select(rounds.c.state, func.count()).group_by(rounds.c.state)).all()
    return dict.fromkeys(map(str, RoundState), 0) | dict(map(tuple, found))
