"""Outcomes of the gate: for each round its test, its comparison, the decision and where its adapter served."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from pydantic import ValidationError
from sqlalchemy import Connection, RowMapping, Select, func, select

from flywheel.records.round import Comparison, GateDecision, GateTest
from flywheel.records.states import RoundState
from flywheel.store import deployments
from flywheel.store.deployments import ServingPeriod
from flywheel.store.kernel.schema import gate_decisions, gate_tests, rounds

_COMPARISON: Final = func.json_extract(rounds.c.result, "$.comparison")
_ROUND: Final = (
    rounds.c.id, rounds.c.name, rounds.c.state, rounds.c.trigger, rounds.c.parent, rounds.c.reason, rounds.c.dir,
    rounds.c.created_at, rounds.c.finished_at, rounds.c.target,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class GateOutcome:
    """A round as the gate sees it.

    Attributes:
        test: Its test; None for rounds of early versions that were never compared.
        conversations: How many the test used; None if it was not spent, because no rewards were seen.
        comparison: None without one, and where one of an early version cannot be read.
        decision: None before it, without a comparison, and for rounds of early versions.
        target: The target that it trains; empty without `targets`.
    """

    id: int
    round: str
    state: RoundState
    trigger: str
    parent: str | None
    reason: str
    dir: str
    created_at: str
    finished_at: str | None
    test: GateTest | None
    conversations: int | None
    comparison: Comparison | None
    decision: GateDecision | None
    decided_at: str | None
    services: tuple[ServingPeriod, ...] = ()
    target: str = ""

    @property
    def is_spent(self) -> bool:
        """Whether its test counts: rewards of held-out answers were seen."""
        return self.conversations is not None


def listed(conn: Connection, limit: int, before: int | None = None) -> list[GateOutcome]:
    """Rounds, the newest first; only those before the round with number `before`. Comparisons lack the scores of
    single tasks."""
    bare = func.json_set(_COMPARISON, "$.scores", func.json("[]"))
    query = _query(bare).order_by(rounds.c.id.desc()).limit(limit)
    if before is not None:
        query = query.where(rounds.c.id < before)
    return _outcomes(conn, query)


def by_name(conn: Connection, name: str) -> GateOutcome | None:
    """The outcome of a round, with the scores of all tasks; None if there is no such round."""
    found = _outcomes(conn, _query(_COMPARISON).where(rounds.c.name == name))
    return found[0] if found else None


def _query(comparison: Any) -> Select[Any]:
    return (
        select(
            *_ROUND,
            comparison.label("comparison"),
            *(gate_tests.c[name] for name in ("epoch", "number", "alpha", "conversations")),
            gate_decisions.c.decision,
            gate_decisions.c.decided_at,
        )
        .outerjoin(gate_tests, gate_tests.c.round_id == rounds.c.id)
        .outerjoin(gate_decisions, gate_decisions.c.round_id == rounds.c.id)
    )


def _outcomes(conn: Connection, query: Select[Any]) -> list[GateOutcome]:
    rows = conn.execute(query).mappings().all()
    services = deployments.services(conn, [row["name"] for row in rows])
    return [_outcome(row, tuple(services[row["name"]])) for row in rows]


def _outcome(row: RowMapping, services: tuple[ServingPeriod, ...]) -> GateOutcome:
    test = None
    if row["number"] is not None:
        test = GateTest(epoch=row["epoch"], number=row["number"], alpha=row["alpha"])
    decision = row["decision"]
    return GateOutcome(
        id=row["id"],
        round=row["name"],
        state=RoundState(row["state"]),
        **{name: row[name] for name in ("trigger", "parent", "reason", "dir", "created_at", "finished_at")},
        test=test,
        conversations=row["conversations"],
        comparison=_comparison(row["comparison"]),
        decision=GateDecision.model_validate(decision) if decision is not None else None,
        decided_at=row["decided_at"],
        services=services,
        target=row["target"],
    )


def _comparison(text: str | None) -> Comparison | None:
    try:
        return Comparison.model_validate_json(text) if text is not None else None
    except ValidationError:
        return None
