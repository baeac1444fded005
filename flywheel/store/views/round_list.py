"""What the pages of rounds show: results in short, samples, and the history of a round."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Connection, Row, func, or_, select

from flywheel.records.states import Split
from flywheel.store.kernel.schema import adapters, deployments, events, round_samples, rounds, tasks

_PARTS: Final = (
    "steps", "reward_first", "reward_last", "seconds", "usage", "versions", "device", "without_gradient", "left_out",
    "outcome",
)  # fmt: skip
"""What pages show of a worker's result; the rest, as probe and scores, is large."""


@dataclass(frozen=True, slots=True)
class RoundFacts:
    """A round with the small parts of its worker's result, which are None before there is one."""

    id: int
    name: str
    state: str
    trigger: str
    attempt: int
    parent: str | None
    seed: int
    dir: str
    reason: str
    created_at: str
    finished_at: str | None
    result: Mapping[str, Any]
    adapter: str | None
    adapter_state: str | None
    target: str
    selection: Mapping[str, Any] | None


def facts(conn: Connection, names: Sequence[str]) -> dict[str, RoundFacts]:
    """These rounds by name."""
    query = (
        select(
            *(rounds.c[name] for name in (
                "id", "name", "state", "trigger", "attempt", "parent", "seed", "dir", "reason", "created_at",
                "finished_at", "target", "selection",
            )),
            *(func.json_extract(rounds.c.result, f"$.{name}").label(f"result_{name}") for name in _PARTS),
            adapters.c.name.label("adapter"),
            adapters.c.state.label("adapter_state"),
        )
        .outerjoin(adapters, adapters.c.round_id == rounds.c.id)
        .where(rounds.c.name.in_(names))
    )  # fmt: skip
    found = {}
    for row in conn.execute(query).mappings():
        own = {name: row[name] for name in RoundFacts.__slots__ if name != "result"}
        result = {name: _parsed(row[f"result_{name}"]) for name in _PARTS}
        found[row["name"]] = RoundFacts(**own, result=result)
    return found


def _parsed(value: Any) -> Any:
    """What `json_extract` returns: objects and arrays as JSON text."""
    return json.loads(value) if isinstance(value, str) and value[:1] in ("{", "[") else value


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


@dataclass(frozen=True, slots=True)
class Share:
    """Some samples of a round: their split, the agent that answered, and the version of its model ("": the base)."""

    split: str
    agent: str
    adapter: str
    tasks: int
    conversations: int


def shares(conn: Connection, number: int) -> list[Share]:
    """The samples of a round, by split, agent and version."""
    keys = (round_samples.c.split, tasks.c.agent, tasks.c.adapter)
    counts = (func.count(), func.count(tasks.c.conversation_id.distinct()))
    query = select(*keys, *counts).join(tasks, tasks.c.id == round_samples.c.task_id)
    found = conn.execute(query.where(round_samples.c.round_id == number).group_by(*keys).order_by(*keys))
    return [Share(split, agent or "", adapter or "", many, several) for split, agent, adapter, many, several in found]


def samples(conn: Connection, number: int, split: Split, after: int, limit: int) -> Sequence[Row[Any]]:
    """Samples (`id`, `key`, `state`, `agent`, `question`, `replayed`) with task numbers above `after`, in their
    order."""
    chosen = (
        select(round_samples.c.task_id, round_samples.c.replayed)
        .where(round_samples.c.round_id == number, round_samples.c.split == split.value)
        .where(round_samples.c.task_id > after)
        .order_by(round_samples.c.task_id)
        .limit(limit)
        .subquery()
    )
    question = func.json_extract(tasks.c.payload, "$.main_query").label("question")
    columns: Any = (tasks.c.id, tasks.c.key, tasks.c.state, tasks.c.agent, question, chosen.c.replayed)
    query = select(*columns).join(chosen, chosen.c.task_id == tasks.c.id)
    return conn.execute(query.order_by(tasks.c.id)).all()
