"""`flywheel rubric`: check, calibrate and draft rubrics."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from flywheel.cli.app import (
    ConfigOption,
    JsonOption,
    command_group,
    load_config,
    open_state,
    print_json,
    run_async,
    this_person,
)
from flywheel.cli.progress_bars import of_tasks
from flywheel.cli.tables import Row, estimated, rows_table, spent, stdout
from flywheel.daemon.calibration import calibrate_rubric, draft_rubric
from flywheel.daemon.judging.judging_report import Cost
from flywheel.errors import EXIT_CONFIG, EXIT_FAILED, ConfigError
from flywheel.judge.rubric.checks.python_check import Python
from flywheel.judge.rubric.file import contradictions, likely_mistakes, read_rubric
from flywheel.system.files import write_atomic
from flywheel.system.terminal import escape_terminal, excerpt, quantity

EXCERPT = 300
"""Characters of the texts of a disagreement."""

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
    settings = load_config(config)
    calibrated = run_async(
        calibrate_rubric(
            settings,
            partial(open_state, settings),
            file,
            labels,
            this_person(),
            repeats=repeats,
            on_estimate=partial(_tell, repeats, as_json),
            progress=partial(of_tasks, "judging", quiet=as_json),
        )
    )
    report = calibrated.as_json()
    if as_json:
        print_json(report)
    else:
        _show(report)
    if calibrated.shortfall:
        raise typer.Exit(EXIT_FAILED)


def _tell(repeats: int, quiet: bool, replies: int, cost: Cost) -> str:
    """Print the expected cost; it, in words."""
    estimate = estimated(cost.json())
    times = f", {repeats} times each" if repeats > 1 else ""
    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True, quiet=quiet)
    console.print(f"{quantity(replies, 'reply', 'replies')}{times}: {estimate}", style="dim")
    return estimate


def _show(report: dict[str, Any]) -> None:
    console = stdout()
    report = escape_terminal(report)
    text = quantity(report["judged"], "reply", "replies")
    if report["left_out"]:
        text += f", {quantity(report['left_out'], 'line')} excluded: no answer or no verdict"
    console.print(f"rubric {report['rubric']} judged by {report['judge']}: {text}")
    rows = [
        Row((f"human: {label}", str(row["accepted"]), str(row["rejected"])))
        for label, row in report["confusion"].items()
    ]
    console.print(rows_table(("", "judge: accept", "judge: reject"), rows, fold=()))
    kappa, base = report["kappa"], report["base_rate"]
    if kappa["value"] is None:
        console.print("Cohen's kappa is not defined: all labels and all verdicts are the same")
    else:
        interval = "" if kappa["low"] is None else f" (95 % interval {kappa['low']:.2f} to {kappa['high']:.2f})"
        console.print(f"Cohen's kappa {kappa['value']:.2f}{interval}")
    console.print(
        f"agreement {report['agreement']:.0%}; accepted: human {base:.0%}, judge {report['judge_rate']:.0%};"
        f" always giving the same verdict would agree on {max(base, 1 - base):.0%}"
    )
    if (pairs := report["consistency"]["pairs"]) is not None:
        console.print(
            f"consistency over {report['repeats']} repeats: {pairs:.0%} of pairs of verdicts agree;"
            f" {report['consistency']['unanimous']:.0%} of replies got the same verdict in all"
        )
    for each in report["undecided"]:
        console.print(f"undecided: {each['name']}: {each['error']}")
    if report["worst"]:
        console.print(f"\nthe worst disagreements ({len(report['worst'])}):")
    for number, each in enumerate(report["worst"], 1):
        reason = f" ({each['label_reason']})" if each["label_reason"] else ""
        score = "" if each["score"] is None else f", score {each['score']:.2f}"
        console.print(f"\n{number}. {each['name']}: human: {each['label']}{reason}; judge: {each['verdict']}{score}")
        for name, key in (("question", "query"), ("answer", "answer"), ("judge", "reason")):
            console.print(f"   {name + ':':<9} {excerpt(each[key], EXCERPT)}")
    console.print(f"\n{spent(report['usage'], 0, report['cost'])}")
    if report["shortfall"]:
        console.print(report["shortfall"])


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
    if out is not None and out.exists() and not force:
        raise ConfigError(f"write {out}", "it exists", "Name another file, or use --force.")
    settings, name = load_config(config), out.stem if out is not None else "suggested"
    text = run_async(draft_rubric(settings, partial(open_state, settings), labels, name))
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
