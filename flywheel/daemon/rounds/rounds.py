"""Rounds: takes the live round through its states, from whatever state a crash left it in.

planned     start the worker                                  → training
training    wait for it, adopt it, or read its result         → evaluating, or abandoned
evaluating  compare, decide, swap                             → passed | promoted | rejected | failed
abandoned   plan it again while attempts last                 → planned | failed

A round whose candidate waits (`passed`) is live no more: `promote_passed` swaps it in when it need not wait any more.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Collection
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Self

from sqlalchemy import Connection, Row

from flywheel import __version__
from flywheel.config.file import Config
from flywheel.config.judge import JudgeBudget, JudgePrices
from flywheel.daemon.configured_source import apply_model_rules
from flywheel.daemon.deployer import ABTestRequest, Deployer
from flywheel.daemon.judging.judge_setup import judge_settings, rubric_of_target
from flywheel.daemon.rounds import candidate, planner
from flywheel.daemon.rounds.removal import tasks_of
from flywheel.daemon.rounds.sample_selection import AvailableSamplesCache, choose
from flywheel.daemon.rounds.suites import require_grader, suites_of
from flywheel.daemon.rounds.trackers import Trackers, decision_of, require_trackers
from flywheel.daemon.rounds.waiting import expired, waits_for
from flywheel.daemon.rounds.worker_process import WorkerProcess, result_of
from flywheel.errors import Condition, ServeError, TrainError
from flywheel.judge.filters.chain import chain_of
from flywheel.judge.grader import Grader
from flywheel.judge.rubric.rubric import Rubric
from flywheel.judge.usage import Allowance, Budget, UsageFile
from flywheel.records.round import CANDIDATE_DIR, SPEC_FILE, RoundResult, Suite
from flywheel.records.states import RoundState
from flywheel.serving.calls.call_log import call_log_copy_path
from flywheel.serving.replica_addresses import replica_urls
from flywheel.sources.call_puller import OFF, pulled_servers
from flywheel.store import calibrations, deployments, gate_tests, judge_usage, notices, rounds, samples
from flywheel.store.kernel import database
from flywheel.store.kernel.database import Store
from flywheel.store.kernel.transitions import move
from flywheel.system.files import file_identity, tree_sha256
from flywheel.system.heartbeat import beat
from flywheel.training.data.round_directory import END_FILE, clear, has_format, version_of
from flywheel.training.data.round_progress import RoundProgress, progress_of
from flywheel.training.gate.gate import decide

log = logging.getLogger(__name__)
REPORTED: Final = 10
"""How many of the last rounds are looked at for decisions that trackers do not have."""
WATCH_SECONDS = 1.0
"""How often the progress of a running round is read."""
LOG_SECONDS: Final = 60.0
"""How often steps and rollouts are logged. A new phase, a pause and its end are logged at once."""


def left(conn: Connection, limits: JudgeBudget, budget: Budget) -> Allowance | None:
    """The tokens that may still be used, and the reason once there are none; None without a limit.

    The usage of this run comes from `budget`, that of the day from the state.
    """
    rows: list[Allowance] = []
    if limits.tokens_per_day is not None:
        tokens = limits.tokens_per_day - judge_usage.tokens_today(conn)
        name = f"judge.budget.tokens_per_day ({limits.tokens_per_day:,})"
        rows.append(Allowance(tokens, f"{name} is spent; it goes on at midnight UTC"))
    if (tokens_of_run := budget.run_left()) is not None:
        name = f"judge.budget.tokens_per_run ({limits.tokens_per_run:,})"
        rows.append(Allowance(tokens_of_run, f"{name} is spent; it goes on with the next run"))
    return min(rows, key=lambda row: row.tokens, default=None)


class RoundUsage:
    """Books the judge usage of one round. Call `settle` repeatedly while the worker runs, and once after it."""

    def __init__(
        self,
        store: Store,
        budget: Budget,
        limits: JudgeBudget,
        round_id: int,
        round_dir: Path,
        prices: JudgePrices | None = None,
    ) -> None:
        self._store, self._budget, self._limits = store, budget, limits
        self._round_id, self._dir = round_id, round_dir
        self._prices = prices
        self._size = -1
        self._booked: int | None = None
        self._allowance: Allowance | None = None

    async def settle(self) -> None:
        """Book new usage and write the new allowance."""
        if self._booked is None:
            self._booked = await self._store.read(judge_usage.booked_of_round, self._round_id, self._dir)
        if (size := await asyncio.to_thread(UsageFile(self._dir).size)) != self._size:
            found = await self._store.write(judge_usage.book_round, self._round_id, self._dir, self._prices)
            tokens = sum(used.tokens for used in found)
            self._budget.book(tokens)
            self._booked += tokens
            self._size = size
        remaining = await self._store.read(left, self._limits, self._budget) if self._budget.limits else None
        if remaining is None:
            return
        allowance = Allowance(self._booked + max(0, remaining.tokens), remaining.why)
        if allowance != self._allowance:
            await asyncio.to_thread(allowance.write, self._dir)
        self._allowance = allowance

    async def note_pause(self, name: str, why: str) -> None:
        """Note why the round of this name waits for its judge, empty while it does not."""
        spent = self._allowance is not None and self._booked is not None and self._booked >= self._allowance.tokens
        await self._store.write(notices.note_pause, name, why, spent=spent)

    @property
    def used_up(self) -> str:
        """Why the budget of this run allows no further verdict; empty while it does."""
        run_left = self._budget.run_left()
        if run_left is None or run_left > 0:
            return ""
        return f"judge.budget.tokens_per_run ({self._limits.tokens_per_run:,}) is spent"


@dataclass(frozen=True, slots=True)
class _TargetRounds:
    """What the rounds of a target need."""

    config: Config
    rubric: Rubric
    suites: list[Suite]
    deployer: Deployer
    available_samples: AvailableSamplesCache

    @classmethod
    def of(cls, config: Config, rubric: Rubric, deployer: Deployer) -> Self:
        """With the files that the settings name; `rubric` is for targets without their own. Raises ConfigError."""
        own = rubric_of_target(config, rubric)
        require_grader(config, own)
        return cls(config, own, suites_of(config, own), deployer.of(config), AvailableSamplesCache(config))


class Rounds:
    """Plans rounds and finishes them, one at a time; those of several targets in turn."""

    def __init__(
        self, store: Store, config: Config, rubric: Rubric, deployer: Deployer, budget: Budget | None = None
    ) -> None:
        """`budget` also counts what this run uses for judging tasks. Targets use `rubric` unless they have their own.

        Raises ConfigError for a wrong rubric or suite, or if the package of a tracker is missing.
        """
        require_trackers(config.tracking, "start rounds", Path(sys.executable))
        self._store = store
        self._budget = budget or Budget(config.judge.budget)
        self._config = config
        self._rubric = rubric
        self._targets = {name: _TargetRounds.of(own, rubric, deployer) for name, own in config.by_target().items()}
        self._worker: WorkerProcess | None = None
        self._stopping = asyncio.Event()
        self._detaching = asyncio.Event()
        self._with_worker = asyncio.Lock()
        self._deciding = asyncio.Lock()
        self._finishing = asyncio.Lock()
        self._cancelled: dict[str, str] = {}
        """Why a round ends, by its name: the next one may begin before its worker has."""
        self._without_erased: tuple[object, ...] = ()
        """The round, the number of erased tasks and the specification that were looked at last, in vain."""
        self._trackers = Trackers(Path(sys.executable))
        self._reported: dict[str, str] = {}
        self._noted_supplies: dict[str, tuple[int, int, str]] = {}

    async def start_due(self, *, window: bool = False) -> bool:
        """Plan a round if one is due."""
        due = await self.due(window=window)
        if due.start:
            await self.plan(due.reason, due.target or None)
        else:
            await self._note(due.reason)
        return due.start

    async def due(self, *, window: bool = False, target: str | None = None) -> planner.Due:
        """Whether a round is due now, of the given target or of any, and of which."""
        await apply_model_rules(self._store, self._config)
        reasons = {}
        if target is None:
            turn = await self._store.read(planner.in_turn, self._config)
        else:
            turn = [await self._store.read(planner.next_with_samples, self._config, target)]
        for own in (self._targets[each.target] for each in turn):
            due = await self._store.read(planner.due, own.config, own.available_samples, window=window)
            await self._note_available(own, due.reason)
            if due.start:
                why = await self._store.read(self._shortfall, own) or await self._store.read(self._spent)
                if not why:
                    return due
                due = planner.Due(False, why)
            reasons[own.config.target] = due.reason
        summaries = (f"{name}: {reason}" if name else reason for name, reason in reasons.items())
        return planner.Due(False, "; ".join(summaries))

    async def plan(self, trigger: str, target: str | None = None) -> str:
        """Plan a round now, of the given target or of the next one with samples; returns its name. Raises TrainError
        when that is not possible or not allowed."""
        await apply_model_rules(self._store, self._config)
        chosen = await self._store.read(planner.next_with_samples, self._config, target)
        return await self._plan(self._targets[chosen.target], trigger)

    async def plan_candidate(self, folder: Path, trained_on: Path | None, target: str | None = None) -> str:
        """Plan a round that compares the adapter in a folder, which another trainer made, with what serves; returns
        its name. `trained_on` is the data that it was trained on. Raises ConfigError for data that cannot be read,
        and TrainError for an adapter that cannot serve, or was trained on held-out conversations."""
        attempted = f"compare the adapter in {folder} with what serves"
        if target is None and len(self._targets) > 1:
            why = f"there are several targets: {', '.join(self._targets)}"
            raise TrainError(attempted, why, "Name one with --target.")
        chosen = await self._store.read(planner.next_with_samples, self._config, target)
        own = self._targets[chosen.target]
        data, exposure = None, candidate.UNKNOWN
        if trained_on is not None:
            data = await asyncio.to_thread(candidate.TrainingData.read, trained_on, own.config)
            exposure = await self._store.read(data.exposure, attempted)
        stage = self._config.state_dir / "rounds" / f".{CANDIDATE_DIR}"
        try:
            made = await asyncio.to_thread(candidate.take, folder, stage, own.config, exposure, data, attempted)
            return await self._plan(own, f"by hand: {made.summary}", partial(candidate.place, stage))
        finally:
            shutil.rmtree(stage, ignore_errors=True)

    async def _plan(self, own: _TargetRounds, trigger: str, place: Callable[[Path], None] | None = None) -> str:
        if shortfall := await self._store.read(self._shortfall, own):
            raise TrainError("start a round", shortfall, "Or lower judge.min_kappa.")
        if spent := await self._store.read(self._spent):
            raise TrainError("start a round", spent, "Or raise it.")
        directory = self._config.state_dir / "rounds"
        # Outside of the transaction that plans: it may take seconds.
        chosen = await self._store.read(choose, own.config, own.rubric) if place is None else None
        row = await self._store.write(planner.plan, own.config, own.rubric, directory, trigger, place, chosen)
        log.info("%s is planned%s: %s", row.name, f" for {row.target}" if row.target else "", trigger)
        if chosen is not None:
            log.info("%s takes %s", row.name, "; ".join(chosen[1].sentences))
        await self._note("")
        return str(row.name)

    def _target_of(self, row: Row[Any]) -> _TargetRounds:
        """What the live round needs. Raises TrainError if its target is no longer configured."""
        if (own := self._targets.get(row.target)) is None:
            why = f"`targets` has no {row.target} now" if row.target else "it was planned before `targets` was set"
            raise TrainError(f"finish {row.name}", why, "Its samples are free again.")
        return own

    def _shortfall(self, conn: Connection, own: _TargetRounds) -> str | None:
        """Why the rubric may not be used for training: its agreement with people is below `judge.min_kappa`."""
        bar = own.config.judge.min_kappa
        if bar is None:
            return None
        with closing(Grader(own.rubric, judge_settings(own.config, chain_of(own.config)))) as grader:
            return calibrations.shortfall(conn, own.rubric.hash, grader.judge_hash, bar)

    def _spent(self, conn: Connection) -> str:
        """Why the judge budget allows no verdict; empty when it does."""
        lent = left(conn, self._config.judge.budget, self._budget)
        return lent.why if lent is not None and lent.tokens <= 0 else ""

    async def finish_live(self) -> RoundState | None:
        """Take the live round as far as possible; its final state, or None without one.

        Raises ServeError when the candidate is better but the servers cannot load it now, and TrainError when the
        adapter's files cannot be read now. Then the round stays in `evaluating`, and the next call retries.
        """
        async with self._finishing:
            try:
                return await self._finish_live()
            finally:
                await self._report()

    async def _finish_live(self) -> RoundState | None:
        while not self._stopping.is_set() and (row := await self._store.read(rounds.live)) is not None:
            state = RoundState(row.state)
            if row.name in self._cancelled:
                await self._fail(row, state, self._cancelled[row.name])
            elif await _has_erased(self._store, row):
                # The request for it came before this process, or while the round was planned.
                await _stop_workers(row)
                await self._fail(row, state, rounds.HAS_ERASED)
            elif state in (RoundState.PLANNED, RoundState.TRAINING):
                async with self._with_worker:
                    if self._stopping.is_set():
                        break
                    if state is RoundState.TRAINING or await self._start(row):
                        await self._watch(row)
            elif state is RoundState.ABANDONED:
                await self._retry(row, state, "its worker died")
            else:
                async with self._deciding:
                    await self._evaluate(row)
            ended = await self._store.read(rounds.by_name, row.name)
            if ended is not None and ended.live is None:
                return RoundState(ended.state)
        return None

    async def _start(self, row: Row[Any]) -> bool:
        try:
            own = self._target_of(row)
            row = await self._store.write(planner.begin, row, own.config, own.rubric)
            spec = await self._store.read(planner.spec_of, row, own.config, own.rubric, own.suites)
            for stray in await asyncio.to_thread(WorkerProcess.strays, Path(row.dir)):
                log.warning("%s: an unrecorded worker (process %d) is stopped", row.name, stray.pid)
                await stray.stop()
            self._worker = await WorkerProcess.start(Path(row.dir), spec, self._usage_of(row).settle)
        except TrainError as error:
            await self._fail(row, RoundState.PLANNED, str(error))
            return False
        pid = self._worker.pid
        await self._store.write(move, row.id, RoundState.PLANNED, RoundState.TRAINING, "worker started", pid=pid)
        if spec.candidate is not None:
            log.info("%s compares %s (process %d)", row.name, spec.candidate.summary, pid)
        else:
            log.info("%s trains on %d samples (process %d)", row.name, len(spec.train), pid)
        return True

    async def _watch(self, row: Row[Any]) -> None:
        worker = self._worker
        if worker is None and (worker := WorkerProcess.adopt(Path(row.dir), row.pid)) is not None:
            log.info("%s: the worker of an earlier daemon (process %d) is adopted", row.name, worker.pid)
            await asyncio.to_thread(_end_other_version, row.name, worker.dir)
        self._worker = worker
        usage = self._usage_of(row)
        code: int | None = None
        try:
            stopped = self._stopping.is_set() and not self._detaching.is_set()
            if worker is not None and (stopped or row.name in self._cancelled):
                await worker.stop()
            elif worker is not None:
                self._trackers.begin(Path(row.dir), self._config.tracking.of_round(row.name, self._config.state_dir))
                watch = WorkerWatch(row.name, worker, usage)
                code = await watch.follow(self._config.daemon.round_timeout_seconds, self._detaching)
            if row.name in self._cancelled:
                await self._fail(row, RoundState.TRAINING, self._cancelled[row.name])
                return
            if self._detaching.is_set():
                if worker is not None:
                    log.info("%s: its worker (process %d) goes on; the next daemon adopts it", row.name, worker.pid)
                return
            if self._stopping.is_set():
                await self._store.write(rounds.retry, row.id, RoundState.TRAINING, "it was stopped", 0)
                return
            result = await asyncio.to_thread(result_of, Path(row.dir), code)
        except TimeoutError:
            assert worker is not None
            await worker.stop()
            seconds = self._config.daemon.round_timeout_seconds
            await self._retry(row, RoundState.TRAINING, f"it ran longer than {seconds:g} s")
            return
        except TrainError as error:
            if worker is not None:
                await worker.stop()
            await self._end(row, error)
            return
        finally:
            await usage.settle()
            self._worker = None
        await self._store.write(_trained, row.id, result)

    async def _end(self, row: Row[Any], error: TrainError) -> None:
        """What follows the end of a worker without a result."""
        if not error.retryable:
            await self._fail(row, RoundState.TRAINING, str(error))
        elif (Path(row.dir) / END_FILE).exists():
            await self._store.write(rounds.retry, row.id, RoundState.TRAINING, "it ended at its checkpoint", 0)
        else:
            await self._retry(row, RoundState.TRAINING, str(error))

    def _usage_of(self, row: Row[Any]) -> RoundUsage:
        judge = self._config.judge
        return RoundUsage(self._store, self._budget, judge.budget, row.id, Path(row.dir), judge.prices)

    async def _retry(self, row: Row[Any], state: RoundState, why: str) -> None:
        if row.attempt >= self._config.daemon.round_attempts:
            await self._fail(row, state, f"{why} (attempt {row.attempt} of {row.attempt})")
            return
        log.warning("%s is retried: %s", row.name, why)
        await self._store.write(rounds.retry, row.id, state, why)

    async def _fail(self, row: Row[Any], state: RoundState, why: str) -> None:
        log.error("%s failed: %s", row.name, why)
        await asyncio.to_thread(clear, Path(row.dir), is_over=True)
        await self._store.write(rounds.finish, row.id, state, RoundState.FAILED, why)

    async def _evaluate(self, row: Row[Any]) -> None:
        result = RoundResult.model_validate(row.result)
        try:
            own = self._target_of(row)
        except TrainError as error:
            await self._fail(row, RoundState.EVALUATING, str(error))
            return
        if result.adapter is None or result.comparison is None:
            reason = result.reason or "the round left no adapter"
            log.warning("%s is rejected: %s", row.name, reason)
            await self._reject(row, reason)
            return
        try:
            found = await asyncio.to_thread(tree_sha256, Path(result.adapter.path))
        except OSError as error:
            why = f"{error.filename or result.adapter.path}: {error.strerror or error}"
            await self._note(f"{row.name} cannot be decided: {why}")
            attempted, hint = f"read the adapter of {row.name}", "Correct that: the daemon decides the round again."
            raise TrainError(attempted, why, hint, retryable=True) from error
        if found != result.adapter.sha256:
            await self._fail(row, RoundState.EVALUATING, f"the files in {result.adapter.path} have changed")
            return
        await self._store.write(rounds.add_adapter, row, result, self._config.model.base)
        decision = decide(result.comparison, self._config.gate)
        reason = result.explained(decision.reason)
        await self._store.write(gate_tests.record_decision, row.id, decision)
        if not decision.promote:
            log.info("%s is rejected: %s", row.name, reason)
            await self._reject(row, reason)
            return
        name, alias = result.adapter.name, own.config.model.alias
        # A crash may have followed the swap.
        if not await self._store.read(deployments.has_served, alias, name) and (
            why := await self._store.read(waits_for, own.config, row)
        ):
            uses = own.config.training.max_uses
            await self._store.write(rounds.let_wait, row, alias, reason, why, uses)
            await self._note("")
            log.info("%s passed the gate and waits for %s", row.name, why)
            return
        await self._promote(row, own, name, reason)

    async def _report(self) -> None:
        """Send trackers the decisions on the last rounds, also those that were made elsewhere, or before a crash."""
        tracking = self._config.tracking
        for row in await self._store.read(rounds.newest, REPORTED) if tracking.trackers else ():
            if row.live is None and self._reported.get(row.name) != row.state:
                self._reported[row.name] = row.state
                own = tracking.of_round(row.name, self._config.state_dir)
                self._trackers.end(Path(row.dir), own, decision_of(row.state, row.reason, row.result))

    async def close(self) -> None:
        """Wait until trackers have what is left, for a limited time."""
        await self._trackers.close()

    async def promote_passed(self) -> None:
        """Promote each candidate that need not wait any more, and reject those about which no person has decided in
        time. Raises ServeError when the servers cannot load a candidate now; the next call retries."""
        for waiting in await self._store.read(rounds.passed):
            async with self._deciding:
                row = await self._store.read(rounds.by_name, waiting.name)
                if self._stopping.is_set() or row is None or row.state != RoundState.PASSED:
                    continue
                try:
                    own = self._target_of(row)
                except TrainError as error:
                    await self._fail(row, RoundState.PASSED, str(error))
                    continue
                if why := await self._store.read(expired, own.config, row):
                    log.info("%s is rejected: %s", row.name, why)
                    await self._reject(row, f"{row.reason}; but {why}")
                elif not await self._store.read(waits_for, own.config, row):
                    await self._promote(row, own, row.name, row.reason)

    async def cancel_rolled_back(self) -> str | None:
        """End the live round that goes on from an adapter that was rolled back since, as `cancel` does."""
        row = await self._store.read(rounds.live)
        own = self._targets.get(row.target) if row is not None else None
        if row is None or own is None or row.parent is None:
            return None
        active = await self._store.read(deployments.active, own.config.model.alias)
        if active is None or row.parent == active.adapter or row.parent != active.previous:
            return None
        if (why := deployments.rollback_cause(active.reason)) is None:
            return None
        return await self.cancel(row.parent, f"its parent {row.parent} was rolled back{why}")

    async def cancel_erased(self) -> str | None:
        """End the live round that uses an erased task, as `cancel` does; the next one is planned without it. A round
        whose candidate waits is not live: it stays, and what it was trained on is said of it
        (`flywheel.store.views.erased_samples`)."""
        row = await self._store.read(rounds.live)
        if row is None:
            return None
        # A specification may be large: it is read again only if it, or what is erased, has changed.
        erased = await self._store.read(samples.count_erased)
        looked_at = row.name, erased, await asyncio.to_thread(file_identity, Path(row.dir) / SPEC_FILE)
        if looked_at == self._without_erased:
            return None
        if await _has_erased(self._store, row):
            return await self._cancel(row, rounds.HAS_ERASED)
        self._without_erased = looked_at
        return None

    async def cancel(self, parent: str, why: str) -> str | None:
        """End the live round that goes on from `parent` or is compared with it, in whatever state, and release its
        samples; its worker is stopped at once. Returns its name, None without such a round."""
        row = await self._store.read(rounds.live)
        if row is None or row.parent != parent:
            return None
        return await self._cancel(row, why)

    async def _cancel(self, row: Row[Any], why: str) -> str:
        self._cancelled[row.name] = why
        try:
            if self._worker is not None:
                await self._worker.stop()
            else:
                await _stop_workers(row)
            # `finish_live` fails the round, unless it does not run, or was deciding about it.
            async with self._finishing:
                left = await self._store.read(rounds.live)
                if left is not None and left.name == row.name:
                    await self._fail(left, RoundState(left.state), why)
        finally:
            self._cancelled.pop(row.name, None)
        return str(row.name)

    async def _reject(self, row: Row[Any], why: str) -> None:
        uses, rejected = self._config.training.max_uses, RoundState.REJECTED
        await self._store.write(rounds.finish, row.id, RoundState(row.state), rejected, why, max_uses=uses)

    async def _promote(self, row: Row[Any], own: _TargetRounds, adapter: str, reason: str) -> None:
        alias = own.config.model.alias
        active = await self._store.read(deployments.active, alias)
        serves = active.adapter if active is not None else None
        if serves != adapter and await self._store.read(deployments.has_served, alias, adapter):
            # It was swapped in before a crash and has been rolled back since.
            await self._promoted(row, f"{reason}; rolled back since")
            return
        if serves not in (adapter, row.parent):
            why = f"{reason}; but {rounds.other_serves(row.parent, serves)}"
            await self._fail(row, RoundState(row.state), why)
            return
        if serves != adapter:
            try:
                urls = await replica_urls(own.config.serving)
                ab_test = await asyncio.to_thread(_ab_test, own.config, urls)
                await own.deployer.deploy(adapter, f"{row.name}: {reason}", ab_test, instead_of=row.parent)
            except ServeError as error:
                # A server error does not fail the candidate, whose training may have taken hours.
                if error.retryable or error.condition == Condition.MISCONFIGURED:
                    await self._note(f"{row.name} is better, but {error}")
                    raise
                await self._fail(row, RoundState(row.state), f"better ({reason}), but not deployed: {error}")
                return
        await self._promoted(row, reason)

    async def _promoted(self, row: Row[Any], reason: str) -> None:
        await self._note("")
        uses, promoted = self._config.training.max_uses, RoundState.PROMOTED
        await self._store.write(rounds.finish, row.id, RoundState(row.state), promoted, reason, max_uses=uses)
        log.info("%s is promoted: %s", row.name, reason)

    async def stop(self, *, detach: bool = False) -> None:
        """Stop the worker and plan its round again, for the next start. `finish_live` then returns.

        With `detach`, the worker goes on, and its round stays in `training`: the next start adopts it.
        """
        self._stopping.set()
        if detach:
            self._detaching.set()
        elif self._worker is not None:
            await self._worker.stop()
        async with self._with_worker:
            pass  # `finish_live` has planned the round again, or left it

    async def _note_available(self, own: _TargetRounds, reason: str) -> None:
        available = await self._store.read(own.available_samples.now)
        target, found = own.config.target, (available.usable, available.needs, reason)
        if found != self._noted_supplies.get(target):
            await self._store.write(samples.note_available, *found, target)
            self._noted_supplies[target] = found

    async def _note(self, text: str) -> None:
        if await self._store.read(database.noted, database.ROUND_NOTE) != text:
            await self._store.write(database.note, database.ROUND_NOTE, text)


async def end_round_with_erased(store: Store) -> str | None:
    """What `Rounds.cancel_erased` does, for a command that has the state for itself: no daemon runs."""
    row = await store.read(rounds.live)
    if row is None or not await _has_erased(store, row):
        return None
    await _stop_workers(row)
    await asyncio.to_thread(clear, Path(row.dir), is_over=True)
    await store.write(rounds.finish, row.id, RoundState(row.state), RoundState.FAILED, rounds.HAS_ERASED)
    return str(row.name)


async def _has_erased(store: Store, row: Row[Any]) -> bool:
    """Whether a round uses an erased task, or its worker has recorded results or a reply of one."""
    if not await store.read(samples.count_erased):
        return False
    return await store.read(rounds.has_erased, row.id, await asyncio.to_thread(tasks_of, Path(row.dir)))


async def _stop_workers(row: Row[Any]) -> None:
    """Stop the worker that an earlier daemon started, recorded or not."""
    for worker in await asyncio.to_thread(WorkerProcess.strays, Path(row.dir)):
        await worker.stop()


def _ab_test(config: Config, urls: Collection[str]) -> ABTestRequest | None:
    """How a promotion is shared with the version before while it is watched; None if it is not, or could not be.
    `urls` are the servers."""
    share = config.deploy.watch.new_share
    if share == 1 or config.serving.call_log is None:
        return None
    pulled = pulled_servers(call_log_copy_path(config.state_dir))
    if off := [url for url in urls if url in pulled and pulled[url].condition == OFF]:
        log.warning("the promotion is not watched: %s records no calls", ", ".join(off))
        return None
    return ABTestRequest(share, secrets.token_hex(16))


def _end_other_version(name: str, directory: Path) -> None:
    """Ask an adopted worker to end at its next checkpoint if its version is another one: this daemon may not read its
    result. It is left to end where a further worker could not go on with its files."""
    if (version := version_of(directory)) in (None, __version__):
        return
    if has_format(directory):
        log.info("%s: its worker is of version %s, and ends at its next checkpoint", name, version)
        (directory / END_FILE).touch()
    else:
        log.info("%s: its worker is of version %s, and goes on: its files have another format", name, version)


def _trained(conn: Connection, round_id: int, result: RoundResult) -> None:
    rounds.store_result(conn, round_id, result)
    move(conn, round_id, RoundState.TRAINING, RoundState.EVALUATING, result.outcome, pid=None)


class WorkerWatch:
    """Watches one worker: logs its progress under `name` and books its judge usage."""

    def __init__(self, name: str, worker: WorkerProcess, usage: RoundUsage | None = None) -> None:
        self._name, self._worker, self._usage = name, worker, usage
        self._paused: str | None = None
        self._logged: RoundProgress | None = None
        self._logged_at = float("-inf")
        self._read_at = time.monotonic()
        self._worked_seconds = 0.0

    async def follow(self, most_seconds: float, leaving: asyncio.Event | None = None) -> int | None:
        """Wait for the worker's end; returns its exit code, see `WorkerProcess.wait`. None when `leaving` is set
        earlier.

        Raises TimeoutError when it worked for longer than `most_seconds` without pauses, and TrainError when it waits
        for tokens that the budget of this run does not have.
        """
        waiting = asyncio.create_task(self._worker.wait())
        try:
            while not waiting.done() and not (leaving is not None and leaving.is_set()):
                await asyncio.wait((waiting,), timeout=WATCH_SECONDS)
                beat()
                progress = await self._progress()
                if self._usage is not None:
                    await self._usage.settle()
                    paused = progress.paused if progress is not None else ""
                    if paused != self._paused:
                        await self._usage.note_pause(self._name, paused)
                        self._paused = paused
                    if progress is not None and progress.paused and (why := self._usage.used_up):
                        raise TrainError(f"finish {self._name}", why, "Raise the budget; the samples are free again.")
                if self._worked_seconds > most_seconds and not waiting.done():
                    raise TimeoutError
            return await waiting if waiting.done() else None
        finally:
            waiting.cancel()

    async def _progress(self) -> RoundProgress | None:
        """Read the progress, and log it when it changed."""
        now = time.monotonic()
        elapsed, self._read_at = now - self._read_at, now
        progress = await asyncio.to_thread(progress_of, self._worker.dir)
        if progress is None or not progress.paused:
            self._worked_seconds += elapsed
        if progress is None:
            return None
        before = self._logged
        changed = before is None or (before.phase, before.paused) != (progress.phase, progress.paused)
        moved = before is None or (before.step, before.rollouts) != (progress.step, progress.rollouts)
        if changed or (moved and now - self._logged_at >= LOG_SECONDS):
            log.info("%s: %s", self._name, progress.summary)
            self._logged, self._logged_at = progress, now
        return progress
