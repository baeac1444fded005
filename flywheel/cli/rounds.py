"""`flywheel round`, `deploy` and `rollback`: by hand what the daemon does by itself."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from flywheel.cli.app import (
    ConfigOption,
    JsonOption,
    absolute,
    app,
    change_state,
    load_config,
    open_state,
    print_error,
    print_json,
    read_state,
    require_state,
    run_async,
)
from flywheel.cli.tables import criterion_lines, forecast_text, stdout
from flywheel.errors import EXIT_FAILED, ServeError, StateBusyError, TrainError
from flywheel.system.terminal import escape_terminal, quantity

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from flywheel.config.file import Config
    from flywheel.daemon.forecast import Forecast
    from flywheel.daemon.rounds.rounds import Rounds
    from flywheel.serving.client.adapter_swap import SwapReport
    from flywheel.store.kernel.database import Store

    Swap: TypeAlias = Callable[[], Coroutine[Any, Any, tuple[str | None, SwapReport]]]

TargetOption = Annotated[
    str | None, typer.Option("--target", metavar="NAME", help="The target, if there are several.")
]


@app.command(name="round")
def train_round(
    config: ConfigOption = None,
    debug: Annotated[
        bool,
        typer.Option(
            "--debug", help="Generate and grade rollouts without training; only the judge's usage is stored."
        ),
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Start with fewer samples than trigger.min_samples.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="With --force: do not ask for confirmation.")] = False,
    adapter: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Train nothing: compare this adapter, which another trainer made."),
    ] = None,
    trained_on: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="With --adapter: the data that it was trained on."),
    ] = None,
    target: TargetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run one training round now."""
    if trained_on is not None and adapter is None:
        raise typer.BadParameter("it is the data of an adapter: give --adapter", param_hint="--trained-on")
    if adapter is not None and (debug or force):
        raise typer.BadParameter("it needs no samples: leave out --debug and --force", param_hint="--adapter")
    settings = load_config(config)
    expected = None
    if adapter is None:
        expected = run_async(read_state(settings, partial(_forecast, settings, target), warn=False))
    if expected is not None and not as_json:
        typer.echo(forecast_text(expected))
    if force and not debug:
        shortage = run_async(read_state(settings, lambda conn: _shortage(conn, settings, target), warn=False))
        _confirm(shortage, yes)
    if debug:
        run = _debug(settings, target, quiet=as_json)
    else:
        files = tuple(path and absolute(path) for path in (adapter, trained_on))
        run = _round(settings, force, target, files, quiet=as_json)
    report = run_async(run)
    if as_json:
        print_json(report | {"forecast": expected and expected.as_json()})
    else:
        if adapter is not None:
            typer.echo(escape_terminal(report["trigger"]))
        _print(escape_terminal(report))
    if report["state"] == "failed":
        raise typer.Exit(EXIT_FAILED)


def _forecast(config: Config, target: str | None, conn: Connection) -> Forecast:
    """What the rounds of a target could train on; of all without one, or one that there is not."""
    from flywheel.daemon.forecast import forecast

    return forecast(conn, config.by_target().get(target or "", config))


def _why_not(conn: Connection, config: Config, target: str | None, reason: str) -> tuple[str, str]:
    """Why no round starts, and what to do."""
    from flywheel.daemon.forecast import none_free
    from flywheel.daemon.rounds.planner import next_with_samples
    from flywheel.store.samples import count_free

    own = next_with_samples(conn, config, target)
    if count_free(conn, own.takes.train):
        return reason, "Wait, or use --force."
    why, hint = none_free(conn, own)
    return f"{reason}; {why}", hint


def _shortage(conn: Connection, config: Config, target: str | None) -> str:
    """That a new round would have fewer samples than it should; empty if it has enough."""
    from flywheel.daemon.rounds.planner import next_with_samples
    from flywheel.daemon.rounds.sample_selection import AvailableSamplesCache
    from flywheel.store.rounds import live

    available = AvailableSamplesCache(next_with_samples(conn, config, target)).now(conn)
    if live(conn) is not None or not available.usable or available.usable >= available.needs:
        return ""
    return f"{available.summary}: a round with so few samples learns little"


def _confirm(shortage: str, yes: bool) -> None:
    """Ask whether to go on in spite of a shortage. A usage error if nobody can be asked."""
    if not shortage:
        return
    print_error(f"flywheel: {shortage}")
    if yes:
        return
    if sys.stdin is None or not sys.stdin.isatty():
        raise typer.BadParameter("stdin is not a terminal to confirm this on: give --yes", param_hint="--force")
    if not typer.confirm("Start it anyway?", err=True):
        raise typer.Exit(EXIT_FAILED)


async def _round(
    config: Config, force: bool, target: str | None, files: Sequence[Path | None], *, quiet: bool
) -> dict[str, Any]:
    from flywheel.daemon.deployer import Deployer
    from flywheel.daemon.judging.judge_setup import rubric_of
    from flywheel.daemon.rounds.rounds import Rounds
    from flywheel.daemon.status import as_json, snapshot
    from flywheel.system.signals import StopSignals

    rubric = rubric_of(config)
    async with open_state(config, lock=True) as store:
        rounds = Rounds(store, config, rubric, Deployer(store, config))
        interruption = StopSignals(config.daemon.drain_seconds)
        name = await interruption.during(
            _train(rounds, store, config, force, target, files, quiet=quiet), rounds.stop
        )
        if interruption.by is not None:
            raise interruption.error("finish the round", await store.read(left_of_round))
        status = await store.read(snapshot, config)
    return as_json(next(entry for entry in status["rounds"] if entry["round"] == name))


async def _train(
    rounds: Rounds,
    store: Store,
    config: Config,
    force: bool,
    target: str | None,
    files: Sequence[Path | None],
    *,
    quiet: bool,
) -> str:
    """Continue the unfinished round or run a new one; its name, once it has ended or was stopped. `files` are another
    trainer's adapter and its data."""
    from flywheel.cli import progress_bars
    from flywheel.store.rounds import by_name, live

    adapter, trained_on = files
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
    async with progress_bars.beside(progress_bars.of_round(Path(row.dir), quiet=quiet)):
        await rounds.finish_live()
    await rounds.close()
    return name


def left_of_round(conn: Connection) -> str:
    """What became of the round after a stop, and how it continues."""
    from flywheel.store.rounds import live

    if (row := live(conn)) is None:
        return "No round is left unfinished."
    return f"{row.name} is {row.state}: the daemon, `flywheel run --once` or `flywheel round` continues it."


async def _debug(config: Config, target: str | None, *, quiet: bool) -> dict[str, Any]:
    from flywheel.cli import progress_bars
    from flywheel.cli.rollouts import table_of
    from flywheel.daemon.judging.judge_setup import rubric_of, rubric_of_target
    from flywheel.daemon.rounds.planner import debug_spec, next_with_samples
    from flywheel.daemon.rounds.rounds import WorkerWatch, left
    from flywheel.daemon.rounds.suites import require_grader
    from flywheel.daemon.rounds.worker_process import WorkerProcess, result_of
    from flywheel.judge.usage import Budget, UsageFile
    from flywheel.store.judge_usage import book
    from flywheel.system.signals import StopSignals
    from flywheel.training.data.round_progress import read_steps

    shared = rubric_of(config)
    own = await read_state(config, lambda conn: next_with_samples(conn, config, target))
    rubric = rubric_of_target(own, shared)
    require_grader(own, rubric)
    spec = await read_state(config, lambda conn: debug_spec(conn, own, rubric), warn=False)
    directory = config.state_dir / "rounds" / "debug"
    usage, budget = UsageFile(directory), config.judge.budget
    lent = await read_state(config, lambda conn: left(conn, budget, Budget(budget)), warn=False)
    if lent is not None and lent.tokens <= 0:
        raise TrainError("try a round", lent.why, "Or raise it.")

    async def begin_account() -> None:
        # The calls of an earlier debug round are already counted.
        usage.path.unlink(missing_ok=True)
        if lent is not None:
            lent.write(directory)

    interruption = StopSignals(config.daemon.drain_seconds)
    workers: list[WorkerProcess] = []

    async def work() -> int | None:
        # A signal that arrived while the worker started must still stop it.
        workers.append(await WorkerProcess.start(directory, spec, begin_account))
        if interruption.by is not None:
            await stop()
        return await WorkerWatch("debug", workers[0]).follow(math.inf)

    async def stop() -> None:
        for worker in workers:
            await worker.stop()

    try:
        async with progress_bars.beside(progress_bars.of_round(directory, quiet=quiet)):
            code = await interruption.during(work(), stop)
    except BaseException:
        await stop()
        raise
    finally:
        # Also beside a running daemon.
        if used := usage.read(0)[0]:
            await change_state(config, lambda conn: book(conn, used, config.judge.prices), lock=False)
    if interruption.by is not None:
        raise interruption.error("try a round", "Its worker has ended; only the judge's usage was stored.")
    result = result_of(directory, code)
    return {
        "round": "debug",
        "state": result.outcome,
        "reason": result.reason,
        "dir": str(directory),
        "metrics": read_steps(directory),
        "rollouts": table_of(directory),
    }


def _print(report: dict[str, Any]) -> None:
    typer.echo(f"{report['round']}: {report['state']}{': ' + report['reason'] if report['reason'] else ''}")
    if report.get("waits_for"):
        typer.echo(f"it waits for {report['waits_for']}")
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
        missed = f", {step['missed']:,} ended at a call without a recorded result" if step.get("missed") else ""
        causes = step.get("program", {}).get("failures", {})
        late = causes.get("late_call", 0)
        failed = "".join(f", {number:,} failed ({cause})" for cause, number in causes.items() if cause != "late_call")
        failed += f", {quantity(late, 'process', 'processes')} replaced (late_call)" if late else ""
        typer.echo(f"{reward}, {step['undecided']} undecided{missed}{failed}")
    typer.echo(f"files: {report['dir']}")
    if rollouts := report.get("rollouts"):
        from flywheel.cli.rollouts import print_table

        typer.echo()
        print_table(stdout(), rollouts)


@app.command()
def deploy(
    adapter: Annotated[
        str, typer.Argument(metavar="ADAPTER", help="An adapter (`r0007`), or `base`, the base model.")
    ],
    target: TargetOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Deploy an adapter: load it on every server, verify it there, then point the alias at it."""
    from flywheel.store.deployments import BY_HAND

    settings = load_config(config)
    attempted = f"deploy adapter {adapter}"
    own = _settings_of(settings, target, adapter, attempted)
    name = _adapter(adapter, own, attempted)

    async def swap() -> tuple[str | None, SwapReport]:
        from flywheel.daemon.deployer import Deployer

        chosen = None if name == "base" else name
        async with open_state(own) as store:
            return chosen, await Deployer(store, own).deploy(chosen, BY_HAND)

    _swap(own, swap, attempted, as_json)


@app.command()
def rollback(
    to: Annotated[
        str | None, typer.Option(metavar="ADAPTER", help="Roll back to this adapter, or to `base`.")
    ] = None,
    target: TargetOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Roll back: point the alias at the previous adapter."""
    settings = load_config(config)
    attempted = f"roll {target or 'a target' if settings.targets else settings.model.alias} back"
    own = _settings_of(settings, target, to or "", attempted)
    name = None if to is None else _adapter(to, own, attempted)
    _swap(own, lambda: _roll_back(own, name), attempted, as_json)


async def _roll_back(config: Config, to: str | None) -> tuple[str | None, SwapReport]:
    """Roll back; if another process is in the middle of writing the state, the servers first."""
    from flywheel.daemon.deployer import GRACE_SECONDS, Deployer

    with contextlib.suppress(StateBusyError):
        async with open_state(config, busy_ms=round(GRACE_SECONDS * 1000)) as store:
            return await Deployer(store, config).rollback(to)
    print_error("flywheel: another process is writing the state: the servers are rolled back before it is recorded")
    async with open_state(config, "view") as store:
        await Deployer(store, config).roll_servers_back(to)
    async with open_state(config) as store:
        return await Deployer(store, config).rollback(to)


def _settings_of(config: Config, target: str | None, adapter: str, attempted: str) -> Config:
    """The settings of the target that is named, or whose round made the adapter. Raises ServeError."""
    from flywheel.store.rounds import by_name as round_by_name

    settings = config.by_target()
    if not config.targets:
        if target is not None:
            raise ServeError(attempted, "the configuration has no `targets`", "Leave out --target.")
        return settings[""]
    require_state(config, attempted)
    alias, _, name = adapter.rpartition("@")
    row = run_async(read_state(config, lambda conn: round_by_name(conn, name), warn=False))
    made_for = row.target if row is not None else ""
    if target is None:
        named = (own.target for own in settings.values() if own.model.alias == alias)
        target = next(named, None) or made_for or (next(iter(settings)) if len(settings) == 1 else None)
    names = ", ".join(settings)
    if target is None:
        raise ServeError(attempted, f"there are several targets: {names}", "Name one with --target.")
    if target not in settings:
        raise ServeError(attempted, f"there is no target {target}", f"The targets are {names}.")
    if made_for and made_for != target:
        why = f"{name} was trained for {made_for}, not for {target}"
        raise ServeError(attempted, why, f"Use --target {made_for}, or name another adapter.")
    return settings[target]


def _adapter(text: str, config: Config, attempted: str) -> str:
    """The adapter named as `rNNNN` or `ALIAS@rNNNN`."""
    alias, at, name = text.rpartition("@")
    if not name:
        raise ServeError(attempted, "no adapter is named", "`flywheel status` lists them.")
    if at and alias != config.model.alias:
        why = f"{text} is no version of {config.model.alias}"
        raise ServeError(attempted, why, "Name the configuration with that model.alias with -c.")
    return name


def _swap(config: Config, swap: Swap, attempted: str, as_json: bool) -> None:
    require_state(config, attempted)
    adapter, swapped = run_async(_run_swap(swap, attempted))
    if as_json:
        print_json({"alias": config.model.alias, "adapter": adapter, "report": swapped.as_json()})
    else:
        typer.echo(f"{config.model.alias} is now {adapter or 'the base model'}")


async def _run_swap(swap: Swap, attempted: str) -> tuple[str | None, SwapReport]:
    """A signal has the swap undone; a second one does not interrupt that. Raises StoppedError."""
    from flywheel.system.signals import unless_cancelled

    return await unless_cancelled(swap(), attempted, "The alias is unchanged; `flywheel status` shows it.")
