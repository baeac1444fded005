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
from collections.abc import Callable, Collection, Coroutine
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Self

from sqlalchemy import Connection, Row

from flywheel import __version__
from flywheel.config.file import Config
from flywheel.daemon.configured_source import apply_model_rules
from flywheel.daemon.deployer import ABTestRequest, Deployer
from flywheel.daemon.judging.judge_setup import judge_settings, rubric_of_target
from flywheel.daemon.rounds import candidate, planner
from flywheel.daemon.rounds.removal import tasks_of
from flywheel.daemon.rounds.round_usage import RoundUsage, left
from flywheel.daemon.rounds.sample_selection import AvailableSamplesCache, choose
from flywheel.daemon.rounds.suites import require_grader, suites_of
from flywheel.daemon.rounds.trackers import Trackers, decision_of, require_trackers
from flywheel.daemon.rounds.waiting import expired, waits_for
from flywheel.daemon.rounds.worker_process import WorkerProcess, result_of
from flywheel.daemon.rounds.worker_watch import WorkerWatch
from flywheel.errors import Condition, ServeError, TrainError
from flywheel.judge.filters.chain import chain_of
from flywheel.judge.grader import Grader
from flywheel.judge.rubric.rubric import Rubric
from flywheel.judge.usage import Budget
from flywheel.records.round import CANDIDATE_DIR, SPEC_FILE, RoundResult, Suite
from flywheel.records.states import RoundState
from flywheel.serving.calls.call_log import call_log_copy_path
from flywheel.serving.replica_addresses import replica_urls
from flywheel.sources.call_puller import OFF, pulled_servers
from flywheel.store import calibrations, deployments, gate_tests, rounds, samples
from flywheel.store.kernel import database
from flywheel.store.kernel.database import Store
from flywheel.store.kernel.transitions import move
from flywheel.system.files import file_identity, tree_sha256
from flywheel.system.signals import Stop, StopReason
from flywheel.training.data.round_directory import END_FILE, clear, has_format, version_of
from flywheel.training.gate.gate import decide

log = logging.getLogger(__name__)
_End = tuple[RoundState, str]
"""The state in which a round ends, and why."""
REPORTED: Final = 10
"""How many of the last rounds are looked at for decisions that trackers do not have."""


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
        self,
        store: Store,
        config: Config,
        rubric: Rubric,
        deployer: Deployer,
        budget: Budget | None = None,
        stop: Stop | None = None,
    ) -> None:
        """`budget` also counts what this run uses for judging tasks. Targets use `rubric` unless they have their own.
        When `stop` is asked for, the live round is planned again for the next start, or its worker goes on.

        Raises ConfigError for a wrong rubric or suite, or if the package of a tracker is missing.
        """
        require_trackers(config.tracking, "start rounds", Path(sys.executable))
        self._store = store
        self._budget = budget or Budget(config.judge.budget)
        self._config = config
        self._rubric = rubric
        self._targets = {name: _TargetRounds.of(own, rubric, deployer) for name, own in config.by_target().items()}
        self._stop = stop or Stop()
        self._turn = asyncio.Lock()
        """Held by whoever works on the live round: `finish_live`, and at its end `cancel`."""
        self._parts: dict[str, Stop] = {}
        """What ends the work on a round alone, by its name: the next one may begin before its worker has ended."""
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
                if not (why := await self._store.read(self._forbids, own)):
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
        if why := await self._store.read(self._forbids, own):
            raise TrainError("start a round", why, "Or change that setting.")
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

    def _forbids(self, conn: Connection, own: _TargetRounds) -> str:
        """Why no round may start: the rubric's agreement with people is below `judge.min_kappa`, or the judge budget
        allows no verdict; empty when one may."""
        if (bar := own.config.judge.min_kappa) is not None:
            with closing(Grader(own.rubric, judge_settings(own.config, chain_of(own.config)))) as grader:
                if why := calibrations.shortfall(conn, own.rubric.hash, grader.judge_hash, bar):
                    return why
        lent = left(conn, self._config.judge.budget, self._budget)
        return lent.why if lent is not None and lent.tokens <= 0 else ""

    async def finish_live(self) -> RoundState | None:
        """Take the live round as far as possible; its final state, or None without one.

        Raises ServeError when the candidate is better but the servers cannot load it now, and TrainError when the
        adapter's files cannot be read now. Then the round stays in `evaluating`, and the next call retries.
        """
        async with self._turn:
            try:
                return await self._finish_live()
            finally:
                await self._report()

    async def _finish_live(self) -> RoundState | None:
        while (row := await self._store.read(rounds.live)) is not None:
            state, stop = RoundState(row.state), self._stop_of(row)
            if not stop.is_set() and await _has_erased(self._store, row):
                # The request for it came before this process, or while the round was planned.
                stop.ask(StopReason.CANCELLED, rounds.HAS_ERASED)
            if stop.why:
                await self._end_early(row, state, stop.why)
            elif stop.is_set():
                break
            elif state in (RoundState.PLANNED, RoundState.TRAINING):
                await _whole(self._train(row, stop), stop)
            elif state is RoundState.ABANDONED:
                await self._retry(row, state, "its worker died")
            else:
                await self._decide(row)
            ended = await self._store.read(rounds.by_name, row.name)
            if ended is not None and ended.live is None:
                self._parts.pop(row.name, None)
                return RoundState(ended.state)
        return None

    def _stop_of(self, row: Row[Any]) -> Stop:
        return self._parts.setdefault(row.name, self._stop.part())

    async def _train(self, row: Row[Any], stop: Stop) -> None:
        """Start or adopt the worker of a round, and wait for its result, or until `stop` is asked for."""
        usage = RoundUsage(self._store, self._budget, self._config.judge, row.id, Path(row.dir))
        try:
            worker = await (self._start(row, usage) if row.state == RoundState.PLANNED else self._adopt(row))
        except TrainError as error:
            await self._finish(row, RoundState.PLANNED, RoundState.FAILED, str(error))
            return
        seconds = self._config.daemon.round_timeout_seconds
        code: int | None = None
        result: RoundResult | None = None
        try:
            if worker is not None and not stop.is_set():
                self._trackers.begin(worker.dir, self._config.tracking.of_round(row.name, self._config.state_dir))
                code = await WorkerWatch(row.name, worker, usage).follow(seconds, stop)
            # What a worker has finished when the process is stopped is kept.
            if stop.is_set() and (stop.why or code != 0):
                await self._end_early(row, RoundState.TRAINING, stop.why, worker)
            else:
                result = await asyncio.to_thread(result_of, Path(row.dir), code)
        except TimeoutError:
            assert worker is not None
            await worker.stop()
            await self._retry(row, RoundState.TRAINING, f"it ran longer than {seconds:g} s")
        except TrainError as error:
            if worker is not None:
                await worker.stop()
            await self._end(row, error)
        finally:
            await usage.settle()
        if result is not None:
            await self._store.write(_trained, row.id, result)

    async def _start(self, row: Row[Any], usage: RoundUsage) -> WorkerProcess:
        """Start the worker of a planned round. Raises TrainError."""
        own = self._target_of(row)
        row = await self._store.write(planner.begin, row, own.config, own.rubric)
        spec = await self._store.read(planner.spec_of, row, own.config, own.rubric, own.suites)
        for stray in await asyncio.to_thread(WorkerProcess.strays, Path(row.dir)):
            log.warning("%s: stopping a worker without a record (process %d)", row.name, stray.pid)
            await stray.stop()
        worker = await WorkerProcess.start(Path(row.dir), spec, usage.settle)
        pid = worker.pid
        try:
            await self._store.write(move, row.id, RoundState.PLANNED, RoundState.TRAINING, "worker started", pid=pid)
        except BaseException:
            # A worker that is not recorded would not be stopped with the daemon.
            await worker.stop()
            raise
        what = f"compares {spec.candidate.summary}" if spec.candidate else f"trains on {len(spec.train)} samples"
        log.info("%s %s (process %d)", row.name, what, pid)
        return worker

    async def _adopt(self, row: Row[Any]) -> WorkerProcess | None:
        """The worker that an earlier daemon started; None if it has ended."""
        if (worker := WorkerProcess.adopt(Path(row.dir), row.pid)) is not None:
            log.info("%s: resuming with the worker of an earlier daemon (process %d)", row.name, worker.pid)
            await asyncio.to_thread(_end_other_version, row.name, worker.dir)
        return worker

    async def _end_early(
        self, row: Row[Any], state: RoundState, why: str, worker: WorkerProcess | None = None
    ) -> None:
        """End the work on a round before it has a result: it fails, where this says why. Else the process ends: the
        round is planned again, or its worker goes on."""
        if not why and self._stop.detaches:
            if worker is not None:
                log.info(
                    "%s: its worker (process %d) keeps running; the next daemon resumes with it", row.name, worker.pid
                )
            return
        await (worker.stop() if worker is not None else _stop_workers(row))
        if why:
            await self._finish(row, state, RoundState.FAILED, why)
        else:
            await self._store.write(rounds.retry, row.id, state, "it was stopped", 0)

    async def _end(self, row: Row[Any], error: TrainError) -> None:
        """What follows the end of a worker without a result."""
        if not error.retryable:
            await self._finish(row, RoundState.TRAINING, RoundState.FAILED, str(error))
        elif (Path(row.dir) / END_FILE).exists():
            await self._store.write(rounds.retry, row.id, RoundState.TRAINING, "it ended at its checkpoint", 0)
        else:
            await self._retry(row, RoundState.TRAINING, str(error))

    async def _retry(self, row: Row[Any], state: RoundState, why: str) -> None:
        if row.attempt >= self._config.daemon.round_attempts:
            await self._finish(row, state, RoundState.FAILED, f"{why} (attempt {row.attempt} of {row.attempt})")
            return
        log.warning("%s is retried: %s", row.name, why)
        await self._store.write(rounds.retry, row.id, state, why)

    async def _finish(self, row: Row[Any], state: RoundState, end: RoundState, why: str) -> None:
        """End a round, which is in this state."""
        if end is RoundState.FAILED:
            log.error("%s failed: %s", row.name, why)
            await asyncio.to_thread(clear, Path(row.dir), is_over=True)
        else:
            log.info("%s is %s: %s", row.name, end.value, why)
        await self._note("")
        uses = self._config.training.max_uses
        await self._store.write(rounds.finish, row.id, state, end, why, max_uses=uses)

    async def _decide(self, row: Row[Any]) -> None:
        """Decide about a candidate that was evaluated, or waits, and end its round, unless it waits on."""
        state = RoundState(row.state)
        try:
            own = self._target_of(row)
            end = await (self._after_gate if state is RoundState.EVALUATING else self._after_wait)(row, own)
        except TrainError as error:
            if error.retryable:
                raise
            end = RoundState.FAILED, str(error)
        if end is not None:
            await self._finish(row, state, *end)

    async def _after_gate(self, row: Row[Any], own: _TargetRounds) -> _End | None:
        """How a round that was evaluated ends; None if its candidate waits."""
        result = RoundResult.model_validate(row.result)
        if result.adapter is None or result.comparison is None:
            return RoundState.REJECTED, result.reason or "the round left no adapter"
        try:
            found = await asyncio.to_thread(tree_sha256, Path(result.adapter.path))
        except OSError as error:
            why = f"{error.filename or result.adapter.path}: {error.strerror or error}"
            await self._note(f"{row.name} cannot be decided: {why}")
            attempted, hint = f"read the adapter of {row.name}", "Correct that; the daemon then retries the decision."
            raise TrainError(attempted, why, hint, retryable=True) from error
        if found != result.adapter.sha256:
            return RoundState.FAILED, f"the files in {result.adapter.path} have changed"
        await self._store.write(rounds.add_adapter, row, result, self._config.model.base)
        decision = decide(result.comparison, self._config.gate)
        reason = result.explained(decision.reason)
        await self._store.write(gate_tests.record_decision, row.id, decision)
        if not decision.promote:
            return RoundState.REJECTED, reason
        name, alias = result.adapter.name, own.config.model.alias
        # A crash may have followed the swap.
        if not await self._store.read(deployments.has_served, alias, name) and (
            why := await self._store.read(waits_for, own.config, row)
        ):
            uses = own.config.training.max_uses
            await self._store.write(rounds.let_wait, row, alias, reason, why, uses)
            await self._note("")
            log.info("%s passed the gate and waits for %s", row.name, why)
            return None
        return await self._promoted(row, own, name, reason)

    async def _after_wait(self, row: Row[Any], own: _TargetRounds) -> _End | None:
        """How a round whose candidate waited ends; None if it waits on."""
        if why := await self._store.read(expired, own.config, row):
            return RoundState.REJECTED, f"{row.reason}; but {why}"
        if await self._store.read(waits_for, own.config, row):
            return None
        return await self._promoted(row, own, row.name, row.reason)

    async def _promoted(self, row: Row[Any], own: _TargetRounds, adapter: str, reason: str) -> _End:
        """How a round ends whose adapter is swapped in now, unless a crash followed the swap."""
        alias = own.config.model.alias
        active = await self._store.read(deployments.active, alias)
        serves = active.adapter if active is not None else None
        if serves == adapter:
            return RoundState.PROMOTED, reason
        if await self._store.read(deployments.has_served, alias, adapter):
            return RoundState.PROMOTED, f"{reason}; rolled back since"
        if serves != row.parent:
            return RoundState.FAILED, f"{reason}; but {rounds.other_serves(row.parent, serves)}"
        try:
            urls = await replica_urls(own.config.serving)
            ab_test = await asyncio.to_thread(_ab_test, own.config, urls)
            # Another process, or the promotion of another round, may have made a swap: `instead_of` tells.
            await own.deployer.deploy(adapter, f"{row.name}: {reason}", ab_test, instead_of=row.parent)
        except ServeError as error:
            # A server error does not fail the candidate, whose training may have taken hours.
            if error.retryable or error.condition == Condition.MISCONFIGURED:
                await self._note(f"{row.name} is better, but {error}")
                raise
            return RoundState.FAILED, f"better ({reason}), but not deployed: {error}"
        return RoundState.PROMOTED, reason

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
            # The promotion of another one may have ended it.
            row = await self._store.read(rounds.by_name, waiting.name)
            if self._stop.is_set() or row is None or row.state != RoundState.PASSED:
                continue
            await self._decide(row)

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
        return await self.cancel(row, f"its parent {row.parent} was rolled back{why}")

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
            return await self.cancel(row, rounds.HAS_ERASED)
        self._without_erased = looked_at
        return None

    async def cancel(self, row: Row[Any], why: str) -> str:
        """End the live round in whatever state, and release its samples; its worker is stopped at once. Returns its
        name."""
        stop = self._stop_of(row)
        stop.ask(StopReason.CANCELLED, why)
        async with self._turn:
            # `finish_live` has failed it, unless it does not run, or was deciding about it.
            left = await self._store.read(rounds.live)
            if left is not None and left.name == row.name:
                await self._end_early(left, RoundState(left.state), why)
            self._parts.pop(row.name, None)
        return str(row.name)

    async def _note_available(self, own: _TargetRounds, reason: str) -> None:
        available = await self._store.read(own.available_samples.now)
        target, found = own.config.target, (available.usable, available.needs, reason)
        if found != self._noted_supplies.get(target):
            await self._store.write(samples.note_available, *found, target)
            self._noted_supplies[target] = found

    async def _note(self, text: str) -> None:
        if await self._store.read(database.noted, database.ROUND_NOTE) != text:
            await self._store.write(database.note, database.ROUND_NOTE, text)


async def _whole(work: Coroutine[Any, Any, None], stop: Stop) -> None:
    """Do work that no cancellation interrupts: it asks for the `stop` instead, and waits."""
    task = asyncio.create_task(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        stop.ask(StopReason.FINISHED)
        await asyncio.wait((task,))
        task.result()
        raise


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
        log.warning("no canary for this promotion: %s records no calls", ", ".join(off))
        return None
    return ABTestRequest(share, secrets.token_hex(16))


def _end_other_version(name: str, directory: Path) -> None:
    """Ask an adopted worker to end at its next checkpoint if its version is another one: this daemon may not read its
    result. It is left to end where a further worker could not go on with its files."""
    if (version := version_of(directory)) in (None, __version__):
        return
    if has_format(directory):
        log.info("%s: its worker of version %s ends at its next checkpoint", name, version)
        (directory / END_FILE).touch()
    else:
        log.info("%s: its worker of version %s keeps running: its files have another format", name, version)


def _trained(conn: Connection, round_id: int, result: RoundResult) -> None:
    rounds.store_result(conn, round_id, result)
    move(conn, round_id, RoundState.TRAINING, RoundState.EVALUATING, result.outcome, pid=None)
