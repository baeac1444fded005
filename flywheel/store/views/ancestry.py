"""Ancestry of adapters: what each was trained on and from, what was trained from it, and which rounds used a task.

Lists of conversations and replies come in parts: a round has thousands of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

from sqlalchemy import ColumnElement, Connection, Row, Select, and_, func, literal, or_, select

from flywheel.records.states import Split
from flywheel.store.gate_tests import conversation
from flywheel.store.kernel.bulk import count_rows, rows_in
from flywheel.store.kernel.schema import adapters, replies, round_samples, rounds, sources, tasks

DEEPEST: Final = 1_000
"""Generations of adapters that are followed; a state can hold no cycle, but a damaged one might."""

_SAMPLES: Final = round_samples.join(tasks, tasks.c.id == round_samples.c.task_id)


class UsedConversation(NamedTuple):
    """A conversation that a round was trained on: one of its tasks, by number and key, with its question."""

    number: int
    conversation: str
    task: str
    question: str


@dataclass(frozen=True, slots=True)
class Use:
    """Tasks of a subject in one round. `left_out` of `tasks` were not trained on. `adapter` is None without one."""

    round: str
    state: str
    split: str
    tasks: int
    left_out: int
    adapter: str | None


Kind = Literal["task", "conversation", "trace", "span"]


@dataclass(frozen=True, slots=True)
class Subject:
    """What an id names, with a condition for its replies (in `replies` joined with `tasks`)."""

    kind: Kind
    id: str
    is_its: ColumnElement[bool]


def listed(conn: Connection, limit: int, before: int | None = None) -> Sequence[Row[Any]]:
    """Adapters, the newest first, with the name and state of their rounds; only those before the one with number
    `before`."""
    query: Select[Any] = (
        select(adapters, rounds.c.name.label("round"), rounds.c.state.label("round_state"), rounds.c.target)
        .join(rounds, rounds.c.id == adapters.c.round_id)
        .order_by(adapters.c.id.desc())
        .limit(limit)
    )
    return conn.execute(query if before is None else query.where(adapters.c.id < before)).all()


def samples(conn: Connection, round_ids: Sequence[int]) -> dict[int, int]:
    """How many samples each of these rounds was trained on."""
    own = round_samples.c.round_id, round_samples.c.split == Split.TRAIN.value, round_samples.c.task_id
    counted = select(own[0], func.count()).where(own[1]).group_by(own[0])
    found = dict.fromkeys(round_ids, 0) | dict(rows_in(conn, counted, own[0], round_ids))
    for number in round_ids:
        # Few are left out: their keys are looked up, and not those of all samples.
        left_out = select(tasks.c.id).where(tasks.c.key.in_(_left_out(number)))
        found[number] -= count_rows(conn, round_samples, own[0] == number, own[1], own[2].in_(left_out))
    return found


def conversations_of(conn: Connection, round_id: int, limit: int, after: int = 0) -> list[UsedConversation]:
    """The samples that a round was trained on with their conversations; only tasks `after` a number."""
    question = func.coalesce(func.json_extract(tasks.c.payload, "$.main_query"), "")
    query = (
        select(tasks.c.id, conversation(), tasks.c.key, question)
        .select_from(_SAMPLES)
        .where(
            round_samples.c.round_id == round_id,
            round_samples.c.task_id > after,
            round_samples.c.split == Split.TRAIN.value,
            tasks.c.key.not_in(_left_out(round_id)),
        )
        .order_by(round_samples.c.task_id)
        .limit(limit)
    )
    return [UsedConversation(*row) for row in conn.execute(query)]


def ancestors(conn: Connection, adapter: str) -> list[str]:
    """The adapters that an adapter goes back to, from its parent on; the last one was trained from the base model."""
    line = (
        select(adapters.c.parent.label("name"), literal(1).label("depth"))
        .where(adapters.c.name == adapter)
        .cte("line", recursive=True)
    )
    further = select(adapters.c.parent, line.c.depth + 1).join(line, adapters.c.name == line.c.name)
    line = line.union_all(further.where(line.c.depth < DEEPEST))
    query = select(line.c.name).where(line.c.name.is_not(None)).order_by(line.c.depth)
    return list(conn.execute(query).scalars())


def descendants(conn: Connection, names: Iterable[str]) -> dict[str, str]:
    """The adapters that were trained from these or from their descendants, in their order, each with its parent."""
    known = set(names)
    found: dict[str, str] = {}
    # A parent is always older than its child.
    for name, parent in conn.execute(select(adapters.c.name, adapters.c.parent).order_by(adapters.c.id)):
        if parent in known:
            known.add(name)
            found[name] = parent
    return found


def subject(conn: Connection, name: str) -> Subject | None:
    """What an id names, if replies have it: a task, a conversation, a trace or a span."""
    ways: tuple[tuple[Kind, ColumnElement[bool]], ...] = (
        ("task", tasks.c.key == name),
        ("conversation", replies.c.id.in_(_replies_of_conversation(name))),
        ("trace", replies.c.trace_id == name),
        ("span", replies.c.span_id == name),
    )
    for kind, is_its in ways:
        if conn.execute(_replies(replies.c.id).where(is_its).limit(1)).first() is not None:
            return Subject(kind, name, is_its)
    return None


def replies_of(conn: Connection, found: Subject, limit: int, after: int = 0) -> Sequence[Row[Any]]:
    """The replies of a subject in their order, each with its task if it has one; only those `after` a number."""
    columns = [replies.c[name] for name in ("id", "span_id", "trace_id", "agent", "state", "skip_reason", "detail")]
    of_task = tasks.c.key, tasks.c.split, tasks.c.state.label("task_state"), tasks.c.conversation_id
    question = func.json_extract(tasks.c.payload, "$.main_query").label("question")
    query = _replies(*columns, *of_task, question, sources.c.path.label("source"))
    query = query.join(sources, sources.c.id == replies.c.source_id)
    return conn.execute(query.where(found.is_its, replies.c.id > after).order_by(replies.c.id).limit(limit)).all()


def uses(conn: Connection, found: Subject) -> list[Use]:
    """The rounds that used the tasks of a subject, the oldest first."""
    own = _replies(replies.c.task_id).where(found.is_its)
    query = (
        select(rounds.c.id, rounds.c.name, rounds.c.state, round_samples.c.split, tasks.c.key)
        .select_from(round_samples)
        .join(rounds, rounds.c.id == round_samples.c.round_id)
        .join(tasks, tasks.c.id == round_samples.c.task_id)
        .where(round_samples.c.task_id.in_(own))
    )
    groups: dict[tuple[int, str, str, str], list[str]] = defaultdict(list)
    for number, name, state, split, key in conn.execute(query):
        groups[number, name, state, split].append(key)
    numbers = sorted({number for number, *_ in groups})
    left_out: dict[int, set[str]] = defaultdict(set)
    each = func.json_each(rounds.c.result, "$.left_out").table_valued("key", joins_implicitly=True)
    for number, key in rows_in(conn, select(rounds.c.id, each.c.key).select_from(rounds, each), rounds.c.id, numbers):
        left_out[number].add(key)
    made = {
        row.round_id: row.name
        for row in rows_in(conn, select(adapters.c.round_id, adapters.c.name), adapters.c.round_id, numbers)
    }
    return [
        Use(name, state, split, len(keys), len(left_out[number].intersection(keys)), made.get(number))
        for (number, name, state, split), keys in sorted(groups.items())
    ]


def _replies(*columns: ColumnElement[Any]) -> Select[Any]:
    return select(*columns).select_from(replies).outerjoin(tasks, tasks.c.id == replies.c.task_id)


def _replies_of_conversation(name: str) -> Select[Any]:
    """The numbers of the replies of a conversation: of its tasks by an index, and those without a task."""
    by_task = select(tasks.c.id).where(tasks.c.conversation_id == name)
    without = and_(replies.c.conversation_id == name, replies.c.task_id.is_(None))
    return select(replies.c.id).where(or_(replies.c.task_id.in_(by_task), without))


def _left_out(round_id: int) -> Select[Any]:
    """The keys of the tasks of a round that were not trained on."""
    result = select(rounds.c.result).where(rounds.c.id == round_id).scalar_subquery()
    return select(func.json_each(result, "$.left_out").table_valued("key").c.key)
