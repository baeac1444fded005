"""`flywheel prune`: remove the files of old rounds and old recorded calls by hand, as the daemon does regularly."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated

import typer

from flywheel.cli.app import (
    ConfigOption,
    JsonOption,
    app,
    complain,
    load_config,
    open_state,
    print_json,
    require_state,
    run_async,
)
from flywheel.config.file import Config
from flywheel.daemon.rounds.retention import Pruned, prune_call_logs, remove_old
from flywheel.system.terminal import byte_size, escape_terminal, quantity

WAIT_SECONDS = 120.0
"""Longest wait for a swap in progress."""


@app.command()
def prune(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what would be removed.")] = False,
    keep_days: Annotated[
        float | None,
        typer.Option(min=0, max=36_500, metavar="N", help="Keep rounds for N days, instead of retention.keep_days."),
    ] = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Remove adapters, rollouts and logs of old rounds that are no longer needed, and old recorded calls."""
    settings = load_config(config)
    if keep_days is not None and math.isnan(keep_days):
        raise typer.BadParameter("it must be a number", param_hint="--keep-days")
    days = settings.retention.keep_days if keep_days is None else keep_days
    if days is None:
        complain("retention.keep_days is null: files of rounds are kept. --keep-days N removes those of older ones.")
    require_state(settings, "remove files of old rounds")
    done = run_async(_prune(settings, days, dry_run=dry_run))
    if as_json:
        import msgspec

        told = msgspec.to_builtins(done)
        for each in told["removed"]:
            del each["dir"]
        print_json(told)
        return
    for line in _lines(settings, done):
        typer.echo(escape_terminal(line, one_line=True))


async def _prune(config: Config, keep_days: float | None, *, dry_run: bool) -> Pruned:

    done = Pruned(dry_run=dry_run)
    if keep_days is not None:
        why = f"by hand, --keep-days {keep_days:g}"
        async with open_state(config, "view" if dry_run else "open") as store:
            done = await remove_old(store, config, keep_days, why, dry_run=dry_run, wait_seconds=WAIT_SECONDS)
    done.call_logs = prune_call_logs(config, dry_run=dry_run)
    return done


def _lines(config: Config, done: Pruned) -> Iterator[str]:
    kept = config.serving.call_log
    logs = [each for each in done.call_logs if each.calls or (done.dry_run and each.above)]
    for log in logs:
        if done.dry_run and kept is not None:
            # How many calls are too many is known once they are removed.
            parts = [f"{quantity(log.calls, 'call')} older than {kept.keep_days:g} days"] if log.calls else []
            parts += [f"{byte_size(log.above)} above {kept.max_gb:g} GB"] if log.above else []
            yield f"{log.path}  {' and '.join(parts)}"
        else:
            yield f"{log.path}  {quantity(log.calls, 'call')} removed, {byte_size(log.size)} stay"
    for each in done.removed:
        yield f"{each.round}  {each.state}  {each.finished_at[:10]}  {byte_size(each.bytes)}  {each.dir}"
    yield from (f"{each.round}  stays: {each.why}" for each in done.kept)
    if done.removed:
        what = f"{quantity(len(done.removed), 'round')}, {byte_size(done.bytes)}"
        yield f"{what}{': dry run, nothing was removed' if done.dry_run else ' removed'}"
    elif not logs:
        yield "nothing to remove"
