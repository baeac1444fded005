"""`flywheel tasks`: look at tasks by their state, and decide about those that are set aside for a person."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flywheel.cli.app import ConfigOption, Group, JsonOption, app, load_config, print_json, run_async
from flywheel.cli.facts import moment
from flywheel.cli.state import look_at
from flywheel.disarmed import disarmed
from flywheel.errors import EXIT_USAGE, StoreError
from flywheel.states import TaskState

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy import Connection

    from flywheel.config import Config

tasks_app = typer.Typer(
    cls=Group, help="Look at tasks by their state; release or reject those that are set aside.", rich_markup_mode=None
)
app.add_typer(tasks_app, name="tasks")

IdsArgument = Annotated[list[str] | None, typer.Argument(metavar="ID", help="Ids of held tasks.")]
AllOption = Annotated[bool, typer.Option("--all", help="All that are held.")]
QUERY_SHOWN = 100


@dataclass(frozen=True, slots=True)
class _Before:
    """What the command line says before `release` or `reject`; it holds for them as if it stood behind."""

    config: Path | None
    as_json: bool


@tasks_app.callback(invoke_without_command=True)
def show(
    context: typer.Context,
    config: ConfigOption = None,
    state: Annotated[TaskState, typer.Option(help="The state.")] = TaskState.HELD,
    limit: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Show this many at most, the oldest first.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List tasks of a state, or `release` or `reject` those that are held."""
    if (verb := context.invoked_subcommand) is not None:
        if state is not TaskState.HELD or limit is not None:
            name = "--state" if limit is None else "--limit"
            raise typer.BadParameter(f"it is for listing: give {verb} ids, or --all", param_hint=name)
        context.obj = _Before(config, as_json)
        return
    from flywheel.store.influence import of_state

    found = run_async(look_at(load_config(config), lambda conn: of_state(conn, state, limit)))
    shown = [
        {
            "task_id": row.key,
            "state": row.state,
            "split": row.split,
            "query": row.payload["main_query"],
            "answer": row.payload["answer"],
            "conversation_id": row.payload["metadata"]["conversation_id"],
            "started_at": row.payload["metadata"]["started_at"],
            "origin": row.origin,
            "like": row.like,
        }
        for row in found
    ]
    if as_json:
        print_json({"state": state.value, "tasks": shown})
        return
    for task in disarmed(shown, one_line=True):
        query = " ".join(task["query"].split())
        when = moment(task["started_at"])
        typer.echo(f"{task['task_id']}  {when}  {task['origin'] or '–'}  {query[:QUERY_SHOWN]}")
    typer.echo(f"{len(shown)} {state.value}")


@tasks_app.command()
def release(
    context: typer.Context,
    ids: IdsArgument = None,
    everything: AllOption = False,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let held tasks go on to the filters and the judge; they are not held again."""
    from flywheel.store.judging import release_held

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
    from flywheel.store.judging import reject_held

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
    from flywheel.store.influence import of_state

    def settle(conn: Connection) -> list[str]:
        held = {row.key: row.id for row in of_state(conn, TaskState.HELD, None)}
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
