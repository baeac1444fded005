"""Verdicts: a judge is never paid twice for the same task, rubric and judge.

Verdicts of filter chains and of people are stored in the same table; see `CHAIN` and `PERSON`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final
from urllib.parse import urlsplit, urlunsplit

from sqlalchemy import ColumnElement, Connection, Row, and_, case, exists, func, or_, select, true, update
from sqlalchemy.dialects.sqlite import insert

from flywheel.config.judge import JudgePrices
from flywheel.records.states import ACCEPTED, TaskState
from flywheel.records.task import storable
from flywheel.records.verdict import CriterionResult, Judgement, Outcome, Verdict
from flywheel.store import judge_usage
from flywheel.store.kernel.bulk import chunks, rows_in
from flywheel.store.kernel.schema import judge_models, rubrics, tasks, verdicts
from flywheel.store.kernel.transitions import utcnow

CHAIN: Final = "chain:"
"""Verdicts of filter chains have this and the chain's hash in place of the rubric's hash. A chain of AgentJet's that
has no judge accepts as well."""
PERSON: Final = "person"
"""Verdicts of people have this in place of the rubric's hash."""
NOT_OF_THE_JUDGE: Final = or_(verdicts.c.rubric_hash.startswith(CHAIN), verdicts.c.rubric_hash == PERSON)
OF_JUDGES: Final = and_(verdicts.c.outcome.in_([Outcome.ACCEPTED.value, Outcome.REJECTED.value]), ~NOT_OF_THE_JUDGE)
"""Decided verdicts of judges."""
_later: Final = verdicts.alias("later")
SAMPLED: Final = 200
"""The newest verdicts whose usage estimates are based on."""
_COUNTS: Final = ("calls", "prompt_tokens", "completion_tokens")


def store(
    conn: Connection,
    task: int,
    verdict: Verdict,
    rubric_hash: str,
    judge_hash: str,
    prices: JudgePrices | None = None,
) -> None:
    """Store a verdict and count its cost; the task keeps its state.

    One of the same rubric and judge is replaced, a decided one not by an undecided one, and its cost is kept. So is
    an earlier verdict of a filter chain or a person.
    """
    judge_usage.book_verdict(conn, verdict, prices=prices)
    if verdict.outcome is Outcome.UNDECIDED:
        judge_usage.add_error(conn, verdict.error)
    key = {"task_id": task, "rubric_hash": rubric_hash, "judge_hash": judge_hash}
    counts = {name: getattr(verdict, name) for name in _COUNTS}
    values = {
        "outcome": verdict.outcome.value,
        "score": verdict.score,
        "results": [asdict(result) for result in verdict.results],
        "reason": storable(verdict.reason),
        "error": storable(verdict.error),
        "latency_seconds": verdict.latency_seconds,
        "created_at": utcnow(),
        "judgements": [asdict(judgement) for judgement in verdict.judgements],
        "is_disputed": len({judgement.outcome for judgement in verdict.judgements}) > 1,
    }
    is_replaced = or_(verdicts.c.outcome == Outcome.UNDECIDED.value, NOT_OF_THE_JUDGE)
    if verdict.outcome is not Outcome.UNDECIDED:
        is_replaced = true()
    replaced = conn.execute(
        update(verdicts)
        .where(*(verdicts.c[name] == value for name, value in key.items()), is_replaced)
        .values(**values, **{name: verdicts.c[name] + count for name, count in counts.items()})
    )
    if replaced.rowcount == 0:
        conn.execute(insert(verdicts).values(**key, **values, **counts).on_conflict_do_nothing())
    point(conn, [task])


def point(conn: Connection, ids: Sequence[int]) -> None:
    """Set the current verdict of these tasks, whose verdicts or states have changed.

    It is the newest verdict with the outcome that the state says: after a change of rubric and back an older verdict
    decides again. Of a task that is not decided, it is the newest verdict.
    """
    said = case(
        (tasks.c.state == TaskState.REJECTED.value, Outcome.REJECTED.value),
        (tasks.c.state.in_([state.value for state in ACCEPTED]), Outcome.ACCEPTED.value),
        else_=verdicts.c.outcome,
    )
    newest = select(verdicts.c.id).where(verdicts.c.task_id == tasks.c.id).limit(1)
    newest = newest.order_by(verdicts.c.created_at.desc(), verdicts.c.id.desc())
    current = func.coalesce(newest.where(verdicts.c.outcome == said).scalar_subquery(), newest.scalar_subquery())
    for some in chunks(ids):
        is_other = tasks.c.verdict_id.is_distinct_from(current)
        conn.execute(update(tasks).where(tasks.c.id.in_(some), is_other).values(verdict_id=current))


def of_tasks(conn: Connection, ids: Sequence[int], judge_hash: str) -> dict[int, list[tuple[str, Verdict]]]:
    """The verdicts of a judge on these tasks, each with the hash of its rubric, the newest first."""
    of_judge = select(verdicts).where(verdicts.c.judge_hash == judge_hash)
    found: dict[int, list[tuple[str, Verdict]]] = {}
    for row in rows_in(conn, of_judge.order_by(verdicts.c.id.desc()), verdicts.c.task_id, ids):
        found.setdefault(row.task_id, []).append((row.rubric_hash, _verdict(row)))
    return found


def decided(conn: Connection, keys: Sequence[str]) -> list[dict[str, Any]]:
    """The decided verdicts on tasks by key, for `copy`."""
    query = (
        select(verdicts, tasks.c.key)
        .join(tasks, tasks.c.id == verdicts.c.task_id)
        .where(verdicts.c.outcome != Outcome.UNDECIDED.value)
        .order_by(verdicts.c.id)
    )
    return [{**row._mapping} for row in rows_in(conn, query, tasks.c.key, keys)]


def copy(conn: Connection, found: Sequence[dict[str, Any]]) -> None:
    """Take over verdicts of another state on the tasks of the same keys. Those that are there stay."""
    numbers = {key: number for number, key in rows_in(
        conn, select(tasks.c.id, tasks.c.key), tasks.c.key, [row["key"] for row in found]
    )}  # fmt: skip
    for row in found:
        values = {name: value for name, value in row.items() if name not in ("id", "key", "task_id")}
        added = insert(verdicts).values(task_id=numbers[row["key"]], **values)
        conn.execute(added.on_conflict_do_nothing())
    point(conn, list(numbers.values()))


def _verdict(row: Row[Any]) -> Verdict:
    judgements = tuple(
        Judgement(**{**each, "outcome": Outcome(each["outcome"]), "results": _results(each["results"])})
        for each in row.judgements
    )
    return Verdict(Outcome(row.outcome), row.score, _results(row.results), row.reason, judgements=judgements)


def _results(stored: Sequence[Mapping[str, Any]]) -> tuple[CriterionResult, ...]:
    return tuple(CriterionResult(**result) for result in stored)


def record_judge(conn: Connection, judge_hash: str, model: str, base_url: str) -> None:
    """Store which model a judge's hash stands for, and its endpoint without credentials, unless it is there."""
    url = urlsplit(base_url)
    endpoint = urlunsplit((url.scheme, url.netloc.rpartition("@")[2], url.path, "", ""))
    values = {"hash": judge_hash, "model": storable(model), "endpoint": storable(endpoint), "first_used_at": utcnow()}
    conn.execute(insert(judge_models).values(**values).on_conflict_do_nothing())


def record_rubric(conn: Connection, rubric_hash: str, name: str) -> None:
    """Store which rubric a hash stands for, unless it is there."""
    values = {"hash": rubric_hash, "name": storable(name), "first_used_at": utcnow()}
    conn.execute(insert(rubrics).values(**values).on_conflict_do_nothing())


def decided_by_others() -> ColumnElement[bool]:
    """Tasks whose newest verdict is one of a filter chain or a person, who rejected it."""
    is_by_others = NOT_OF_THE_JUDGE, verdicts.c.outcome == Outcome.REJECTED.value
    # A filter behind the judge decides in the same moment as the judge.
    later = exists().where(_later.c.task_id == verdicts.c.task_id, _later.c.created_at > verdicts.c.created_at)
    return exists().where(verdicts.c.task_id == tasks.c.id, *is_by_others, ~later)


@dataclass(frozen=True, slots=True)
class RecentVerdicts:
    """Counts of the newest decided verdicts: all, the accepted ones, and the causes of the rejected ones.

    A verdict counts once for each criterion that was not met; without one, for its score, its filter or the person.
    """

    judged: int
    accepted: int
    rejected_by: Mapping[str, int]


def recent(conn: Connection, newest: int) -> RecentVerdicts:
    decided = verdicts.c.outcome.in_([Outcome.ACCEPTED.value, Outcome.REJECTED.value])
    query = select(verdicts.c.outcome, verdicts.c.results, verdicts.c.rubric_hash)
    rows = conn.execute(query.where(decided).order_by(verdicts.c.id.desc()).limit(newest)).all()
    rejected = [row for row in rows if row.outcome == Outcome.REJECTED.value]
    causes = Counter(cause for row in rejected for cause in _causes(row.results, row.rubric_hash))
    return RecentVerdicts(len(rows), len(rows) - len(rejected), dict(causes.most_common()))


def _causes(results: Sequence[Mapping[str, Any]], rubric_hash: str) -> list[str]:
    failed = [str(result["criterion"]) for result in results if not result["passed"]]
    if failed:
        return failed
    if rubric_hash == PERSON:
        return ["a person"]
    return ["a filter"] if rubric_hash.startswith(CHAIN) else ["the total score"]


def none_accepted(conn: Connection, window: int) -> str:
    """A warning if none of the newest `window` verdicts accepted a reply; otherwise empty."""
    last = recent(conn, window)
    if last.judged < window or last.accepted:
        return ""
    causes = ", ".join(f"{name} {number}" for name, number in last.rejected_by.items())
    return (
        f"none of the last {window} judged replies was accepted (not met: {causes}). Read some with"
        " `flywheel tasks --state rejected` and `flywheel show ID`: the rubric, the judge or the agent may be wrong."
    )


def usage_of_newest(conn: Connection) -> tuple[int, int, int, int]:
    """How many of the newest verdicts asked a judge that reports its usage, and their calls and tokens together."""
    newest = (
        select(*(verdicts.c[name] for name in _COUNTS))
        .where(verdicts.c.calls > 0, verdicts.c.prompt_tokens > 0)
        .order_by(verdicts.c.id.desc())
        .limit(SAMPLED)
        .subquery()
    )
    sums = (func.coalesce(func.sum(newest.c[name]), 0) for name in _COUNTS)
    count, calls, sent, received = conn.execute(select(func.count(), *sums).select_from(newest)).one()
    return count, calls, sent, received


def usage_of_judge(conn: Connection, judge_hash: str) -> dict[str, int]:
    """Usage of the newest verdicts of a judge, as far as its endpoint reported any.

    `estimated_tokens` is what `prompt_tokens` was estimated to be before the calls.
    """
    rows = conn.execute(
        select(verdicts.c.judgements)
        .where(verdicts.c.judge_hash == judge_hash, verdicts.c.calls > 0)
        .order_by(verdicts.c.id.desc())
        .limit(SAMPLED)
    ).scalars()
    reported = [each for judgements in rows for each in judgements if each.get("estimated_tokens")]
    return {name: sum(each[name] for each in reported) for name in (*_COUNTS, "estimated_tokens")}
