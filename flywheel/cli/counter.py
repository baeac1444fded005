"""How far a long command is, on stderr: a bar with rate and time left on a terminal, else a line now and then."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Coroutine
from typing import Any, Final, Self

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

from flywheel.quantity import duration

LINE_SECONDS: Final = 10.0
"""How often there is a line where there is no terminal."""


@contextlib.asynccontextmanager
async def drawn(drawing: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run `drawing`, which does not end by itself, while the body runs."""
    showing = asyncio.create_task(drawing)
    try:
        yield
    finally:
        showing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await showing


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text("" if task.speed is None else _rate(task.speed), style="progress.data.speed")


class Counter:
    """A context; `step` counts one."""

    def __init__(self, what: str, total: int, *, quiet: bool = False) -> None:
        self._what = what
        self._total = total
        self._quiet = quiet
        self._done = 0
        console = Console(stderr=True)
        self._bar: Progress | None = None
        if console.is_terminal and not quiet:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(bar_width=None),
                MofNCompleteColumn(),
                _Rate(),
                TimeRemainingColumn(),
                TextColumn("left"),
            )
            self._bar = Progress(*columns, console=console, transient=True, expand=True)
            self._task = self._bar.add_task(what, total=total)
        self._console = console

    def __enter__(self) -> Self:
        self._began = self._told = time.monotonic()
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: Any) -> None:
        if self._bar is not None:
            self._bar.stop()

    def step(self) -> None:
        self._done += 1
        if self._bar is not None:
            # A chain can free tasks while others are judged.
            self._bar.update(self._task, completed=self._done, total=max(self._total, self._done))
        elif not self._quiet and (now := time.monotonic()) - self._told >= LINE_SECONDS:
            self._told = now
            speed = self._done / (now - self._began)
            total = max(self._total, self._done)
            left = (total - self._done) / speed
            line = f"{self._what}: {self._done:,} of {total:,}, {_rate(speed)}, {duration(left)} left"
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def _rate(speed: float) -> str:
    return f"{speed:,.0f}/s" if speed >= 10 else f"{speed:.1f}/s" if speed >= 1 else f"{60 * speed:.0f}/min"
