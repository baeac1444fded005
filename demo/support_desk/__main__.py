"""`python -m demo.support_desk`: the command of the scene. Owns options, signals and exit codes."""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
from datetime import UTC, datetime
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from demo import small_model
from demo.command import INTERRUPTED
from demo.parts import PartError
from demo.support_desk.models import WRONG_REPLIES, WRONG_VERDICTS
from demo.support_desk.scene import Report, SceneError, SupportDesk
from flywheel.errors import FlywheelError

INTRODUCTION = (
    f"{small_model.NAME}, learns to read customers' messages. The large model whose replies are recorded, and the "
    f"judge, are scripts: {WRONG_REPLIES:.0%} of those replies are wrong, and {WRONG_VERDICTS:.0%} of the judge's "
    "findings, both ways. What is printed at the end is checked exactly, not judged."
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m demo.support_desk", description=INTRODUCTION)
    parser.add_argument("--seed", type=int, default=0, help="of the messages, the scripts' errors and the rounds (0)")
    parser.add_argument(
        "--dir", type=Path, default=Path("demo-run"), help="where the run's folder is made (demo-run)"
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON, and all else to stderr")
    parser.add_argument(
        "--development", action="store_true", help="measure on the messages on which settings are chosen"
    )
    options = parser.parse_args()
    console = Console(stderr=options.json)

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    folder = (options.dir / datetime.now(UTC).strftime("%Y%m%d-%H%M%S")).absolute()
    say(f"{INTRODUCTION}\nThe run's files are in {folder}.")
    scene = SupportDesk(folder, options.seed, say, development=options.development)
    try:
        asyncio.run(_until_stopped(scene))
    except (PartError, SceneError, FlywheelError) as error:
        console.print(f"\n{error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return error.exit_code if isinstance(error, FlywheelError) else 1
    except asyncio.CancelledError:
        say(f"Stopped; nothing runs any more. The run's files are in {folder}.")
        return INTERRUPTED
    figures = scene.report.as_json()
    (folder / "report.json").write_text(json.dumps(figures, indent=1) + "\n")
    console.print()
    console.print(_table(scene.report))
    say(f"{figures['total_seconds']:.0f} s. Nothing runs any more.")
    if options.json:
        print(json.dumps(figures))
    return 0


def _table(report: Report) -> Table:
    """The held-out messages, answered by the alias after each turn."""
    [first, *_] = report.measured.values()
    title = f"{first.sampled.answers} messages, {first.sampled.exact.phrases} phrases (intervals over phrases)"
    table = Table(title=title, box=box.SIMPLE_HEAVY)
    for heading in ("served", "all fields right", "fields right", "all right, greedy", "fields, greedy"):
        table.add_column(heading, justify="left" if heading == "served" else "right")
    states = ["", *(f", {each['state']}" for each in report.rounds)]
    for (version, measured), state in zip(report.measured.items(), states, strict=True):
        results = (measured.sampled, measured.greedy)
        table.add_row(version + state, *(str(share) for each in results for share in (each.exact, each.right)))
    return table


async def _until_stopped(scene: SupportDesk) -> None:
    """Cancelled by Ctrl-C and its like."""
    playing = asyncio.create_task(scene.play())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, playing.cancel)
    await playing


if __name__ == "__main__":
    sys.exit(main())
