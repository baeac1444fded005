"""Filtering: pending tasks through the chain and the rubric, several at once, into stored verdicts."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from threading import Event
from typing import Any, TypeVar

from sqlalchemy import Connection

from flywheel.config import Config
from flywheel.daemon.judge_setup import chain_of, exchange_of, judge_settings, rubric_of
from flywheel.daemon.pre_filter import Ask, FilterResult, PreFilter, without_embeddings
from flywheel.daemon.signals import LinkedEvent, aside
from flywheel.daemon.task_result import JudgingEstimate, JudgingReport, TaskResult
from flywheel.errors import FilterError, FlywheelError, JudgeError
from flywheel.judge.budget import Budget
from flywheel.judge.calls_in_flight import CallsInFlight
from flywheel.judge.grader import CallEstimate, Grader
from flywheel.judge.independence import check_independence
from flywheel.judge.thread_pool import grade_batches
from flywheel.rubric import Rubric
from flywheel.states import TaskState
from flywheel.store import claims, deduplication, notes, verdicts
from flywheel.store.claims import Claimed
from flywheel.store.database import Store
from flywheel.verdict import Exchange, Outcome, Verdict

log = logging.getLogger(__name__)

T = TypeVar("T")

CAPABILITIES_NOTE = "judge_means"
"""Key of the note on what the judge's endpoints turned out not to do."""


async def recover(store: Store, state_dir: Path) -> tuple[int, list[str]]:
    """Put right what a process that died left behind: book its calls in flight and return its tasks to `pending`.

    Returns how many tasks, and the keys of those that are dead letters now. The caller holds the instance lock.
    """
    calls = CallsInFlight(state_dir)

    def put_right(conn: Connection) -> tuple[int, list[str]]:
        verdicts.book(conn, calls.read())
        return claims.recover(conn)

    found = await store.write(put_right)
    calls.reset()
    return found


@dataclass(slots=True)
class _Run:
    """One call of `Filtering.run`: what its threads and the event loop share."""

    stop: LinkedEvent
    taking: ClaimQueue
    on_judged: Callable[[TaskResult], None] | None
    report: JudgingReport = field(default_factory=JudgingReport)
    freed: int = 0
    has_ended: bool = False


class TaskJudging:
    """Judges what is due. Raises ConfigError at once for a wrong rubric, chain or judge.

    `rubric` replaces the rubric of the configuration and the chain; `calls` counts each call before it is sent. The
    attributes `judge` and `budget` are the judge's settings and what it may use; `redact` removes personal data from
    a task before the judge sees it, if the chain has such a filter.
    """

    def __init__(
        self, store: Store, config: Config, *, rubric: Rubric | None = None, calls: CallsInFlight | None = None
    ) -> None:
        self._store = store
        self._config = config
        self._chain = chain_of(config)
        self.redact = self._chain.redact if self._chain else None
        for notice in self._chain.notices if self._chain else ():
            log.info("%s", notice)
        self.rubric = rubric or rubric_of(config, self._chain)
        check_independence(config, self.rubric)
        self.judge = judge_settings(config, self._chain)
        self._calls = calls
        self.grader = Grader(self.rubric, self.judge, calls=calls)
        self.budget = Budget(self.judge.budget, lambda: self._ask(verdicts.tokens_today))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._failed = False
        self._pre_filter = PreFilter(self._chain, self._ask) if self._chain else None

    async def run(
        self,
        *,
        limit: int | None = None,
        stop: threading.Event | None = None,
        on_judged: Callable[[TaskResult], None] | None = None,
        rejudge: bool = False,
    ) -> JudgingReport:
        """Judge due tasks, at most `limit`, until none is left or `stop` is set. Nothing is left in `judging`.

        With `rejudge`, accepted and rejected tasks follow that another rubric or judge decided; each stays where it
        is until its new verdict is there.
        """
        linked = LinkedEvent(stop)
        run = _Run(linked, self._taking(self._ask, linked, limit), on_judged)
        if self._pre_filter is not None:
            self._pre_filter.stop = linked
        report = run.report
        self._loop = asyncio.get_running_loop()
        capabilities = self.grader.client.capabilities
        capabilities.restore(await self._store.read(notes.noted, CAPABILITIES_NOTE))
        known = capabilities.snapshot()
        try:
            while True:
                run.freed = 0
                taken = run.taking.taken
                suspect = await self._store.read(claims.has_suspects)
                report.error = await aside(partial(self._work, run, rejudge, suspect))
                if suspect and run.taking.taken > taken and report.error is None:
                    continue
                if not run.freed or report.error is not None or run.stop.is_set():
                    break
                # The last verdicts rejected what others had been put aside for: those are due now.
                rejudge = False
        finally:
            run.stop.set()
            run.has_ended = True
            left = list(run.taking.claimed)
            if left:
                await asyncio.shield(self._store.write(claims.release, left, "not judged"))
        await self._store.write(notes.note, notes.JUDGE_NOTE, str(report.error or ""))
        if capabilities.snapshot() != known:
            await self._store.write(notes.note, CAPABILITIES_NOTE, capabilities.snapshot())
        return report

    async def count(self, *, limit: int | None = None, rejudge: bool = False) -> int:
        """How many tasks `run` would take."""
        total = await self._store.read(claims.count_due)
        if rejudge:
            total += await self._store.read(claims.count_decided, self.rubric.hash, self.grader.judge_hash)
        return total if limit is None else min(total, limit)

    async def preview(self, *, limit: int | None = None, rejudge: bool = False) -> JudgingEstimate:
        """What `run` would take, without a call to anybody. Tasks are taken as `run` does, and that is undone.

        Embeddings would have to be asked for: what a chain stops by them is counted as if it went on.
        """
        stop = threading.Event()
        looking = asyncio.create_task(self._store.trial(self._preview, stop, limit, rejudge))
        try:
            return await asyncio.shield(looking)
        except asyncio.CancelledError:
            # A transaction is never broken off: it ends with the tasks that it has taken.
            stop.set()
            await looking
            raise

    def _preview(self, conn: Connection, stop: threading.Event, limit: int | None, rejudge: bool) -> JudgingEstimate:
        def ask(function: Callable[..., T], *args: Any) -> T:
            return function(conn, *args)

        total = JudgingEstimate()
        pre_filter = PreFilter(without_embeddings(self._chain), ask) if self._chain else None
        taking = self._taking(ask, stop, limit)
        suspects = iter(lambda: next(taking.suspect(), []), [])
        for batch in chain(suspects, taking.batches(rejudge=rejudge)):
            for each in pre_filter.apply(batch) if pre_filter else map(FilterResult, batch):
                needed = CallEstimate()
                if each.passed and each.task.stored is None:
                    needed = self.grader.estimate(exchange_of(each.task.line), each.task.earlier)
                total.add(needed)
        return total

    async def _settle(self, run: _Run, done: list[TaskResult]) -> None:
        """Store task results and report them."""
        if run.has_ended:
            raise JudgeError("store verdicts", "judging was stopped", "The tasks are judged again.")
        changed, freed = await self._store.write(self._store_all, done)
        report = run.report
        report.changed += changed
        run.freed += freed
        for item in done:
            run.taking.claimed.pop(item.task.id, None)
            if item.held:
                report.held += 1
            elif item.verdict is None:
                report.dead += 1
            else:
                report.count(item.verdict, reused=item.reused)
            if item.paid is not None and not item.reused:
                report.bill(item.paid)
            self._tell_reason(item)
            if run.on_judged is not None:
                run.on_judged(item)

    def _store_all(self, conn: Any, done: list[TaskResult]) -> tuple[int, int]:
        """How many are decided the other way now, and how many others are due again."""
        changed = 0
        retry = self._config.judge.retry_undecided_seconds
        for item in done:
            if item.held:
                continue
            if item.paid is not None and item.paid is not item.task.stored:
                verdicts.store(conn, item.task.id, item.paid, self.rubric.hash, self.grader.judge_hash)
            if item.repeats is not None:
                deduplication.note(conn, item.task.id, item.repeats)
            if item.verdict is None:
                claims.dead_letter_task(conn, item.task.id, item.task.key, item.error)
                continue
            if item.verdict is not item.task.stored:
                verdicts.store(conn, item.task.id, item.verdict, item.rubric_hash, self.grader.judge_hash)
            if item.task.was is TaskState.JUDGING:
                claims.apply(conn, item.task.id, item.verdict, retry)
            else:
                changed += claims.apply_again(conn, item.task.id, item.task.was, item.verdict)
        # What repeats a task that is rejected now has nothing to repeat any more, nor has what was found to repeat
        # one that was rejected since.
        gone = [item.task.id for item in done if item.verdict is None or item.verdict.outcome is Outcome.REJECTED]
        gone += deduplication.gone(conn, [item.repeats.task for item in done if item.repeats is not None])
        return changed, deduplication.free_repetitions(conn, gone)

    def _work(self, run: _Run, rejudge: bool, suspect: bool) -> FlywheelError | None:
        """Claim, filter and grade tasks, in a thread of its own; what ended it early, if anything did.

        A `suspect`, which was in work when a process ended, is judged alone.
        """

        def settle(done: list[TaskResult]) -> None:
            assert self._loop is not None
            if done:
                asyncio.run_coroutine_threadsafe(self._settle(run, done), self._loop).result()

        # After a failed run the first batch has one task: during an outage each attempt claims and releases it.
        first, self._failed = (1 if self._failed else None), False
        batches = run.taking.suspect() if suspect else run.taking.batches(rejudge=rejudge, first=first)
        try:
            if self._pre_filter is not None:
                self._pre_filter.weigh_earlier()
            # A calibration that runs beside the daemon uses the same daily budget.
            self.budget.refresh()
            judged = grade_batches(
                self.grader,
                self._to_grade(batches, settle),
                self.judge.max_thread,
                run.stop,
                budget=self.budget,
                drain_seconds=self._config.daemon.drain_seconds,
                earlier=lambda task: task.earlier,
                calls=self._calls,
            )
            with closing(judged):
                for batch in judged:
                    settle([self._behind_the_judge(TaskResult(*each, self.rubric.hash)) for each in batch])
        except FlywheelError as error:
            self._failed = True
            # A stop also ends waits of the pre-filter, with FilterError.
            return None if run.stop.is_set() and isinstance(error, FilterError) else error
        except Exception as error:
            log.exception("judging failed")
            return JudgeError(
                "judge tasks", f"{type(error).__name__}: {error}", "This is a defect; please report it."
            )
        return None

    def _taking(self, ask: Ask, stop: threading.Event, limit: int | None) -> ClaimQueue:
        return ClaimQueue(ask, self.rubric.hash, self.grader.judge_hash, stop, 4 * self.judge.max_thread, limit)

    def _to_grade(
        self, batches: Iterator[list[Claimed]], settle: Callable[[list[TaskResult]], None]
    ) -> Iterator[tuple[Claimed, Exchange]]:
        """Tasks that need a call. Those of a batch that stored verdicts or the chain decide are settled first."""
        for batch in batches:
            decided, rest = [], []
            for each in self._pre_filter.apply(batch) if self._pre_filter else map(FilterResult, batch):
                task = each.task
                if not each.passed:
                    decided.append(self._stopped(each))
                    continue
                # Released with the others if the run ends before: in the form that the judge would have seen.
                exchange = exchange_of(task.line)
                verdict = task.stored
                if verdict is None and task.earlier:
                    verdict = self.grader.reuse(exchange, task.earlier)
                if verdict is None:
                    rest.append((task, exchange))
                else:
                    reused = verdict is task.stored or bool(verdict.judgements)
                    decided.append(self._behind_the_judge(TaskResult(task, verdict, self.rubric.hash, reused=reused)))
            settle(decided)
            yield from rest

    def _behind_the_judge(self, judged: TaskResult) -> TaskResult:
        """What the judge accepted can still be stopped by the filters that a chain keeps behind it."""
        verdict = judged.verdict
        if verdict is not None and verdict.broken and judged.task.was is TaskState.JUDGING:
            return replace(judged, verdict=None, error=verdict.error)
        is_new = (
            verdict is not None and verdict.outcome is Outcome.ACCEPTED and judged.task.was is not TaskState.ACCEPTED
        )
        if self._pre_filter is None or not is_new:
            return judged
        result = self._pre_filter.after(judged.task)
        return judged if result.passed else replace(self._stopped(result), paid=verdict, reused=judged.reused)

    def _stopped(self, result: FilterResult) -> TaskResult:
        assert self._chain is not None
        if result.error or result.held:
            return TaskResult(result.task, None, "", error=result.error, held=result.held)
        verdict = Verdict(Outcome.REJECTED, 0.0, reason=result.reason)
        return TaskResult(result.task, verdict, f"{verdicts.CHAIN}{self._chain.hash}", repeats=result.repeats)

    def _ask(self, function: Callable[..., T], *args: Any) -> T:
        """One transaction of the store, from the judging thread."""
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(self._store.write(function, *args), self._loop).result()

    def _tell_reason(self, item: TaskResult) -> None:
        if self._chain and self._chain.judge and self._chain.judge.print_reason and item.verdict is not None:
            verdict = item.verdict
            log.info("%s %s: %s", item.task.key, verdict.outcome.value, verdict.reason or verdict.error)


@dataclass(slots=True)
class ClaimQueue:
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
