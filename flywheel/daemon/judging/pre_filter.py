"""The pre-filter: runs claimed tasks through a filter chain, with what the store knows of earlier tasks. What passes
stays open.

Runs in the judging thread. Raises FilterError if the embedding model cannot be called; the tasks then wait.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final, Protocol, TypeVar

from sqlalchemy import Connection

from flywheel.daemon.judging.judging_report import TaskResult
from flywheel.errors import FilterError
from flywheel.judge.filters.chain import Chain, LineFilter, Step
from flywheel.judge.filters.deduplication import Deduplication, fingerprint
from flywheel.records.similarity import NEAR
from flywheel.records.states import TaskState
from flywheel.records.verdict import Outcome, Verdict
from flywheel.store import deduplication, ledger, verdicts
from flywheel.store.claims import Claimed
from flywheel.store.deduplication import ComparedTask, Near, Repeats

log = logging.getLogger(__name__)

T = TypeVar("T")
BACKFILL_BATCH: Final = 256
"""Earlier tasks per transaction when a filter is new."""


class Ask(Protocol):
    """Runs `function(connection, …)` in one transaction of the store, and waits for it."""

    def __call__(self, function: Callable[..., T], *args: Any) -> T: ...


class PreFilter:
    """Applies a chain to tasks, before the judge and after it."""

    def __init__(self, chain: Chain, ask: Ask) -> None:
        self.stop = threading.Event()
        """Ends waits for the embedding model, and the filtering of a batch, by FilterError."""
        self._chain = chain
        self._ask = ask
        self._deduplication = chain.deduplication
        self._threshold = self._deduplication.similarity_threshold if self._deduplication else NEAR
        self._is_backfilled = False
        self._has_taken_in = self._deduplication is None and chain.influence is None

    def take_in_earlier(self) -> None:
        """Store fingerprints of tasks that were accepted before the chain had `deduplication` or `influence`."""
        if not self._has_taken_in:
            while rows := self._ask(deduplication.unknown, self._threshold, BACKFILL_BATCH):
                entries = [
                    ComparedTask(row.id, row.key, fingerprint(row.payload, self._threshold, row.target))
                    for row in rows
                ]
                self._ask(deduplication.take_in, entries, self._threshold)
            self._has_taken_in = True

    def apply(self, tasks: Sequence[Claimed]) -> list[TaskResult]:
        """Run the filters before the judge. Tasks that passed them earlier are only redacted."""
        if self._chain.decides:
            return self._before(tasks)
        earlier = [task for task in tasks if _was_filtered(task)]
        # They may have passed another chain: no judge sees what this one redacts.
        return [*self._redact(earlier), *self._before([task for task in tasks if not _was_filtered(task)])]

    def _before(self, tasks: Sequence[Claimed]) -> list[TaskResult]:
        """Run the filters before the judge; results are in the order of the tasks."""
        self.take_in_earlier()
        if self._deduplication is not None and not self._is_backfilled:
            self._vectors(self._deduplication, {})
        redacted = {each.task.id: each for each in self._redact(tasks)}
        sound = [each.task for each in redacted.values() if each.is_open]
        entries = self._entries(sound)
        near, held = self._enter(entries)
        # A burst can include tasks that were judged earlier: they are not among these.
        here = held & redacted.keys()
        results = redacted | {number: replace(redacted[number], held=True) for number in here}
        if any(isinstance(step, Deduplication) for step in self._chain.after):
            # They would be dropped behind the judge, who would be paid for what it has said before.
            hashes = {task.id: task.line["metadata"]["qa_hash"] for task in sound}
            for number, repeats in self._ask(deduplication.accepted_before, near, hashes).items():
                results[number] = self._repetition(results[number].task, repeats)
        return self._run(self._chain.before, results, entries, near)

    def after(self, task: Claimed) -> TaskResult:
        """Run the filters after the judge on a task that it accepted."""
        entries = self._entries([task]) if self._chain.after else {}
        near = self._ask(deduplication.enter, list(entries.values()), self._threshold) if entries else {}
        return self._run(self._chain.after, {task.id: TaskResult(task)}, entries, near)[0]

    def _redact(self, tasks: Sequence[Claimed]) -> list[TaskResult]:
        """Remove personal data from tasks that were stored before their chain had a `pii` filter."""
        if (redact := self._chain.redact) is None:
            return [TaskResult(task) for task in tasks]
        results: list[TaskResult] = []
        changed: dict[int, dict[str, Any]] = {}
        for task in tasks:
            try:
                line = redact(task.line)
            except Exception as error:
                # No judge sees this task, since its personal data is unknown; the others are not concerned.
                results.append(TaskResult(task, error=f"filter pii: {type(error).__name__}: {error}"))
                continue
            results.append(TaskResult(replace(task, line=line)))
            if line != task.line:
                changed[task.id] = line
        if changed:
            self._ask(ledger.rewrite_lines, changed)
        return results

    def _entries(self, tasks: Sequence[Claimed]) -> dict[int, ComparedTask]:
        """The fingerprints of the tasks, if a filter needs them."""
        if self._deduplication is None and self._chain.influence is None:
            return {}
        return {
            task.id: ComparedTask(task.id, task.key, fingerprint(task.line, self._threshold, task.target))
            for task in tasks
        }

    def _enter(self, entries: dict[int, ComparedTask]) -> tuple[dict[int, list[Near]], set[int]]:
        """Store the fingerprints. Returns the questions near each task, and the tasks of a burst."""
        if not entries:
            return {}, set()
        settings = self._chain.influence
        burst = settings.burst if settings else None

        def enter(conn: Connection) -> tuple[dict[int, list[Near]], list[int]]:
            near = deduplication.enter(conn, list(entries.values()), self._threshold)
            if burst is None:
                return near, []
            alike = [task for task, others in near.items() if others]
            return near, deduplication.hold_bursts(conn, alike, burst.count, burst.seconds)

        near, held = self._ask(enter)
        if held:
            log.warning(
                "a burst of near-identical questions: %d tasks need review. See `flywheel tasks --state held`",
                len(held),
            )
        return near, set(held)

    def _run(
        self,
        steps: Sequence[Step],
        results: dict[int, TaskResult],
        entries: dict[int, ComparedTask],
        near: dict[int, list[Near]],
    ) -> list[TaskResult]:
        """Run the steps in order, each on the tasks that are still open."""
        for step in steps:
            left = [each.task for each in results.values() if each.is_open]
            if isinstance(step, LineFilter):
                for task in left:
                    if self.stop.is_set():
                        raise FilterError("filter tasks", "judging stops", "The tasks wait.", retryable=True)
                    decision = step.decide(task.line)
                    if decision.error:
                        results[task.id] = TaskResult(task, error=decision.error)
                    elif not decision.kept:
                        results[task.id] = self._rejected(task, f"filter {decision.filter}: {decision.reason}")
            elif left:
                for number, repeats in self._repeats(step, [entries[task.id] for task in left], near).items():
                    results[number] = self._repetition(results[number].task, repeats)
        return list(results.values())

    def _repetition(self, task: Claimed, repeats: Repeats) -> TaskResult:
        how = f"{repeats.method}, {repeats.similarity:.2f}"
        rejected = self._rejected(task, f"filter deduplication: repeats {repeats.key} ({how})")
        return replace(rejected, repeats=repeats)

    def _rejected(self, task: Claimed, reason: str) -> TaskResult:
        verdict = Verdict(Outcome.REJECTED, 0.0, reason=reason)
        return TaskResult(task, verdict, f"{verdicts.CHAIN}{self._chain.hash}")

    def _repeats(
        self, step: Deduplication, entries: Sequence[ComparedTask], near: dict[int, list[Near]]
    ) -> dict[int, Repeats]:
        """The tasks that repeat a kept one. The others are kept from now on."""
        vectors = self._vectors(step, {entry.compared.text: entry.compared.query for entry in entries})

        def compare(conn: Connection) -> dict[int, Repeats]:
            found: dict[int, Repeats] = {}
            kept: list[ComparedTask] = []
            for entry in entries:
                now = {each.task for each in kept}
                others = [other for other in near[entry.task] if other.kept or other.task in now]
                repeats = _nearest(others)
                vector = vectors.get(entry.compared.text, b"")
                if step.model and vector and (repeats is None or repeats.method != "exact"):
                    # Words decide only between questions of which one has no embedding.
                    known = deduplication.of_texts(conn, step.model, [other.text for other in others])
                    by_words = _nearest([other for other in others if not known.get(other.text)])
                    repeats = deduplication.nearest(conn, entry, self._threshold, step.model, vector) or by_words
                if repeats is not None:
                    found[entry.task] = repeats
                    continue
                kept.append(entry)
                if step.model:
                    # At once: the next embedding is compared with those in the store.
                    deduplication.keep(conn, [entry])
            if not step.model:
                deduplication.keep(conn, kept)
            return found

        return self._ask(compare)

    def _vectors(self, step: Deduplication, texts: dict[str, str]) -> dict[str, bytes]:
        """The embeddings of texts (by hash). Those that are not stored are computed and stored permanently, first of
        all those of earlier tasks.

        If the length of vectors has changed, another model answers by the same name, and earlier tasks are embedded
        again: vectors of two models cannot be compared. Raises FilterError.
        """
        if step.model is None:
            return {}
        for _ in range(2):
            known: dict[str, bytes] = {}
            replaced = 0 if self._is_backfilled else self._embed_earlier(step.model, step)
            if not replaced:
                known, replaced = self._embed(step.model, step, texts)
            self._is_backfilled = not replaced
            if not replaced:
                return known
            log.warning(
                "the vectors of the embedding model %s have a new length: %d questions are embedded again",
                step.model,
                replaced,
            )
        raise FilterError(
            f"embed questions with {step.model}",
            "the length of its vectors keeps changing: more than one model answers by this name",
            "Serve one model by this name. The tasks stay pending.",
        )

    def _embed(self, model: str, step: Deduplication, texts: dict[str, str]) -> tuple[dict[str, bytes], int]:
        """The embeddings of texts, and how many stored ones of another length were removed."""
        known = self._ask(deduplication.of_texts, model, list(texts))
        missing = [text for text in texts if text not in known]
        removed = 0
        if missing:
            from flywheel.judge.filters.deduplication import (
                Embedder,  # its client is slow to import, and few chains need it
            )

            embedder = Embedder(step, stop=self.stop)
            try:
                for start in range(0, len(missing), step.batch_size):
                    batch = missing[start : start + step.batch_size]
                    made = dict(zip(batch, embedder.embed([texts[text] for text in batch]), strict=True))
                    removed += self._ask(deduplication.store, model, made)
                    known |= made
            finally:
                embedder.close()
        return known, removed

    def _embed_earlier(self, model: str, step: Deduplication) -> int:
        """Embed kept tasks without an embedding. Returns how many stored ones of another length were removed."""
        while rows := self._ask(deduplication.lacking, model, BACKFILL_BATCH):
            _, removed = self._embed(model, step, {row.text: row.payload["main_query"] for row in rows})
            if removed:
                return removed
        return 0


def without_embeddings(chain: Chain) -> Chain:
    """The chain without a filter that calls an embedding model."""

    def is_local(step: Step) -> bool:
        return not isinstance(step, Deduplication) or step.model is None

    return replace(chain, before=tuple(filter(is_local, chain.before)), after=tuple(filter(is_local, chain.after)))


def _was_filtered(task: Claimed) -> bool:
    return task.was is TaskState.ACCEPTED or (task.was is TaskState.JUDGING and task.stored is not None)


def _nearest(others: Sequence[Near]) -> Repeats | None:
    """The first of them, which is the nearest."""
    found = (Repeats(each.task, each.key, each.similarity, "exact" if each.is_exact else "words") for each in others)
    return next(found, None)
