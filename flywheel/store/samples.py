"""Samples: the tasks that a round may train on, and those that its gate may ask."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import orjson
from sqlalchemy import (
    ColumnElement,
    Connection,
    LargeBinary,
    Row,
    and_,
    case,
    cast,
    exists,
    func,
    insert,
    literal,
    or_,
    select,
    update,
)

from flywheel.records import exclusion
from flywheel.records.exclusion import (
    EVERY_TARGET,
    INEXACT_PROMPT,
    Exclusion,
    Scope,
    TrainedModels,
    parsed,
)
from flywheel.records.states import ABSENT, ACCEPTED, JUDGED, Label, RoundState, Split, TaskState
from flywheel.records.verdict import Outcome
from flywheel.store.claims import DECIDED
from flywheel.store.kernel.bulk import chunks, count_rows, rows_in
from flywheel.store.kernel.schema import (
    available_samples,
    duplicates,
    fingerprints,
    replies,
    round_samples,
    rounds,
    sources,
    tasks,
    verdicts,
)
from flywheel.store.kernel.schema import labels as label_rows
from flywheel.store.kernel.transitions import utcnow
from flywheel.store.labels import majority
from flywheel.store.verdicts import NOT_OF_THE_JUDGE, decided_by_others

_OF_TOOLS: Final = frozenset({Exclusion.TOOLS, Exclusion.UNCALLED, Exclusion.UNRECORDED, Exclusion.UNDEFINED})
_PAGE_OF_LINES: Final = 100
"""Lines in memory at a time: each may have megabytes."""


def rejected_lines(conn: Connection, scope: Scope = EVERY_TARGET) -> Iterator[dict[str, Any]]:
    """The lines of the training replies of a scope's target that most people reject, or that the judge rejected and
    most people do not accept."""
    disliked = tasks.c.id.in_(select(label_rows.c.task_id).where(label_rows.c.label == Label.REJECT.value))
    query = select(cast(tasks.c.payload, LargeBinary)).where(
        or_(
            and_(tasks.c.state == TaskState.REJECTED.value, majority() <= 0),
            and_(tasks.c.state.in_([state.value for state in JUDGED]), disliked, majority() < 0),
        ),
        tasks.c.split == Split.TRAIN.value,
        stands(),
        *(() if scope.target is None else (tasks.c.target == scope.target,)),
    )
    ordered = query.order_by(tasks.c.id).execution_options(yield_per=_PAGE_OF_LINES)
    yield from (orjson.loads(line) for line in conn.execute(ordered).scalars())


def accepted_lines(conn: Connection, limit: int) -> list[dict[str, Any]]:
    """The lines of the newest accepted tasks of both splits."""
    accepted = [state.value for state in ACCEPTED]
    newest = select(tasks.c.payload).where(tasks.c.state.in_(accepted)).order_by(tasks.c.id.desc())
    return [dict(payload) for payload in conn.execute(newest.limit(limit)).scalars()]


def scores(conn: Connection, keys: Sequence[str]) -> dict[str, float]:
    """The scores of these tasks, as far as their current verdicts have one, by key."""
    current = verdicts.c.id == tasks.c.verdict_id, verdicts.c.score.is_not(None)
    query = select(tasks.c.key, verdicts.c.score).join(verdicts, and_(*current))
    return {row.key: row.score for row in rows_in(conn, query, tasks.c.key, keys)}


def count_with_tools(conn: Connection) -> dict[Exclusion, int]:
    """How many tasks with tools there are, by what of their calls is recorded."""
    counts: Counter[Exclusion] = Counter()
    query = select(tasks.c.excluded, func.count()).where(tasks.c.state.not_in(ABSENT))
    for text, number in conn.execute(query.group_by(tasks.c.excluded)):
        counts.update(dict.fromkeys(_OF_TOOLS.intersection(parsed(text)), number))
    return {each: counts[each] for each in Exclusion if counts[each]}


def recorded_lines(
    conn: Connection, which: Iterable[Exclusion] = (Exclusion.TOOLS,), *, newest: int | None = None
) -> Iterator[tuple[Split, dict[str, Any]]]:
    """The lines of decided tasks with recorded results, each with its split in the ledger; the newest first. `which`
    may name other tasks with tools, too.

    A rejected answer says nothing against the results of its tools. What a filter or a person has set aside is left
    out, except repeated questions, of which nothing is wrong.
    """
    repeats = exists().where(duplicates.c.task_id == tasks.c.id)
    # Numbers first: sorting lines would copy them all.
    ids = (
        conn.execute(
            select(tasks.c.id)
            .where(
                tasks.c.state.in_([state.value for state in JUDGED]),
                or_(*(tasks.c.excluded.contains(each.value) for each in which)),
                or_(tasks.c.state != TaskState.REJECTED.value, stands(), repeats),
            )
            .order_by(tasks.c.id.desc())
            .limit(newest)
        )
        .scalars()
        .all()
    )
    lines = select(tasks.c.split, cast(tasks.c.payload, LargeBinary)).order_by(tasks.c.id.desc())
    for start in range(0, len(ids), _PAGE_OF_LINES):
        some = conn.execute(lines.where(tasks.c.id.in_(ids[start : start + _PAGE_OF_LINES]))).all()
        yield from ((Split(split), orjson.loads(line)) for split, line in some)


_KNOWN_OF: Final = tuple(fingerprints.c[name] for name in ("conversation", "user", "template", "origin"))
MOST_CANDIDATES: Final = 1 << 16
"""Samples among which a round's are chosen, at most."""
LEFT_OUT: Final = "left out"
"""The event of a task of a round that its worker did not use."""


def candidates(conn: Connection, scope: Scope = EVERY_TARGET, limit: int | None = None) -> Sequence[Row[Any]]:
    """Samples that a round may take (`id`, `structure`, `uses`, and from `fingerprints` `conversation`, `user`,
    `template` and `origin`, NULL where unknown), in the order in which rounds take them: those that were in the
    fewest rounds with a result first, then the oldest.

    Of more than `MOST_CANDIDATES`, each class and user has its first ones: many tasks of one leave room for others.
    """
    uses = tried().label("uses")
    columns = tasks.c.id, tasks.c.structure, uses
    which = select(*columns).where(free(scope))
    if limit is None and count_free(conn, scope) > MOST_CANDIDATES:
        place = func.row_number().over(
            partition_by=[tasks.c.structure, fingerprints.c.user], order_by=[uses, tasks.c.id]
        )
        which = which.outerjoin(fingerprints, fingerprints.c.task_id == tasks.c.id).order_by(place, tasks.c.id)
    else:
        which = which.order_by(uses, tasks.c.id)
    some = which.limit(limit or MOST_CANDIDATES).subquery()
    query = select(some, *_KNOWN_OF).outerjoin(fingerprints, fingerprints.c.task_id == some.c.id)
    return conn.execute(query.order_by(some.c.uses, some.c.id)).all()


def known(conn: Connection, ids: Sequence[int]) -> list[Row[Any]]:
    """These tasks with the columns of `candidates`, and `key`, in the order of their numbers."""
    query = select(tasks.c.id, tasks.c.key, tasks.c.structure, tried().label("uses"), *_KNOWN_OF)
    return list(
        rows_in(conn, query.outerjoin(fingerprints, fingerprints.c.task_id == tasks.c.id), tasks.c.id, sorted(ids))
    )


def replayable(
    conn: Connection, scope: Scope, buffer: int, rubric_hash: str, *, with_spread: bool
) -> Sequence[Row[Any]]:
    """Tasks that promoted rounds were trained on and that a round may train on again, in the order of their numbers,
    with the columns of `candidates`: at most `buffer`, those of the last rounds.

    They are consumed, not excluded, and accepted by this rubric, if a judge has decided about them; most people do
    not reject them, and no filter has set them aside since. `with_spread`: without those that gave no gradient in the
    last round that had them.
    """
    of_judge = exists().where(verdicts.c.task_id == tasks.c.id, ~NOT_OF_THE_JUDGE)
    of_rubric = verdicts.c.rubric_hash == rubric_hash, verdicts.c.outcome == Outcome.ACCEPTED.value
    accepted = exists().where(verdicts.c.task_id == tasks.c.id, *of_rubric)
    last = func.max(rounds.c.id).label("last")
    promoted = func.max(case((rounds.c.state == RoundState.PROMOTED.value, rounds.c.id)))
    some = (
        select(tasks.c.id, tasks.c.structure, func.count().label("uses"), last)
        .join(round_samples, round_samples.c.task_id == tasks.c.id)
        .join(rounds, rounds.c.id == round_samples.c.round_id)
        .where(
            tasks.c.state == TaskState.CONSUMED.value,
            tasks.c.split == Split.TRAIN.value,
            rounds.c.state.in_([state.value for state in WITH_RESULT]),
            allowed(scope),
            or_(~of_judge, accepted),
            stands(),
            majority() >= 0,
        )
        .group_by(tasks.c.id)
        .having(promoted.is_not(None))
        .order_by(promoted.desc(), tasks.c.id.desc())
        .limit(buffer)
        .subquery()
    )
    query = select(some, *_KNOWN_OF).outerjoin(fingerprints, fingerprints.c.task_id == some.c.id).order_by(some.c.id)
    if with_spread:
        of_last = round_samples.c.task_id == some.c.id, round_samples.c.round_id == some.c.last
        query = query.where(~exists().where(*of_last, round_samples.c.without_gradient))
    return conn.execute(query).all()


def lines(conn: Connection, ids: Sequence[int]) -> Iterator[tuple[int, dict[str, Any]]]:
    """The lines of these tasks with their numbers, in the order of these. Few are in memory at a time."""
    query = select(tasks.c.id, cast(tasks.c.payload, LargeBinary)).order_by(tasks.c.id)
    for some in chunks(sorted(ids), _PAGE_OF_LINES):
        yield from ((number, orjson.loads(line)) for number, line in conn.execute(query.where(tasks.c.id.in_(some))))


def accepted_by_people(conn: Connection, limit: int, scope: Scope = EVERY_TARGET) -> list[int]:
    """Training tasks that the judge rejected and most people accept, the oldest first. They stay rejected: a round
    with a result has each of them once."""
    labelled = select(label_rows.c.task_id).where(label_rows.c.label == Label.ACCEPT.value)
    of_people = tasks.c.id.in_(labelled), majority() > 0
    rejected = tasks.c.state == TaskState.REJECTED.value, tasks.c.split == Split.TRAIN.value, stands()
    which = select(tasks.c.id).where(*of_people, *rejected, allowed(scope), tried() == 0)
    return list(conn.execute(which.order_by(tasks.c.id).limit(limit)).scalars())


WITH_RESULT: Final = (RoundState.PASSED, RoundState.REJECTED, RoundState.PROMOTED)


def tried(*states: RoundState) -> ColumnElement[int]:
    """How many rounds had a sample that ended with a result, or in one of these states. Rounds take those with the
    fewest first."""
    return (
        select(func.count())
        .select_from(round_samples.join(rounds, rounds.c.id == round_samples.c.round_id))
        .where(
            round_samples.c.task_id == tasks.c.id,
            rounds.c.state.in_([state.value for state in states or WITH_RESULT]),
        )
        .correlate(tasks)
        .scalar_subquery()
    )


def count_new(conn: Connection, scope: Scope = EVERY_TARGET) -> int:
    """How many samples a round could take that no round with a result had."""
    return count_rows(conn, tasks, free(scope), tried() == 0)


def free(scope: Scope = EVERY_TARGET) -> ColumnElement[bool]:
    """Training tasks that a round may take: accepted ones that no round has taken and, if the scope has them as well,
    rejected ones that no promoted round was trained on, with `rejected_uses` rounds at most."""
    decided: ColumnElement[bool] = tasks.c.state == TaskState.ACCEPTED.value
    if scope.rejected_uses:
        promoted = tried(RoundState.PROMOTED) == 0
        uses = promoted, tried() < scope.rejected_uses
        decided = or_(decided, and_(tasks.c.state == TaskState.REJECTED.value, stands(), *uses))
    return and_(decided, tasks.c.split == Split.TRAIN.value, allowed(scope))


def of_the_gate() -> ColumnElement[bool]:
    """Held-out tasks that the judge has accepted or rejected, except those that a filter or a person has set aside
    since."""
    decided = tasks.c.state.in_([state.value for state in DECIDED])
    return and_(decided, tasks.c.split == Split.HELD_OUT.value, stands())


def stands() -> ColumnElement[bool]:
    """Accepted tasks, and those that no filter or person has set aside since the judge decided."""
    return or_(tasks.c.state == TaskState.ACCEPTED.value, ~decided_by_others())


def allowed(scope: Scope = EVERY_TARGET) -> ColumnElement[bool]:
    """Tasks that rounds may take: without exclusions that are not in the scope, of its target."""
    is_accepted = tasks.c.state == TaskState.ACCEPTED.value
    return and_(
        tasks.c.excluded.in_(exclusion.columns_within(scope.exclusions)),
        *(or_(is_accepted, ~tasks.c.excluded.contains(each.value)) for each in sorted(scope.if_accepted)),
        *(() if scope.target is None else (tasks.c.target == scope.target,)),
    )


def count_erased(conn: Connection) -> int:
    return count_rows(conn, tasks, tasks.c.state == TaskState.ERASED.value)


def count_free(conn: Connection, scope: Scope = EVERY_TARGET) -> int:
    """How many samples a round could take."""
    return count_rows(conn, tasks, free(scope))


def marks_of_free(conn: Connection, scope: Scope = EVERY_TARGET) -> tuple[int, ...]:
    """Numbers that change when the free samples change. Cheap: an index covers them."""
    ended = select(func.count()).select_from(rounds).where(rounds.c.finished_at.is_not(None)).scalar_subquery()
    numbers = func.count(), func.coalesce(func.max(tasks.c.id), 0), func.coalesce(func.sum(tasks.c.id), 0), ended
    return tuple(conn.execute(select(*numbers).where(free(scope))).one())


def count_held_out(conn: Connection, scope: Scope = EVERY_TARGET, *, most: int | None = None) -> int:
    """How many tasks the gate could ask; counting stops at `most`."""
    if most is None:
        return count_rows(conn, tasks, of_the_gate(), allowed(scope))
    some = select(tasks.c.id).where(of_the_gate(), allowed(scope)).limit(most)
    return count_rows(conn, some.subquery())


def held_out(conn: Connection, limit: int | None, scope: Scope = EVERY_TARGET) -> list[int]:
    """The numbers of the newest tasks that the gate could ask, the oldest of them first."""
    newest = select(tasks.c.id).where(of_the_gate(), allowed(scope)).order_by(tasks.c.id.desc()).limit(limit)
    return sorted(conn.execute(newest).scalars())


@dataclass(frozen=True, slots=True)
class PromptCounts:
    """`tasks` of which so many have an `exact` prompt; the others by reason, of which a task may have several."""

    tasks: int
    exact: int
    inexact: dict[Exclusion, int]


def count_prompts(conn: Connection) -> PromptCounts:
    """How many tasks have an exact prompt, and why the others have none."""
    total = exact = 0
    found: Counter[Exclusion] = Counter()
    # In the order of an index: sorting a hundred thousand rows takes as long as all else here.
    columns = tasks.c.state, tasks.c.split, tasks.c.excluded
    for state, _, text, number in conn.execute(select(*columns, func.count()).group_by(*columns)):
        if state in ABSENT:
            continue
        reasons = INEXACT_PROMPT.intersection(exclusion.parsed(text))
        found.update(dict.fromkeys(reasons, number))
        total += number
        exact += 0 if reasons else number
    return PromptCounts(total, exact, {each: found[each] for each in Exclusion if found[each]})


_PAGE: Final = 1000


class TaskKind(NamedTuple):
    """What of a task decides whether rounds take it, as in its columns."""

    excluded: str
    split: str
    state: str
    target: str


class RuleChange(NamedTuple):
    """What other `models` settings change of the task with this number."""

    task: int
    before: TaskKind
    after: TaskKind


def apply_model_rules(
    conn: Connection, models_of: Callable[[str], TrainedModels], after: int, *, has_targets: bool = False
) -> int | None:
    """Look at some tasks behind `after` anew; the number of the last one, None if there are no more. The other
    arguments are those of `changes_by_rules`."""
    changes, last = changes_by_rules(conn, models_of, after, has_targets=has_targets)
    for number, _, now in changes:
        conn.execute(update(tasks).where(tasks.c.id == number).values(excluded=now.excluded, target=now.target))
    return last


def changes_by_rules(
    conn: Connection, models_of: Callable[[str], TrainedModels], after: int, *, has_targets: bool = False
) -> tuple[list[RuleChange], int | None]:
    """What `apply_model_rules` would change of some tasks behind `after`, and the number of the last one that was
    looked at; None if there are no more.

    `models_of` says by the path of a source whose replies are trained on, and of which target they are tasks. What
    one of several sources takes is taken.
    """
    some = select(tasks.c.id).where(tasks.c.id > after).order_by(tasks.c.id).limit(_PAGE).subquery()
    rows = conn.execute(
        select(
            tasks.c.id,
            tasks.c.agent,
            tasks.c.model,
            tasks.c.adapter,
            tasks.c.excluded,
            tasks.c.split,
            tasks.c.state,
            tasks.c.target,
            # The column is empty if the response's id names the version. Lines are long: they are read for targets
            # only.
            (func.json_extract(tasks.c.payload, "$.metadata.model") if has_targets else literal("")).label("asked"),
            sources.c.path,
        )
        .join(some, some.c.id == tasks.c.id)
        .outerjoin(replies, replies.c.task_id == tasks.c.id)
        .outerjoin(sources, sources.c.id == replies.c.source_id)
        .order_by(tasks.c.id)
    ).all()
    known: dict[str, TrainedModels] = {}
    trained: dict[int, bool] = {}
    for row in rows:
        path = row.path or ""
        if path not in known:
            known[path] = models_of(path)
        trained[row.id] = trained.get(row.id, False) or known[path].trains(row.model, row.adapter)
    changes = []
    for row in {row.id: row for row in rows}.values():
        models = known[row.path or ""]
        target = models.target_of(row.agent, row.asked or row.model, row.adapter)
        found = set(exclusion.parsed(row.excluded)) - {Exclusion.MODEL, Exclusion.TARGET}
        if not trained[row.id]:
            found.add(Exclusion.MODEL)
        if models.targets and not target:
            found.add(Exclusion.TARGET)
        was = TaskKind(row.excluded, row.split, row.state, row.target)
        if (now := was._replace(excluded=exclusion.column(found), target=target)) != was:
            changes.append(RuleChange(row.id, was, now))
    return changes, rows[-1].id if rows else None


AVAILABLE_SHOWN: Final = 200


def note_available(conn: Connection, usable: int, needed: int, waits_for: str, target: str = "") -> None:
    """Note what a target's next round could take and waits for, if that has changed."""
    last = newest_available(conn, 1, target)
    now = (usable, needed, waits_for)
    if not last or (last[0].usable, last[0].needed, last[0].waits_for) != now:
        # Two changes within a millisecond are one.
        values = {"usable": usable, "needed": needed, "waits_for": waits_for, "target": target}
        conn.execute(insert(available_samples).prefix_with("OR REPLACE").values(at=utcnow(), **values))


def newest_available(conn: Connection, limit: int = AVAILABLE_SHOWN, target: str = "") -> Sequence[Row[Any]]:
    """What was noted of a target, the newest first."""
    own = select(available_samples).where(available_samples.c.target == target)
    return conn.execute(own.order_by(available_samples.c.at.desc()).limit(limit)).all()
