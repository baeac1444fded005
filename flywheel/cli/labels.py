"""`flywheel label` and `flywheel labels`: what people say of replies, and how far the judge agrees."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import orjson
import typer

from flywheel.cli.app import (
    ConfigOption,
    JsonOption,
    app,
    ask,
    binary_stdout,
    load_config,
    open_state,
    print_json,
    read_state,
    require_outside_state,
    require_state,
    run_async,
    this_person,
    user_path,
)
from flywheel.cli.tables import Row, print_rows, stdout
from flywheel.config.file import Config
from flywheel.errors import ExportError
from flywheel.store.labels import Opinion, import_file
from flywheel.store.requests import RequestKind
from flywheel.system.files import PRIVATE, write_atomic
from flywheel.system.terminal import escape_terminal, moment, quantity

SHOWN = 50
COLUMNS = ("task", "label", "criterion", "judge", "by", "at", "comment")
WIDE = 120
"""Terminals of this width have room for a label in one row."""


@app.command()
def label(
    task: Annotated[str, typer.Argument(metavar="TASK", help="Id of a task.")],
    verdict: Annotated[
        Literal["accept", "reject", "unsure"],
        typer.Argument(metavar="accept|reject|unsure", help="Your label."),
    ],
    criterion: Annotated[str, typer.Option(metavar="ID", help="Only this criterion. Default: the whole reply.")] = "",
    comment: Annotated[str, typer.Option(metavar="TEXT", help="The reason for your label.")] = "",
    by: Annotated[str, typer.Option(metavar="NAME", help="Name of the labeller. Default: your user name.")] = "",
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Label a reply, independently of the judge's verdict. Your last label on a task counts."""
    settings = load_config(config)
    require_state(settings, f"label {task}")
    by = by or this_person()
    arguments = {"task_id": task, "label": verdict, "criterion": criterion, "comment": comment}
    report = ask(settings, RequestKind.LABEL, arguments, by)
    assert report is not None  # it needs no instance lock
    if as_json:
        print_json({"id": report["label"], "task_id": task, "label": verdict, "criterion": criterion, "by": by})
    else:
        of = f", {criterion}" if criterion else ""
        typer.echo(escape_terminal(f"{task}{of}: {verdict}, by {by}"))


@app.command()
def labels(
    action: Annotated[
        Literal["list", "import"],
        typer.Argument(metavar="list|import", help="What to do: list labels, or store those of a file."),
    ] = "list",
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="FILE", help="For import: labelled tasks, or annotations of another tool.", readable=False
        ),
    ] = None,
    config: ConfigOption = None,
    by: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Only labels by this person. import: the labeller of lines that name none."
        ),
    ] = None,
    criterion: Annotated[
        str | None,
        typer.Option(metavar="ID", help="Only labels on this criterion; with an empty ID, on whole replies."),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help=f"Show at most this many. Default: {SHOWN}, or all with --json."),
    ] = None,
    out: Annotated[
        str, typer.Option(metavar="FILE", help="Write labelled replies for `rubric calibrate`; `-` is stdout.")
    ] = "",
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    whole: Annotated[
        str,
        typer.Option(
            "--name",
            metavar="NAME",
            help="import: annotations with this name rate the whole reply, others the criterion with their name.",
        ),
    ] = "",
    accept_from: Annotated[
        float | None,
        typer.Option(metavar="X", help="import: annotations with at least this score accept; others reject."),
    ] = None,
    also: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND", help="import: also take annotations by this kind of annotator, such as LLM or API."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List labels, newest first, and the judge's agreement with them; write them for `rubric calibrate`; import them.

    `import` stores the labels of tasks in the state, or annotations by trace and span from Langfuse, Phoenix, MLflow
    or another tool (`flywheel docs write-a-rubric`). It reports what cannot be stored, and stores nothing twice.
    """
    settings = load_config(config)
    if (action == "import") != (file is not None):
        raise typer.BadParameter("import needs a file, and list takes none", param_hint="FILE")
    if file is not None:
        _import(settings, file, by or this_person(), as_json, whole=whole, accept_from=accept_from, also=also or ())
        return
    if out:
        if as_json and out == "-":
            raise typer.BadParameter("stdout cannot hold the labels and the report; name a file", param_hint="--out")
        _write(settings, out, force, as_json)
        return
    from flywheel.store import labels

    opinions = run_async(read_state(settings, partial(labels.listed, by=by, criterion=criterion)))
    agreement = labels.agreements(opinions).as_json()
    most = limit if as_json else limit or SHOWN
    shown = [_as_json(each) for each in opinions[:most]]
    if as_json:
        print_json({"total": len(opinions), "labels": shown, "agreement": agreement})
        return
    if shown:
        rows = [Row(_cells(each), (each["comment"],)) for each in escape_terminal(shown, one_line=True)]
        print_rows(stdout(), COLUMNS, rows, wide=WIDE, fold=("criterion", "by", "comment"))
    if not opinions:
        typer.echo(
            "There are no labels"
            + (" like that." if by is not None or criterion is not None else " yet: `flywheel label` makes one.")
        )
        return
    shortened = f"{len(shown):,} of {quantity(len(opinions), 'label')}; --limit N shows more"
    typer.echo(quantity(len(opinions), "label") if len(shown) == len(opinions) else shortened)
    for name, each in (
        ("the judge", "judge"),
        ("the judge, labelled blind", "judge_blind"),
        ("each other", "people"),
    ):
        if agreement[each]["n"]:
            typer.echo(f"people and {name}: {_agreement_text(agreement[each])}")
    for name, of_criterion in agreement["criteria"].items():
        typer.echo(escape_terminal(f"{name}: {_agreement_text(of_criterion)}"))


def _import(config: Config, file: Path, by: str, as_json: bool, **reading: Any) -> None:

    async def imported() -> tuple[int, int, Counter[str]]:
        async with open_state(config) as store:
            return await import_file(store, file, by, **reading)

    replies, new, left_out = run_async(imported())
    if as_json:
        print_json({"file": str(file), "replies": replies, "new": new, "left_out": dict(left_out.most_common())})
        return
    said = f"{quantity(replies, 'labelled reply', 'labelled replies')} in {file}, {quantity(new, 'new label')}"
    typer.echo(escape_terminal(said))
    for why, number in left_out.most_common():
        typer.echo(escape_terminal(f"left out {number:,}: {why}", one_line=True))


def _as_json(opinion: Opinion) -> dict[str, Any]:
    return {
        "id": opinion.id,
        "task_id": opinion.task_id,
        "label": opinion.label.value,
        "criterion": opinion.criterion,
        "judge": None if opinion.accepted is None else "accept" if opinion.accepted else "reject",
        "comment": opinion.comment,
        "by": opinion.labelled_by,
        "at": opinion.created_at,
        "blind": opinion.is_blind,
    }


def _cells(each: dict[str, Any]) -> tuple[str, ...]:
    judge = each["judge"] or "–"
    return each["task_id"], each["label"], each["criterion"] or "–", judge, each["by"], moment(each["at"])


def _agreement_text(figures: dict[str, Any]) -> str:
    kappa = figures["kappa"]
    interval = "" if kappa["low"] is None else f" ({kappa['low']:.2f} to {kappa['high']:.2f})"
    text = (
        "not defined: one side always decides alike" if kappa["value"] is None else f"{kappa['value']:.2f}{interval}"
    )
    return f"{figures['agreement']:.0%} agreement on {quantity(figures['n'], 'reply', 'replies')}, kappa {text}"


def _write(config: Config, out: str, force: bool, as_json: bool) -> None:
    from flywheel.store import labels

    path = user_path(Path(out))
    attempted = f"write labels to {path}"
    if out != "-" and path.exists() and not force:
        raise ExportError(attempted, "it exists", "Name another file, or replace it with --force.")
    require_outside_state(config, path)
    lines = run_async(read_state(config, labels.label_file))
    if not lines:
        raise ExportError(
            attempted, "nobody has labelled a reply", "Label some with `flywheel label`, or in `flywheel web`."
        )
    data = b"".join(orjson.dumps(line) + b"\n" for line in lines)
    if out == "-":
        binary_stdout().write(data)
        return
    try:
        write_atomic(path, data, mode=PRIVATE)
    except OSError as error:
        raise ExportError(attempted, error.strerror or str(error), "Check the path and its permissions.") from error
    decided = sum(line["verdict"] is not None for line in lines)
    if as_json:
        print_json({"out": str(path), "lines": len(lines), "decided": decided})
    else:
        said = f"{quantity(len(lines), 'labelled reply', 'labelled replies')} in {path}, {decided} of them decided"
        typer.echo(escape_terminal(said))
