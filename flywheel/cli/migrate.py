"""`flywheel migrate`: what becomes of another program's file or command line."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from flywheel.cli.app import JsonOption, absolute, app, print_json, run_async
from flywheel.cli.settings import MAX_SHOWN, WIDE, text_of
from flywheel.cli.tables import Row, forecast_text, print_rows, stdout
from flywheel.errors import EXIT_FAILED
from flywheel.secrets import masked
from flywheel.system.terminal import escape_terminal, excerpt, quantity

if TYPE_CHECKING:
    from flywheel.config import foreign

COLUMNS: Final = ("key", "value", "becomes", "here")


@app.command()
def migrate(
    given: Annotated[
        str, typer.Argument(metavar="FILE|COMMAND", help="A file in YAML or Python, or a command line in quotes.")
    ],
    output: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write files of the same meaning for Flywheel there.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Print what becomes of each setting of a file or command line of AgentJet, ASTuner, SAGE or Trinity-RFT.

    --output writes flywheel.yaml, with the rubric and the filters that it names; of a file of Trinity-RFT, a program.
    The exit code is 1 if a setting is refused or missing.
    """
    from flywheel.config.command_lines import translated
    from flywheel.config.translation import TUNER
    from flywheel.daemon.forecast import forecast_of_sources
    from flywheel.daemon.migration import BACKBONE_COUNTS, SCRIPT, SETTINGS, migrated, write

    line = None
    if " " in given.strip() and not os.path.exists(given):  # noqa: PTH110 - False for what no file's name can be
        line = translated(given, None if output is None else output / SETTINGS)
    file = Path(given) if line is None else line.file
    backbone = line is not None and any(row.place == "--backbone" for row in line.rows)
    made = None if file is None else migrated(absolute(file), absolute(output or Path()), backbone=backbone)
    rows = [*(line.rows if line else ()), *(made.rows if made else ())]
    refused = [row for row in rows if row.outcome == "refused"]
    is_written = made and made.files and not (line and line.refused)
    written = write(made.files, output) if made and output and is_written else []
    expected, unread = None, list[str]()
    if made is not None and not refused:
        # A file of Trinity-RFT names data sets, and no traces.
        unread = ["the file names no database"]
        if made.config is not None:
            expected, unread = run_async(forecast_of_sources(made.config))
    commands = line.lines if line else []
    if commands and made is not None and made.program == TUNER:
        commands = [] if output else [f"flywheel migrate {shlex.quote(str(file))} --output DIR"]
        commands.append(f"python {shlex.quote(str((output or Path('DIR')) / SCRIPT))} WORKFLOW.py:FUNCTION")
    elif made is not None and output is None:
        over = [f" --set {row.place}=null" for row in made.rows if row.why == BACKBONE_COUNTS]
        commands = ["".join([each, *over]) for each in commands]
    if as_json:
        print_json(
            {
                "program": line.program if line else made and made.program,
                "rows": [masked(row._asdict()) for row in rows],
                "written": [str(path) for path in written],
                "commands": commands,
                "forecast": expected and expected.as_json(),
                "unread": unread,
            }
        )
    else:
        print_rows(stdout(), COLUMNS, [_row(each) for each in rows], wide=WIDE, fold=("value", "here"))
        said = [f"wrote {path}" for path in written]
        said += [f"run: {each}" for each in commands]
        said += [forecast_text(expected)] if expected else []
        said += [f"no forecast: {why}" for why in unread]
        said += [f"{quantity(len(refused), 'setting')} refused or missing:"] if refused else []
        said += [f"  {row.why.rstrip('.')}. {row.hint}" for row in refused]
        said += [f"Fill in {row.use} in {written[-1]}." for row in refused if written]
        for each in said:
            typer.echo(escape_terminal(each, one_line=True))
    if refused:
        raise typer.Exit(EXIT_FAILED)


def _row(row: foreign.Row) -> Row:
    is_changed = row.sets and row.made != row.value and not isinstance(row.made, dict)
    here = f"{row.use}: {text_of(masked(row.made))}" if is_changed else row.use if row.sets else ""
    said = [here, row.why, f"({row.note})" if row.note and row.note != row.why else ""]
    value = "–" if row.value is None else excerpt(text_of(masked(row.value)), MAX_SHOWN)
    cells = (row.place or "(not set)", value, row.outcome, "; ".join(filter(None, said[:2])) + said[2])
    return Row([escape_terminal(each, one_line=True) for each in cells])
