"""What the gate decides from, and rounds that have spent a test of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sqlalchemy import Connection

from flywheel.config.file import Config
from flywheel.records.round import Comparison, RoundResult, RoundSpec, Score
from flywheel.records.states import RoundState
from flywheel.store import rounds
from flywheel.store.kernel.database import Store
from flywheel.store.kernel.transitions import move
from tests.factories.config import BOXED_RUBRIC, make_config
from tests.factories.trace import on_both_sides
from tests.factories.verdict import put_judged


def gate_config(tmp_path: Path, **gate: Any) -> Config:
    return make_config(
        tmp_path,
        filter={"rubric": str(BOXED_RUBRIC)},
        training={"steps": 1, "prompts_per_step": 1},
        trigger={"min_samples": 1, "min_held_out": 1},
        gate={"min_tasks": 1, "min_power": 0, **gate},
        daemon={"round_attempts": 1},
    )


async def filled(store: Store, held_out: int, train: int = 20) -> None:
    """So many held-out conversations of one task each, beside those that are there already."""
    await store.write(put_judged, *on_both_sides(train, held_out))


def result_of(spec: RoundSpec, **values: Any) -> RoundResult:
    """What its worker came to: no gain on every task that it was given."""
    scores = [Score(task_id=task.task_id, candidate=0.5, deployed=0.5) for task in spec.held_out]
    comparison = Comparison(
        tasks=len(scores), samples=8, undecided=0, candidate_mean=0.5, deployed_mean=0.5, gain=0, lower=-0.1,
        upper=0.1, confidence=0.99, method="test", spread=0.3, scores=scores,
    )  # fmt: skip
    defaults: dict[str, Any] = {"outcome": "trained", "comparison": comparison}
    return RoundResult(round_id=spec.round_id, **{**defaults, **values})


async def ended(store: Store, spec: RoundSpec, state: RoundState = RoundState.REJECTED, **values: Any) -> None:
    """A round that its worker was through with before it ended."""

    def end(conn: Connection) -> None:
        row = rounds.by_name(conn, spec.round_id)
        move(conn, row.id, RoundState.PLANNED, RoundState.TRAINING)
        rounds.store_result(conn, row.id, result_of(spec, **values))
        move(conn, row.id, RoundState.TRAINING, RoundState.EVALUATING)
        rounds.finish(conn, row.id, RoundState.EVALUATING, state, "test", max_uses=3)

    await store.write(end)


def comparison(*, tasks: int = 50, gain: float = 0.2, lower: float = 0.1, undecided: int = 0) -> Comparison:
    return Comparison(
        tasks=tasks,
        samples=2,
        undecided=undecided,
        candidate_mean=0.5 + gain,
        deployed_mean=0.5,
        gain=gain,
        lower=lower,
        upper=gain + (gain - lower),
        confidence=0.95,
        method="studentised by conversation, sign flips",
        scores=[],
    )
