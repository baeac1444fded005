"""Screening: claimed tasks through a filter chain, with what the store knows of earlier ones.

Runs in the judging thread; `Ask` runs a function in a transaction of the store and waits for it. Raises FilterError
when the embedding model cannot be asked: then nothing is decided, and the tasks wait.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol, TypeVar

from sqlalchemy import Connection

from flywheel.filtering.chain import Chain, LineFilter, Step
from flywheel.filtering.deduplication import Deduplication, Fingerprint, fingerprint
from flywheel.filtering.embedder import Embedder
from flywheel.filtering.influence import weigh
from flywheel.likeness import NEAR
from flywheel.store import duplicates, influence, judging
from flywheel.store.duplicates import Repeats
from flywheel.store.judging import Claimed

log = logging.getLogger(__name__)

T = TypeVar("T")
TAKEN_IN: Final = 256
"""Earlier tasks that are taken in at once when a filter is new."""


class Ask(Protocol):
    """Runs `function(connection, …)` in one transaction."""

    def __call__(self, function: Callable[..., T], *args: Any) -> T: ...


@dataclass(frozen=True, slots=True)
class Screened:
    """One task after the chain: its line without personal data, and what stopped it, if anything did.

    `reason` names the filter and why; `error` is set instead when a filter broke; `held` when it waits for a person.
    """

    task: Claimed
    reason: str = ""
    error: str = ""
    held: bool = False
    repeats: Repeats | None = None

    @property
    def goes_on(self) -> bool:
        return not (self.reason or self.error or self.held)


class Screening:
    """What a chain does to tasks, before the judge and after it."""

    def __init__(self, chain: Chain, ask: Ask) -> None:
        self._chain = chain
        self._ask = ask
        self._deduplication = chain.deduplication
        self._threshold = self._deduplication.similarity_threshold if self._deduplication else NEAR
        self._taken_in = False

    def before(self, tasks: Sequence[Claimed]) -> list[Screened]:
        """The tasks after what comes before the judge, in their order."""
        if not self._taken_in:
            self._take_in()
            self._taken_in = True
        tasks = self._redacted(tasks)
        prints = self._compared(tasks)
        held = self._held(tasks, prints)
        screened = {task.id: Screened(task, held=task.id in held) for task in tasks}
        return self._through(self._chain.before, screened, prints)

    def after(self, task: Claimed) -> Screened:
        """A task that the judge accepted after what comes behind the judge."""
        if not self._chain.after:
            return Screened(task)
        prints = {task.id: fingerprint(task.line, self._threshold)} if self._deduplication else {}
        return self._through(self._chain.after, {task.id: Screened(task)}, prints)[0]

    def _redacted(self, tasks: Sequence[Claimed]) -> Sequence[Claimed]:
        """Tasks that were stored before their chain had a `pii` filter lose their personal data now."""
        redact = self._chain.redact
        if redact is None:
            return tasks
        lines = {task.id: redact(task.line) for task in tasks}
        changed = {task.id: lines[task.id] for task in tasks if lines[task.id] != task.line}
        if changed:
            self._ask(judging.rewrite, changed)
        return [replace(task, line=lines[task.id]) for task in tasks]

    def _compared(self, tasks: Sequence[Claimed]) -> dict[int, Fingerprint]:
        if self._deduplication is None and self._chain.influence is None:
            return {}
        return {task.id: fingerprint(task.line, self._threshold) for task in tasks}

    def _held(self, tasks: Sequence[Claimed], prints: dict[int, Fingerprint]) -> set[int]:
        """Enter the tasks into what is known; the ones that are part of a burst."""
        if not prints:
            return set()
        caps = self._chain.influence
        weights = {task.id: weigh(task.line) for task in tasks} if caps else {}
        burst = caps.burst if caps else None

        def enter(conn: Connection) -> list[int]:
            for task in tasks:
                duplicates.enter(conn, task.id, prints[task.id], self._threshold)
                if weights:
                    influence.enter(conn, task.id, weights[task.id])
            if burst is None:
                return []
            return influence.hold_bursts(conn, [task.id for task in tasks], burst.count, burst.seconds)

        held = self._ask(enter)
        if held:
            log.warning(
                "a burst of near-identical questions: %d tasks are set aside. See `flywheel tasks --state held`",
                len(held),
            )
        return set(held)

    def _through(
        self, steps: Sequence[Step], screened: dict[int, Screened], prints: dict[int, Fingerprint]
    ) -> list[Screened]:
        for step in steps:
            left = [each.task for each in screened.values() if each.goes_on]
            if isinstance(step, LineFilter):
                for task in left:
                    decision = step.decide(task.line)
                    reason = f"filter {decision.filter}: {decision.reason}"
                    if not decision.kept:
                        screened[task.id] = Screened(
                            task, error=decision.error, reason="" if decision.error else reason
                        )
            elif left:
                for task_id, repeats in self._repeating(step, left, prints).items():
                    reason = (
                        f"filter deduplication: repeats {repeats.key} ({repeats.method}, {repeats.similarity:.2f})"
                    )
                    screened[task_id] = Screened(screened[task_id].task, reason=reason, repeats=repeats)
        return list(screened.values())

    def _repeating(
        self, step: Deduplication, tasks: Sequence[Claimed], prints: dict[int, Fingerprint]
    ) -> dict[int, Repeats]:
        vectors = self._vectors(step, {prints[task.id].text: prints[task.id].query for task in tasks})

        def compare(conn: Connection) -> dict[int, Repeats]:
            found: dict[int, Repeats] = {}
            for task in tasks:
                own = prints[task.id]
                # It can have come here by way of an older chain, or from behind the judge.
                duplicates.enter(conn, task.id, own, self._threshold)
                repeats = duplicates.repeated(
                    conn, task.id, own, self._threshold, step.model, vectors.get(own.text, b"")
                )
                if repeats is not None:
                    found[task.id] = repeats
                else:
                    duplicates.keep(conn, task.id, own)
            return found

        return self._ask(compare)

    def _vectors(self, step: Deduplication, texts: dict[str, str]) -> dict[str, bytes]:
        """The embeddings of these texts by their hashes; what is not stored is asked for once and stored for ever."""
        if step.model is None:
            return {}
        known = self._ask(duplicates.vectors, step.model, list(texts))
        missing = [text for text in texts if text not in known]
        if missing:
            embedder = Embedder(step)
            try:
                for start in range(0, len(missing), step.batch_size):
                    some = missing[start : start + step.batch_size]
                    made = dict(zip(some, embedder.embed([texts[text] for text in some]), strict=True))
                    self._ask(duplicates.store_vectors, step.model, made)
                    known |= made
            finally:
                embedder.close()
        return known

    def _take_in(self) -> None:
        """Earlier tasks, from before the chain had its filters, are known from now on."""
        if (step := self._deduplication) is not None:
            while rows := self._ask(duplicates.unknown, self._threshold, TAKEN_IN):
                known = [(row.id, fingerprint(row.payload, self._threshold)) for row in rows]
                self._ask(duplicates.take_in, known, self._threshold)
            while step.model is not None and (
                rows := self._ask(duplicates.kept_without_vector, step.model, TAKEN_IN)
            ):
                self._vectors(step, {row.text: row.payload["main_query"] for row in rows})
        if self._chain.influence is not None:
            while rows := self._ask(influence.unknown, TAKEN_IN):
                weights = [(row.id, weigh(row.payload)) for row in rows]
                self._ask(_enter_all, weights)


def _enter_all(conn: Connection, weights: Sequence[tuple[int, Any]]) -> None:
    for task, weight in weights:
        influence.enter(conn, task, weight)
