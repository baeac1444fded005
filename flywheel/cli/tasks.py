"""`flywheel tasks`: tasks with their verdicts, as a list."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from sqlalchemy import Connection

from flywheel.cli import documents
from flywheel.cli.app import (
    ConfigOption,
    JsonOption,
    ask,
    command_group,
    complain,
    load_config,
    print_json,
    read_state,
    run_async,
)
from flywheel.cli.tables import Row, counted, print_rows, spent, stdout
from flywheel.daemon.document_tasks import OUTCOMES
from flywheel.errors import EXIT_USAGE
from flywheel.records import skipping
from flywheel.records.states import SkipReason, TaskState
from flywheel.store import ledger
from flywheel.store.requests import RequestKind
from flywheel.store.views import task_list
from flywheel.system.terminal import escape_terminal, excerpt, moment, quantity, score_text

tasks_app = command_group(
    "tasks", "List tasks with their verdicts; release or reject held tasks.", no_args_is_help=False
)

EXCERPT = 60
"""Characters of a question or an answer in the list."""
SHOWN = 50
WIDE = 120
"""Terminals of this width have room for question and answer beside the verdict."""


@tasks_app.callback(invoke_without_command=True)
def list_tasks(
    context: typer.Context,
    config: ConfigOption = None,
    state: Annotated[TaskState | None, typer.Option(help="Only tasks in this state.")] = None,
    adapter: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Only tasks answered by this adapter, by `base`, or by an `unrecorded` one."
        ),
    ] = None,
    criterion: Annotated[
        str | None, typer.Option(metavar="ID", help="Only tasks that failed this criterion.")
    ] = None,
    text: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Only tasks whose question or answer contains this text.")
    ] = None,
    target: Annotated[str | None, typer.Option(metavar="NAME", help="Only tasks of this target.")] = None,
    limit: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help=f"Show at most this many. Default: {SHOWN}, or all with --json."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List tasks with their verdicts, newest first, or `release` or `reject` held tasks."""
    if (verb := context.invoked_subcommand) is not None:
        for name, value in context.params.items():
            if value is not None and name not in ("config", "as_json"):
                raise typer.BadParameter(
                    f"it applies to the list only: give {verb} ids, or --all", param_hint=f"--{name}"
                )
        context.obj = config, as_json  # they apply to the verb too
        return

    conditions = task_list.conditions(state, adapter, criterion, text, target=target)
    most = limit if as_json else limit or SHOWN

    def look(conn: Connection) -> tuple[Sequence[Any], int, dict[str, list[str]], dict[str, int]]:
        total = task_list.count(conn, conditions)
        # Only an empty list explains itself by what can be chosen.
        choices = {} if total else task_list.choices(conn)
        # A list of all tasks also says which replies are none.
        counts = () if conditions else ledger.counts_by_source(conn).values()
        skipped = sum((Counter(each.skipped) for each in counts), Counter[str]())
        return task_list.listed(conn, conditions, most), total, choices, skipped

    rows, total, choices, skipped = run_async(read_state(load_config(config), look))
    shown = [task_list.summary(row) for row in rows]
    if as_json:
        print_json({"total": total, "tasks": shown, "skipped": None if conditions else dict(sorted(skipped.items()))})
        return
    if shown:
        _print(stdout(), escape_terminal(shown, one_line=True))
    for reason, number in sorted(skipped.items()):
        remedy = skipping.REMEDIES[SkipReason(reason)]
        typer.echo(f"{quantity(number, 'reply is', 'replies are')} no task: {reason}. {remedy}".rstrip())
    if not total:
        if not skipped:
            typer.echo(_nothing(choices, conditions != [], criterion=criterion, adapter=adapter))
        return
    kind = f" {state.value}" if state is not None else ""
    shortened = f"{len(shown):,} of {total:,}{kind}; --limit N shows more"
    typer.echo(f"{total:,}{kind}" if len(shown) == total else shortened)


def _nothing(choices: dict[str, list[str]], is_selection: bool, **values: str | None) -> str:
    """That a list is empty; a value that no task has may be a mistyped one."""
    if not is_selection:
        return "There are no tasks yet: `flywheel ingest` reads the sources."
    said = ["No task matches."]
    for name, value in values.items():
        if value is not None and value not in choices[name]:
            close = difflib.get_close_matches(value, choices[name], n=1)
            meant = f"did you mean {close[0]}?" if close else f"there are {', '.join(choices[name]) or 'none yet'}."
            said.append(f"There is no {name} {value}: {meant}")
    return escape_terminal(" ".join(said))


def _print(console: Console, shown: list[dict[str, Any]]) -> None:
    # Held tasks have no verdict; their origin matters.
    held = all(task["state"] == TaskState.HELD for task in shown)
    columns = ("task", "asked at", "origin") if held else ("task", "asked at", "state", "score", "failed")
    rows = []
    for task in shown:
        verdict = (task["state"], score_text(task["score"]), ", ".join(task["failed"]) or "–")
        about = " → ".join(excerpt(task[name], EXCERPT) for name in ("query", "answer"))
        origin = (task["origin"] or task.get("document", "–"),)
        cells = (task["task_id"], moment(task["started_at"]), *(origin if held else verdict))
        quotes = [f"“{excerpt(quote, 2 * EXCERPT)}”" for quote in task.get("quotes", ()) if held]
        rows.append(Row(cells, (about, *quotes)))
    print_rows(console, (*columns, "question → answer"), rows, wide=WIDE, fold=("failed", "question → answer"))


def decide(
    context: typer.Context,
    ids: Annotated[list[str] | None, typer.Argument(metavar="ID", help="Ids of held tasks.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All held tasks.")] = False,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """`release` or `reject` held tasks."""
    verb, settings = str(context.info_name), load_config(config or context.obj[0])
    if bool(ids) == everything:
        typer.echo(f"flywheel: name the tasks to {verb}, or --all", err=True)
        raise typer.Exit(EXIT_USAGE)

    report = ask(settings, RequestKind(verb), {"tasks": ids or None})
    assert report is not None  # these need no instance lock
    if as_json or context.obj[1]:
        print_json(report)
    else:
        [(past, done)] = report.items()
        typer.echo(f"{len(done)} {past}")


for _verb, _help in (
    ("release", "Send held (quarantined) tasks to the filters and the judge; they are not held again."),
    ("reject", "Reject held tasks."),
):
    tasks_app.command(_verb, help=_help)(decide)


@tasks_app.command("from-documents")
def from_documents(
    context: typer.Context,
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Folder with .md and .txt files.")],
    count: Annotated[int, typer.Option(min=1, metavar="N", help="How many tasks are asked for.")] = 10,
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="The model, at the judge's endpoint. Default: judge.model.")
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="The order of the passages.")] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Read the documents, but ask no model.")] = False,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Have a model write tasks from documents, with quotes; they are held until a person releases them.

    A task with a quote that does not occur in its document is refused. The command given again asks for what is
    missing.
    """

    if not directory.is_dir():
        raise typer.BadParameter(f"there is no directory {directory}", param_hint="DIR")
    settings, quiet = load_config(config or context.obj[0]), as_json or context.obj[1]
    writing = documents.run(settings, directory, count, model, seed, dry_run=dry_run, quiet=quiet)
    report, error = run_async(writing)
    if quiet:
        print_json(report)
    else:
        shown = escape_terminal(report)
        found = f"{quantity(shown['documents'], 'document')}, {quantity(shown['passages'], 'passage')}"
        typer.echo(f"{found}; {quantity(shown['wanted'], 'task')} wanted, {shown['written_before']:,} written before")
        for path, why in shown["left_out"].items():
            typer.echo(f"left out: {path}: {why}")
        typer.echo(counted({name.replace("_", " "): shown[name] for name in (*OUTCOMES, "not_asked")}))
        estimate = f"about {quantity(shown['estimated_tokens'], 'token')} to send; dry run: no model was asked"
        typer.echo(estimate if dry_run else spent(shown["usage"], 0, shown["cost"]))
        if shown["held"]:
            typer.echo("`flywheel tasks --state held` shows them; `flywheel tasks release ID` passes them on")
    if error is not None:
        complain(error)
        raise typer.Exit(error.exit_code)
