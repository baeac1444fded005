"""`python -m demo`: turns the wheel on a tiny policy until two rounds were promoted, and shows what came of it."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from demo import panel
from demo.parts import PartError
from demo.traffic import TrafficError
from demo.wheel import Screen, SlowError, Wheel, record
from flywheel.errors import FlywheelError

INTERRUPTED = 130


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m demo", description="Turn the wheel on a tiny policy.")
    parser.add_argument("--rounds", type=int, default=2, help="promoted rounds after which it ends (2)")
    parser.add_argument("--minutes", type=float, default=20.0, help="give up after this long (20)")
    parser.add_argument(
        "--dir", type=Path, default=Path("demo-run"), help="where the run's folder is made (demo-run)"
    )
    options = parser.parse_args()
    console = Console()
    folder = options.dir / datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    wheel = Wheel(folder.absolute(), options.rounds, options.minutes * 60, Screen(console))
    try:
        status = asyncio.run(_until_stopped(wheel, console))
    except (PartError, TrafficError, SlowError, FlywheelError) as error:
        console.print(f"\n{error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 1
    except asyncio.CancelledError:
        console.print(f"Stopped; nothing runs any more. The run's files are in {folder}.", soft_wrap=True)
        return INTERRUPTED
    console.print()
    console.print(panel.table(status))
    console.print(f"From {record(folder, status)}; nothing runs any more.", highlight=False, soft_wrap=True)
    return 0


async def _until_stopped(wheel: Wheel, console: Console) -> panel.Status:
    """The wheel's last status; cancelled by Ctrl-C and its like, a second one of which ends everything at once."""
    turning = asyncio.create_task(wheel.turn())

    def stop() -> None:
        if turning.cancelling():
            wheel.hurry = True
            return
        console.print("\nStopping; once more to stop at once.")
        turning.cancel()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stop)
    return await turning


if __name__ == "__main__":
    sys.exit(main())
