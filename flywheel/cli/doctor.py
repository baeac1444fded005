"""`flywheel doctor`: whether this installation will work, and what it lacks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from flywheel import __version__
from flywheel.cli.app import ConfigOption, JsonOption, app, find_config, print_json, run_async
from flywheel.cli.tables import plain, short_path
from flywheel.errors import EXIT_CONFIG, EXIT_FAILED
from flywheel.terminal import escape_terminal

if TYPE_CHECKING:
    from flywheel.diagnostics.doctor.finding import Finding

COLOURS: Final = {"ok": "green", "warning": "yellow", "failed": "red", "skipped": "dim"}


@app.command()
def doctor(
    config: ConfigOption = None,
    ask_judge: Annotated[
        bool,
        typer.Option(
            "--ask-judge", help="Also ask each judge one short question, which it may charge (some 50 tokens)."
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Check the installation, and say what it lacks; nothing is changed.

    Looks at packages, configuration, state, sources, rubric, judge, servers, model and machine. Exit 1 when something
    failed, 78 when configuration, rubric or filter file is wrong.
    """
    path = find_config(config)
    findings = run_async(_examined(path, ask_judge))
    counts = Counter(finding.result.value for finding in findings)
    if as_json:
        print_json(
            {
                "version": __version__,
                "config": None if path is None else str(path.absolute()),
                "well": not counts["failed"],
                **{result: counts[result] for result in COLOURS},
                "checks": [finding.as_json() for finding in findings],
            }
        )
    else:
        _show(findings, counts)
    if any(finding.is_file and finding.result == "failed" for finding in findings):
        raise typer.Exit(EXIT_CONFIG)
    if counts["failed"]:
        raise typer.Exit(EXIT_FAILED)


async def _examined(path: Path | None, ask_judge: bool) -> list[Finding]:
    from flywheel.diagnostics.doctor.checkup import checkup

    return [finding async for finding in checkup(path, ask_judge=ask_judge)]


def _show(findings: Sequence[Finding], counts: Counter[str]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    rows = [(finding.result.value, finding.name, _text(finding)) for finding in findings]
    console = Console()
    if console.is_terminal:
        table = Table.grid(padding=(0, 2))
        for _ in range(2):
            table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for result, name, text in rows:
            table.add_row(Text(result, style=COLOURS[result]), Text(name, style="bold"), Text(text, overflow="fold"))
        console.print(table)
    else:
        width = max(map(len, COLOURS))
        typer.echo(plain([(f"{result:<{width}}  {name}", text) for result, name, text in rows]))
    told = ", ".join(f"{counts[result]} {result}" for result in COLOURS if counts[result])
    typer.echo(f"\n{told}")


def _text(finding: Finding) -> str:
    """What was found, below what it is about, and above what to do."""
    shown: dict[str, Any] = escape_terminal(finding.as_json(), one_line=True)
    subject = short_path(shown["subject"]) if shown["subject"].startswith("/") else shown["subject"]
    needs = finding.remedy and finding.result not in ("ok", "skipped")
    return "\n".join(line for line in (subject, shown["found"], f"→ {shown['do']}" if needs else "") if line)
