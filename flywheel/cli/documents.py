"""`flywheel tasks from-documents`: the state and the progress beside what writes tasks."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from flywheel.cli.app import absolute, open_state
from flywheel.cli.progress_bars import of_tasks
from flywheel.config.file import Config
from flywheel.daemon.document_tasks import documents_in, write_tasks
from flywheel.errors import FlywheelError


async def run(
    config: Config, directory: Path, count: int, model: str | None, seed: int, *, dry_run: bool, quiet: bool
) -> tuple[dict[str, Any], FlywheelError | None]:
    """Have tasks written and stored; the report, and the error that ended it. Raises ConfigError without any text."""
    source = absolute(directory)
    found = documents_in(source, seed)
    progress = None if dry_run else partial(of_tasks, "writing", quiet=quiet)
    async with open_state(config, "view" if dry_run else "open") as store:
        return await write_tasks(store, config, source, found, count, model, progress)
