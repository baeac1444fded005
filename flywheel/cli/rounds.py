"""`flywheel round`, `deploy` and `rollback`: what the daemon does by itself, by hand."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from flywheel.cli.app import (
    ConfigOption,
    JsonOption,
    app,
    load_config,
    missing_state,
    print_json,
    read_state,
    read_state_or_warn,
    run_async,
    tell,
)
from flywheel.cli.tables import criterion_lines
from flywheel.errors import EXIT_FAILED, ServeError, StoreError, TrainError
from flywheel.terminal import escape_terminal, quantity

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from flywheel.config import Config
    from flywheel.daemon.deployer import Deployer
    from flywheel.daemon.rounds import Rounds
    from flywheel.judge_usage import UsageFile
    from flywheel.store.database import Store

T = TypeVar("T")


@app.command(name="round")
def train_round(
    config: ConfigOption = None,
    debug: Annotated[
        bool,
        typer.Option(
            "--debug", help="Rollouts and rewards only: no optimizer, and nothing is stored but what the judge took."
        ),
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Do not wait for trigger.min_samples.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="With --force: do not ask about too few samples.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Run one training round now."""
    settings = load_config(config)
    if force and not debug:
        _ask_about(run_async(read_state(settings, _shortage, settings)), yes)
    report = run_async(_debug(settings, quiet=as_json) if debug else _round(settings, force, quiet=as_json))
    if as_json:
        print_json(report)
    else:
        _print(escape_terminal(report))
    if report["state"] == "failed":
        raise typer.Exit(EXIT_FAILED)


def _shortage(conn: Connection, config: Config) -> str:
    """That a new round would be trained on fewer samples than it should be; empty where it would not."""
    from flywheel.daemon.supply import Supplies
    from flywheel.store.rounds import live

    supply = Supplies(config).now(conn)
    if live(conn) is not None or not supply.usable or supply.usable >= supply.needs:
        return ""
    return f"{supply.told}: a round on so few learns little"


def _ask_about(shortage: str, yes: bool) -> None:
    """Say it, and go on if somebody wants that. Raises UsageError where nobody can be asked."""
    if not shortage:
        return
    tell(f"flywheel: {shortage}")
    if yes:
        return
    if sys.stdin is None or not sys.stdin.isatty():
        raise typer.BadParameter("nobody can be asked whether to start it: give --yes", param_hint="--force")
    if not typer.confirm("Start it all the same?", err=True):
        raise typer.Exit(EXIT_FAILED)


async def _round(config: Config, force: bool, *, quiet: bool) -> dict[str, Any]:
    from flywheel.daemon.deployer import Deployer
    from flywheel.daemon.judge_setup import rubric_of
    from flywheel.daemon.lock import InstanceLock
    from flywheel.daemon.rounds import Rounds
    from flywheel.daemon.signals import StopSignals
    from flywheel.daemon.status import snapshot
    from flywheel.store.database import Store

    rubric = rubric_of(config)
    with InstanceLock(config.state_dir):
        store = await Store.open(config.state_dir)
        try:
            rounds = Rounds(store, config, rubric, Deployer(store, config))
            interruption = StopSignals(config.daemon.drain_seconds)
            name = await interruption.during(_train(rounds, store, config, force, quiet=quiet), rounds.stop)
            if interruption.by is not None:
                raise interruption.error("finish the round", await store.read(left_of_round))
            status = await store.read(snapshot, config)
        finally:
            await store.close()
    return next(entry for entry in status["rounds"] if entry["round"] == name)


async def _train(rounds: Rounds, store: Store, config: Config, force: bool, *, quiet: bool) -> str:
    """The round that was left unfinished, else a new one; its name when it has ended, or was stopped."""
    from flywheel.cli import progress_bars
    from flywheel.daemon.planner import due
    from flywheel.store.rounds import by_name, live

    if (row := await store.read(live)) is not None:
        name = str(row.name)
    elif force:
        name = await rounds.plan("by hand")
    else:
        wanted = await store.read(due, config)
        if not wanted.start:
            raise TrainError("start a round", wanted.reason, "Wait for that, or use --force.")
        name = await rounds.plan(wanted.reason)
    row = await store.read(by_name, name)
    assert row is not None
    async with progress_bars.of_round(Path(row.dir), quiet=quiet):
        await rounds.finish_live()
    return name


def left_of_round(conn: Connection) -> str:
    """What to know and do about the round after a stop."""
    from flywheel.store.rounds import live

    if (row := live(conn)) is None:
        return "No round is left unfinished."
    return f"{row.name} is {row.state}: the daemon, `flywheel run --once` or `flywheel round` goes on with it."


async def _debug(config: Config, *, quiet: bool) -> dict[str, Any]:
    from flywheel.cli import progress_bars
    from flywheel.daemon.judge_setup import rubric_of
    from flywheel.daemon.planner import debug_spec
    from flywheel.daemon.round_usage import left
    from flywheel.daemon.rounds import WorkerWatch
    from flywheel.daemon.signals import StopSignals
    from flywheel.daemon.status import metrics_of
    from flywheel.daemon.worker_process import WorkerProcess, result_of
    from flywheel.judge.budget import Budget
    from flywheel.judge_usage import UsageFile

    rubric = rubric_of(config)
    spec = await read_state_or_warn(config, debug_spec, config, rubric)
    directory = config.state_dir / "rounds" / "debug"
    usage, lent = (
        UsageFile(directory),
        await read_state_or_warn(config, left, config.judge.budget, Budget(config.judge.budget)),
    )
    if lent is not None and lent.tokens <= 0:
        raise TrainError("try a round", lent.why, "Or raise it.")

    async def begin_account() -> None:
        # An earlier one's calls are booked.
        usage.path.unlink(missing_ok=True)
        if lent is not None:
            lent.write(directory)

    interruption = StopSignals(config.daemon.drain_seconds)
    workers: list[WorkerProcess] = []

    async def work() -> int | None:
        # Signals are heard already: one that comes now must not leave the worker behind.
        workers.append(await WorkerProcess.start(directory, spec, begin_account))
        if interruption.by is not None:
            await stop()
        return await WorkerWatch("debug", workers[0]).follow(math.inf)

    async def stop() -> None:
        for worker in workers:
            await worker.stop()

    try:
        async with progress_bars.of_round(directory, quiet=quiet):
            code = await interruption.during(work(), stop)
    except BaseException:
        await stop()
        raise
    finally:
        await _book(config, usage)
    if interruption.by is not None:
        raise interruption.error("try a round", "Its worker has ended; nothing but what its judge took was stored.")
    result = result_of(directory, code)
    steps = [entry for entry in metrics_of(directory) if entry.get("event") == "step"]
    return {
        "round": "debug",
        "state": result.outcome,
        "reason": result.reason,
        "dir": str(directory),
        "metrics": steps,
    }


async def _book(config: Config, usage: UsageFile) -> None:
    """Count what a debug round's judge was used for. A running daemon is not in the way: what was spent is added."""
    from flywheel.store.database import Store
    from flywheel.store.verdicts import book

    found, _ = usage.read(0)
    if not found:
        return
    store = await Store.open(config.state_dir)
    try:
        await store.write(book, found)
    finally:
        await store.close()


def _print(report: dict[str, Any]) -> None:
    typer.echo(f"{report['round']}: {report['state']}{': ' + report['reason'] if report['reason'] else ''}")
    comparison = report.get("comparison")
    if comparison:
        typer.echo(
            f"held-out score {comparison['deployed_mean']:.3f} → {comparison['candidate_mean']:.3f} on "
            f"{quantity(comparison['tasks'], 'task')} (gain {comparison['lower']:+.3f} … {comparison['upper']:+.3f})"
        )
        for line in criterion_lines(comparison):
            typer.echo(line)
    for step in report.get("metrics", []):
        mean, deviation = step["reward_mean"], step["reward_std"]
        reward = "no reward" if mean is None else f"reward {mean:.3f} ± {deviation:.3f}"
        typer.echo(f"{reward}, {step['undecided']} undecided")
    typer.echo(f"files: {report['dir']}")


@app.command()
def deploy(
    adapter: Annotated[
        str, typer.Argument(metavar="ADAPTER", help="An adapter (`r0007`), or `base`, the base model.")
    ],
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Point the alias at an adapter: load it everywhere, prove that it answers, then flip."""
    settings = load_config(config)
    attempted = f"deploy adapter {adapter}"
    name = _adapter(adapter, settings, attempted)
    report = run_async(_deploy(settings, None if name == "base" else name, attempted))
    _print_swap(report, as_json)


@app.command()
def rollback(
    to: Annotated[str | None, typer.Option(metavar="ADAPTER", help="To this one, or to `base`.")] = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Point the alias back at the adapter that served before."""
    settings = load_config(config)
    attempted = f"roll {settings.model.alias} back"
    name = None if to is None else _adapter(to, settings, attempted)
    report = run_async(_rollback(settings, name, attempted))
    _print_swap(report, as_json)


def _adapter(text: str, config: Config, attempted: str) -> str:
    """The adapter that is meant, by its name or as `ALIAS@rNNNN`."""
    alias, at, name = text.rpartition("@")
    if not name:
        raise ServeError(attempted, "no adapter is named", "List what there is with `flywheel status`.")
    if at and alias != config.model.alias:
        why = f"{text} is no version of {config.model.alias}"
        raise ServeError(attempted, why, "Name the configuration whose model.alias it is with -c.")
    return name


@contextlib.asynccontextmanager
async def _deployer(config: Config, attempted: str) -> AsyncIterator[Deployer]:
    """What moves the alias, on a state that is there."""
    from flywheel.daemon.deployer import Deployer
    from flywheel.store.database import Store

    if missing := missing_state(config):
        # An empty one would know nothing to go back to, and would be made in a wrong place.
        hint = "Name the configuration with -c, or set state.dir or $FLYWHEEL_HOME to where the daemon has it."
        raise StoreError(attempted, missing, hint)
    store = await Store.open(config.state_dir)
    try:
        yield Deployer(store, config)
    finally:
        await store.close()


async def _deploy(config: Config, adapter: str | None, attempted: str) -> dict[str, Any]:
    async with _deployer(config, attempted) as deployer:
        report = await _undisturbed(deployer.deploy(adapter, "by hand"), attempted)
    return {"alias": config.model.alias, "adapter": adapter, "report": report.as_json()}


async def _rollback(config: Config, to: str | None, attempted: str) -> dict[str, Any]:
    async with _deployer(config, attempted) as deployer:
        adapter, report = await _undisturbed(deployer.rollback(to), attempted)
    return {"alias": config.model.alias, "adapter": adapter, "report": report.as_json()}


async def _undisturbed(swap: Coroutine[Any, Any, T], attempted: str) -> T:
    """What `swap` returns. A signal has it taken back, which no second one breaks off. Raises StoppedError."""
    from flywheel.daemon.signals import StopSignals

    async def nothing_more() -> None: ...

    interruption = StopSignals(drain_seconds=0)
    result = await interruption.during(swap, nothing_more)
    if result is None:
        raise interruption.error(attempted, "What served before still does; `flywheel status` shows it.")
    return result


def _print_swap(report: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(report)
    else:
        typer.echo(f"{report['alias']} is now answered by {report['adapter'] or 'the base model'}")
