"""Progress of long commands on stderr: bars on a terminal, otherwise a line or a log entry every ten seconds.

Of tasks that are judged (`of_tasks`), of sources that are read (`of_sources`), of a round (`of_round`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from flywheel.cli.tables import short_path
from flywheel.system.terminal import duration, escape_terminal
from flywheel.training.data.round_progress import RoundProgress, progress_of

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID

    from flywheel.sources.ingestion import Ingestion

log = logging.getLogger(__name__)

LINE_SECONDS = 10.0
"""Time between two lines where there is no terminal."""
DRAW_SECONDS: Final = 0.1
LONG_ROWS: Final = 4_000
"""Sources with fewer rows to read are not shown."""


@contextlib.contextmanager
def of_tasks(what: str, total: int, *, quiet: bool = False) -> Iterator[Callable[[], None]]:
    """Show how many of `total` tasks are done; each call of what this yields counts one."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True, quiet=quiet)
    rate_column = TextColumn("{task.fields[rate]}", style="progress.data.speed")
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=None), MofNCompleteColumn(), rate_column,
               TimeRemainingColumn(), TextColumn("left"))  # fmt: skip
    is_drawn = console.is_terminal and not quiet
    began = printed = time.monotonic()
    done = 0

    def step() -> None:
        nonlocal done, printed
        done += 1
        now = time.monotonic()
        per_second = done / max(now - began, 1e-9)
        # A filter chain can release held tasks while others are judged, so there may be more than counted at first.
        most = max(total, done)
        rate = f"{per_second:,.0f}/s" if per_second >= 10 else f"{per_second:.1f}/s"
        if per_second < 1:
            rate = f"{60 * per_second:.0f}/min"
        drawing.update(bar, completed=done, total=most, rate=rate)
        if not is_drawn and now - printed >= LINE_SECONDS:
            printed = now
            line = f"{what}: {done:,} of {most:,}, {rate}, {duration((most - done) / per_second)} left"
            console.print(line, markup=False, highlight=False, soft_wrap=True)

    with Progress(*columns, console=console, transient=True, expand=True, disable=not is_drawn) as drawing:
        bar = drawing.add_task(what, total=total, rate="")
        yield step


async def of_sources(ingestion: Ingestion) -> None:
    """Show how much of each long source was read, until this is cancelled."""
    from rich.console import Console

    console = Console(stderr=True)
    if console.is_terminal:
        await _draw_sources(console, ingestion)
    sources = ingestion.sources()
    while True:
        await asyncio.sleep(LINE_SECONDS)
        for source in sources:
            progress = source.connector.progress
            if progress.read and (not progress.in_all or progress.read < progress.in_all):
                total = f" of {progress.in_all:,}" if progress.in_all else ""
                left = "" if progress.left is None else f", about {progress.left:,.0f} s left"
                log.info("%s: %s%s rows read, %s rows/s%s", source.path, f"{progress.read:,}", total,
                         f"{progress.rate:,.0f}", left)  # fmt: skip


async def _draw_sources(console: Console, ingestion: Ingestion) -> None:
    from rich import progress as rich

    columns = (rich.TextColumn("{task.description}", markup=False), rich.BarColumn(bar_width=None),
               rich.TaskProgressColumn(), rich.MofNCompleteColumn(), rich.TextColumn("{task.fields[rate]}"),
               rich.TimeRemainingColumn())  # fmt: skip
    width = max(12, console.width - 60)
    bars: dict[Path, TaskID] = {}
    sources = ingestion.sources()
    with rich.Progress(*columns, console=console, transient=True, expand=True) as drawing:
        while True:
            for source in sources:
                counts = source.connector.progress
                most = max(counts.in_all, counts.read)
                if most < LONG_ROWS:
                    continue
                if source.path not in bars:
                    name = escape_terminal(short_path(source.path))
                    bars[source.path] = drawing.add_task(
                        name if len(name) <= width else f"…{name[1 - width :]}", rate=""
                    )
                total = most if counts.in_all else None
                rate = f"{counts.rate:,.0f} rows/s"
                drawing.update(bars[source.path], total=total, completed=counts.read, rate=rate)
            await asyncio.sleep(DRAW_SECONDS)


async def of_round(round_dir: Path, *, quiet: bool, name: str = "", more: Callable[[], str] = lambda: "") -> None:
    """Show the phase, step and rollouts of a round, and what `more` returns, until this is cancelled. Without a
    terminal the log has them."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        return
    columns = (
        TextColumn(escape_terminal(name or round_dir.name, one_line=True), markup=False),
        BarColumn(bar_width=20),
        TextColumn("{task.description}", markup=False),
    )
    with Progress(*columns, console=console, transient=True) as drawing, _log_above():
        bar = drawing.add_task("starting", total=None)
        while True:
            if (progress := progress_of(round_dir)) is not None:
                total = None if progress.phase == "starting" else 1.0
                text = escape_terminal(", ".join(filter(None, (progress.summary, more()))), one_line=True)
                drawing.update(bar, description=text, total=total, completed=_share_done(progress))
            await asyncio.sleep(DRAW_SECONDS)


def _share_done(progress: RoundProgress) -> float:
    """The share of the current phase that is done, 0 to 1."""
    of_step = progress.rollouts / progress.rollouts_planned if progress.rollouts_planned else 0.0
    if progress.phase == "evaluating" or not progress.steps:
        return of_step
    return min(1.0, (progress.step + of_step) / progress.steps)


@contextlib.contextmanager
def _log_above() -> Iterator[None]:
    """Log lines are printed above the bar: handlers write to the stderr that rich has redirected."""
    handlers = [each for each in logging.getLogger().handlers if isinstance(each, logging.StreamHandler)]
    before = [each.setStream(sys.stderr) for each in handlers]
    try:
        yield
    finally:
        for handler, stream in zip(handlers, before, strict=True):
            if stream is not None:
                handler.setStream(stream)


@contextlib.asynccontextmanager
async def beside(drawing: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run `drawing`, one of the above, while the body runs."""
    task = asyncio.create_task(drawing)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
