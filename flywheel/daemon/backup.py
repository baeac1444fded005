"""What a backup has: the state, what only Flywheel has, and what is needed to serve again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from sqlalchemy import Connection, select

from flywheel.config.file import Config
from flywheel.config.section import leaves
from flywheel.daemon.erasure import Eraser
from flywheel.daemon.rounds.removal import STAYS
from flywheel.records.states import AdapterState
from flywheel.sources.ingestion import Ingestion
from flywheel.store import erasures
from flywheel.store.backup import CONFIGURATION, FOLDERS_NOTE, Backup, tell
from flywheel.store.holder import locked
from flywheel.store.kernel.database import STATE_FILE, Store, note, noted, read_once
from flywheel.store.kernel.schema import adapters
from flywheel.store.task_file import FileState, noted_state
from flywheel.system.files import shipped_folder

DATABASES: Final = ("otlp/*.sqlite", "calls/*.sqlite", "calls/*.db", "serving/calls-*.db")
"""Received spans and recorded calls, of which there is no other copy."""
ELSEWHERE: Final = {"state", "sources", "model"}
"""Sections of the configuration whose paths are no files of it."""
DEPLOYABLE: Final = (AdapterState.STAGED, AdapterState.READY, AdapterState.RETIRED)


async def back_up(config: Config, folder: Path) -> Backup:
    """Make a backup in a folder, beside a running daemon. Raises StoreError and LockedError."""
    state = config.state_dir
    with Backup.into(folder, state) as made:
        if str(folder) not in json.loads(await read_once(state, noted, FOLDERS_NOTE) or "[]"):
            store = await Store.open(state)
            try:
                await store.write(_note_folder, folder)
            finally:
                await store.close()
        # First the state: what is received meanwhile is read again from where it was.
        made.add_database(STATE_FILE, state / STATE_FILE)
        await _add_rounds(made, config)
        await _add_task_file(made, config)
        for path in sorted(each for pattern in DATABASES for each in state.glob(pattern)):
            made.add_database(path.relative_to(state).as_posix(), path)
        for name, path in _configuration(config):
            made.add(name, path, masks=path.suffix in (".yaml", ".yml"))
    # Of those during the backup, too.
    await asyncio.to_thread(tell, [str(folder)], await read_once(state, erasures.everything_erased))
    return made


async def erase_again(config: Config, folder: Path) -> None:
    """Erase from a restored state what was erased since the backup in a folder. Raises FlywheelError. After a crash
    the daemon, or the next `flywheel forget`, goes on."""
    store = await Store.open(config.state_dir)
    ingestion = Ingestion(store, config)
    try:
        async with locked(store, config.state_dir):
            # The folder may have been another one when the backup was made.
            await store.write(_note_folder, folder)
            await Eraser(store, config, ingestion).finish()
    finally:
        await ingestion.close()
        await store.close()


def _note_folder(conn: Connection, folder: Path) -> None:
    """Have erasures told to the backup in a folder, beside those that another process makes meanwhile."""
    known = {*json.loads(noted(conn, FOLDERS_NOTE) or "[]"), str(folder)}
    note(conn, FOLDERS_NOTE, json.dumps(sorted(known)))


async def _add_rounds(made: Backup, config: Config) -> None:
    """The adapters that can be deployed, and what stays of each round."""
    for directory in sorted((config.state_dir / "rounds").glob("*/")):
        for path in sorted(directory / name for name in STAYS if (directory / name).is_file()):
            made.add(path.relative_to(config.state_dir).as_posix(), path)
    for name, folder in await read_once(made.copy_of_state, _adapters):
        if not folder.is_relative_to(config.state_dir):
            made.left_out[name] = f"its files are outside of the state directory, in {folder}"
        elif not folder.is_dir():
            made.left_out[name] = f"its files in {folder} are gone"
        else:
            made.add_tree(folder.relative_to(config.state_dir).as_posix(), folder)


async def _add_task_file(made: Backup, config: Config) -> None:
    """The task file as long as it was when the state was copied: later lines are written again after a restore."""
    path, noted = config.task_file, await read_once(made.copy_of_state, noted_state)
    if not path.is_relative_to(config.state_dir) or noted is None or noted.path != str(path):
        return
    now, name = FileState.of(path), path.relative_to(config.state_dir).as_posix()
    if now is None or now.size < noted.size or not now.begins.startswith(noted.begins):
        made.left_out[name] = "it was moved away or cut"
    else:
        made.add(name, path, noted.size)


def _adapters(conn: Connection) -> list[tuple[str, Path]]:
    query = select(adapters.c.name, adapters.c.path).where(adapters.c.state.in_(DEPLOYABLE))
    return [(name, Path(path)) for name, path in conn.execute(query)]


def _configuration(config: Config) -> Iterator[tuple[str, Path]]:
    """The configuration file, and the files that it names, such as rubrics, with their names in the backup."""
    if config.file is None:
        return
    home = config.file.absolute().parent
    named = [path for _, path in leaves(config.model_dump(exclude=ELSEWHERE)) if isinstance(path, Path)]
    own = {path.absolute() for path in named if path.is_file() and not path.is_relative_to(config.state_dir)}
    for path in sorted({config.file.absolute(), *own}):
        if path.is_relative_to(home):
            yield f"{CONFIGURATION}/{path.relative_to(home).as_posix()}", path
        elif not path.is_relative_to(shipped_folder()):
            yield f"{CONFIGURATION}/elsewhere{path.as_posix()}", path
