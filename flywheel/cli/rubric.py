"""`flywheel rubric`: writing rubrics with confidence."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flywheel.cli.app import app, print_json
from flywheel.errors import EXIT_CONFIG

rubric = typer.Typer(help="Work on rubric files.", no_args_is_help=True)
app.add_typer(rubric, name="rubric")


@rubric.command()
def check(
    files: Annotated[list[Path], typer.Argument(metavar="FILE…", help="Rubrics in YAML.")],
) -> None:
    """Say everything that is wrong with rubrics, as FILE:LINE:COL: …, or that nothing is; exit 78 if something is."""
    from flywheel.judge.rubric_examples import contradictions
    from flywheel.judge.rubric_file import read_rubric

    wrong = False
    for file in files:
        read = read_rubric(file)
        problems = list(read.problems)
        if read.rubric is not None and read.places is not None:
            problems += contradictions(read.rubric, read.places)
        for problem in problems:
            typer.echo(f"{file}:{problem}")
        if problems or read.rubric is None:
            wrong = True
            continue
        found = read.rubric
        typer.echo(f"{file}: rubric {found.id} is right: {len(found.every)} criteria, threshold {found.threshold:g}")
    if wrong:
        raise typer.Exit(EXIT_CONFIG)


@rubric.command()
def schema() -> None:
    """Print the JSON Schema of rubric files, for editors that complete and validate while one types."""
    from flywheel.rubric import json_schema

    print_json(json_schema())
