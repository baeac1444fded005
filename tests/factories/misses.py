"""Tasks whose replies miss criteria of several rubrics, in every way that counts of them must tell apart."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from datetime import timedelta
from typing import Final

from sqlalchemy import Connection, func, select, update

from flywheel.records.states import TaskState
from flywheel.records.verdict import CriterionResult, Outcome, Verdict
from flywheel.store import claims, ledger, verdicts
from flywheel.store.kernel import schema
from flywheel.store.kernel.transitions import move
from tests.factories.trace import START, batch, record, reply
from tests.factories.verdict import settle, undecided

OLD, NEW, OTHER = "rubric-1", "rubric-2/with ?&#+%", "another"
"""Two versions of the rubric `support`, and one of another, whose name has markup."""
NAMES: Final = {OLD: "support", NEW: "support", OTHER: '<b>"höflich" & 親切</b>'}
AGENTS: Final = (
    "Tutor",
    "",
    " ",
    " Eve ",
    "Q\"uote' & <i>",
    "返信エージェント" * 12,
    "a/b?c=d&e#f%20+",
    "unrecorded",
)
ADAPTERS: Final = ("", "agent@r0001", "agent@r0002", "other@r0001")
MODELS: Final = ("", "agent", "gpt-4o & friends")
TRUE_MISS: Final = "a_very_long_criterion_name_" + "x" * 37
SOURCES: Final = ("/traces/one.sqlite", "/traces/zwei & drei.sqlite")


def verdict(*met: bool, score: float | None = None, required: bool = True) -> Verdict:
    """A verdict about `correct`, `polite` and a criterion with a long name; without `required` about `correct` alone:
    that one was required and not met."""
    names = ("correct", "polite", TRUE_MISS) if required else ("correct",)
    results = tuple(
        CriterionResult(name, "yes" if is_met else "no", float(is_met), is_met, f'"passed": {not is_met}')
        for name, is_met in zip(names, met, strict=False)
    )
    share = sum(met) / len(results) if score is None else score
    return Verdict(Outcome.ACCEPTED if share > 0.5 else Outcome.REJECTED, share, results, "because", calls=1)


def judge(conn: Connection, task: int, found: Verdict, rubric: str, judge_hash: str = "a-judge") -> None:
    move(conn, task, TaskState.PENDING, TaskState.JUDGING)
    settle(conn, task, found, rubric, judge_hash, 60.0)


def judge_again(conn: Connection, task: int, found: Verdict, rubric: str, *, is_stored: bool = False) -> None:
    """What `flywheel filter --rejudge` does; `is_stored` where the verdict is one that the state has."""
    state = TaskState(conn.execute(select(schema.tasks.c.state).where(schema.tasks.c.id == task)).scalar_one())
    if not is_stored:
        verdicts.store(conn, task, found, rubric, "a-judge")
    claims.apply_again(conn, task, state, found)


def put_misses(conn: Connection, count: int = 240) -> Sequence[int]:
    """Fill a state; the ids of its tasks."""
    last = conn.execute(select(func.max(schema.tasks.c.id))).scalar_one() or 0
    every = itertools.product(AGENTS, ADAPTERS, MODELS)
    replies = [
        reply(
            number, agent=agent, adapter=adapter, model=model, conversation_id=f"conversation-{number // 3}",
            started_at=START + timedelta(days=number % 41), ended_at=START + timedelta(days=number % 41),
        )
        for number, (agent, adapter, model) in zip(range(count), itertools.cycle(every), strict=False)
    ]  # fmt: skip
    half = len(replies) // 2
    for path, some in zip(SOURCES, (replies[:half], replies[half:]), strict=True):
        record(conn, ledger.source_id(conn, path), batch(*some), train_ratio=0.7, split_seed=42)
    # One source shows the first replies of the other too.
    record(conn, ledger.source_id(conn, SOURCES[1]), batch(*replies[:5], rowid=2), train_ratio=0.7, split_seed=42)
    for rubric, name in NAMES.items():
        verdicts.record_rubric(conn, rubric, name)
    verdicts.record_judge(conn, "a-judge", "the & judge", "http://192.0.2.1")
    ids = list(
        conn.execute(select(schema.tasks.c.id).where(schema.tasks.c.id > last).order_by(schema.tasks.c.id)).scalars()
    )
    for task in ids:
        _decide(conn, task)
    return ids


def way_of(task: int) -> int:
    """Which of twelve ways a task goes: not in step with the adapters and models."""
    return (task + task // 12) % 12


def _decide(conn: Connection, task: int) -> None:
    """What becomes of a task goes by its number."""
    met = (task % 2 == 0, task % 3 == 0, task % 7 < 4)
    way = way_of(task)
    if way == 0:  # it stays pending
        return
    if way == 1:
        move(conn, task, TaskState.PENDING, TaskState.HELD, "a burst")
        if task % 5 == 0:
            claims.reject_held(conn, [task])
        return
    if way == 2:
        judge(conn, task, undecided(), OLD)
        return
    if way == 3:  # the judge accepted, and a filter behind it did not
        verdicts.store(conn, task, verdict(True, True, False), NEW, "a-judge")
        judge(conn, task, Verdict(Outcome.REJECTED, 0.0, reason="too long"), f"{verdicts.CHAIN}c")
        return
    if way == 4:
        judge(conn, task, verdict(False, required=False, score=0.0), OTHER, "another-judge")
        return
    judge(conn, task, verdict(*met), OLD if way < 9 else OTHER)
    if way in (5, 6, 7):
        judge_again(conn, task, verdict(*(not each for each in met)), NEW)
    if way == 6:  # and back: the older verdict decides again
        judge_again(conn, task, verdict(*met), OLD, is_stored=True)
    if way == 7:  # the judge does not decide the second time: nothing changes
        judge_again(conn, task, undecided(), OTHER)
    if way == 10:
        move(conn, task, TaskState.ACCEPTED, TaskState.RESERVED)
    if way == 11 and task % 5 == 0:
        conn.execute(update(schema.tasks).where(schema.tasks.c.id == task).values(excluded="inexact"))
