"""How far a round is, on a terminal: one line with a bar, on stderr. Elsewhere the log has it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from flywheel.progress import Progress, progress_of
from flywheel.terminal import disarmed

if TYPE_CHECKING:
    from rich.console import Console

DRAW_SECONDS: Final = 0.5


@contextlib.asynccontextmanager
async def shown(round_dir: Path, *, quiet: bool) -> AsyncIterator[None]:
    """Show how far the round is while the body runs it."""
    from rich.console import Console

    from flywheel.cli.counter import drawn

    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield
        return
    async with drawn(_bar(console, round_dir)):
        yield


async def _bar(console: Console, round_dir: Path) -> None:
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn(disarmed(round_dir.name, one_line=True), markup=False),
        BarColumn(bar_width=20),
        TextColumn("{task.description}", markup=False),
    )
    with Bars(*columns, console=console, transient=True) as bars, _log_above():
        bar = bars.add_task("starting", total=None)
        while True:
            if (progress := progress_of(round_dir)) is not None:
                total = None if progress.phase == "starting" else 1.0
                told = disarmed(progress.told, one_line=True)
                bars.update(bar, description=told, total=total, completed=_share(progress))
            await asyncio.sleep(DRAW_SECONDS)


def _share(progress: Progress) -> float:
    """How much of its phase is done."""
    within = progress.rollouts / progress.rollouts_planned if progress.rollouts_planned else 0.0
    if progress.phase == "evaluating" or not progress.steps:
        return within
    return min(1.0, (progress.step + within) / progress.steps)


@contextlib.contextmanager
def _log_above() -> Iterator[None]:
    """Lines of the log come above the bar and not into it: they are written to where rich looks."""
    handlers = [each for each in logging.getLogger().handlers if isinstance(each, logging.StreamHandler)]
    before = [each.setStream(sys.stderr) for each in handlers]
    try:
        yield
    finally:
        for handler, stream in zip(handlers, before, strict=True):
            if stream is not None:
                handler.setStream(stream)
