"""`flywheel round`, `deploy` and `rollback`: by hand what the daemon does by itself."""

from __future__ import annotations

import sys
from collections.abc import Coroutine
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flywheel.cli.app import (
    ConfigOption,
    JsonOption,
    absolute,
    app,
    complain,
    load_config,
    open_state,
    print_error,
    print_json,
    read_state,
    require_state,
    run_async,
)
from flywheel.cli.tables import criterion_lines, forecast_text
from flywheel.errors import EXIT_FAILED
from flywheel.system.terminal import escape_terminal, quantity

if TYPE_CHECKING:
    from flywheel.config.file import Config
    from flywheel.daemon.swap_by_hand import Swapped

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
        typer.Option(metavar="FILE", help="With --adapter: the file with its training data."),
    ] = None,
    target: TargetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run one training round now."""
    from flywheel.cli import progress_bars
    from flywheel.daemon.forecast import forecast
    from flywheel.daemon.rounds import by_hand
    from flywheel.training.data.rollout_file import in_short

    if trained_on is not None and adapter is None:
        raise typer.BadParameter("--trained-on needs --adapter", param_hint="--trained-on")
    if adapter is not None and (debug or force):
        raise typer.BadParameter("--adapter trains nothing: leave out --debug and --force", param_hint="--adapter")
    settings = load_config(config)
    expected = None
    if adapter is None:
        own = settings.by_target().get(target or "", settings)
        expected = run_async(read_state(settings, lambda conn: forecast(conn, own), warn=debug))
    if expected is not None and not as_json:
        typer.echo(forecast_text(expected))
    if force and not debug:
        question = partial(by_hand.shortage, config=settings, target=target)
        _confirm(run_async(read_state(settings, question, warn=False)), yes)

    def beside(directory: Path) -> AbstractAsyncContextManager[None]:
        return progress_bars.beside(progress_bars.of_round(directory, quiet=as_json))

    async def run() -> dict[str, Any]:
        files = {"adapter": adapter and absolute(adapter), "trained_on": trained_on and absolute(trained_on)}
        async with open_state(settings, lock=True) as store:
            return await by_hand.run(store, settings, beside, target=target, force=force, **files)

    if debug:
        report = run_async(by_hand.show_rollouts(settings, target, beside))
        report["rollouts"] = in_short(Path(report["dir"]))
    else:
        report = run_async(run())
    if as_json:
        print_json(report | {"forecast": expected and expected.as_json()})
    else:
        if adapter is not None:
            typer.echo(escape_terminal(report["trigger"]))
        _print(escape_terminal(report))
    if report["state"] == "failed":
        raise typer.Exit(EXIT_FAILED)


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
        from flywheel.cli.show import short_lines

        typer.echo()
        typer.echo("\n".join(short_lines(rollouts)))


@app.command(name="deploy")
def deploy_version(
    adapter: Annotated[
        str, typer.Argument(metavar="ADAPTER", help="An adapter (`r0007`), or `base`, the base model.")
    ],
    target: TargetOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Deploy an adapter: load it on every server, verify it there, then point the alias at it."""
    from flywheel.daemon.swap_by_hand import deploy, named_version

    settings = load_config(config)
    attempted = f"deploy adapter {adapter}"
    require_state(settings, attempted)
    own, name = run_async(named_version(settings, target, adapter, attempted))
    _swap(own, deploy(own, str(name), open_state), attempted, as_json)


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
    from flywheel.daemon.swap_by_hand import named_version, roll_back

    settings = load_config(config)
    attempted = f"roll {target or 'a target' if settings.targets else settings.model.alias} back"
    require_state(settings, attempted)
    own, name = run_async(named_version(settings, target, to, attempted))
    _swap(own, roll_back(own, name, open_state, complain), attempted, as_json)


def _swap(config: Config, swap: Coroutine[Any, Any, Swapped], attempted: str, as_json: bool) -> None:
    """A signal has the swap undone; a second one does not interrupt that. Raises StoppedError."""
    from flywheel.system.signals import unless_cancelled

    left = "The alias is unchanged; `flywheel status` shows it."
    adapter, swapped = run_async(unless_cancelled(swap, attempted, left))
    if as_json:
        print_json({"alias": config.model.alias, "adapter": adapter, "report": swapped.as_json()})
    else:
        typer.echo(f"{config.model.alias} is now {adapter or 'the base model'}")
