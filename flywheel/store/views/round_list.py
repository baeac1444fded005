"""What the pages of rounds and of the gate show: rounds with results and decisions, samples, and the history of a
round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import JSON, ColumnElement, Connection, Row, Select, func, or_, select, type_coerce

from flywheel.records.round import Comparison, GateDecision, GateTest
from flywheel.records.states import RoundState, Split
from flywheel.store.deployments import ServingPeriod, services
from flywheel.store.kernel.schema import (
    adapters,
    deployments,
    events,
    gate_tests,
    round_samples,
    rounds,
    tasks,
)
from flywheel.store.splits import conversation

_ROUND: Final = (
    "id", "name", "trigger", "attempt", "parent", "seed", "dir", "reason", "created_at", "finished_at", "target",
    "selection",
)  # fmt: skip
_RESULT: Final = func.json_remove(rounds.c.result, "$.probe")
_WITHOUT_SCORES: Final = func.json_replace(_RESULT, "$.comparison.scores", func.json("[]"))


@dataclass(frozen=True, slots=True)
class RoundFacts:
    """A round, as pages show it.

    Attributes:
        result: The result of its worker (`flywheel.records.round.RoundResult`), without the probe; empty before it.
        test: Its test of the gate.
        conversations: How many the test used; None if it was not spent, because no rewards were seen.
        comparison: None without one.
        decision: None before it, and without a comparison.
        services: When its adapter served.
    """

    id: int
    name: str
    trigger: str
    attempt: int
    parent: str | None
    seed: int
    dir: str
    reason: str
    created_at: str
    finished_at: str | None
    target: str
    selection: Mapping[str, Any] | None
    state: RoundState
    result: Mapping[str, Any]
    adapter: str | None
    adapter_state: str | None
    test: GateTest
    conversations: int | None
    comparison: Comparison | None
    decision: GateDecision | None
    decided_at: str | None
    services: Sequence[ServingPeriod]

    @property
    def is_spent(self) -> bool:
        """Whether its test counts: rewards of held-out answers were seen."""
        return self.conversations is not None


def listed(conn: Connection, limit: int, before: int | None = None) -> list[RoundFacts]:
    """Rounds, the newest first; only those before the round with number `before`. Comparisons lack the scores of
    single tasks."""
    query = _query(_WITHOUT_SCORES).order_by(rounds.c.id.desc()).limit(limit)
    return _facts(conn, query if before is None else query.where(rounds.c.id < before))


def facts(conn: Connection, names: Sequence[str]) -> dict[str, RoundFacts]:
    """These rounds by name. Comparisons lack the scores of single tasks."""
    return {each.name: each for each in _facts(conn, _query(_WITHOUT_SCORES).where(rounds.c.name.in_(names)))}


def with_scores(conn: Connection, name: str) -> RoundFacts | None:
    """A round, with the scores of all tasks; None if there is no such round."""
    return next(iter(_facts(conn, _query(_RESULT).where(rounds.c.name == name))), None)


def _query(result: ColumnElement[Any]) -> Select[Any]:
    return (
        select(
            *(rounds.c[name] for name in _ROUND),
            rounds.c.state,
            type_coerce(result, JSON).label("result"),
            adapters.c.name.label("adapter"),
            adapters.c.state.label("adapter_state"),
            *(gate_tests.c[name] for name in ("epoch", "number", "alpha", "conversations", "decision", "decided_at")),
        )
        .join(gate_tests, gate_tests.c.round_id == rounds.c.id)
        .outerjoin(adapters, adapters.c.round_id == rounds.c.id)
    )


def _facts(conn: Connection, query: Select[Any]) -> list[RoundFacts]:
    rows = conn.execute(query).all()
    served = services(conn, [row.name for row in rows])
    return [_facts_of(row, served[row.name]) for row in rows]


def _facts_of(row: Row[Any], served: Sequence[ServingPeriod]) -> RoundFacts:
    values, result = {**row._mapping}, row.result or {}
    compared = result.get("comparison")
    return RoundFacts(
        test=GateTest(**{name: values.pop(name) for name in GateTest.model_fields}),
        services=served,
        **values
        | {
            "state": RoundState(row.state),
            "result": result,
            "comparison": compared and Comparison.model_validate(compared),
            "decision": row.decision and GateDecision.model_validate(row.decision),
        },
    )


def beside(conn: Connection, number: int) -> tuple[str | None, str | None]:
    """The names of the round before and the round after this one."""
    name = rounds.c.name
    older = conn.execute(select(name).where(rounds.c.id < number).order_by(rounds.c.id.desc()).limit(1))
    newer = conn.execute(select(name).where(rounds.c.id > number).order_by(rounds.c.id).limit(1))
    return older.scalar_one_or_none(), newer.scalar_one_or_none()


def newest_names(conn: Connection, limit: int) -> list[str]:
    """The names of the last rounds, the newest first."""
    return list(conn.execute(select(rounds.c.name).order_by(rounds.c.id.desc()).limit(limit)).scalars())


def history(conn: Connection, found: RoundFacts) -> Sequence[Row[Any]]:
    """The changes of state (`at`, `kind`, `old`, `new`, `detail`) of a round, its adapter and its deployments."""
    own = [(rounds.name, [str(found.id)])]
    if found.adapter is not None:
        numbers = conn.execute(select(adapters.c.id).where(adapters.c.name == found.adapter)).scalars()
        own.append((adapters.name, [str(number) for number in numbers]))
        numbers = conn.execute(select(deployments.c.id).where(deployments.c.adapter == found.adapter)).scalars()
        own.append((deployments.name, [str(number) for number in numbers]))
    is_own = or_(*((events.c.kind == kind) & events.c.subject.in_(subjects) for kind, subjects in own))
    columns: Any = (events.c.at, events.c.kind, events.c.old, events.c.new, events.c.detail)
    return conn.execute(select(*columns).where(is_own).order_by(events.c.id)).all()


def shares(conn: Connection, number: int) -> Sequence[Row[Any]]:
    """How many `tasks` and `conversations` a round has, by `split`, the `agent` that answered, and the version of its
    model (`adapter`, empty for the base)."""
    keys = (round_samples.c.split, tasks.c.agent, tasks.c.adapter)
    several = func.count(tasks.c.conversation_id.distinct()).label("conversations")
    query = select(*keys, func.count().label("tasks"), several).join(tasks, tasks.c.id == round_samples.c.task_id)
    return conn.execute(query.where(round_samples.c.round_id == number).group_by(*keys).order_by(*keys)).all()


def samples(conn: Connection, number: int, split: Split, after: int, limit: int) -> Sequence[Row[Any]]:
    """Samples (`id`, `key`, `state`, `agent`, `conversation`, `question`, `replayed`, `left_out`,
    `without_gradient`) with task numbers above `after`, in their order."""
    chosen = (
        select(round_samples)
        .where(round_samples.c.round_id == number, round_samples.c.split == split.value)
        .where(round_samples.c.task_id > after)
        .order_by(round_samples.c.task_id)
        .limit(limit)
        .subquery()
    )
    question = func.json_extract(tasks.c.payload, "$.main_query").label("question")
    of_round = (chosen.c[name] for name in ("replayed", "left_out", "without_gradient"))
    of_task = tasks.c.id, tasks.c.key, tasks.c.state, tasks.c.agent, conversation().label("conversation")
    columns: Any = (*of_task, question, *of_round)
    query = select(*columns).join(chosen, chosen.c.task_id == tasks.c.id)
    return conn.execute(query.order_by(tasks.c.id)).all()
