"""The command of a demo: turns the wheel until its rounds were promoted, and shows what came of it.

Owns options, signals and exit codes; what is played is a scene's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

from demo.panel import Status
from demo.parts import PartError
from demo.recording import RecordingError
from demo.users import TrafficError
from demo.wheel import Scene, Screen, SlowError, Wheel, record
from flywheel.errors import FlywheelError

INTERRUPTED = 130
T = TypeVar("T")
Recorder = Callable[[Path, Path], int]


def play(
    program: str,
    description: str,
    scene: Scene,
    table: Callable[[Status, Path], Table],
    figures: Callable[[Status, Path], dict[str, Any]] | None = None,
    workflow: Scene | None = None,
    recorder: Recorder | None = None,
) -> int:
    """`table` and `figures`, which `--json` prints, are made from the last status and the run's folder.

    `workflow` is played with `--workflow` instead of `scene`. `recorder`, which writes a run's folder to a file and
    returns the number of bytes, is called with `--record`, after one round.
    """
    parser = argparse.ArgumentParser(prog=program, description=description)
    parser.add_argument("--rounds", type=int, default=2, help="promoted rounds after which it ends (2)")
    parser.add_argument("--minutes", type=float, default=20.0, help="give up after this long (20)")
    parser.add_argument(
        "--dir", type=Path, default=Path("demo-run"), help="where the run's folder is made (demo-run)"
    )
    parser.add_argument("--watch", action="store_true", help="both versions answer at first, and are compared")
    if figures is not None:
        parser.add_argument("--json", action="store_true", help="print the figures as JSON, and all else to stderr")
    if workflow is not None:
        parser.add_argument("--workflow", action="store_true", help="rollouts run the agent itself, with its tool")
    if recorder is not None:
        parser.add_argument(
            "--record", type=Path, metavar="FILE", help="record a run of one round for `flywheel demo`"
        )
    options = parser.parse_args()
    target: Path | None = options.record if recorder is not None else None
    promotions = options.rounds if target is None else 1
    if workflow is not None and options.workflow:
        scene = workflow
    scene = replace(scene, watches=options.watch)
    as_json = figures is not None and options.json
    console = Console(stderr=as_json)
    folder = (options.dir / datetime.now(UTC).strftime("%Y%m%d-%H%M%S")).absolute()
    wheel = Wheel(scene, folder, promotions, options.minutes * 60, Screen(console))
    started = time.monotonic()
    try:
        status = asyncio.run(until_stopped(wheel.turn(), wheel.hurry, console.print))
    except (PartError, TrafficError, SlowError, FlywheelError) as error:
        console.print(f"\n{error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 1
    except asyncio.CancelledError:
        console.print(f"Stopped; nothing runs any more. The run's files are in {folder}.", soft_wrap=True)
        return INTERRUPTED
    seconds = time.monotonic() - started
    console.print()
    console.print(table(status, folder))
    console.print(
        f"{seconds:.0f} s. From {record(folder, status)}; nothing runs any more.", highlight=False, soft_wrap=True
    )
    if recorder is not None and target is not None:
        try:
            size = recorder(folder, target)
        except (RecordingError, FlywheelError, OSError) as error:
            console.print(f"The run is not recorded: {error}.", style="red", markup=False, soft_wrap=True)
            return 1
        console.print(f"{target} has {size:,} bytes.", highlight=False, soft_wrap=True)
    if figures is not None and as_json:
        print(json.dumps({**figures(status, folder), "seconds": round(seconds, 1)}))
    return 0


async def until_stopped(playing: Coroutine[Any, Any, T], hurry: Callable[[], None], say: Callable[[str], None]) -> T:
    """What `playing` returns. It is cancelled by Ctrl-C and its like, of which a second one calls `hurry`."""
    turning = asyncio.create_task(playing)

    def stop() -> None:
        if turning.cancelling():
            hurry()
            return
        say("\nStopping; once more to stop at once.")
        turning.cancel()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stop)
    return await turning
