"""`flywheel audit`: prove that every reply is accounted for, without changing anything."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flywheel.cli.app import (
    ConfigOption,
    JsonOption,
    absolute,
    app,
    load_config,
    missing_state,
    open_state,
    print_json,
    run_async,
)
from flywheel.config.file import Config
from flywheel.errors import EXIT_FAILED
from flywheel.sources.audit import DeepAudit
from flywheel.store.views.balance import Balance, balance
from flywheel.system.process import tune_process
from flywheel.system.terminal import escape_terminal, quantity


@app.command()
def audit(
    config: ConfigOption = None,
    deep: Annotated[
        bool, typer.Option("--deep", help="Also compare the ledger with the sources and the task file.")
    ] = False,
    source: Annotated[
        list[Path] | None,
        typer.Option(metavar="DB", help="With --deep: read this database instead of the configured sources."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Verify that every reply is accounted for. Exit 1 if one is not."""
    settings = load_config(config, names_sources=bool(source))
    if source and not deep:
        raise typer.BadParameter("it requires --deep", param_hint="--source")
    if source:
        from flywheel.config.ingest import StudioSource

        settings = settings.model_copy(update={"sources": [StudioSource(path=absolute(path)) for path in source]})
    tune_process()
    ledger, sources_audit = run_async(_audit(settings, deep=deep))
    problems = [*ledger.problems, *(sources_audit.problems if sources_audit else ())]
    missing = missing_state(settings)
    if as_json:
        report = {
            "balanced": ledger.balanced,
            "replies": ledger.replies,
            **ledger.ends,
            "reply_states": ledger.reply_states,
            "task_states": ledger.task_states,
            "skip_reasons": ledger.skipped,
            **(sources_audit.as_json() if sources_audit else {}),
            "no_state": missing,
            "problems": problems,
        }
        print_json(report)
    else:
        ends = " + ".join(f"{number:,} {end}" for end, number in ledger.ends.items() if number or end != "erased")
        balance = "balanced" if ledger.balanced else "NOT balanced"
        if ledger.balanced and problems:
            balance = "balanced; the problems above are outside the ledger"
        lines = [
            f"{quantity(ledger.replies, 'reply', 'replies')} = {ends}",
            *(sources_audit.lines if sources_audit else ()),
            *(f"problem: {problem}" for problem in problems),
            missing or f"Ledger: {balance}",
        ]
        typer.echo("\n".join(escape_terminal(line, one_line=True) for line in lines))
    if problems:
        raise typer.Exit(EXIT_FAILED)


async def _audit(config: Config, *, deep: bool) -> tuple[Balance, DeepAudit | None]:

    async with open_state(config, "view") as store:
        ledger = await store.read(balance)
        if not deep:
            return ledger, None
        from flywheel.sources.audit import deep_audit

        return ledger, await deep_audit(store, config)
