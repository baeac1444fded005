"""`flywheel rubric`: writing rubrics with confidence."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flywheel.cli.app import app

rubric = typer.Typer(help="Work on rubric files.", no_args_is_help=True)
app.add_typer(rubric, name="rubric")


@rubric.command()
def check(file: Annotated[Path, typer.Argument(metavar="FILE", help="A rubric in YAML.")]) -> None:
    """Say what is wrong with a rubric, or that nothing is; exit 78 if something is."""
    from flywheel.judge.rubric_file import load_rubric

    found = load_rubric(file)
    typer.echo(f"{file}: rubric {found.id} is right: {len(found.criteria)} criteria, threshold {found.threshold:g}")
