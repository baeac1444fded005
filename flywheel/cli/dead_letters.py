"""`flywheel dead-letters`: what could not go on, and what is to be done with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from flywheel.cli.app import (
    ConfigOption,
    JsonOption,
    app,
    load_config,
    missing_state,
    print_json,
    read_state,
    run_async,
)
from flywheel.cli.tables import UNBROKEN, moment, stdout
from flywheel.terminal import escape_terminal, quantity

if TYPE_CHECKING:
    from rich.console import Console
    from sqlalchemy import Connection

    from flywheel.config import Config
    from flywheel.store.dead_letters import Letter

T = TypeVar("T")

NEXT = {
    "judged": "the task is pending again: the daemon or `flywheel filter` judges it",
    "read": "its trace is read again: by the daemon or by `flywheel ingest`",
    "swept": "nothing is remembered of its trace: the daemon or `flywheel ingest --sweep` looks through its source",
    "reread": "its file is read again from the beginning: by the daemon or by `flywheel ingest`",
    "alive": "it is not dead any more: nothing is left to do",
}
"""What happens after a retry, by `flywheel.store.dead_letters.Next`."""


COLUMNS = ("id", "kind", "source", "subject", "when", "state", "error")
WIDE = 100
"""From so many columns on, a letter has room in one row of a table."""
ERROR_SHOWN = 200
"""Characters of an error that a list on a terminal shows; `show ID` has all of it."""


class Action(StrEnum):
    SHOW = "show"
    RETRY = "retry"
    DROP = "drop"


@app.command(name="dead-letters")
def dead_letters(
    action: Annotated[Action, typer.Argument(metavar="show|retry|drop", help="What to do.")] = Action.SHOW,
    ids: Annotated[list[int] | None, typer.Argument(metavar="ID", help="Only these.")] = None,
    every: Annotated[bool, typer.Option("--all", help="All open ones; show also the others.")] = False,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show rows and tasks that could not go on, have them looked at again, or close them for good."""
    settings = load_config(config)
    if action is Action.SHOW:
        _show(settings, ids or [], every, as_json)
        return
    if bool(ids) == every:
        raise typer.BadParameter("name the letters by their numbers, or all open ones with --all", param_hint="ID")
    if action is Action.RETRY:
        _retry(settings, ids, as_json)
    else:
        _drop(settings, ids, as_json)


def _show(config: Config, ids: list[int], every: bool, as_json: bool) -> None:
    from flywheel.states import LetterState
    from flywheel.store import dead_letters

    def look(conn: Connection) -> tuple[list[dict[str, Any]], dict[str, int]]:
        states = list(LetterState) if every else [LetterState.OPEN]
        found = dead_letters.letters_of(conn, ids) if ids else dead_letters.letters_in(conn, states)
        histories = [{"history": dead_letters.history_of(conn, letter.id)} if ids else {} for letter in found]
        told = [asdict(letter) | history for letter, history in zip(found, histories, strict=True)]
        return told, dead_letters.count(conn)

    found, counts = run_async(read_state(config, look))
    if as_json:
        print_json({"letters": found, **counts})
        return
    found = escape_terminal(found)
    if ids:
        for letter in found:
            _print_whole(letter)
    else:
        _print_table(found, counts, every)
        if missing := missing_state(config):
            typer.echo(missing)


def _retry(config: Config, ids: list[int] | None, as_json: bool) -> None:
    from flywheel.store import dead_letters

    done = run_async(_change(config, lambda conn: dead_letters.retry(conn, ids)))
    if as_json:
        print_json({"retried": [{**_named(letter), "next": then.value} for letter, then in done]})
        return
    for letter, then in done:
        typer.echo(f"{letter.id}: {escape_terminal(letter.subject)}: {NEXT[then]}")
    typer.echo(f"{len(done)} retried; one that fails again is open again, and counted" if done else "none is open")


def _drop(config: Config, ids: list[int] | None, as_json: bool) -> None:
    from flywheel.store import dead_letters

    done = run_async(_change(config, lambda conn: dead_letters.drop(conn, ids)))
    if as_json:
        print_json({"dropped": [_named(letter) for letter in done]})
        return
    typer.echo(
        f"{len(done)} dropped; what they are about stays dead, and `--all` shows them" if done else "none is open"
    )


def _named(letter: Letter) -> dict[str, Any]:
    return {"id": letter.id, "kind": letter.kind, "subject": letter.subject}


async def _change(config: Config, change: Callable[[Connection], T]) -> T:
    from flywheel.daemon.lock import InstanceLock
    from flywheel.store.database import Store

    with InstanceLock(config.state_dir):
        store = await Store.open(config.state_dir)
        try:
            return await store.write(change)
        finally:
            await store.close()


def _print_table(letters: list[dict[str, Any]], counts: dict[str, int], every: bool) -> None:
    console = stdout()
    rows = [tuple(escape_terminal(list(_row(letter)), one_line=True)) for letter in letters]
    if rows and console.width == UNBROKEN:
        for row in (COLUMNS, *rows):
            typer.echo("\t".join(row))
    elif rows:
        (_print_wide if console.width >= WIDE else _print_narrow)(console, rows)
    closed = ", ".join(f"{counts[state]} {state}" for state in ("retried", "dropped") if counts[state])
    hint = f" ({closed}: see --all)" if closed and not every else ""
    open_ones = quantity(counts["open"], "open dead letter") if counts["open"] else "no open dead letters"
    console.print(f"{open_ones}{hint}")


def _row(letter: dict[str, Any]) -> tuple[str, ...]:
    state = letter["state"] if letter["attempts"] == 1 else f"{letter['state']}, {letter['attempts']} times"
    when = moment(letter["created_at"])
    source = Path(letter["source"]).name or "–"
    return str(letter["id"]), letter["kind"], source, letter["subject"], when, state, letter["error"]


def _print_wide(console: Console, rows: list[tuple[str, ...]]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table()
    for name in COLUMNS:
        table.add_column(name, overflow="fold", no_wrap=name in ("id", "kind", "when"))
    for row in rows:
        table.add_row(*(Text(cell) for cell in (*row[:-1], row[-1][:ERROR_SHOWN])))
    console.print(table)


def _print_narrow(console: Console, rows: list[tuple[str, ...]]) -> None:
    """Each letter in lines of its own."""
    from rich.padding import Padding
    from rich.text import Text

    for number, kind, source, subject, when, state, error in rows:
        console.print(Text(f"{number}  {kind}  {subject}", style="bold"))
        for line in (f"{source}, {when}, {state}", error[:ERROR_SHOWN]):
            console.print(Padding(Text(line), (0, 0, 0, 2), expand=False))


def _print_whole(letter: dict[str, Any]) -> None:
    typer.echo(f"dead letter {letter['id']}: {letter['kind']} {letter['subject']}")
    typer.echo(f"  source:   {letter['source'] or '–'}")
    typer.echo(
        f"  state:    {letter['state']}, failed {quantity(letter['attempts'], 'time')}, first {letter['created_at']}"
    )
    typer.echo(f"  error:    {letter['error']}")
    for entry in letter["history"]:
        typer.echo(f"  {entry['at']}  {entry['state']}  {entry['detail']}".rstrip())
    if letter["excerpt"]:
        typer.echo(letter["excerpt"])
