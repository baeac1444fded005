"""Judging: due tasks through the filter chain and the judge, several at once, into stored verdicts."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from sqlalchemy import Connection

from flywheel.config.file import Config
from flywheel.config.judge import JudgeSettings
from flywheel.daemon.configured_source import apply_model_rules
from flywheel.daemon.judging.judge_setup import (
    check_independence,
    exchange_of,
    judge_settings,
    rubric_of,
    rubric_of_target,
)
from flywheel.daemon.judging.judging_report import JudgingEstimate, JudgingReport, TaskResult
from flywheel.daemon.judging.pre_filter import Ask, PreFilter, without_embeddings
from flywheel.errors import FilterError, FlywheelError, JudgeError
from flywheel.judge.client import require_judge
from flywheel.judge.filters.chain import Chain, chain_of
from flywheel.judge.grader import CallEstimate, Grader
from flywheel.judge.rubric.rubric import Rubric
from flywheel.judge.thread_pool import grade_batches
from flywheel.judge.usage import Budget, BudgetSpentError, CallsInFlight
from flywheel.records.states import TaskState
from flywheel.records.task import Batch, Entry
from flywheel.records.verdict import Exchange, Outcome, Verdict
from flywheel.store import claims, deduplication, judge_usage, ledger, notices, stages, verdicts
from flywheel.store.claims import Claimed
from flywheel.store.kernel import database
from flywheel.store.kernel.database import Store
from flywheel.store.stages import Pass
from flywheel.system.shortage import shortage_of
from flywheel.system.signals import in_daemon_thread
from flywheel.system.terminal import quantity

log = logging.getLogger(__name__)

T = TypeVar("T")

UNREADABLE_NOTE: Final = "judge_unreadable"
"""Key, with the hash of the judge, of the note on how many of its answers in a row could not be read."""
CLAIMED_PER_THREAD: Final = 4
"""Tasks in a claimed batch, for each thread that calls the judge."""


async def recover(store: Store, state_dir: Path, judge: JudgeSettings) -> tuple[int, list[str]]:
    """Clean up after a process that died: book its calls in flight and return its tasks to `pending`. None that is
    undecided waits longer than the settings say.

    Returns the number of tasks, and the keys of those that became dead letters. The caller holds the instance lock.
    """
    calls = CallsInFlight(state_dir)
    if used := calls.read():
        await store.write(judge_usage.book, used, judge.prices)
        calls.reset()
    await store.write(claims.bound_waits, judge.retry_undecided_seconds)
    return await store.write(claims.recover)


@asynccontextmanager
async def state_of(entries: Sequence[Entry], directory: Path | None = None) -> AsyncIterator[Store]:
    """The state in a directory, or one in memory, with replies that are in no source as tasks."""
    store = await (Store.empty() if directory is None else Store.open(directory))
    try:
        source = await store.write(ledger.source_id, "replies", "jsonl")
        await store.write(ledger.record_batch, source, Batch(None, tuple(entries)), train_ratio=1.0, split_seed=0)
        yield store
    finally:
        await store.close()


@dataclass(slots=True)
class _JudgingRun:
    """One call of `TaskJudging.run`. `claimed` are its claimed tasks that have no verdict yet, by number; `taken`
    counts the tasks of all its batches; `released` counts tasks that its last verdicts made due again."""

    stop: threading.Event
    limit: int | None = None
    on_judged: Callable[[TaskResult], None] | None = None
    claimed: dict[int, Claimed] = field(default_factory=dict)
    taken: int = 0
    released: int = 0
    has_ended: bool = False
    report: JudgingReport = field(default_factory=JudgingReport)


class TaskJudging:
    """Judges due tasks. Raises ConfigError for a wrong rubric, chain or judge.

    `rubric` replaces the rubrics of the configuration and the chain; `calls` counts each call before it is sent.
    Tasks of targets with a rubric of their own are judged by it, with another `TaskJudging` for `which` tasks. With
    `redacts_only`, the chain removes personal data from tasks, and none of its filters decides. The attributes
    `judge` and `budget` are the judge's settings and what it may use. With `by_chain`, the chain accepts what it does
    not reject, and no judge is asked.
    """

    def __init__(
        self,
        store: Store,
        config: Config,
        *,
        rubric: Rubric | None = None,
        calls: CallsInFlight | None = None,
        which: claims.Judged = claims.ALL,
        redacts_only: bool = False,
    ) -> None:
        self._store = store
        self._config = config
        self._chain = chain_of(config) or Chain("", "", before=())
        if redacts_only:
            self._chain = replace(self._chain, before=(), after=(), influence=None)
        for notice in filter(None, (config.assumed, *self._chain.notices)):
            log.info("%s", notice)
        self.rubric = rubric or rubric_of(config, self._chain)
        check_independence(config, self.rubric)
        self.by_chain = rubric is None and self._chain.decides
        self.judge = judge_settings(config, self._chain)
        self._calls = calls
        self.grader = Grader(self.rubric, self.judge, calls=calls)
        self.budget = Budget(self.judge.budget, lambda: self._ask(judge_usage.tokens_today))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._failed = False
        self._is_recorded = False
        self._pre_filter = PreFilter(self._chain, self._ask)
        self._which = which
        self._others = [] if rubric or self.by_chain else self._by_own_rubrics()

    def _by_own_rubrics(self) -> list[TaskJudging]:
        """What judges the tasks of targets with rubrics of their own. Raises ConfigError."""
        groups: dict[Path, list[str]] = {}
        for name, target in self._config.targets.items():
            if target.rubric is not None:
                groups.setdefault(target.rubric, []).append(name)
        if groups:
            self._which = claims.Judged(tuple(itertools.chain(*groups.values())), others=True)
        found = []
        for names in groups.values():
            own = self._config.by_target()[names[0]]
            of = claims.Judged(tuple(names))
            judging = TaskJudging(
                self._store, own, rubric=rubric_of_target(own, self.rubric), calls=self._calls, which=of
            )
            judging.budget = self.budget
            found.append(judging)
        return found

    @property
    def _decided_by(self) -> tuple[str, str]:
        """By what verdicts are stored: the hash of the rubric or chain, and that of the judge."""
        by = f"{verdicts.CHAIN}{self._chain.hash}" if self.by_chain else self.rubric.hash
        return by, self.grader.judge_hash

    def require_judge(self) -> None:
        """Raises ConfigError if a rubric asks a judge and the settings do not say which one."""
        for each in () if self.by_chain else (self, *self._others):
            require_judge(each.rubric, each.judge)

    def grader_of(self, result: TaskResult) -> Grader:
        """The grader with the rubric that a task was judged by, or was to be."""
        own = (each.grader for each in self._others if result.task.target in each._which.targets)
        return next(own, self.grader)

    async def run(
        self,
        *,
        limit: int | None = None,
        stop: threading.Event | None = None,
        on_judged: Callable[[TaskResult], None] | None = None,
        rejudge: bool = False,
    ) -> JudgingReport:
        """Judge due tasks, at most `limit`, until none is left or `stop` is set. No task remains in `judging`.

        With `rejudge`, tasks that another rubric or judge accepted or rejected follow, with users' functions in the
        rubric all decided ones; each keeps its state until its new verdict is stored. A cancelled run sets `stop`.

        After a judge whose answers could not be read, the next run asks about one task before it takes others; the
        error says when that is of use.
        """
        stop = stop or threading.Event()
        if self._config.targets:
            # A target that is new in the configuration may have another rubric.
            await apply_model_rules(self._store, self._config)
        report = JudgingReport()
        for each in (self, *self._others):
            left = None if limit is None else limit - report.tasks
            report.join(await each._run(_JudgingRun(stop, left, on_judged), rejudge))
            if report.error is not None or stop.is_set():
                break
        await self._store.write(self._note, report)
        return report

    def _note(self, conn: Connection, report: JudgingReport) -> None:
        """Note what the run says of the judge: that it answered, that nothing is left to ask, or its error."""
        due = claims.next_due(conn)
        # What needed no call says nothing about a judge that fails.
        is_failing = bool(stages.record_of(conn, notices.JUDGE).failing_since)
        if report.calls or (report.tasks and not is_failing):
            report.result = Pass.WORKED
        elif due is None:
            report.result = Pass.IDLE
        wait = 0.0
        if (error := report.error) is not None:
            left = datetime.fromisoformat(due) - datetime.now(UTC) if due else timedelta()
            wait = max(error.retry_after, left.total_seconds(), stages.RETRY_SECONDS)
        spent = isinstance(error, BudgetSpentError)
        stages.note(conn, notices.JUDGE, error or report.result, wait, spent=spent)

    async def _run(self, run: _JudgingRun, rejudge: bool) -> JudgingReport:
        """Judge the tasks of this rubric."""
        self._pre_filter.stop = run.stop
        report = run.report
        self._loop = asyncio.get_running_loop()
        unreadable_note = f"{UNREADABLE_NOTE} {self.grader.judge_hash}"
        self.grader.unreadable = unreadable = int(await self._store.read(database.noted, unreadable_note) or 0)
        try:
            while True:
                run.released, taken = 0, run.taken
                suspect = bool(await self._store.read(claims.suspects, self._which))
                report.error = await in_daemon_thread(partial(self._judge_batches, run, rejudge, suspect))
                if suspect and run.taken > taken and report.error is None:
                    continue
                if not run.released or report.error is not None or run.stop.is_set():
                    break
                rejudge = False
        except asyncio.CancelledError:
            run.stop.set()
            raise
        finally:
            run.has_ended = True
            if run.claimed:
                await asyncio.shield(self._store.write(claims.release, list(run.claimed), "not judged"))
        if self.grader.unreadable != unreadable:
            await self._store.write(database.note, unreadable_note, str(self.grader.unreadable or ""))
        if self.grader.unusable and report.error is not None and not report.error.retryable:
            report.error.retry_after = self.judge.retry_undecided_seconds
        if report.calls or report.error is not None:
            self._failed = report.error is not None
        return report

    async def count(self, *, limit: int | None = None, rejudge: bool = False) -> int:
        """The number of tasks that `run` would judge."""
        if self._config.targets:
            await apply_model_rules(self._store, self._config)
        total = 0
        for each in (self, *self._others):
            total += await self._store.read(claims.count_due, each._which)
            if rejudge:
                count = partial(claims.count_decided, every=each.rubric.has_functions)
                total += await self._store.read(count, *each._decided_by, each._which)
        return total if limit is None else min(total, limit)

    async def preview(self, *, limit: int | None = None, rejudge: bool = False) -> JudgingEstimate:
        """What `run` would take, without any request. Tasks are claimed in a transaction that is rolled back.

        Filters that need embeddings are skipped: tasks that they would stop count as judged.
        """
        total, stop = JudgingEstimate(), threading.Event()
        for each in (self, *self._others):
            run = _JudgingRun(stop, None if limit is None else limit - total.tasks)
            estimating = asyncio.create_task(self._store.trial(each._estimate, run, rejudge, total))
            try:
                await asyncio.shield(estimating)
            except asyncio.CancelledError:
                # A transaction cannot be interrupted: it ends after its current batch.
                stop.set()
                await estimating
                raise
        return total

    def _estimate(self, conn: Connection, run: _JudgingRun, rejudge: bool, total: JudgingEstimate) -> None:
        def ask(function: Callable[..., T], *args: Any) -> T:
            return function(conn, *args)

        pre_filter = PreFilter(without_embeddings(self._chain), ask)

        def add(batch: Sequence[Claimed]) -> None:
            for each in pre_filter.apply(batch):
                needed = CallEstimate()
                if each.is_open and self._kept(each.task) is None:
                    needed = self.grader.estimate(exchange_of(each.task.line), each.task.earlier)
                total.add(needed)

        while suspect := next(self._claim(run, ask, suspect=True), None):
            add(suspect)
        for batch in self._claim(run, ask, rejudge=rejudge):
            add(batch)

    def _claim(
        self, run: _JudgingRun, ask: Ask, *, suspect: bool = False, rejudge: bool = False, first: int | None = None
    ) -> Iterator[list[Claimed]]:
        """Batches of due tasks, which are claimed, then of tasks to judge again. The `first` batch has this size.

        A `suspect` was in work when a process died: it is the only task of the only batch.
        """
        hashes = self._decided_by
        most = CLAIMED_PER_THREAD * self.judge.max_thread
        size = 1 if suspect else first or most
        after: int | None = None
        while not run.stop.is_set():
            number = size if run.limit is None else min(size, run.limit - run.taken)
            if number <= 0:
                return
            if after is not None:
                found = ask(claims.decided, number, after, *hashes, self._which, self.rubric.has_functions)
            else:
                found = ask(claims.claim, number, *hashes, suspect, self._which)
                run.claimed.update({task.id: task for task in found})
            if found:
                run.taken += len(found)
                yield found
            if suspect or not (found or (rejudge and after is None)):
                return
            if after is not None or not found:
                after = found[-1].id if found else 0
            size = min(2 * size, most)

    def _judge_batches(self, run: _JudgingRun, rejudge: bool, suspect: bool) -> FlywheelError | None:
        """Claim, filter and grade tasks, in a thread of its own. Returns the error that ended it early, if any."""
        # After a failed run the first batch has one task: during an outage each attempt claims and releases it.
        first = 1 if self._failed or self.grader.unusable else None
        try:
            self._pre_filter.take_in_earlier()
            # A calibration that runs beside the daemon uses the same daily budget.
            self.budget.refresh()
            batches = grade_batches(
                self.grader,
                self._to_grade(run, self._claim(run, self._ask, suspect=suspect, rejudge=rejudge, first=first)),
                self.judge.max_thread,
                run.stop,
                budget=self.budget,
                drain_seconds=self._config.daemon.drain_seconds,
                earlier=lambda task: task.earlier,
                calls=self._calls,
            )
            with closing(batches):
                for batch in batches:
                    results = [self._after_judge(TaskResult(*each, self.rubric.hash)) for each in batch]
                    self._in_loop(self._report(run, results))
        except FlywheelError as error:
            # A stop ends waits of the pre-filter with FilterError.
            return None if run.stop.is_set() and isinstance(error, FilterError) else error
        except Exception as error:
            if (lack := shortage_of(error)) is not None:
                return FlywheelError("judge tasks", *lack, retryable=True)
            log.exception("judging failed")
            why = f"{type(error).__name__}: {error}"
            return FlywheelError("judge tasks", why, "This is a defect; please report it.")
        return None

    def _to_grade(self, run: _JudgingRun, batches: Iterator[list[Claimed]]) -> Iterator[tuple[Claimed, Exchange]]:
        """Tasks that need a judge call. The other tasks of a batch, which a stored verdict or the chain decides, are
        stored first."""
        for batch in batches:
            decided, rest = [], []
            for each in self._pre_filter.apply(batch):
                exchange = exchange_of(each.task.line)
                result = self._free(each.task, exchange) if each.is_open else each
                if result.is_open:
                    rest.append((each.task, exchange))
                else:
                    decided.append(result)
            if decided:
                self._in_loop(self._report(run, decided))
            yield from rest

    def _free(self, task: Claimed, exchange: Exchange) -> TaskResult:
        """The result without a call of the judge; open if it has to be asked."""
        verdict = self._kept(task)
        if verdict is None and (task.earlier or task.stored):
            begun = self.grader.begin(exchange, task.earlier)
            verdict = begun if isinstance(begun, Verdict) else None
            if verdict and task.stored and verdict.results == task.stored.results:
                verdict = task.stored
        if verdict is None:
            return TaskResult(task)
        reused = verdict is task.stored or bool(verdict.judgements)
        return self._after_judge(TaskResult(task, verdict, self._decided_by[0], reused=reused))

    def _kept(self, task: Claimed) -> Verdict | None:
        """That of the chain, or the stored verdict if it needs no look. What a user's function reads may have changed
        since: for tasks that are judged again, functions run again."""
        if self.by_chain:
            return Verdict(Outcome.ACCEPTED, 1.0, reason="accepted by the chain")
        runs_again = self.rubric.has_functions and task.was is not TaskState.JUDGING
        return None if runs_again else task.stored

    def _after_judge(self, result: TaskResult) -> TaskResult:
        """The result after the filters behind the judge, which can stop what the judge accepted."""
        verdict, was = result.verdict, result.task.was
        if verdict is not None and verdict.broken and was is TaskState.JUDGING:
            return replace(result, verdict=None, error=verdict.error)
        if verdict is not None and verdict.outcome is Outcome.UNDECIDED:
            return self._after_attempt(result, verdict)
        is_new = verdict is not None and verdict.outcome is Outcome.ACCEPTED and was is not TaskState.ACCEPTED
        filtered = self._pre_filter.after(result.task) if is_new else None
        if filtered is None or filtered.is_open:
            return result
        return replace(filtered, paid=verdict, reused=result.reused)

    def _after_attempt(self, result: TaskResult, verdict: Verdict) -> TaskResult:
        """The undecided result with the judgements of all attempts; a dead letter after the last permitted one."""
        earlier, was_reached = result.task.attempts, verdict.is_failed_attempt
        attempt = max((each.attempt for each in earlier), default=0) + 1
        judgements = [each for each in verdict.judgements if was_reached or each.calls]
        numbered = [replace(each, attempt=attempt if was_reached else 0) for each in judgements]
        verdict = replace(verdict, judgements=(*earlier, *numbered))
        if not was_reached or attempt < self.judge.max_task_attempts or result.task.was is not TaskState.JUDGING:
            return replace(result, verdict=verdict)
        why = f"the judge gave no verdict in {quantity(attempt, 'attempt')}. The last error: {verdict.error}"
        return replace(result, verdict=None, error=why, paid=verdict)

    def _ask(self, function: Callable[..., T], *args: Any) -> T:
        """The result of one write transaction, for a thread other than the event loop's."""
        return self._in_loop(self._store.write(function, *args))

    def _in_loop(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, which runs in the event loop, for another thread."""
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _report(self, run: _JudgingRun, results: list[TaskResult]) -> None:
        """Store results and report them."""
        if run.has_ended:
            raise JudgeError("store verdicts", "judging was stopped", "The tasks are judged again.")
        changed, released = await self._store.write(self._store_results, results)
        self._is_recorded = True
        run.report.changed += changed
        run.released += released
        prints_reason = self._chain.judge and self._chain.judge.print_reason
        for result in results:
            run.claimed.pop(result.task.id, None)
            run.report.add(result)
            if prints_reason and (verdict := result.verdict) is not None:
                log.info("%s %s: %s", result.task.key, verdict.outcome.value, verdict.reason or verdict.error)
            if run.on_judged is not None:
                run.on_judged(result)

    def _store_results(self, conn: Connection, results: list[TaskResult]) -> tuple[int, int]:
        """Returns how many tasks have the opposite outcome now, and how many others are due again."""
        changed, prices = 0, self.judge.prices
        if not (self._is_recorded or self.by_chain):
            judge = self.grader.client.endpoints[0].config
            verdicts.record_judge(conn, self.grader.judge_hash, judge.model, judge.base_url)
            verdicts.record_rubric(conn, self.rubric.hash, self.rubric.id)
        for result in results:
            task, verdict = result.task, result.verdict
            if result.held:
                continue
            if result.paid is not None and result.paid is not task.stored:
                verdicts.store(conn, task.id, result.paid, self.rubric.hash, self.grader.judge_hash, prices)
            if result.repeats is not None:
                deduplication.note(conn, task.id, result.repeats)
            if verdict is None:
                answers = "\n".join(each.answer for each in (result.paid.judgements if result.paid else ()))
                claims.dead_letter_task(conn, task.id, task.key, result.error, answers.strip())
                continue
            if verdict is not task.stored:
                verdicts.store(conn, task.id, verdict, result.rubric_hash, self.grader.judge_hash, prices)
            if task.was is TaskState.JUDGING:
                claims.apply(conn, task.id, verdict, self._config.judge.retry_undecided_seconds)
            else:
                changed += claims.apply_again(conn, task.id, task.was, verdict)
        # A task that was stopped as a repetition of a task that is rejected now is due again.
        rejected = [each.task.id for each in results if not each.verdict or each.verdict.outcome is Outcome.REJECTED]
        if repeated := [each.repeats.task for each in results if each.repeats is not None]:
            rejected += deduplication.gone(conn, repeated)
        return changed, deduplication.free_repetitions(conn, rejected) if rejected else 0
