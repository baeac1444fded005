"""`flywheel rubric`: check, calibrate and draft rubrics."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flywheel.cli.app import ConfigOption, JsonOption, command_group, load_config, print_json, run_async
from flywheel.errors import EXIT_CONFIG, EXIT_FAILED, ConfigError
from flywheel.system.files import write_atomic
from flywheel.system.terminal import escape_terminal

rubric = command_group("rubric", "Check, calibrate and draft rubrics.")

LabelsOption = Annotated[
    Path,
    typer.Option("--labels", metavar="FILE", help="Replies with verdicts, one JSON object per line.", readable=False),
]


@rubric.command()
def check(
    files: Annotated[list[Path], typer.Argument(metavar="FILE", help="Rubrics in YAML.", readable=False)],
) -> None:
    """List every problem of rubrics as FILE:LINE:COL: …; exit 78 if there is one.

    Warnings point out likely mistakes, such as a backspace in a pattern; they are not errors.
    """
    from flywheel.judge.rubric.checks.python_check import Python
    from flywheel.judge.rubric.file import contradictions, likely_mistakes, read_rubric

    wrong = False
    for file in files:
        read = read_rubric(file)
        problems = [*read.problems, *contradictions(read)]
        for problem in problems:
            typer.echo(escape_terminal(f"{file}:{problem}"))
        for warning in likely_mistakes(read):
            typer.echo(escape_terminal(f"{file}:{warning.line}:{warning.column}: warning: {warning.message}"))
        if problems or read.rubric is None:
            wrong = True
            continue
        found = read.rubric
        for criterion in found.criteria:
            if isinstance(criterion, Python):
                names = [criterion.file, *(name for name, _ in found.files[criterion.file].uses)]
                listed = " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
                text = f"the hash of the rubric has {listed}; other files that the function reads are not tracked"
                typer.echo(escape_terminal(f"{file}: criterion {criterion.id}: {text}: list them in `files`"))
        typer.echo(f"{file}: rubric {found.id} is valid: {len(found.every)} criteria, threshold {found.threshold:g}")
    if wrong:
        raise typer.Exit(EXIT_CONFIG)


@rubric.command()
def calibrate(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A rubric in YAML.", readable=False)],
    labels: LabelsOption,
    config: ConfigOption = None,
    repeats: Annotated[int, typer.Option(min=1, metavar="N", help="Judge each labelled reply N times.")] = 1,
    as_json: JsonOption = False,
) -> None:
    """Judge labelled replies, report how well the judge agrees with the labels, and store the result.

    Labels of tasks are stored in the state first, as `flywheel labels import` does.
    The expected cost is printed first and counts towards judge.budget. Exit 1 if judge.min_kappa is set and not
    reached.
    """
    from flywheel.cli.rubric import calibration

    settings = load_config(config)
    report = run_async(calibration.run(settings, file, labels, repeats, quiet=as_json))
    if as_json:
        print_json(report)
    else:
        calibration.show(report)
    if report["shortfall"]:
        raise typer.Exit(EXIT_FAILED)


@rubric.command()
def suggest(
    labels: LabelsOption,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the rubric here. Default: print it.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    config: ConfigOption = None,
) -> None:
    """Have the judge draft a rubric from labelled replies. The draft passes `flywheel rubric check`."""
    from flywheel.cli.rubric import calibration

    if out is not None and out.exists() and not force:
        raise ConfigError(f"write {out}", "it exists", "Name another file, or use --force.")
    text = run_async(calibration.suggest(load_config(config), labels, out.stem if out is not None else "suggested"))
    if out is None:
        typer.echo(text, nl=False)
        return
    try:
        write_atomic(out, text.encode())
    except OSError as error:
        raise ConfigError(
            f"write {out}", error.strerror or str(error), "Check the path and its permissions."
        ) from error
    typer.echo(f"{out}: a draft; compare it with the labels: flywheel rubric calibrate {out} --labels {labels}")
