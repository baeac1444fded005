"""`flywheel ingest`: one pass over the sources."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from flywheel.cli.app import ConfigOption, JsonOption, app, complain, load_config, print_json, run_async
from flywheel.config import Config, StudioSource
from flywheel.errors import EXIT_FAILED


@app.command()
def ingest(
    config: ConfigOption = None,
    source: Annotated[
        list[Path] | None, typer.Option(metavar="DB", help="Read this database instead of the configured ones.")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Append the tasks here.")] = None,
    sweep: Annotated[
        bool, typer.Option("--sweep", help="Compare everything with the ledger, not only what is new.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Read new replies from the sources and make tasks of them."""
    settings = load_config(config)
    if source:
        settings = settings.model_copy(update={"sources": [StudioSource(path=path) for path in source]})
    report, errors = run_async(_ingest(settings, out, sweep))
    if as_json:
        print_json(report)
    else:
        _print(report)
    for error in errors:
        complain(error)
    if errors:
        raise typer.Exit(EXIT_FAILED)


async def _ingest(config: Config, out: Path | None, sweep: bool) -> tuple[dict[str, Any], list[str]]:
    from flywheel.daemon.ingestion import Ingestion
    from flywheel.daemon.lock import InstanceLock
    from flywheel.store.database import Store
    from flywheel.store.export import export_sources

    with InstanceLock(config.state_dir):
        store = await Store.open(config.state_dir)
        ingestion = Ingestion(store, config, export_tasks=out is None)
        try:
            reports = await ingestion.run(final=True, sweep=sweep)
            if out is not None:
                await export_sources(store, out, [report.source_id for report in reports])
        finally:
            await ingestion.close()
            await store.close()
    return {
        "sources": [report.as_json() for report in reports],
        "tasks": sum(report.counts.tasks for report in reports),
        "new": sum(report.new for report in reports),
        "out": str(out or config.task_file),
    }, [str(report.error) for report in reports if report.error is not None]


def _print(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("source", "schema", "replies", "tasks", "new", "skipped", "dead")
    for source in report["sources"]:
        skipped = ", ".join(f"{reason} {number}" for reason, number in source["skipped"].items()) or "–"
        numbers = (str(source[key]) for key in ("replies", "tasks", "new"))
        table.add_row(source["path"], source["schema"] or "?", *numbers, skipped, str(source["dead"]))
    console = Console()
    console.print(table)
    for source in report["sources"]:
        for warning in source["warnings"]:
            console.print(f"warning: {source['path']}: {warning}", markup=False, highlight=False)
    console.print(f"{report['tasks']} tasks, {report['new']} new, in {report['out']}", markup=False, highlight=False)
