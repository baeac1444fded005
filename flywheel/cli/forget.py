"""`flywheel forget`: erase a conversation, or all of a user, wherever Flywheel has it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Final

import typer

from flywheel.cli.app import (
    ConfigOption,
    JsonOption,
    app,
    load_config,
    open_state,
    print_json,
    require_state,
    run_async,
)
from flywheel.daemon import erasure
from flywheel.daemon.erasure import shares
from flywheel.errors import EXIT_LOCKED
from flywheel.records.task import NO_CONVERSATION
from flywheel.store.erasures import Kind
from flywheel.system.terminal import escape_terminal, quantity

OUT_OF_REACH: Final = (
    "Flywheel cannot erase the originals in the sources (Studio's database, files), trained weights, exports,"
    " published adapters, and data sent to webhooks, Langfuse or trackers. Backups keep the texts; a restore erases"
    " them again."
)
UNFINISHED: Final = {
    "open": "Not erased yet: another process uses the state. The daemon or a rerun erases it; no round uses it.",
    "erased": "Erased, not yet purged: another process reads an older state. The daemon retries; or run it again.",
}


@app.command()
def forget(
    conversation: Annotated[str | None, typer.Option(metavar="ID", help="The conversation to erase.")] = None,
    user: Annotated[str | None, typer.Option(metavar="ID", help="Erase all conversations of this user.")] = None,
    service: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="With --conversation: erase only what this service has under that id."),
    ] = None,
    block: Annotated[
        bool, typer.Option("--block", help="With --user: refuse new conversations of the user, too.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be erased.")] = False,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Erase a conversation, or all of a user: replies, tasks, verdicts, recorded calls, texts in files of rounds."""
    if (conversation is None) == (user is None):
        raise typer.BadParameter("name one of them", param_hint="--conversation or --user")
    subject = str(user if conversation is None else conversation)
    if service is not None and conversation is None:
        raise typer.BadParameter("it goes with --conversation", param_hint="--service")
    if block and user is None:
        raise typer.BadParameter("--block needs --user: a conversation is always blocked", param_hint="--block")
    if subject in NO_CONVERSATION:
        raise typer.BadParameter(
            f"{subject!r} is shared by unrelated conversations without an id", param_hint="--conversation or --user"
        )
    settings = load_config(config)
    require_state(settings, "erase a conversation")
    kind = Kind.CONVERSATION if user is None else Kind.USER
    tell = (lambda _: None) if as_json else _print_others

    async def erased() -> dict[str, Any]:

        async with open_state(settings) as store:
            return await erasure.forget(
                store, settings, kind, subject, service, blocks=block, dry_run=dry_run, tell=tell
            )

    found = run_async(erased())
    if as_json:
        about = {"kind": kind.value, "service": service, "blocked": block or user is None, "dry_run": dry_run}
        print_json({**about, **found})
    else:
        for line in _lines(found):
            print(escape_terminal(line, one_line=True))
    if found["state"] not in ("found", "purged"):
        raise typer.Exit(EXIT_LOCKED)


def _print_others(others: Sequence[Mapping[str, str]]) -> None:
    """What its traces have besides, as a client gave several runs the same trace ids, a line each."""
    for each in others:
        named = each["conversation"] not in NO_CONVERSATION
        name = f"conversation {each['conversation']}" if named else f"span {each['span']}"
        line = f"its trace {each['trace']} also has {name} of {each['started_at'][:19]}: it is erased as well"
        print(escape_terminal(line, one_line=True), flush=True)


def _lines(found: Mapping[str, Any]) -> Iterator[str]:
    counts = {
        "reply": found["replies"], "task": found["tasks"], "recorded call": found["calls"], "span": found["spans"],
        "line of the task file": found["lines"],
    }  # fmt: skip
    many = {"reply": "replies", "line of the task file": "lines of the task file"}
    what = ", ".join(quantity(count, name, many.get(name, f"{name}s")) for name, count in counts.items() if count)
    yield f"{'would erase' if found['state'] == 'found' else 'erased'} {what}" if what else "nothing of it is stored"
    if len(found["services"].keys() - {""}) > 1:
        yield f"several services have conversations with this id: {shares(found['services'])}"
    if found["rounds"]:
        yield f"rounds that used it: {', '.join(found['rounds'])}"
    yield from found["advice"]
    for name in found["unprovable"]:
        yield f"{name} cannot pass a weight check any more: its probe contained these texts"
    for url, count in found["pending"].items():
        yield f"{url} did not answer: {quantity(count, 'call')} there will be erased when it does"
    for folder in found["backups"]:
        yield f"the backup in {folder} could not be reached: a restore from it would bring the texts back"
    if found["state"] != "found":
        yield from filter(None, (UNFINISHED.get(found["state"]), OUT_OF_REACH))
