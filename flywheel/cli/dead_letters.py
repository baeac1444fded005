"""`flywheel dead-letters`: list, retry or close what could not be processed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import typer
from sqlalchemy import Connection

from flywheel.cli.app import (
    ConfigOption,
    JsonOption,
    app,
    ask,
    load_config,
    missing_state,
    print_json,
    read_state,
    run_async,
)
from flywheel.cli.tables import UNBROKEN, Row, print_rows, stdout
from flywheel.config.file import Config
from flywheel.records.states import DeadLetterState
from flywheel.store.dead_letters import AFTER_RETRY, DeadLetter, count, history_of, in_states, with_ids
from flywheel.store.requests import RequestKind
from flywheel.system.terminal import escape_terminal, moment, quantity

COLUMNS: Final = ("id", "kind", "source", "subject", "when", "state", "error")
WIDE: Final = 100
"""Terminals of this width have room for a dead letter in one row."""
ERROR_SHOWN: Final = 200
"""Characters of an error in a list on a terminal; `show ID` prints all of it."""


@app.command(name="dead-letters")
def dead_letters(
    action: Annotated[
        Literal["show", "retry", "drop"],
        typer.Argument(metavar="show|retry|drop", help="What to do with the dead letters."),
    ] = "show",
    ids: Annotated[list[int] | None, typer.Argument(metavar="ID", help="Ids of dead letters.")] = None,
    every: Annotated[
        bool, typer.Option("--all", help="All open dead letters; with `show`, closed ones too.")
    ] = False,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """List rows and tasks that could not be processed, retry them, or close them for good."""
    settings = load_config(config)
    if action == "show":
        _show(settings, ids or [], every, as_json)
        return
    if bool(ids) == every:
        raise typer.BadParameter("name dead letters by their numbers, or use --all", param_hint="ID")
    _close(settings, ids, as_json, retries=action == "retry")


def _show(config: Config, ids: list[int], every: bool, as_json: bool) -> None:
    def look(conn: Connection) -> tuple[list[DeadLetter], dict[int, list[dict[str, Any]]], dict[str, int]]:
        states = list(DeadLetterState) if every else [DeadLetterState.OPEN]
        letters = with_ids(conn, ids) if ids else in_states(conn, states)
        histories = {letter.id: history_of(conn, letter.id) for letter in letters if ids}
        return letters, histories, count(conn)

    letters, histories, counts = run_async(read_state(config, look, warn=False))
    if as_json:
        shown = [asdict(letter) | ({"history": histories[letter.id]} if ids else {}) for letter in letters]
        print_json({"letters": shown, **counts})
    elif ids:
        for letter in letters:
            typer.echo(escape_terminal("\n".join(_lines(letter, histories[letter.id]))))
    else:
        _print_table(letters, counts, every)
        if missing := missing_state(config):
            typer.echo(missing)


def _close(config: Config, ids: list[int] | None, as_json: bool, *, retries: bool) -> None:
    """Retry or drop these dead letters, all open ones without `ids`."""
    outcome = ask(config, RequestKind.RETRY if retries else RequestKind.DROP, {"ids": ids})
    report: dict[str, Any] = outcome if outcome is not None else {"retried": [], "queued": True}
    if as_json:
        print_json(report)
    elif outcome is None:
        typer.echo("queued: the running daemon retries them, otherwise the next `flywheel run` or `flywheel ingest`")
    elif not any(report.values()):
        typer.echo("no dead letter is open")
    elif retries:
        for letter in report["retried"]:
            typer.echo(f"{letter['id']}: {escape_terminal(letter['subject'])}: {AFTER_RETRY[letter['next']]}")
        typer.echo(f"{len(report['retried'])} retried; those that fail again are reopened")
    else:
        typer.echo(f"{len(report['dropped'])} dropped; their rows and tasks stay dead, and `--all` lists them")


def _print_table(letters: list[DeadLetter], counts: dict[str, int], every: bool) -> None:
    console = stdout()
    rows = [escape_terminal(_cells(letter), one_line=True) for letter in letters]
    if rows and console.width == UNBROKEN:
        for cells in (COLUMNS, *rows):
            typer.echo("\t".join(cells))
    elif rows:
        shown = [Row(cells, (error[:ERROR_SHOWN],)) for *cells, error in rows]
        print_rows(console, COLUMNS, shown, wide=WIDE, fold=("source", "subject", "state", "error"))
    closed = ", ".join(f"{counts[state]} {state}" for state in ("retried", "dropped") if counts[state])
    hint = f" ({closed}: see --all)" if closed and not every else ""
    open_ones = f"{counts['open']:,} open" if counts["open"] else "none"
    typer.echo(f"Dead letters: {open_ones}{hint}")


def _cells(letter: DeadLetter) -> list[str]:
    state = letter.state if letter.attempts == 1 else f"{letter.state}, {letter.attempts} times"
    source = Path(letter.source).name or "–"
    return [str(letter.id), letter.kind, source, letter.subject, moment(letter.created_at), state, letter.error]


def _lines(letter: DeadLetter, history: list[dict[str, Any]]) -> Iterator[str]:
    yield f"dead letter {letter.id}: {letter.kind} {letter.subject}"
    yield f"  source:   {letter.source or '–'}"
    yield f"  state:    {letter.state}, failed {quantity(letter.attempts, 'time')}, first {letter.created_at}"
    yield f"  error:    {letter.error}"
    for entry in history:
        yield f"  {entry['at']}  {entry['state']}  {entry['detail']}".rstrip()
    if letter.excerpt:
        yield letter.excerpt
