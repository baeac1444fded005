"""Taking: which tasks a run of filtering looks at, in which order, and how many at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from threading import Event

from flywheel.daemon.pre_filter import Ask
from flywheel.store import claims
from flywheel.store.claims import Claimed


@dataclass(slots=True)
class Taking:
    """The tasks that one run takes, at most `limit`, `most` at once; `claimed` are those that it still has."""

    ask: Ask
    rubric_hash: str
    judge_hash: str
    stop: Event
    most: int
    limit: int | None = None
    claimed: dict[int, Claimed] = field(default_factory=dict)
    taken: int = 0

    def batches(self, *, rejudge: bool, first: int | None = None) -> Iterator[list[Claimed]]:
        """Due tasks, which are claimed, then those that are to be judged again; the `first` batch has so many."""
        size = self.most if first is None else first
        after: int | None = None
        while (room := self._room(size)) > 0 and not self.stop.is_set():
            size = min(2 * size, self.most)
            if after is None:
                found = self.ask(claims.claim, room, self.rubric_hash, self.judge_hash)
                self.claimed.update({task.id: task for task in found})
            else:
                found = self.ask(claims.decided, room, after, self.rubric_hash, self.judge_hash)
            if found:
                after = None if after is None else found[-1].id
                self.taken += len(found)
                yield found
            elif rejudge and after is None:
                after = 0
            else:
                return

    def suspect(self) -> Iterator[list[Claimed]]:
        """One due task that was in work when a process ended, which is claimed, if there is one."""
        if self._room(1) > 0 and not self.stop.is_set():
            found = self.ask(claims.claim_suspect, self.rubric_hash, self.judge_hash)
            self.claimed.update({task.id: task for task in found})
            self.taken += len(found)
            if found:
                yield found

    def _room(self, size: int) -> int:
        return size if self.limit is None else min(size, self.limit - self.taken)
