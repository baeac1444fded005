"""What erased tasks were used for: the adapters that were trained on them, what goes back to those, and the version
that did not see them. Erased tasks keep their rows, and rounds theirs of `round_samples`: nothing else is read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, NamedTuple

from sqlalchemy import ColumnElement, Connection, func, select

from flywheel.records.states import AdapterState, RoundState, Split, TaskState
from flywheel.store import deployments
from flywheel.store.kernel.bulk import rows_in
from flywheel.store.kernel.schema import adapters, round_samples, rounds, tasks
from flywheel.store.kernel.schema import deployments as deployment_rows
from flywheel.store.views import lineage
from flywheel.system.terminal import quantity


class HeldOutUse(NamedTuple):
    """So many erased tasks were asked in the comparison of a round, and trained nothing there."""

    round: str
    state: str
    tasks: int


@dataclass(frozen=True, slots=True)
class AffectedAdapter:
    """An adapter that was trained on erased samples, or goes back to one that was.

    Attributes:
        samples: What its own round was trained on; `erased` of them.
        inherited_samples: What its ancestors were trained on, `inherited_erased` of them.
        serves_as: The aliases that it answers now, also a share of.
    """

    adapter: str
    state: str
    round_state: str
    samples: int
    erased: int
    inherited_samples: int
    inherited_erased: int
    serves_as: tuple[str, ...]

    @property
    def share(self) -> float:
        """0…1, of its own round."""
        return self.erased / self.samples if self.samples else 0.0

    @property
    def inherited_share(self) -> float:
        """0…1, of all rounds of its ancestors."""
        return self.inherited_erased / self.inherited_samples if self.inherited_samples else 0.0

    @property
    def sentence(self) -> str:
        parts = []
        if self.erased:
            own = f"{self.erased:,} of {quantity(self.samples, 'sample')}"
            parts.append(f"it was trained on texts that were erased since ({own}, {self.share:.1%})")
        if self.inherited_erased:
            before = f"{self.inherited_erased:,} of {quantity(self.inherited_samples, 'sample')}"
            parts.append(f"it goes on from adapters that were ({before}, {self.inherited_share:.1%})")
        if self.round_state == RoundState.PASSED:
            parts.append("it waits to be deployed: refuse it, or deploy it knowing that")
        if self.serves_as:
            parts.append(f"it serves as {', '.join(self.serves_as)}")
        return f"{self.adapter}: {'; '.join(parts)}"

    def as_json(self) -> dict[str, Any]:
        found = asdict(self) | {"share": self.share, "inherited_share": self.inherited_share}
        return found | {"serves_as": list(self.serves_as)}


class CleanVersion(NamedTuple):
    """The newest version that `alias` can go back to and that saw no erased sample, None for the base model, in the
    place of `serves`, which did."""

    alias: str
    serves: str
    clean: str | None

    @property
    def sentence(self) -> str:
        target = self.clean or "base"
        return (
            f"The last version of {self.alias} without erased samples is {self.clean or 'the base model'}:"
            f" `flywheel rollback --to {target}` goes back to it, and a round from there is trained without them."
        )


USABLE: Final = (AdapterState.READY.value, AdapterState.RETIRED.value)


def affected(conn: Connection, ids: Collection[int] | None = None) -> list[AffectedAdapter]:
    """The adapters that the tasks with these numbers (None: all erased ones) went into, the oldest first."""
    erased = _by_round(conn, lineage.TRAINED_ON, ids)
    columns = adapters.c.name, adapters.c.parent, adapters.c.round_id, adapters.c.state
    query = select(*columns, rounds.c.state.label("round_state")).join(rounds, rounds.c.id == adapters.c.round_id)
    every = {row.name: row for row in conn.execute(query.order_by(adapters.c.id))} if erased else {}
    own = [name for name, row in every.items() if erased[row.round_id]]
    names = [name for name in every if name in {*own, *lineage.descendants(conn, own)}]
    lines = {name: [each for each in lineage.ancestors(conn, name) if each in every] for name in names}
    needed = {every[each].round_id for name, line in lines.items() for each in (name, *line)}
    samples = lineage.samples(conn, sorted(needed))
    serving = _serving(conn)
    return [
        AffectedAdapter(
            adapter=name,
            state=every[name].state,
            round_state=every[name].round_state,
            samples=samples[every[name].round_id],
            erased=erased[every[name].round_id],
            inherited_samples=sum(samples[every[each].round_id] for each in lines[name]),
            inherited_erased=sum(erased[every[each].round_id] for each in lines[name]),
            serves_as=tuple(alias for alias, versions in serving.items() if name in versions),
        )
        for name in names
    ]


def held_out_uses(conn: Connection, ids: Collection[int] | None = None) -> list[HeldOutUse]:
    """The rounds in which these tasks (None: all erased ones) were held out, the oldest first."""
    counts = _by_round(conn, round_samples.c.split == Split.HELD_OUT.value, ids)
    query = select(rounds.c.id, rounds.c.name, rounds.c.state).order_by(rounds.c.id)
    return [
        HeldOutUse(row.name, row.state, counts[row.id]) for row in rows_in(conn, query, rounds.c.id, sorted(counts))
    ]


def last_clean(conn: Connection, found: Collection[AffectedAdapter]) -> list[CleanVersion]:
    """For each alias that an affected adapter answers, the newest version that is not affected: an ancestor of that
    adapter, or one that has served as the alias, whose files are there."""
    names = {each.adapter for each in found}
    return [
        CleanVersion(row.alias, row.adapter, _newest_clean(conn, row.alias, row.adapter, names))
        for row in deployments.all_active(conn)
        if row.adapter in names
    ]


def warnings(conn: Connection) -> list[str]:
    """What a person should know: the affected adapters that serve or wait, and where to go back to."""
    found = affected(conn)
    concerned = [each.sentence for each in found if each.serves_as or each.round_state == RoundState.PASSED]
    return [*concerned, *(each.sentence for each in last_clean(conn, found))]


def _newest_clean(conn: Connection, alias: str, serves: str, names: Collection[str]) -> str | None:
    served = select(deployment_rows.c.adapter).where(
        deployment_rows.c.alias == alias, deployment_rows.c.activated_at.is_not(None)
    )
    possible = {*conn.execute(served).scalars(), *lineage.ancestors(conn, serves)} - {None, *names}
    query = select(adapters.c.name, adapters.c.id).where(adapters.c.state.in_(USABLE))
    return max(rows_in(conn, query, adapters.c.name, sorted(possible)), key=lambda row: row.id, default=(None,))[0]


def _serving(conn: Connection) -> Mapping[str, set[str | None]]:
    """The adapters that answer each alias."""
    return {row.alias: {row.adapter, (row.ab_test or {}).get("other")} for row in deployments.all_active(conn)}


def _by_round(conn: Connection, which: ColumnElement[bool], ids: Collection[int] | None) -> Counter[int]:
    """In how many of such rows of `round_samples` each round, by number, has these tasks."""
    number = round_samples.c.round_id
    query = select(number, func.count()).where(which).group_by(number)
    if ids is None:
        query = query.join(tasks, tasks.c.id == round_samples.c.task_id)
        return Counter(dict(conn.execute(query.where(tasks.c.state == TaskState.ERASED.value)).all()))
    found = Counter[int]()
    for of_round, count in rows_in(conn, query, round_samples.c.task_id, sorted(ids)):
        found[of_round] += count
    return found
