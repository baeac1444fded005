"""`flywheel backup` and `flywheel restore`: a copy of the state and what belongs to it, and the way back."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flywheel.cli.app import (
    ConfigOption,
    JsonOption,
    absolute,
    app,
    load_config,
    open_state,
    print_json,
    require_state,
    run_async,
)
from flywheel.cli.tables import short_path
from flywheel.config.file import Config
from flywheel.daemon.backup import back_up, erase_again
from flywheel.sources.audit import SourceAudit, compare_sources
from flywheel.store.backup import CURRENT
from flywheel.system.terminal import byte_size, escape_terminal, quantity

FolderArgument = Annotated[Path, typer.Argument(metavar="DIR", help="The folder of the backup.")]


@app.command()
def backup(folder: FolderArgument, config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Copy the state, beside a running daemon: database, adapters, received spans, recorded calls, configuration."""
    settings, folder = load_config(config), absolute(folder)
    require_state(settings, f"make a backup in {folder}")
    made = run_async(back_up(settings, folder))
    size = sum(each["size"] for each in made.files.values())
    if as_json:
        print_json(
            {
                "folder": str(folder / CURRENT),
                "files": len(made.files),
                "bytes": size,
                "copied_bytes": made.copied,
                "left_out": made.left_out,
            }
        )
        return
    what = f"{quantity(len(made.files), 'file')}, {byte_size(size)} in {short_path(folder / CURRENT)}"
    print(escape_terminal(f"{what}, of which {byte_size(made.copied)} are new", one_line=True))
    for name, why in made.left_out.items():
        print(escape_terminal(f"left out {name}: {why}", one_line=True))


@app.command()
def restore(folder: FolderArgument, config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Restore a backup into an empty state directory, and list replies that are only in the sources."""
    from flywheel.store import backup

    settings, folder = load_config(config), absolute(folder)
    found, manifest = backup.restore(folder, settings.state_dir)
    erased = len(backup.erased_since(folder))
    run_async(erase_again(settings, folder))
    sources = run_async(_compared(settings))
    kept = found / backup.CONFIGURATION
    if as_json:
        print_json(
            {
                "state_dir": str(settings.state_dir),
                "made_at": manifest["made_at"],
                "files": len(manifest["files"]),
                "left_out": manifest["left_out"],
                "erased": erased,
                "configuration": str(kept) if kept.is_dir() else None,
                "sources": [each.as_json() for each in sources],
            }
        )
        return
    lines = [f"{short_path(settings.state_dir)} is as it was at {manifest['made_at'][:19]}Z"]
    lines += [f"not in the backup: {name}: {why}" for name, why in manifest["left_out"].items()]
    if erased:
        lines.append(
            f"erased again: {quantity(erased, 'conversation or user', 'conversations and users')} of later erasures"
        )
    for each in sources:
        newer = each.not_read_yet + len(each.missing)
        lines.append(
            f"{each.path}: {each.error}"
            if each.error
            else f"{each.path}: {quantity(newer, 'reply', 'replies')} that are not in the restored state"
        )
    if any(each.not_read_yet or each.missing for each in sources):
        lines.append("`flywheel ingest`, or the daemon, reads them.")
    if kept.is_dir():
        lines.append(f"the configuration of the backup is in {short_path(kept)}; your configuration was not changed")
    for line in lines:
        print(escape_terminal(line, one_line=True))


async def _compared(config: Config) -> list[SourceAudit]:

    async with open_state(config, "view") as store:
        return await compare_sources(store, config)
