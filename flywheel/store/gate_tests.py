"""Gate tests: the significance level of each round's test, and the held-out conversations that it used."""

from __future__ import annotations

from sqlalchemy import ColumnElement, Connection, exists, func, insert, select, true, update
from sqlalchemy.dialects.sqlite import insert as insert_or_ignore

from flywheel.records.exclusion import EVERY_TARGET, Scope
from flywheel.records.round import Comparison, GateDecision, GateTest, SpentTest
from flywheel.records.states import RoundState
from flywheel.store.kernel.bulk import rows_in
from flywheel.store.kernel.schema import gate_conversations, gate_tests, rounds, tasks
from flywheel.store.kernel.transitions import utcnow
from flywheel.store.samples import allowed, of_the_gate
from flywheel.store.splits import conversation


def plan(conn: Connection, round_id: int, test: GateTest) -> None:
    """Store the test of a planned round. It is not spent yet."""
    conn.execute(insert(gate_tests).values(round_id=round_id, **test.model_dump()))


def of_round(conn: Connection, round_id: int) -> GateTest | None:
    row = conn.execute(select(gate_tests).where(gate_tests.c.round_id == round_id)).one_or_none()
    return GateTest(epoch=row.epoch, number=row.number, alpha=row.alpha) if row is not None else None


def spend(conn: Connection, round_id: int, comparison: Comparison) -> None:
    """Spend the test of a round: its rewards were seen, on the conversations of its scores. Idempotent."""
    keys = [score.task_id for score in comparison.scores]
    used = {name for (name,) in rows_in(conn, select(conversation()), tasks.c.key, keys)}
    conn.execute(
        update(gate_tests)
        .where(gate_tests.c.round_id == round_id)
        .values(conversations=len(used), spread=comparison.spread, samples=comparison.samples)
    )
    if used:
        conn.execute(
            insert_or_ignore(gate_conversations).on_conflict_do_nothing(),
            [{"conversation": each, "round_id": round_id} for each in sorted(used)],
        )


def record_decision(conn: Connection, round_id: int, decision: GateDecision) -> None:
    """Record the gate's decision about a round. The same one is not recorded twice, another one replaces it."""
    if decision_of(conn, round_id) != decision:
        own = update(gate_tests).where(gate_tests.c.round_id == round_id)
        conn.execute(own.values(decided_at=utcnow(), decision=decision.model_dump(mode="json")))


def decision_of(conn: Connection, round_id: int) -> GateDecision | None:
    """The recorded decision about a round; None without one."""
    query = select(gate_tests.c.decision).where(gate_tests.c.round_id == round_id)
    found = conn.execute(query).scalar_one_or_none()
    return GateDecision.model_validate(found) if found is not None else None


def decisions(conn: Connection) -> dict[str, int]:
    """How many comparisons ended in each decision."""
    decided = (RoundState.PROMOTED.value, RoundState.REJECTED.value)
    compared = select(rounds.c.state, func.count()).join(gate_tests, gate_tests.c.round_id == rounds.c.id)
    rows = conn.execute(compared.where(gate_tests.c.conversations.is_not(None)).group_by(rounds.c.state))
    return dict.fromkeys(decided, 0) | {state: count for state, count in rows if state in decided}


def _of_target(target: str | None) -> ColumnElement[bool]:
    """Tests (in `gate_tests`) of the rounds of a target, and of those before there were targets; None: all."""
    if target is None:
        return true()
    own = select(rounds.c.id).where(rounds.c.target.in_(("", target)))
    return gate_tests.c.round_id.in_(own)


def spent(conn: Connection, limit: int, target: str | None = None) -> list[SpentTest]:
    """Spent tests of a target (None: of all), the newest first."""
    rows = conn.execute(
        select(gate_tests)
        .where(gate_tests.c.conversations.is_not(None), _of_target(target))
        .order_by(gate_tests.c.round_id.desc())
        .limit(limit)
    )
    return [SpentTest.model_validate({key: row[key] for key in SpentTest.model_fields}) for row in rows.mappings()]


def candidates(
    conn: Connection, limit: int, scope: Scope = EVERY_TARGET, epoch: int | None = None
) -> list[tuple[int, str]]:
    """Tasks for the gate (number, conversation), the newest first: of conversations that no test of the target has
    used, or with an `epoch`, of those that its tests have used."""
    used = exists().where(gate_conversations.c.conversation == conversation())
    if epoch is not None or scope.target is not None:
        used = used.where(gate_conversations.c.round_id == gate_tests.c.round_id, _of_target(scope.target))
    of_epoch = used.where(gate_tests.c.epoch == epoch)
    rows = conn.execute(
        select(tasks.c.id, conversation())
        .where(of_the_gate(), allowed(scope), ~used if epoch is None else of_epoch)
        .order_by(tasks.c.id.desc())
        .limit(limit)
    )
    return [(number, name) for number, name in rows]
