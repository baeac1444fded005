"""A round that a person starts: the unfinished one, one that is due or forced, one of an adapter of another trainer,
or one that only shows rollouts."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection

from flywheel.config.file import Config
from flywheel.daemon.deployer import Deployer
from flywheel.daemon.file_round import run_worker
from flywheel.daemon.forecast import none_free
from flywheel.daemon.judging.judge_setup import rubric_of, rubric_of_target
from flywheel.daemon.rounds.planner import debug_spec, next_with_samples
from flywheel.daemon.rounds.round_usage import left
from flywheel.daemon.rounds.rounds import Rounds
from flywheel.daemon.rounds.sample_selection import AvailableSamplesCache
from flywheel.daemon.rounds.suites import require_grader
from flywheel.daemon.status import as_json, snapshot
from flywheel.errors import TrainError
from flywheel.judge.rubric.rubric import Rubric
from flywheel.judge.usage import Allowance, Budget, UsageFile
from flywheel.records.round import RoundSpec
from flywheel.store.judge_usage import book
from flywheel.store.kernel.database import Store, read_once
from flywheel.store.rounds import by_name, live
from flywheel.store.samples import count_free
from flywheel.system.signals import Stop, unless_cancelled
from flywheel.training.data.round_progress import read_steps

Beside = Callable[[Path], AbstractAsyncContextManager[None]]
"""What accompanies the worker of a round with this directory, such as a progress bar."""


def shortage(conn: Connection, config: Config, target: str | None) -> str:
    """That a new round would have fewer samples than it should; empty if it has enough."""
    available = AvailableSamplesCache(next_with_samples(conn, config, target)).now(conn)
    if live(conn) is not None or not available.usable or available.usable >= available.needs:
        return ""
    return f"{available.summary}: too few samples to learn much"


def left_of_round(conn: Connection) -> str:
    """What became of the round after a stop, and how it continues."""
    if (row := live(conn)) is None:
        return "No round is left unfinished."
    return f"{row.name} is {row.state}: the daemon, `flywheel run --once` or `flywheel round` continues it."


async def run(
    store: Store,
    config: Config,
    beside: Beside,
    *,
    target: str | None = None,
    force: bool = False,
    adapter: Path | None = None,
    trained_on: Path | None = None,
) -> dict[str, Any]:
    """Finish the unfinished round, or a new one: of the samples that a round is due for, or that `force` takes, or of
    another trainer's `adapter`, with the data that it was `trained_on`. Returns its entry of `flywheel status`. A
    signal stops it. Raises TrainError and StoppedError."""
    stop = Stop(config.daemon.drain_seconds)
    rounds = Rounds(store, config, rubric_of(config), Deployer(store, config), stop=stop)

    async def train() -> str:
        await rounds.promote_passed()
        if (row := await store.read(live)) is not None:
            if adapter is not None:
                hint = "`flywheel round` without --adapter finishes it."
                raise TrainError(f"compare the adapter in {adapter}", f"{row.name} is {row.state}", hint)
            name = str(row.name)
        elif adapter is not None:
            name = await rounds.plan_candidate(adapter, trained_on, target)
        elif force:
            name = await rounds.plan("by hand", target)
        else:
            decision = await rounds.due(target=target)
            if not decision.start:
                raise TrainError("start a round", *await store.read(_why_not, config, target, decision.reason))
            name = await rounds.plan(decision.reason, decision.target or None)
        row = await store.read(by_name, name)
        assert row is not None
        async with beside(Path(row.dir)):
            await rounds.finish_live()
        await rounds.close()
        return name

    name = await stop.during(train())
    if stop.by is not None:
        raise stop.error("finish the round", await store.read(left_of_round))
    status = await store.read(snapshot, config)
    entry: dict[str, Any] = as_json(next(each for each in status["rounds"] if each["round"] == name))
    return entry


def _why_not(conn: Connection, config: Config, target: str | None, reason: str) -> tuple[str, str]:
    """Why no round starts, and what to do."""
    own = next_with_samples(conn, config, target)
    if count_free(conn, own.takes.train):
        return reason, "Wait, or use --force."
    why, hint = none_free(conn, own)
    return f"{reason}; {why}", hint


async def show_rollouts(config: Config, target: str | None, beside: Beside) -> dict[str, Any]:
    """Generate and grade the rollouts of a first step, beside a daemon too. Only the judge's usage is stored. Returns
    the outcome, and the entries of `metrics.jsonl`. A signal stops it. Raises TrainError and StoppedError."""
    shared = rubric_of(config)

    def planned(conn: Connection) -> tuple[Config, RoundSpec, Allowance | None]:
        own = next_with_samples(conn, config, target)
        rubric: Rubric = rubric_of_target(own, shared)
        require_grader(own, rubric)
        budget = config.judge.budget
        return own, debug_spec(conn, own, rubric), left(conn, budget, Budget(budget))

    own, spec, lent = await read_once(config.state_dir, planned)
    if lent is not None and lent.tokens <= 0:
        raise TrainError("try a round", lent.why, "Or raise it.")
    directory = config.state_dir / "rounds" / spec.round_id
    usage = UsageFile(directory)

    async def begin_account() -> None:
        # The calls of an earlier one are already counted.
        usage.path.unlink(missing_ok=True)
        if lent is not None:
            lent.write(directory)

    working = run_worker(spec, directory, own, python=Path(sys.executable), prepare=begin_account)
    try:
        async with beside(directory):
            left_over = "Its worker has ended; only the judge's usage was stored."
            result = await unless_cancelled(working, "try a round", left_over)
    finally:
        if used := usage.read(0)[0]:
            store = await Store.open(config.state_dir)
            try:
                await store.write(book, used, config.judge.prices)
            finally:
                await store.close()
    return {
        "round": spec.round_id,
        "state": result.outcome,
        "reason": result.reason,
        "dir": str(directory),
        "metrics": read_steps(directory),
    }
