"""`flywheel prune`: remove the files of old rounds and old recorded calls by hand, as the daemon does regularly."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any

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
from flywheel.system.terminal import byte_size, escape_terminal, quantity

if TYPE_CHECKING:
    from flywheel.config.file import Config
    from flywheel.daemon.rounds.retention import PrunedLog, Removal

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
    from flywheel.daemon.rounds.retention import prune_call_logs

    removal = run_async(_prune(settings, days, dry_run=dry_run))
    logs = prune_call_logs(settings, dry_run=dry_run)
    if as_json:
        print_json(_as_json(removal, logs, dry_run=dry_run))
        return
    for line in [*_log_lines(settings, logs, dry_run=dry_run), *_lines(removal, logs, dry_run=dry_run)]:
        typer.echo(escape_terminal(line, one_line=True))


async def _prune(config: Config, keep_days: float | None, *, dry_run: bool) -> Removal:
    from flywheel.daemon.rounds.retention import Removal, Retention

    require_state(config, "remove files of old rounds")
    if keep_days is None:
        return Removal()
    async with open_state(config, "view" if dry_run else "open") as store:
        retention = Retention(store, config)
        if dry_run:
            return await retention.look(keep_days)
        return await retention.remove(keep_days, f"by hand, --keep-days {keep_days:g}", wait_seconds=WAIT_SECONDS)


def _as_json(removal: Removal, logs: list[PrunedLog], *, dry_run: bool) -> dict[str, Any]:
    return {
        "removed": [
            {"round": each.name, "state": each.state, "finished_at": each.finished_at, "bytes": size}
            for each, size in removal.removed
        ],
        "kept": [{"round": each.name, "why": why} for each, why in removal.kept],
        "bytes": removal.size,
        "call_logs": [
            {"path": str(each.path), "calls": each.calls, "size": each.size, "above": each.above} for each in logs
        ],
        "dry_run": dry_run,
    }


def _log_lines(config: Config, logs: list[PrunedLog], *, dry_run: bool) -> list[str]:
    kept = config.serving.call_log
    lines = []
    for each in logs:
        if not dry_run and each.calls:
            lines.append(f"{each.path}  {quantity(each.calls, 'call')} removed, {byte_size(each.size)} stay")
        elif dry_run and kept is not None:
            old = f"{quantity(each.calls, 'call')} older than {kept.keep_days:g} days" if each.calls else ""
            above = f"{byte_size(each.above)} above {kept.max_gb:g} GB" if each.above else ""
            if old or above:
                lines.append(f"{each.path}  {' and '.join(part for part in (old, above) if part)}")
    return lines


def _lines(removal: Removal, logs: list[PrunedLog], *, dry_run: bool) -> list[str]:
    lines = [
        f"{each.name}  {each.state}  {each.finished_at[:10]}  {byte_size(size)}  {each.dir}"
        for each, size in removal.removed
    ]
    lines += [f"{each.name}  stays: {why}" for each, why in removal.kept]
    if not removal.removed:
        return lines if any(each.calls or each.above for each in logs) else [*lines, "nothing to remove"]
    what = f"{quantity(len(removal.removed), 'round')}, {byte_size(removal.size)}"
    return [*lines, f"{what}{': dry run, nothing was removed' if dry_run else ' removed'}"]
