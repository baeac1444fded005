"""`flywheel prune`: what the daemon does now and then to old rounds, by hand."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flywheel.cli.app import ConfigOption, JsonOption, app, load_config, missing_state, print_json, run_async
from flywheel.errors import ConfigError, StoreError
from flywheel.terminal import byte_size, escape_terminal

if TYPE_CHECKING:
    from flywheel.config import Config
    from flywheel.daemon.retention import Removal

WAIT_SECONDS = 120.0
"""How long a swap that is under way is waited for."""


@app.command()
def prune(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    keep_days: Annotated[
        float | None, typer.Option(min=0, max=36_500, metavar="N", help="Instead of retention.keep_days.")
    ] = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Remove the adapters, rollouts and logs of old rounds that nothing needs any more."""
    settings = load_config(config)
    if keep_days is not None and math.isnan(keep_days):
        raise typer.BadParameter("it must be a number", param_hint="--keep-days")
    days = settings.retention.keep_days if keep_days is None else keep_days
    if days is None:
        raise ConfigError(
            "remove files of old rounds",
            "retention.keep_days is null: they stay for ever",
            "Say with --keep-days how many days they stay.",
        )
    done = run_async(_prune(settings, days, dry_run=dry_run))
    if as_json:
        print_json(_as_json(done, dry_run=dry_run))
        return
    for line in _lines(done, dry_run=dry_run):
        typer.echo(escape_terminal(line, one_line=True))


async def _prune(config: Config, keep_days: float, *, dry_run: bool) -> Removal:
    from flywheel.daemon.retention import Retention
    from flywheel.store.database import Store

    if missing := missing_state(config):
        hint = "Name the configuration with -c, or set state.dir or $FLYWHEEL_HOME to where the daemon has it."
        raise StoreError("remove files of old rounds", missing, hint)
    store = await (Store.view if dry_run else Store.open)(config.state_dir)
    try:
        retention = Retention(store, config)
        if dry_run:
            return await retention.look(keep_days)
        return await retention.remove(keep_days, f"by hand, --keep-days {keep_days:g}", wait_seconds=WAIT_SECONDS)
    finally:
        await store.close()


def _as_json(done: Removal, *, dry_run: bool) -> dict[str, Any]:
    return {
        "removed": [
            {"round": each.name, "state": each.state, "finished_at": each.finished_at, "bytes": size}
            for each, size in done.removed
        ],
        "kept": [{"round": each.name, "why": each.needed} for each in done.kept],
        "bytes": done.size,
        "dry_run": dry_run,
    }


def _lines(done: Removal, *, dry_run: bool) -> list[str]:
    lines = [
        f"{each.name}  {each.state}  {each.finished_at[:10]}  {byte_size(size)}  {each.dir}"
        for each, size in done.removed
    ]
    lines += [f"{each.name}  stays: {each.needed}" for each in done.kept]
    rounds = "1 round" if len(done.removed) == 1 else f"{len(done.removed)} rounds"
    if not done.removed:
        return [*lines, "nothing to remove"]
    return [*lines, f"{rounds}, {byte_size(done.size)}{': dry run, nothing was removed' if dry_run else ' removed'}"]
