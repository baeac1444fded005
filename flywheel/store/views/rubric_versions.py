"""Versions of rubrics: their texts, what was judged by them, their calibrations, and the outcomes they changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, FromClause, Row, and_, exists, func, select

from flywheel.records.verdict import Outcome
from flywheel.store.kernel.bulk import rows_in
from flywheel.store.kernel.schema import calibrations, judge_models, rounds, rubric_texts, tasks, verdicts
from flywheel.store.verdicts import NOT_OF_THE_JUDGE

ROUNDS_SHOWN: Final = 20


@dataclass(frozen=True, slots=True)
class Use:
    """What a judge has judged by a rubric. `model` and `endpoint` are empty if they were not recorded."""

    judge_hash: str
    model: str
    endpoint: str
    last: str
    outcomes: dict[str, int]

    @property
    def verdicts(self) -> int:
        return sum(self.outcomes.values())


@dataclass(frozen=True, slots=True)
class Version:
    """A rubric as it was. `text` is None and `rubric_id` may be empty if an earlier version of Flywheel used it."""

    hash: str
    rubric_id: str
    text: str | None
    first: str
    """When it was first used or calibrated."""
    last: str
    verdicts: int
    judge: str
    """The model that judged last by it, or its hash if the model was not recorded; empty without verdicts."""
    calibrations: tuple[Row[Any], ...]
    """The newest first."""


def versions(conn: Connection) -> list[Version]:
    """All versions that are known, the last used first."""
    texts = {row.hash: row for row in conn.execute(select(rubric_texts))}
    judges = {row.hash: row.model for row in conn.execute(select(judge_models))}
    judged = _first_and_last(conn)
    calibrated: dict[str, list[Row[Any]]] = {}
    for row in conn.execute(select(calibrations).order_by(calibrations.c.id.desc())):
        calibrated.setdefault(row.rubric_hash, []).append(row)
    found = []
    for each in {**texts, **judged, **calibrated}:
        recorded, own = texts.get(each), calibrated.get(each, [])
        number, *ends = judged.get(each, (0,))
        times = [row.created_at for row in (*own, *ends)]
        if recorded is not None:
            times.append(recorded.first_used_at)
        name = recorded.rubric_id if recorded is not None else own[0].rubric_id if own else ""
        text = recorded.text if recorded is not None else None
        judge = judges.get(ends[1].judge_hash, ends[1].judge_hash) if ends else ""
        found.append(Version(each, name, text, min(times), max(times), number, judge, tuple(own)))
    return sorted(found, key=lambda version: (version.last, version.first), reverse=True)


def _first_and_last(conn: Connection) -> dict[str, tuple[int, Row[Any], Row[Any]]]:
    """By rubric, how many verdicts there are, the first and the last one."""
    # All but these verdicts is in an index.
    number = verdicts.c.id
    query = select(verdicts.c.rubric_hash, func.count().label("number"), func.min(number), func.max(number))
    groups = conn.execute(query.where(~NOT_OF_THE_JUDGE).group_by(verdicts.c.rubric_hash)).all()
    ends = [end for group in groups for end in group[2:]]
    columns = number, verdicts.c.created_at, verdicts.c.judge_hash
    rows = {row.id: row for row in rows_in(conn, select(*columns), number, ends)}
    return {group.rubric_hash: (group.number, rows[group[2]], rows[group[3]]) for group in groups}


def uses(conn: Connection, rubric_hash: str) -> list[Use]:
    """What each judge has judged by a rubric, the last used judge first."""
    number = verdicts.c.id
    columns = verdicts.c.judge_hash, verdicts.c.outcome
    query = select(*columns, func.count().label("number"), func.max(number).label("last"))
    groups = conn.execute(query.where(verdicts.c.rubric_hash == rubric_hash).group_by(*columns)).all()
    times = {
        row.id: row.created_at
        for row in rows_in(conn, select(number, verdicts.c.created_at), number, [group.last for group in groups])
    }
    judges = {row.hash: row for row in conn.execute(select(judge_models))}
    found: dict[str, Use] = {}
    for group in sorted(groups, key=lambda group: -int(group.last)):
        judge = judges.get(group.judge_hash)
        model, endpoint = (judge.model, judge.endpoint) if judge is not None else ("", "")
        use = found.setdefault(group.judge_hash, Use(group.judge_hash, model, endpoint, times[group.last], {}))
        use.outcomes[group.outcome] = group.number
    return list(found.values())


def before(version: Version, every: Sequence[Version]) -> Version | None:
    """The version of the same rubric that came before."""
    same = [each for each in every if each.rubric_id == version.rubric_id]
    earlier = [each for each in same if (each.first, each.hash) < (version.first, version.hash)]
    return max(earlier, key=lambda each: (each.first, each.hash), default=None)


def trained(conn: Connection, rubric_hash: str) -> list[str]:
    """The newest rounds that a rubric rewarded."""
    query = select(rounds.c.name).where(rounds.c.rubric_hash == rubric_hash)
    return list(conn.execute(query.order_by(rounds.c.id.desc()).limit(ROUNDS_SHOWN)).scalars())


@dataclass(frozen=True, slots=True)
class Flip:
    """A task that two rubrics decided differently. `criteria` are those that only one of them found met, each with
    both choices and whether it is met now."""

    task_id: str
    question: str
    was: Row[Any]
    now: Row[Any]
    criteria: tuple[tuple[str, str, str, bool], ...]


@dataclass(frozen=True, slots=True)
class Changes:
    """What another version of a rubric changed, of the tasks that were judged by both."""

    pairs: Mapping[tuple[str, str], int]
    """How many tasks have each outcome by the old and the new version."""
    other_judge: int
    """How many of them another judge judged."""
    flips: Sequence[Flip]
    """The newest tasks whose decision changed, `limit` at most."""

    @property
    def both(self) -> int:
        return sum(self.pairs.values())

    @property
    def flipped(self) -> int:
        return sum(self.pairs.get(pair, 0) for pair in FLIPS)

    @property
    def by_criterion(self) -> list[tuple[str, int, int]]:
        """Criteria that differ in `flips`: how often each is met now and was not, and the opposite."""
        found = Counter((name, is_met) for flip in self.flips for name, _, _, is_met in flip.criteria)
        each = [(name, found[name, True], found[name, False]) for name in {name for name, _ in found}]
        return sorted(each, key=lambda row: (-row[1] - row[2], row[0]))


FLIPS: Final = (
    (Outcome.REJECTED.value, Outcome.ACCEPTED.value),
    (Outcome.ACCEPTED.value, Outcome.REJECTED.value),
)


def changes(conn: Connection, old: str, new: str, limit: int) -> Changes:
    """Compare the newest verdicts by two rubrics."""
    was, now = verdicts.alias("was"), verdicts.alias("now")
    both = now.join(was, was.c.task_id == now.c.task_id)
    compared = _is_newest(was, old), _is_newest(now, new)
    columns = was.c.outcome.label("was"), now.c.outcome.label("now")
    other = func.count().filter(was.c.judge_hash != now.c.judge_hash).label("other_judge")
    counts = conn.execute(
        select(*columns, func.count().label("number"), other).select_from(both).where(*compared).group_by(*columns)
    ).all()
    decided = [Outcome.ACCEPTED.value, Outcome.REJECTED.value]
    flipped = conn.execute(
        select(was.c.task_id, was.c.id.label("was"), now.c.id.label("now"))
        .select_from(both)
        .where(*compared, was.c.outcome.in_(decided), now.c.outcome.in_(decided), was.c.outcome != now.c.outcome)
        .order_by(now.c.task_id.desc())
        .limit(limit)
    ).all()
    pairs = {(row.was, row.now): row.number for row in counts}
    return Changes(pairs, sum(row.other_judge for row in counts), _flips(conn, flipped))


def _is_newest(table: FromClause, rubric_hash: str) -> ColumnElement[bool]:
    """The newest verdict of its task by a rubric. An index answers it."""
    later = verdicts.alias()
    same = later.c.rubric_hash == rubric_hash, later.c.task_id == table.c.task_id
    return and_(table.c.rubric_hash == rubric_hash, ~exists(select(later.c.id).where(*same, later.c.id > table.c.id)))


def _flips(conn: Connection, ids: Iterable[Any]) -> list[Flip]:
    ids = list(ids)
    wanted = [number for row in ids for number in (row.was, row.now)]
    columns = [verdicts.c[name] for name in ("id", "outcome", "score", "results", "reason")]
    told = {row.id: row for row in rows_in(conn, select(*columns), verdicts.c.id, wanted)}
    question = func.json_extract(tasks.c.payload, "$.main_query").label("question")
    asked = {
        row.id: row
        for row in rows_in(conn, select(tasks.c.id, tasks.c.key, question), tasks.c.id, [row.task_id for row in ids])
    }
    found = []
    for row in ids:
        task, was, now = asked[row.task_id], told[row.was], told[row.now]
        found.append(Flip(task.key, task.question or "", was, now, _differing(was.results, now.results)))
    return found


def _differing(
    was: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]
) -> tuple[tuple[str, str, str, bool], ...]:
    """The criteria of both whose result is met in one of them only."""
    before_ = {str(each["criterion"]): each for each in was}
    return tuple(
        (name, str(before_[name]["choice"]), str(each["choice"]), bool(each["passed"]))
        for each in now
        if (name := str(each["criterion"])) in before_ and before_[name]["passed"] != each["passed"]
    )
