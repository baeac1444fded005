"""`flywheel forget`: erase a conversation, or all of a user, wherever Flywheel has it."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any, Final

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
from flywheel.errors import EXIT_LOCKED, LockedError
from flywheel.system.terminal import escape_terminal, quantity

if TYPE_CHECKING:
    from flywheel.config.file import Config
    from flywheel.store.erasures import Kind

WAIT_SECONDS: Final = 60.0
"""How long a running daemon, which ends what it is judging first, is waited for."""
_PAUSE_SECONDS: Final = 0.2
OUT_OF_REACH: Final = (
    "Flywheel cannot erase: what the sources themselves have (Studio's database, files), weights that were"
    " trained on it, backups (a restore erases it again), exports, what webhooks, Langfuse and trackers were sent,"
    " published adapters."
)


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
    from flywheel.records.task import NO_CONVERSATION
    from flywheel.store.erasures import Kind

    if (conversation is None) == (user is None):
        raise typer.BadParameter("name one of them", param_hint="--conversation or --user")
    subject = str(user if conversation is None else conversation)
    if service is not None and conversation is None:
        raise typer.BadParameter("it goes with --conversation", param_hint="--service")
    if block and user is None:
        raise typer.BadParameter("a conversation is always blocked; it goes with --user", param_hint="--block")
    if subject in NO_CONVERSATION:
        raise typer.BadParameter(
            f"{subject!r} stands for unrelated conversations without an id", param_hint="--conversation or --user"
        )
    settings = load_config(config)
    require_state(settings, "erase a conversation")
    kind = Kind.CONVERSATION if user is None else Kind.USER
    found = run_async(_forget(settings, kind, subject, service, block=block, dry_run=dry_run, is_quiet=as_json))
    if as_json:
        about = {"kind": kind.value, "service": service, "blocked": block or user is None, "dry_run": dry_run}
        print_json({**about, **found})
    else:
        for line in _lines(found, dry_run=dry_run):
            print(escape_terminal(line, one_line=True))
    if not (dry_run or found["state"] == "purged"):
        raise typer.Exit(EXIT_LOCKED)


async def _forget(
    config: Config, kind: Kind, subject: str, service: str | None, *, block: bool, dry_run: bool, is_quiet: bool
) -> dict[str, Any]:
    """What was erased (`Report`), or would be, how far that got, how many traces each service has of a conversation,
    and what its traces have besides, which is said before it is erased."""
    # Imported here: `flywheel --help` needs no event loop.
    import asyncio

    from flywheel.daemon.erasure import Eraser, report_of, used_for
    from flywheel.sources.ingestion import Ingestion
    from flywheel.store import erasures
    from flywheel.store.holder import locked

    async with open_state(config) as store:
        ingestion = Ingestion(store, config)
        eraser = Eraser(store, config, ingestion)
        try:
            by_trace = await eraser.services(subject) if kind is erasures.Kind.CONVERSATION else {}
            services = dict(sorted(Counter(name for names in by_trace.values() for name in names or {""}).items()))
            if service is not None:
                kind, subject = erasures.Kind.SERVICE, erasures.in_service(subject, service)
                if services and service not in services and not await store.read(erasures.has_begun, kind, subject):
                    raise typer.BadParameter(
                        f"it has no trace of the conversation; {_shares(services)}", param_hint="--service"
                    )
            found = await eraser.find(kind, subject)
            others = await store.read(erasures.others_in_traces, found)
            if not is_quiet:
                for line in _shared_traces(others):
                    print(escape_terminal(line, one_line=True), flush=True)
            about = {"services": services, "other_runs": others}
            if dry_run:
                return {"state": "found", **about, **report_of(found, **await store.read(used_for, found))}
            number = await store.write(erasures.begin, kind, subject, found.conversations, blocks=block)
            until = time.monotonic() + WAIT_SECONDS
            while True:
                try:
                    async with locked(store, config.state_dir):
                        await eraser.finish()
                except LockedError:
                    pass
                row = await store.read(erasures.with_id, number)
                if row.state == erasures.ErasureState.PURGED or time.monotonic() >= until:
                    return {"state": row.state, **about, **(row.report or report_of(found))}
                await asyncio.sleep(_PAUSE_SECONDS)
        finally:
            await ingestion.close()


def _shared_traces(others: list[dict[str, str]]) -> list[str]:
    """What its traces have besides, as a client gave several runs the same trace ids, a line each."""
    from flywheel.records.task import NO_CONVERSATION

    def name(run: dict[str, str]) -> str:
        return (
            f"span {run['span']}" if run["conversation"] in NO_CONVERSATION else f"conversation {run['conversation']}"
        )

    return [
        f"its trace {each['trace']} also has {name(each)} of {each['started_at'][:19]}: it is erased as well"
        for each in others
    ]


def _shares(services: dict[str, int]) -> str:
    """How many traces each service has, with what erases those of one."""
    of_each = [f"{name or 'not known'} ({quantity(count, 'trace')})" for name, count in services.items()]
    return f"{', '.join(of_each)}; --service NAME takes those of one, and those of none that is known"


def _lines(found: dict[str, Any], *, dry_run: bool) -> list[str]:
    counts = {
        "reply": found["replies"], "task": found["tasks"], "recorded call": found["calls"], "span": found["spans"],
        "line of the task file": found["lines"],
    }  # fmt: skip
    many = {"reply": "replies", "line of the task file": "lines of the task file"}
    what = ", ".join(quantity(count, name, many.get(name, f"{name}s")) for name, count in counts.items() if count)
    lines = [f"{'would erase' if dry_run else 'erased'} {what}" if what else "nothing of it is stored"]
    if len(found["services"].keys() - {""}) > 1:
        lines.append(f"several services have conversations with this id: {_shares(found['services'])}")
    if found["rounds"]:
        lines.append(f"rounds that used it: {', '.join(found['rounds'])}")
    lines += found["advice"]
    for name in found["unprovable"]:
        lines.append(f"{name} cannot be proven on a server any more: its probe had these texts")
    for url, count in found["pending"].items():
        lines.append(f"{url} could not be asked: {quantity(count, 'call')} there are erased when it can be reached")
    for folder in found["backups"]:
        lines.append(f"the backup in {folder} could not be reached: a restore from there would bring it back")
    if dry_run:
        return lines
    if found["state"] == "open":
        lines.append(
            "Another flywheel has the state. The daemon, or this command again, erases it; nothing takes it now."
        )
    elif found["state"] == "erased":
        lines.append(
            "Erased, not yet purged: another process reads an older state. The daemon goes on; run it again."
        )
    return [*lines, OUT_OF_REACH]
