"""How far a long ingestion is: a bar per long source on a terminal, else a line of log now and then. On stderr."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from flywheel.cli.facts import place
from flywheel.terminal import disarmed

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from flywheel.daemon.ingestion import Ingestion
    from flywheel.sources.studio_connector import Progress as Pace

log = logging.getLogger(__name__)

LONG_ROWS: Final = 4_000
"""A source with so many rows to read is shown."""
BAR_SECONDS: Final = 0.1
LOG_SECONDS = 10.0
"""Without a terminal: how long nothing is said, and how often something is said then."""


@contextlib.asynccontextmanager
async def shown(ingestion: Ingestion) -> AsyncIterator[None]:
    """Show how far the sources are while the body reads them."""
    from rich.console import Console

    from flywheel.cli.counter import drawn

    console = Console(stderr=True)
    async with drawn(_bars(console, ingestion) if console.is_terminal else _lines(ingestion)):
        yield


async def _bars(console: Console, ingestion: Ingestion) -> None:
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None),
        TaskProgressColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    bars: dict[Path, _Bar] = {}
    intakes = ingestion.intakes()
    with Progress(*columns, console=console, transient=True, expand=True) as progress:
        while True:
            for intake in intakes:
                found = intake.feed.progress
                if max(found.in_all, found.read) < LONG_ROWS:
                    continue
                if intake.path not in bars:
                    bars[intake.path] = _Bar(progress, intake.path, console.width)
                bars[intake.path].draw(found)
            await asyncio.sleep(BAR_SECONDS)


class _Bar:
    """A long source's."""

    def __init__(self, progress: Progress, path: Path, width: int) -> None:
        self._progress = progress
        self._task = progress.add_task(_end_of(disarmed(place(path)), max(12, width - 60)), visible=False, rate="")

    def draw(self, found: Pace) -> None:
        total = max(found.in_all, found.read) if found.in_all else None
        rate = f"{found.rate:,.0f} rows/s"
        self._progress.update(self._task, total=total, completed=found.read, rate=rate, visible=True)


def _end_of(text: str, width: int) -> str:
    return text if len(text) <= width else f"…{text[1 - width :]}"


async def _lines(ingestion: Ingestion) -> None:
    intakes = ingestion.intakes()
    while True:
        await asyncio.sleep(LOG_SECONDS)
        for intake in intakes:
            found = intake.feed.progress
            if found.read and (not found.in_all or found.read < found.in_all):
                of = f" of {found.in_all:,}" if found.in_all else ""
                left = "" if found.left is None else f", about {found.left:,.0f} s left"
                rate = f"{found.rate:,.0f} rows/s"
                log.info("%s: %s%s rows read, %s%s", intake.path, f"{found.read:,}", of, rate, left)
