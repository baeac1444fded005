"""`flywheel migrate`: what becomes of another program's file or command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from flywheel.cli.app import JsonOption, app, print_json, run_async
from flywheel.cli.settings import MAX_SHOWN, WIDE, text_of
from flywheel.cli.tables import Row, forecast_text, print_rows, stdout
from flywheel.config import foreign
from flywheel.daemon.migration import migrated, write
from flywheel.errors import EXIT_FAILED
from flywheel.secrets import masked
from flywheel.system.terminal import escape_terminal, excerpt, quantity

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

    made = migrated(given, output)
    written = write(made.files, output) if output and made.files else []
    expected, unread = run_async(made.forecast())
    if as_json:
        print_json(
            {
                "program": made.program,
                "rows": [masked(row._asdict()) for row in made.rows],
                "written": [str(path) for path in written],
                "commands": made.commands,
                "forecast": expected and expected.as_json(),
                "unread": unread,
            }
        )
    else:
        print_rows(stdout(), COLUMNS, [_row(each) for each in made.rows], wide=WIDE, fold=("value", "here"))
        said = [f"wrote {path}" for path in written]
        said += [f"run: {each}" for each in made.commands]
        said += [forecast_text(expected)] if expected else []
        said += [f"no forecast: {why}" for why in unread]
        said += [f"{quantity(len(made.refused), 'setting')} refused or missing:"] if made.refused else []
        said += [f"  {row.why.rstrip('.')}. {row.hint}" for row in made.refused]
        said += [f"Fill in {row.use} in {written[-1]}." for row in made.refused if written]
        for each in said:
            typer.echo(escape_terminal(each, one_line=True))
    if made.refused:
        raise typer.Exit(EXIT_FAILED)


def _row(row: foreign.Row) -> Row:
    is_changed = row.sets and row.made != row.value and not isinstance(row.made, dict)
    here = f"{row.use}: {text_of(masked(row.made))}" if is_changed else row.use if row.sets else ""
    said = [here, row.why, f"({row.note})" if row.note and row.note != row.why else ""]
    value = "–" if row.value is None else excerpt(text_of(masked(row.value)), MAX_SHOWN)
    cells = (row.place or "(not set)", value, row.outcome, "; ".join(filter(None, said[:2])) + said[2])
    return Row([escape_terminal(each, one_line=True) for each in cells])
