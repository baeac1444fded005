"""`make demo-real`: a genuine small model learns. Owns options, signals and exit codes."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from rich import box
from rich.console import Console
from rich.table import Table

from demo import small_model
from demo.calculator import Calculator
from demo.command import INTERRUPTED, until_stopped
from demo.parts import PartError
from demo.support_desk.desk import SupportDesk
from demo.two_turns import Report, SceneError, TwoTurns
from flywheel.errors import FlywheelError

SCENES: Final[dict[str, type[TwoTurns]]] = {"desk": SupportDesk, "agent": Calculator}
TITLES: Final = {"exact": "all fields right", "fields": "fields right", "right": "right"}


def main() -> int:
    description = f"{small_model.NAME}, learns from recorded replies of a large model, and then by GRPO."
    parser = argparse.ArgumentParser(prog="python -m demo.real_model", description=description)
    scenes = "desk: JSON from customers' messages; agent: an agent with a tool (desk)"
    parser.add_argument("--scene", choices=SCENES, default="desk", help=scenes)
    parser.add_argument("--seed", type=int, default=0, help="of questions, the scripts' errors and the rounds (0)")
    parser.add_argument(
        "--dir", type=Path, default=Path("demo-run"), help="where the run's folder is made (demo-run)"
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON, and all else to stderr")
    parser.add_argument(
        "--development", action="store_true", help="measure on the questions on which settings are chosen"
    )
    options = parser.parse_args()
    console = Console(stderr=options.json)

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    folder = (options.dir / datetime.now(UTC).strftime("%Y%m%d-%H%M%S")).absolute()
    scene = SCENES[options.scene](folder, options.seed, say, development=options.development)
    checked = "What is printed at the end is checked exactly, not judged."
    say(f"{small_model.NAME}, {scene.about} {checked}\nThe run's files are in {folder}.")
    try:
        asyncio.run(until_stopped(scene.play(), scene.hurry, say))
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
    """The held-out questions, answered by the alias after each turn."""
    [first, *_] = report.measured.values()
    names = list(first.sampled.shares)
    phrases = first.sampled.shares[names[0]].phrases
    title = f"{first.sampled.answers} questions, {phrases} phrases (intervals over phrases)"
    table = Table(title=title, box=box.SIMPLE_HEAVY)
    table.add_column("served")
    for heading in (*(TITLES[name] for name in names), *(f"{TITLES[name]}, greedy" for name in names)):
        table.add_column(heading, justify="right")
    states = ["", *(f", {each['state']}" for each in report.rounds)]
    for (version, measured), state in zip(report.measured.items(), states, strict=True):
        results = (measured.sampled, measured.greedy)
        table.add_row(version + state, *(str(each.shares[name]) for each in results for name in names))
    return table


if __name__ == "__main__":
    sys.exit(main())
