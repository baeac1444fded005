"""Backups of a state directory."""

from __future__ import annotations

from pathlib import Path

from flywheel.store.backup import Backup
from flywheel.store.kernel.database import STATE_FILE as STATE


def back_up(state: Path, folder: Path) -> Backup:
    """One of the database, the rounds and the task file."""
    with Backup.into(folder, state) as made:
        made.add_database(STATE, state / STATE)
        made.add_tree("rounds", state / "rounds")
        made.add("tasks.jsonl", state / "tasks.jsonl")
    return made
