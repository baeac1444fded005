"""`flywheel tasks`: list tasks with their verdicts, and decide about those that are set aside for a person."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flywheel.cli.app import (
    ConfigOption,
    Group,
    JsonOption,
    app,
    load_config,
    print_json,
    read_state_or_warn,
    run_async,
)
from flywheel.cli.tables import moment, stdout
from flywheel.errors import EXIT_USAGE, StoreError
from flywheel.states import TaskState
from flywheel.terminal import escape_terminal

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console
    from sqlalchemy import Connection, Row

    from flywheel.config import Config

tasks_app = typer.Typer(
    cls=Group,
    help="List tasks with their verdicts; release or reject those that are set aside.",
    rich_markup_mode=None,
)
app.add_typer(tasks_app, name="tasks")

IdsArgument = Annotated[list[str] | None, typer.Argument(metavar="ID", help="Ids of held tasks.")]
AllOption = Annotated[bool, typer.Option("--all", help="All that are held.")]
EXCERPT = 60
"""Characters of a question and of an answer."""
SHOWN = 50
WIDE = 120
"""From so many columns on, question and answer have room beside the verdict."""


@dataclass(frozen=True, slots=True)
class _Before:
    """What the command line says before `release` or `reject`; it holds for them as if it stood behind."""

    config: Path | None
    as_json: bool


@tasks_app.callback(invoke_without_command=True)
def show(
    context: typer.Context,
    config: ConfigOption = None,
    state: Annotated[TaskState | None, typer.Option(help="Of this state.")] = None,
    adapter: Annotated[
        str | None, typer.Option(metavar="NAME", help="Answered by this adapter; `base` is the base model.")
    ] = None,
    criterion: Annotated[str | None, typer.Option(metavar="ID", help="Did not meet this criterion.")] = None,
    text: Annotated[str | None, typer.Option(metavar="TEXT", help="Question or answer contains this.")] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, metavar="N", help=f"At most this many. Default: {SHOWN}; with --json all.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List tasks with their verdicts, the newest first; or `release` or `reject` those that are held."""
    if (verb := context.invoked_subcommand) is not None:
        given = {"--state": state, "--adapter": adapter, "--criterion": criterion, "--text": text, "--limit": limit}
        for name, value in given.items():
            if value is not None:
                raise typer.BadParameter(f"it is for listing: give {verb} ids, or --all", param_hint=name)
        context.obj = _Before(config, as_json)
        return
    from flywheel.store import task_list

    wanted = task_list.conditions(state, adapter, criterion, text)
    most = limit if as_json else limit or SHOWN
    found, total = run_async(
        read_state_or_warn(
            load_config(config),
            lambda conn: (task_list.listed(conn, wanted, most), task_list.count(conn, wanted)),
        )
    )
    shown = [_task(row) for row in found]
    if as_json:
        print_json({"total": total, "tasks": shown})
        return
    if shown:
        _print(stdout(), escape_terminal(shown, one_line=True))
    kind = f" {state.value}" if state is not None else ""
    shortened = f"{len(shown):,} of {total:,}{kind}; --limit N shows more"
    typer.echo(f"{total:,}{kind}" if len(shown) == total else shortened)


def _task(row: Row[Any]) -> dict[str, Any]:
    return {
        "task_id": row.key,
        "state": row.state,
        "split": row.split,
        "score": row.score,
        "failed": [result["criterion"] for result in row.results or () if not result["passed"]],
        "reason": row.reason or row.error or "",
        "agent": row.agent,
        "adapter": row.adapter,
        "query": row.payload["main_query"],
        "answer": row.payload["answer"],
        "conversation_id": row.payload["metadata"]["conversation_id"],
        "started_at": row.payload["metadata"]["started_at"],
        "origin": row.origin,
        "like": row.like,
    }


def _print(console: Console, shown: list[dict[str, Any]]) -> None:
    """In a table, with question and answer in its last column, or on a line of their own where that has no room."""
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    from flywheel.cli.verdict_table import excerpt

    table = Table(box=None, pad_edge=False, header_style="dim")
    # Held tasks have no verdict; what matters of them is where they come from.
    held = all(task["state"] == TaskState.HELD for task in shown)
    columns = ("task", "asked at", "origin") if held else ("task", "asked at", "state", "score", "failed")
    for name in columns:
        table.add_column(name, no_wrap=name != "failed", justify="right" if name == "score" else "left")
    is_wide = console.width >= WIDE
    if is_wide:
        table.add_column("question → answer", overflow="fold")
    for task in shown:
        score = "–" if task["score"] is None else f"{task['score']:.2f}"
        failed = ", ".join(task["failed"]) or "–"
        cells = (task["origin"] or "–",) if held else (task["state"], score, failed)
        about = Text(" → ".join(excerpt(task[name], EXCERPT) for name in ("query", "answer")))
        facts = [Text(cell) for cell in (task["task_id"], moment(task["started_at"]), *cells)]
        if is_wide:
            table.add_row(*facts, about)
        else:
            console.print(Text("  ").join(facts))
            console.print(Padding(about, (0, 0, 0, 2), expand=False))
    if is_wide:
        console.print(table)


@tasks_app.command()
def release(
    context: typer.Context,
    ids: IdsArgument = None,
    everything: AllOption = False,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let held tasks go on to the filters and the judge; they are not held again."""
    from flywheel.store.claims import release_held

    before: _Before = context.obj
    settings = load_config(config or before.config)
    _decide("release", release_held, ids or [], everything, config=settings, as_json=as_json or before.as_json)


@tasks_app.command()
def reject(
    context: typer.Context,
    ids: IdsArgument = None,
    everything: AllOption = False,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Reject held tasks, as a person's verdict."""
    from flywheel.store.claims import reject_held

    before: _Before = context.obj
    settings = load_config(config or before.config)
    _decide("reject", reject_held, ids or [], everything, config=settings, as_json=as_json or before.as_json)


def _decide(
    verb: str,
    decide: Callable[[Connection, list[int]], list[int]],
    keys: list[str],
    everything: bool,
    *,
    config: Config,
    as_json: bool,
) -> None:
    if bool(keys) == everything:
        typer.echo(f"flywheel: name the tasks to {verb}, or --all", err=True)
        raise typer.Exit(EXIT_USAGE)
    from flywheel.store import task_list

    def settle(conn: Connection) -> list[str]:
        held = {row.key: row.id for row in reversed(task_list.listed(conn, task_list.conditions(TaskState.HELD)))}
        if unknown := [key for key in keys if key not in held]:
            raise StoreError(
                f"{verb} {', '.join(unknown[:5])}",
                "no held task has this id" if len(unknown) == 1 else "no held tasks have these ids",
                "`flywheel tasks --state held` lists them.",
            )
        done = set(decide(conn, [held[key] for key in (keys or held)]))
        return [key for key, number in held.items() if number in done]

    done = run_async(_change(config, settle))
    past = {"release": "released", "reject": "rejected"}[verb]
    if as_json:
        print_json({past: done})
    else:
        typer.echo(f"{len(done)} {past}")


async def _change(config: Config, change: Callable[[Connection], list[str]]) -> list[str]:
    from flywheel.store.database import Store

    # Without the instance lock: the daemon may run, and each change is one compare-and-set in one transaction.
    store = await Store.open(config.state_dir)
    try:
        return await store.write(change)
    finally:
        await store.close()
