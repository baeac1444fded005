"""Labels: what people say of replies, beside the verdicts of the judge.

Labels are append-only. Of each person, the last label on a task and criterion counts. Labels change no task: they
show how far judge and people agree, a file of them calibrates a rubric, and rounds that train on recorded replies
take what most people accept for good, and what most reject for bad.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, Select, and_, case, exists, func, insert, or_, select

from flywheel.errors import StoreError
from flywheel.judge.annotations import Annotation, LeftOutError, read_annotations, spellings, usable
from flywheel.judge.calibration import Agreement
from flywheel.judge.labels import LabelFile, PersonLabel, read_labels
from flywheel.records.states import Label
from flywheel.records.task import storable
from flywheel.records.verdict import Outcome
from flywheel.store.calibrations import lines_of
from flywheel.store.kernel.bulk import rows_in
from flywheel.store.kernel.database import Store
from flywheel.store.kernel.schema import labels, replies, sources, tasks, verdicts
from flywheel.store.kernel.transitions import utcnow
from flywheel.store.reply_names import names_of_span, run_of
from flywheel.store.verdicts import NOT_OF_THE_JUDGE, OF_JUDGES

LONGEST_COMMENT: Final = 2_000
RANDOM_SHARE: Final = 10
"""One of so many tasks is in the random part of the queue."""
WINDOW: Final = 2_000
"""The queue is filled from the newest tasks, so many."""
QUEUE: Final = 60
"""Tasks of each part of the queue, at most."""
NEAR: Final = 0.2
"""Scores that are not further from the threshold are near it."""
_SPREAD: Final = 2_654_435_761
"""Spreads consecutive numbers evenly (Knuth's multiplicative hash)."""
_later = labels.alias("later_label")


@dataclass(frozen=True, slots=True)
class Opinion:
    """A label that counts. `criterion` is empty for the whole reply; `accepted` is what the judge's newest verdict
    says of the same, None without one."""

    id: int
    task_id: str
    label: Label
    criterion: str
    comment: str
    is_blind: bool
    labelled_by: str
    created_at: str
    accepted: bool | None


@dataclass(frozen=True, slots=True)
class Agreements:
    """People's labels and the judge's verdicts on whole replies, of all labels and of those that were given without
    seeing the verdict; the labels of two people; and the same as `judge` for each criterion."""

    judge: Agreement = field(default_factory=Agreement)
    judge_blind: Agreement = field(default_factory=Agreement)
    people: Agreement = field(default_factory=Agreement)
    criteria: dict[str, Agreement] = field(default_factory=lambda: defaultdict(Agreement))

    def as_json(self) -> dict[str, Any]:
        whole = {name: getattr(self, name).as_json() for name in ("judge", "judge_blind", "people")}
        return {**whole, "criteria": {name: each.as_json() for name, each in sorted(self.criteria.items())}}


def add(
    conn: Connection,
    key: str,
    label: Label,
    by: str,
    *,
    criterion: str = "",
    comment: str = "",
    is_blind: bool = False,
    at: str = "",
) -> int:
    """Store a label on a task, made `at` this time or now; its number. The same label again is not stored twice.

    Raises StoreError.
    """
    attempted = f"label {key}"
    query = select(tasks.c.id, tasks.c.verdict_id, verdicts.c.results)
    query = query.outerjoin(verdicts, verdicts.c.id == tasks.c.verdict_id)
    task = conn.execute(query.where(tasks.c.key == key)).one_or_none()
    if task is None:
        raise StoreError(attempted, "there is no task with this id", "`flywheel tasks` lists them.")
    if len(comment) > LONGEST_COMMENT:
        raise StoreError(attempted, f"the comment has more than {LONGEST_COMMENT:,} characters", "Shorten it.")
    criteria = [str(result["criterion"]) for result in task.results or ()]
    if criterion and criterion not in criteria:
        why = f"its verdict has no criterion {criterion!r}" + (f", but {', '.join(criteria)}" if criteria else "")
        raise StoreError(attempted, why, "Name another criterion, or none for the whole reply.")
    person = {"task_id": task.id, "criterion": criterion, "labelled_by": storable(by)}
    said = {
        "verdict_id": task.verdict_id,
        "label": label.value,
        "comment": storable(comment.strip()),
        "is_blind": is_blind,
    }
    last = conn.execute(
        select(labels)
        .where(*(labels.c[name] == value for name, value in person.items()))
        .order_by(labels.c.id.desc())
        .limit(1)
    ).one_or_none()
    if last is not None and all(getattr(last, name) == value for name, value in said.items()):
        return int(last.id)
    added = insert(labels).values(**person, **said, created_at=at or utcnow()).returning(labels.c.id)
    return int(conn.execute(added).scalar_one())


async def read_label_file(store: Store, path: Path) -> LabelFile:
    """The labels of a file, whose lines can name tasks of the state. Raises ConfigError."""
    return await store.read(lambda conn: read_labels(path, partial(lines_of, conn)))


async def import_file(store: Store, path: Path, by: str, **reading: Any) -> tuple[int, int, Counter[str]]:
    """Store the labels of a file of labelled tasks, or the annotations of another tool, which are read as `reading`
    says (`usable`). `by` labelled where the file does not say who did. Returns what `import_labels` does. Raises
    ConfigError."""
    found: Iterable[tuple[Annotation | str, PersonLabel]]
    if (lines := read_annotations(path)) is not None:
        found, left_out = usable(lines, by=by, **reading)
    else:
        given = await read_label_file(store, path)
        found, left_out = given.by_task(by), Counter({"it has no answer or no verdict": given.left_out})
    replies, new, unstored = await store.write(import_labels, found)
    return replies, new, left_out + unstored


def import_labels(
    conn: Connection, found: Iterable[tuple[Annotation | str, PersonLabel]]
) -> tuple[int, int, Counter[str]]:
    """Store what people say of replies, each named by its task's id or by an annotation of another tool: how many
    replies it is about, how many labels are new, and why others are not stored.

    Of several by a person on the same task and criterion the newest is taken, unless a stored one is newer.
    """
    newest, left_out = dict[tuple[str, str, str], PersonLabel](), Counter[str]()
    for said, person in sorted(found, key=lambda each: each[1].at or utcnow()):
        try:
            key = _task_of(conn, said), person.criterion, person.by
        except LeftOutError as error:
            left_out[str(error)] += 1
            continue
        left_out["a later one by the same person replaces it"] += key in newest
        newest[key] = person
    labelled, new = set[str](), 0
    for (task, _, _), person in newest.items():
        try:
            new += _add_new(conn, task, person)
            labelled.add(task)
        except StoreError as error:
            left_out[f"{error.why}; --name {person.criterion} stores it on the whole reply"] += 1
    return len(labelled), new, +left_out


def _add_new(conn: Connection, key: str, person: PersonLabel) -> bool:
    """Store a label unless its person's last one is the same or newer; whether it was stored. Raises StoreError."""
    last = conn.execute(
        select(labels.c.label, labels.c.created_at)
        .join(tasks)
        .where(
            tasks.c.key == key, labels.c.criterion == person.criterion, labels.c.labelled_by == storable(person.by)
        )
        .order_by(labels.c.id.desc())
        .limit(1)
    ).one_or_none()
    if last is not None and (last.label == person.label.value or (person.at and last.created_at >= person.at)):
        return False
    comment = person.comment[:LONGEST_COMMENT]
    add(
        conn, key, person.label, person.by,
        criterion=person.criterion, comment=comment, is_blind=person.is_blind, at=person.at,
    )  # fmt: skip
    return True


def _task_of(conn: Connection, said: Annotation | str) -> str:
    """The key of the task that an annotation is about. Raises LeftOutError.

    A span within the trace that is not the reply's own is about the reply if the trace has no other one.
    """
    if isinstance(said, str):
        if conn.execute(select(tasks.c.id).where(tasks.c.key == said)).one_or_none() is None:
            raise LeftOutError("it names no task of the state")
        return said
    spans, traces = spellings(said.span), spellings(said.trace)
    if not spans and not traces:
        raise LeftOutError("it names neither a trace nor a span")
    columns = replies.c.span_id, replies.c.trace_id, tasks.c.key
    query = select(*columns).select_from(replies.outerjoin(tasks))
    ways = [replies.c.trace_id.in_(traces)] if traces else [way for span in spans for way in names_of_span(span)]
    if not traces:
        # Spans are indexed within a source.
        query = query.where(replies.c.source_id.in_(select(sources.c.id)))
    rows = [row for way in ways for row in conn.execute(query.where(way))]
    if not rows:
        raise LeftOutError(f"no reply of its {'trace' if traces else 'span'} is in the state")
    own = [row for row in rows if run_of(row.span_id, row.trace_id).span_id in spans]
    keys = {row.key for row in own or rows if row.key is not None}
    if len({row.key for row in own}) > 1:
        raise LeftOutError(
            "its ids are those of several replies: the client gives spans of different runs the same ids"
        )
    if len(keys) > 1 or (spans and not own and len({row.span_id for row in rows}) > 1):
        raise LeftOutError("its trace has several replies, and it does not name the span of one of them")
    if not keys:
        raise LeftOutError("its reply is no task; `flywheel why TRACE` says why")
    return str(keys.pop())


def of_task(conn: Connection, task: int) -> list[dict[str, Any]]:
    """All labels of a task, the newest first; `counts` says whether it is its person's last one."""
    rows = conn.execute(select(labels, _counts().label("counts")).where(labels.c.task_id == task)).mappings()
    return [dict(row) for row in sorted(rows, key=lambda row: -int(row["id"]))]


def listed(conn: Connection, *, by: str | None = None, criterion: str | None = None) -> list[Opinion]:
    """The labels that count, the newest first."""
    query = select(labels, tasks.c.key).join(tasks, tasks.c.id == labels.c.task_id).where(_counts())
    if by is not None:
        query = query.where(labels.c.labelled_by == by)
    if criterion is not None:
        query = query.where(labels.c.criterion == criterion)
    rows = conn.execute(query.order_by(labels.c.id.desc())).all()
    judged = _judged(conn, {row.task_id for row in rows})
    return [
        Opinion(
            row.id, row.key, Label(row.label), row.criterion, row.comment, bool(row.is_blind), row.labelled_by,
            row.created_at, judged.get((row.task_id, row.criterion)),
        )
        for row in rows
    ]  # fmt: skip


def majority() -> ColumnElement[int]:
    """Of a task: above 0 if most people accept the whole reply, below 0 if most reject it."""
    vote = case((labels.c.label == Label.ACCEPT.value, 1), (labels.c.label == Label.REJECT.value, -1), else_=0)
    return (
        select(func.coalesce(func.sum(vote), 0))
        .where(labels.c.task_id == tasks.c.id, labels.c.criterion == "", _counts())
        .correlate(tasks)
        .scalar_subquery()
    )


def decisions(conn: Connection, keys: Sequence[str]) -> dict[str, bool]:
    """Whether most people accept the reply of each of these tasks, by key; without those that are undecided."""
    rows = rows_in(conn, select(tasks.c.key, majority().label("votes")), tasks.c.key, keys)
    return {row.key: row.votes > 0 for row in rows if row.votes}


def _counts() -> ColumnElement[bool]:
    """Labels that no later one of the same person on the same task and criterion replaces."""
    same = [_later.c[name] == labels.c[name] for name in ("task_id", "criterion", "labelled_by")]
    return ~exists(select(_later.c.id).where(*same, _later.c.id > labels.c.id))


def _judged(conn: Connection, ids: Collection[int]) -> dict[tuple[int, str], bool]:
    """Whether the newest decided verdict of a judge accepts each task, under the task and "" for the whole reply, and
    whether it found each criterion met."""
    columns = verdicts.c.task_id, verdicts.c.outcome, verdicts.c.results
    query = select(*columns).where(OF_JUDGES).order_by(verdicts.c.id)
    newest = {row.task_id: row for row in rows_in(conn, query, verdicts.c.task_id, sorted(ids))}
    whole = {(task, ""): row.outcome == Outcome.ACCEPTED.value for task, row in newest.items()}
    return whole | {
        (task, str(each["criterion"])): bool(each["passed"]) for task, row in newest.items() for each in row.results
    }


def agreements(opinions: Iterable[Opinion]) -> Agreements:
    """What people and judge have both decided. Labels `unsure` decide nothing."""
    found = Agreements()
    by_task: defaultdict[str, dict[str, bool]] = defaultdict(dict)
    for each in opinions:
        if each.label is Label.UNSURE:
            continue
        accepts = each.label is Label.ACCEPT
        if not each.criterion:
            by_task[each.task_id][each.labelled_by] = accepts
        if each.accepted is None:
            continue
        of = found.criteria[each.criterion] if each.criterion else found.judge
        of.counts[accepts, each.accepted] += 1
        found.judge_blind.counts[accepts, each.accepted] += each.is_blind and not each.criterion
    for said in by_task.values():
        if len(said) > 1:
            # The two whose names come first: each reply counts once.
            one, other = sorted(said)[:2]
            found.people.counts[said[one], said[other]] += 1
    return found


def label_file(conn: Connection) -> list[dict[str, Any]]:
    """The lines of a file for `rubric calibrate` and `suggest`: one for each labelled task, oldest label first.

    The verdict is that of most people, null if they are unsure or as many accept as reject.
    """
    by_task: dict[str, list[Opinion]] = {}
    for each in reversed(listed(conn, criterion="")):
        by_task.setdefault(each.task_id, []).append(each)
    rows = rows_in(conn, select(tasks.c.key, tasks.c.payload), tasks.c.key, list(by_task))
    lines = {row.key: row.payload for row in rows}
    merged_lines = []
    for key, said in by_task.items():
        votes = Counter(each.label for each in said)
        more = votes[Label.ACCEPT] - votes[Label.REJECT]
        verdict = None if not more else Label.ACCEPT.value if more > 0 else Label.REJECT.value
        reason = "; ".join(each.comment for each in said if each.comment)
        people = [
            {
                "by": each.labelled_by,
                "label": each.label.value,
                "comment": each.comment,
                "at": each.created_at,
                "blind": each.is_blind,
            }
            for each in said
        ]
        merged_lines.append({**lines[key], "verdict": verdict, "reason": reason, "labels": people})
    return merged_lines


def queue(conn: Connection, by: str, threshold: float) -> list[tuple[int, str]]:
    """The tasks that a person should label next, each with why: `disputed`, `threshold` or `random`.

    Disputed are tasks whose judge gave different answers, or where people contradict each other or the verdict. Near
    the threshold are those whose scores are closest to it. The random tenth is a sample without such a choice, for
    figures that hold for all tasks. Each task is there once; those that the person has labelled are left out.
    """
    newest = select(func.max(tasks.c.id)).scalar_subquery()
    recent = verdicts.c.task_id > newest - WINDOW
    mine = select(labels.c.id).where(
        labels.c.task_id == verdicts.c.task_id, labels.c.labelled_by == by, labels.c.criterion == ""
    )
    base = (
        select(verdicts.c.task_id).where(recent, OF_JUDGES, ~exists(mine)).group_by(verdicts.c.task_id).limit(QUEUE)
    )
    distance = func.abs(verdicts.c.score - threshold)
    parts: dict[str, Select[Any]] = {
        "disputed": base.where(_is_disputed()).order_by(verdicts.c.task_id.desc()),
        "threshold": base.where(distance <= NEAR).order_by(func.min(distance), verdicts.c.task_id.desc()),
        "random": base.where(is_random(verdicts.c.task_id)).order_by(verdicts.c.task_id.desc()),
    }
    reasons: dict[int, str] = {}
    for why, query in parts.items():
        for task in conn.execute(query).scalars():
            reasons.setdefault(int(task), why)
    return list(reasons.items())


def threshold(conn: Connection) -> float:
    """About the score that divides accepted from rejected replies, by the newest verdicts.

    A reply that lacks a required criterion has the score 0, whatever else it is.
    """
    newest = select(func.max(verdicts.c.id)).scalar_subquery()
    bounds = conn.execute(
        select(
            func.min(case((verdicts.c.outcome == Outcome.ACCEPTED.value, verdicts.c.score))),
            func.max(case((verdicts.c.outcome == Outcome.REJECTED.value, verdicts.c.score))),
        ).where(verdicts.c.id > newest - WINDOW, ~NOT_OF_THE_JUDGE)
    ).one()
    accepted, rejected = bounds[0], bounds[1]
    if accepted is None:
        return float(rejected or 0.5)
    return float(accepted if rejected is None or rejected >= accepted else (accepted + rejected) / 2)


def is_random(task: ColumnElement[int]) -> ColumnElement[bool]:
    """Whether a task is in the random tenth, which is the same for everybody and at any time."""
    spread = (task * _SPREAD).op("%")(1 << 32)
    return spread.op(">>")(16).op("%")(RANDOM_SHARE) == 0


def _is_disputed() -> ColumnElement[bool]:
    """Verdicts of which the judge's answers differ, or that a label contradicts."""
    opposite = or_(
        and_(labels.c.label == Label.ACCEPT.value, verdicts.c.outcome == Outcome.REJECTED.value),
        and_(labels.c.label == Label.REJECT.value, verdicts.c.outcome == Outcome.ACCEPTED.value),
    )
    contradicted = exists(
        select(labels.c.id)
        .where(labels.c.task_id == verdicts.c.task_id, labels.c.criterion == "", opposite, _counts())
        .correlate(verdicts)
    )
    return or_(verdicts.c.is_disputed, contradicted)
