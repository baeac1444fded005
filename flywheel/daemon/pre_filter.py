"""Screening: claimed tasks through a filter chain, with what the store knows of earlier ones.

Runs in the judging thread; `Ask` runs a function in a transaction of the store and waits for it. Raises FilterError
when the embedding model cannot be asked: then nothing is decided, and the tasks wait.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol, TypeVar

from sqlalchemy import Connection

from flywheel.errors import FilterError
from flywheel.filtering.chain import Chain, LineFilter, Step
from flywheel.filtering.fingerprint import Deduplication, fingerprint
from flywheel.filtering.influence import weigh
from flywheel.similarity import NEAR
from flywheel.states import TaskState
from flywheel.store import deduplication, embeddings, influence, ledger
from flywheel.store.claims import Claimed
from flywheel.store.deduplication import Near, Repeats

log = logging.getLogger(__name__)

T = TypeVar("T")
Prints = dict[int, deduplication.Entry]
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
    """What a chain does to tasks, before the judge and after it.

    `stop` ends waits for the embedding model, and screening with the task that is being looked at, by FilterError.
    """

    def __init__(self, chain: Chain, ask: Ask) -> None:
        self.stop = threading.Event()
        self._chain = chain
        self._ask = ask
        self._deduplication = chain.deduplication
        self._threshold = self._deduplication.similarity_threshold if self._deduplication else NEAR
        self._taken_in = False
        self._weighed = chain.influence is None

    def weigh_earlier(self) -> None:
        """Samples from before the chain had `influence` have shares of a round from now on."""
        if not self._weighed:
            while rows := self._ask(influence.unknown, TAKEN_IN):
                self._ask(influence.enter, {row.id: weigh(row.payload) for row in rows})
            self._weighed = True

    def through(self, tasks: Sequence[Claimed]) -> list[Screened]:
        """The tasks after what comes before the judge; those that have been through it before are only redacted."""
        known = [task for task in tasks if _was_through(task)]
        # They may have been through another chain: no judge sees what this one takes out.
        return [*self.redacted(known), *self.before([task for task in tasks if not _was_through(task)])]

    def before(self, tasks: Sequence[Claimed]) -> list[Screened]:
        """The tasks after what comes before the judge, in their order."""
        if not self._taken_in:
            self._take_in()
            self._taken_in = True
        redacted = {each.task.id: each for each in self.redacted(tasks)}
        sound = [each.task for each in redacted.values() if each.goes_on]
        prints = self._prints(sound)
        near, held = self._entered(sound, prints)
        screened = {number: replace(each, held=number in held) for number, each in redacted.items()}
        return self._through(self._chain.before, screened, prints, near)

    def after(self, task: Claimed) -> Screened:
        """A task that the judge accepted after what comes behind the judge."""
        if not self._chain.after:
            return Screened(task)
        prints = self._prints([task])
        near = self._ask(deduplication.enter, list(prints.values()), self._threshold) if prints else {}
        return self._through(self._chain.after, {task.id: Screened(task)}, prints, near)[0]

    def redacted(self, tasks: Sequence[Claimed]) -> list[Screened]:
        """Tasks that were stored before their chain had a `pii` filter lose their personal data now."""
        redact = self._chain.redact
        if redact is None:
            return [Screened(task) for task in tasks]
        found: list[Screened] = []
        changed: dict[int, dict[str, Any]] = {}
        for task in tasks:
            try:
                line = redact(task.line)
            except Exception as error:
                # What is in it cannot be told: no judge sees it, and the others go on.
                found.append(Screened(task, error=f"filter pii: {type(error).__name__}: {error}"))
                continue
            found.append(Screened(replace(task, line=line)))
            if line != task.line:
                changed[task.id] = line
        if changed:
            self._ask(ledger.rewrite_lines, changed)
        return found

    def _prints(self, tasks: Sequence[Claimed]) -> Prints:
        if self._deduplication is None and self._chain.influence is None:
            return {}
        return {
            task.id: deduplication.Entry(task.id, task.key, fingerprint(task.line, self._threshold)) for task in tasks
        }

    def _entered(self, tasks: Sequence[Claimed], prints: Prints) -> tuple[dict[int, list[Near]], set[int]]:
        """Enter the tasks into what is known: what is near each of them, and which are part of a burst."""
        if not prints:
            return {}, set()
        caps = self._chain.influence
        weights = {task.id: weigh(task.line) for task in tasks} if caps else {}
        burst = caps.burst if caps else None

        def enter(conn: Connection) -> tuple[dict[int, list[Near]], list[int]]:
            near = deduplication.enter(conn, list(prints.values()), self._threshold)
            if weights:
                influence.enter(conn, weights)
            if burst is None:
                return near, []
            alike = [task for task, others in near.items() if others]
            return near, influence.hold_bursts(conn, alike, burst.count, burst.seconds)

        near, held = self._ask(enter)
        if held:
            log.warning(
                "a burst of near-identical questions: %d tasks are set aside. See `flywheel tasks --state held`",
                len(held),
            )
        return near, set(held)

    def _through(
        self,
        steps: Sequence[Step],
        screened: dict[int, Screened],
        prints: Prints,
        near: dict[int, list[Near]],
    ) -> list[Screened]:
        for step in steps:
            left = [each.task for each in screened.values() if each.goes_on]
            if isinstance(step, LineFilter):
                for task in left:
                    if self.stop.is_set():
                        raise FilterError("screen tasks", "judging stops", "The tasks wait.", retryable=True)
                    decision = step.decide(task.line)
                    reason = f"filter {decision.filter}: {decision.reason}"
                    if not decision.kept:
                        screened[task.id] = Screened(
                            task, error=decision.error, reason="" if decision.error else reason
                        )
            elif left:
                for task_id, repeats in self._repeating(step, [prints[task.id] for task in left], near).items():
                    reason = (
                        f"filter deduplication: repeats {repeats.key} ({repeats.method}, {repeats.similarity:.2f})"
                    )
                    screened[task_id] = Screened(screened[task_id].task, reason=reason, repeats=repeats)
        return list(screened.values())

    def _repeating(
        self, step: Deduplication, entries: Sequence[deduplication.Entry], near: dict[int, list[Near]]
    ) -> dict[int, Repeats]:
        """Those of the tasks that repeat a kept one; the others are kept from now on."""
        vectors = self._vectors(step, {entry.compared.text: entry.compared.query for entry in entries})

        def compare(conn: Connection) -> dict[int, Repeats]:
            found: dict[int, Repeats] = {}
            kept: list[deduplication.Entry] = []
            for entry in entries:
                now = {each.task for each in kept}
                others = [other for other in near[entry.task] if other.kept or other.task in now]
                repeats = _by_text(others)
                vector = vectors.get(entry.compared.text, b"")
                if step.model and vector and (repeats is None or repeats.method != "exact"):
                    # Words decide only where one of the two has no embedding.
                    made = embeddings.of_texts(conn, step.model, [other.text for other in others])
                    by_words = _by_text([other for other in others if not made.get(other.text)])
                    repeats = embeddings.nearest(conn, entry, self._threshold, step.model, vector) or by_words
                if repeats is not None:
                    found[entry.task] = repeats
                    continue
                kept.append(entry)
                if step.model:
                    # Embeddings are compared with what the store has.
                    deduplication.keep(conn, [entry])
            if not step.model:
                deduplication.keep(conn, kept)
            return found

        return self._ask(compare)

    def _vectors(self, step: Deduplication, texts: dict[str, str]) -> dict[str, bytes]:
        """The embeddings of these texts by their hashes; what is not stored is asked for once and stored for ever.

        When they have become longer or shorter, another model answers by the same name: then those of earlier tasks
        are made anew, for nothing else can be compared with them. Raises FilterError.
        """
        if step.model is None:
            return {}
        for _ in range(2):
            known, forgotten = self._made(step.model, step, texts)
            if not forgotten:
                return known
            log.warning(
                "the embedding model %s gives vectors of another length than before: %d questions are embedded anew",
                step.model,
                forgotten,
            )
            if self._embed_earlier(step.model, step):
                break
        raise FilterError(
            f"embed questions with {step.model}",
            "its vectors are now of one length and now of another: there is more than one model behind it",
            "Let one model answer by this name; the tasks wait.",
        )

    def _made(self, model: str, step: Deduplication, texts: dict[str, str]) -> tuple[dict[str, bytes], int]:
        """The embeddings of these texts, and how many stored ones turned out to be of another length."""
        known = self._ask(embeddings.of_texts, model, list(texts))
        missing = [text for text in texts if text not in known]
        forgotten = 0
        if missing:
            from flywheel.filtering.embedder import Embedder  # its client takes long to import, and few need it

            embedder = Embedder(step, stop=self.stop)
            try:
                for start in range(0, len(missing), step.batch_size):
                    some = missing[start : start + step.batch_size]
                    made = dict(zip(some, embedder.embed([texts[text] for text in some]), strict=True))
                    forgotten += self._ask(embeddings.store, model, made)
                    known |= made
            finally:
                embedder.close()
        return known, forgotten

    def _embed_earlier(self, model: str, step: Deduplication) -> int:
        """Embed the kept tasks that lack it; how many stored ones turned out to be of another length."""
        while rows := self._ask(embeddings.lacking, model, TAKEN_IN):
            _, forgotten = self._made(model, step, {row.text: row.payload["main_query"] for row in rows})
            if forgotten:
                return forgotten
        return 0

    def _take_in(self) -> None:
        """Questions from before the chain had `deduplication`, or its model, are known from now on."""
        if (step := self._deduplication) is not None:
            while rows := self._ask(deduplication.unknown, self._threshold, TAKEN_IN):
                known = [
                    deduplication.Entry(row.id, row.key, fingerprint(row.payload, self._threshold)) for row in rows
                ]
                self._ask(deduplication.take_in, known, self._threshold)
            while step.model is not None and (rows := self._ask(embeddings.lacking, step.model, TAKEN_IN)):
                self._vectors(step, {row.text: row.payload["main_query"] for row in rows})


def without_embeddings(chain: Chain) -> Chain:
    """The chain without the filter that asks an embedding model, if it has such a one."""

    def asks_nobody(step: Step) -> bool:
        return not isinstance(step, Deduplication) or step.model is None

    return replace(
        chain, before=tuple(filter(asks_nobody, chain.before)), after=tuple(filter(asks_nobody, chain.after))
    )


def _was_through(task: Claimed) -> bool:
    return task.was is TaskState.ACCEPTED or (task.was is TaskState.JUDGING and task.stored is not None)


def _by_text(others: Sequence[Near]) -> Repeats | None:
    """The nearest, which is the first."""
    for other in others:
        return Repeats(other.task, other.key, other.similarity, "exact" if other.is_exact else "words")
    return None
