"""`flywheel doctor`: check whether this installation works, and what it lacks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from flywheel import __version__
from flywheel.cli.app import ConfigOption, JsonOption, app, find_config, load_config, print_json, run_async
from flywheel.cli.tables import forecast_text, print_facts, short_path
from flywheel.errors import EXIT_CONFIG, EXIT_FAILED
from flywheel.system.terminal import escape_terminal

if TYPE_CHECKING:
    from flywheel.daemon.checkup import Finding

COLOURS: Final = {"ok": "green", "warning": "yellow", "failed": "red", "skipped": "dim"}


@app.command()
def doctor(
    config: ConfigOption = None,
    ask_judge: Annotated[
        bool,
        typer.Option(
            "--ask-judge", help="Also ask each judge a short question (some 100 tokens, which may cost money)."
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Check the installation and report problems. Nothing is changed.

    Checks packages, configuration, state, sources, rubric, judge, model, servers and machine. Exit 1 when something
    failed, 78 when configuration, rubric or filter file is wrong.
    """
    path = find_config(config)
    findings = look(path, ask_judge=ask_judge)
    counts = Counter(finding.result.value for finding in findings)
    if as_json:
        print_json(
            {
                "version": __version__,
                "config": None if path is None else str(path.absolute()),
                "well": not counts["failed"],
                **{result: counts[result] for result in COLOURS},
                "forecast": next((each.forecast.as_json() for each in findings if each.forecast), None),
                "checks": [_as_json(finding) for finding in findings],
            }
        )
    else:
        show(findings, counts)
    if any(finding.is_file and finding.result == "failed" for finding in findings):
        raise typer.Exit(EXIT_CONFIG)
    if counts["failed"]:
        raise typer.Exit(EXIT_FAILED)


def look(path: Path | None, *, ask_judge: bool = False) -> list[Finding]:
    """Every finding about the configuration at `path`."""
    from flywheel.daemon.checkup import examined

    return run_async(examined(partial(load_config, path), path, ask_judge=ask_judge))


def show(findings: Sequence[Finding], counts: Counter[str]) -> None:
    """Print findings, and how many there are of each result."""
    width = max(map(len, COLOURS))
    rows = [(f"{finding.result.value:<{width}}", finding.name, _text(finding)) for finding in findings]
    print_facts(rows, {f"{result:<{width}}": colour for result, colour in COLOURS.items()})
    typer.echo("\n" + ", ".join(f"{counts[result]} {result}" for result in COLOURS if counts[result]))


def _as_json(finding: Finding) -> dict[str, Any]:
    return {
        "name": finding.name,
        "subject": finding.subject,
        "result": finding.result,
        "found": finding.text if finding.forecast is None else forecast_text(finding.forecast),
        "do": finding.remedy,
        "figures": dict(finding.figures),
    }


def _text(finding: Finding) -> str:
    """The subject, the text, and what to do."""
    shown: dict[str, Any] = escape_terminal(_as_json(finding), one_line=True)
    subject = short_path(shown["subject"]) if shown["subject"].startswith("/") else shown["subject"]
    remedy = f"→ {shown['do']}" if shown["do"] and finding.result not in ("ok", "skipped") else ""
    return "\n".join(filter(None, (subject, shown["found"], remedy)))
