"""The passes of `flywheel export` over the tasks of a state. The first one finds the tasks of each record, and what
writers and readers must know of all records; the second one writes them."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Final

from flywheel.errors import ExportError
from flywheel.records.states import ABSENT, ACCEPTED, Split, TaskState
from flywheel.store import rounds
from flywheel.store.kernel.database import Store
from flywheel.store.views import task_list
from flywheel.store.views.task_list import ExportedTask
from flywheel.system.files import json_line
from flywheel.training.data.chat_messages import LeftOut
from flywheel.training.data.export_formats import Format, Record, Splits, States, reply_of
from flywheel.training.data.loss_selection import losses_in, metrics_of
from flywheel.training.data.pairs import ALONE, Reply, matched

PAGE: Final = 200
MOST_ROUNDS: Final = 1000
"""The newest rounds in which measured losses are looked for."""
STATES: Final[Mapping[States, Sequence[TaskState]]] = {
    "accepted": ACCEPTED,
    "pending": (TaskState.PENDING, TaskState.JUDGING),
    "rejected": (TaskState.REJECTED,),
    # The others are no training data.
    "all": tuple(state for state in TaskState if state not in (TaskState.HELD, TaskState.DEAD, *ABSENT)),
}
REPLIES: Final = tuple(state for state in TaskState if state not in ABSENT)
"""What a table has by default. What was withdrawn is a reply no more."""
OTHERS: Final[Mapping[States, States]] = {"accepted": "rejected", "rejected": "accepted"}


@dataclass
class Export:
    """Tasks in a format: of a state, which pairs have none of, a split, and a target if one is named. The scores of a
    pair differ by at least `margin`.

    Attributes:
        groups: The tasks of each record to write.
        typed: The traits of all records (`Format.columns`).
        left_out: Number of tasks that are in no record, by reason.
    """

    store: Store
    state_dir: Path
    form: Format
    state: States
    split: Splits
    margin: float = 0.0
    target: str | None = None
    groups: list[tuple[int, ...]] = field(default_factory=list)
    typed: frozenset[str] = frozenset()
    left_out: Counter[str] = field(default_factory=Counter)

    async def survey(self) -> None:
        """The first pass. Raises ExportError if there is nothing to write."""
        if self.form.paired:
            async for group, record in self._records(await self._pairs()):
                self._add(group, record)
        else:
            async for one in self._tasks(self.state, self.left_out):
                with _counted(self.left_out):
                    self._add((one.id,), self.form.record(one))
        if self.form.is_table:
            self.groups.sort()
        if not self.groups:
            raise await self._nothing()

    async def write(self, file: BinaryIO) -> None:
        """The second pass."""
        with self.form.writer(file, self.typed) as write:
            async for _, record in self._records(self.groups):
                write(record)

    async def write_metrics(self, file: BinaryIO) -> None:
        """A line of metrics for each task of a record."""
        losses = losses_in([Path(row.dir) for row in await self.store.read(rounds.newest, MOST_ROUNDS)])
        ids = sorted({*itertools.chain(*self.groups)})
        for start in range(0, len(ids), PAGE):
            for one in await self.store.read(task_list.with_verdicts, ids[start : start + PAGE]):
                file.write(json_line(metrics_of(one.line, losses.get(one.line["task_id"]))))

    def as_json(self) -> dict[str, Any]:
        return {
            "lines": len(self.groups),
            "left_out": dict(self.left_out.most_common()),
            "state": self._states,
            "split": self.split,
        }

    @property
    def _states(self) -> str:
        return "accepted and rejected" if self.form.paired else self.state

    def _add(self, group: tuple[int, ...], record: Record) -> None:
        # The first record with a new trait goes to the front: readers infer types from the beginning of a file.
        new = self.form.columns(record) - self.typed
        self.typed |= new
        self.groups.insert(0 if new else len(self.groups), group)

    async def _pairs(self) -> list[tuple[int, ...]]:
        # Hashes and scores and not texts, so that a large state needs little memory.
        rejected = defaultdict[bytes, list[Reply[int]]](list)
        accepted = defaultdict[bytes, list[Reply[int]]](list)
        sides: tuple[tuple[States, dict[bytes, list[Reply[int]]]], ...] = (
            ("rejected", rejected),
            ("accepted", accepted),
        )
        for state, side in sides:
            # What is not on this side is on the other one.
            async for one in self._tasks(state, Counter()):
                with _counted(self.left_out):
                    prompt, reply = reply_of(one)
                    if side is accepted and prompt not in rejected:
                        raise LeftOut(ALONE)
                    side[prompt].append(reply)
        found: list[tuple[int, ...]] = []
        for prompt, worse in rejected.items():
            pairs, left_out = matched(accepted[prompt], worse, self.margin)
            found += [(chosen.of, other.of) for chosen, other in pairs]
            self.left_out += left_out
        return sorted(found)

    async def _tasks(self, state: States, left_out: Counter[str]) -> AsyncIterator[ExportedTask]:
        """The tasks in a state. Where they are only accepted or only rejected ones, what most people say of a reply
        counts more than its verdict, as in rounds that train on recorded replies."""
        states = REPLIES if self.form.is_table and state == "all" else STATES[state]
        others = () if self.form.is_table or state not in OTHERS else STATES[OTHERS[state]]
        splits = tuple(Split) if self.split == "all" else (Split(self.split),)
        after, which = 0, partial(task_list.next_ids, if_labelled=others, limit=PAGE)
        while ids := await self.store.read(which, states, splits, self.target, after=after):
            for one in await self.store.read(task_list.with_verdicts, ids):
                decided = self._decided(one)
                if not others or decided.state in states:
                    yield decided
                elif one.state in states:
                    left_out[f"most people {'accept' if one.by_people else 'reject'} the reply"] += 1
            after = ids[-1]

    def _decided(self, one: ExportedTask) -> ExportedTask:
        """The task as most people decide about it. A table has the verdict."""
        if self.form.is_table or one.by_people in (None, one.state in ACCEPTED):
            return one
        if one.state not in (*ACCEPTED, TaskState.REJECTED):
            return one
        state = TaskState.ACCEPTED if one.by_people else TaskState.REJECTED
        return replace(one, state=state, score=float(one.by_people))

    async def _records(self, groups: Sequence[tuple[int, ...]]) -> AsyncIterator[tuple[tuple[int, ...], Record]]:
        for start in range(0, len(groups), PAGE):
            some = groups[start : start + PAGE]
            found = await self.store.read(task_list.with_verdicts, list(itertools.chain(*some)))
            tasks = {one.id: self._decided(one) for one in found}
            for group in some:
                yield group, self.form.record(*(tasks[number] for number in group))

    async def _nothing(self) -> ExportError:
        attempted = f"export for {self.form.name}"
        of_split = "" if self.split == "all" else f" in the {self.split} split"
        of_split += f" of {self.target}" if self.target is not None else ""
        if self.left_out:
            reasons = "; ".join(f"{number}: {reason}" for reason, number in self.left_out.most_common())
            why = f"every {self._states} task{of_split} is left out ({reasons})"
            return ExportError(attempted, why, "Choose another format.")
        counts = sorted((await self.store.read(task_list.count_by_state)).items())
        if not counts:
            why = f"the state in {self.state_dir} has no task"
            return ExportError(attempted, why, "Run `flywheel ingest`, or name its file with -c.")
        there = ", ".join(f"{number} {state} ({side})" for (state, side), number in counts)
        hint = f"There are: {there}. Choose with --state and --split."
        return ExportError(attempted, f"no task is {self._states}{of_split}", hint)


@contextlib.contextmanager
def _counted(left_out: Counter[str]) -> Iterator[None]:
    try:
        yield
    except LeftOut as reason:
        left_out[str(reason)] += 1
