"""Progress of long commands on stderr, by rich: bars on a terminal, otherwise a line or log entry every ten seconds.

Of tasks that are judged (`of_tasks`), of sources that are read (`of_sources`), of a round (`of_round`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from flywheel.sources.ingestion import Ingestion
from flywheel.system.terminal import duration, escape_terminal
from flywheel.training.data.round_progress import RoundProgress, progress_of

log = logging.getLogger(__name__)

LINE_SECONDS = 10.0
"""Time between two lines where there is no terminal."""
DRAW_SECONDS: Final = 0.1
LONG_ROWS: Final = 4_000
"""Sources with fewer rows to read have no bar."""

NAME_SHOWN: Final = 24
"""Last characters of a source's path."""


class _RateColumn(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(rate_of(task), style="progress.data.speed")


def rate_of(task: Task) -> str:
    """How many are done per second, or per minute where these are few."""
    per_second = task.completed / (task.elapsed or 1e-9)
    if per_second < 1:
        return f"{60 * per_second:.0f}/min"
    return f"{per_second:,.0f}/s" if per_second >= 10 else f"{per_second:.1f}/s"


class _Bars(Progress):
    """A bar for each task that is visible."""

    def __init__(self, *, quiet: bool = False) -> None:
        console = Console(stderr=True, quiet=quiet)
        columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=None), MofNCompleteColumn(),
                   _RateColumn(), TimeRemainingColumn(), TextColumn("left"))  # fmt: skip
        is_drawn = console.is_terminal and not quiet
        super().__init__(*columns, console=console, transient=True, expand=True, disable=not is_drawn)
        self._printed = self.get_time()

    def lines(self, what: str = "") -> Iterator[str]:
        """Where no bars are drawn, a line for each now and then, with `what` behind its figures."""
        if not self.disable or self.get_time() - self._printed < LINE_SECONDS:
            return
        self._printed = self.get_time()
        for task in self.tasks:
            if task.visible and task.completed:
                total = left = ""
                if task.total is not None:
                    total = f" of {task.total:,.0f}"
                    seconds = (task.total - task.completed) * (task.elapsed or 0) / task.completed
                    left = f", {duration(seconds)} left"
                yield f"{task.description}: {task.completed:,.0f}{total}{what}, {rate_of(task)}{left}"


@contextlib.contextmanager
def of_tasks(what: str, total: int, *, quiet: bool = False) -> Iterator[Callable[[], None]]:
    """Show how many of `total` tasks are done; each call of what this yields counts one."""
    with _Bars(quiet=quiet) as bars:
        bar = bars.add_task(what, total=total)

        def step() -> None:
            bars.advance(bar)
            # A filter chain can release held tasks while others are judged: there may be more than were counted.
            bars.update(bar, total=max(total, bars.tasks[0].completed))
            for line in bars.lines():
                bars.console.print(line, markup=False, highlight=False, soft_wrap=True)

        yield step


async def of_sources(ingestion: Ingestion) -> None:
    """Show how much of each long source was read, until this is cancelled. Without a terminal the log has it, of each
    source that is being read."""
    with _Bars() as bars:

        def named(path: Path) -> str:
            short = "/".join(path.parts[-2:])[-NAME_SHOWN:]
            return str(path) if bars.disable else escape_terminal(short, one_line=True)

        sources = [
            (source, bars.add_task(named(source.path), total=None, visible=False)) for source in ingestion.sources()
        ]
        while True:
            for source, bar in sources:
                counts = source.connector.progress
                most = max(counts.in_all, counts.read)
                total = most if counts.in_all else None
                is_read = total is not None and counts.read == most
                is_shown = not is_read if bars.disable else most >= LONG_ROWS
                bars.update(bar, completed=counts.read, total=total, visible=is_shown)
            for line in bars.lines(" rows read"):
                log.info("%s", line)
            await asyncio.sleep(DRAW_SECONDS)


async def of_round(round_dir: Path, *, quiet: bool, name: str = "", more: Callable[[], str] = lambda: "") -> None:
    """Show the phase, step and rollouts of a round, and what `more` returns, until this is cancelled. Without a
    terminal the log has them."""
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        return
    columns = (
        TextColumn(escape_terminal(name or round_dir.name, one_line=True), markup=False),
        BarColumn(bar_width=20),
        TextColumn("{task.description}", markup=False),
    )
    with Progress(*columns, console=console, transient=True) as drawing:
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
