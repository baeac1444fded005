"""`flywheel ingest`: one pass over the sources."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from flywheel.cli.app import (
    ConfigOption,
    JsonOption,
    absolute,
    app,
    complain,
    load_config,
    open_state,
    print_json,
    require_outside_state,
    run_async,
)
from flywheel.cli.progress_bars import beside, of_sources
from flywheel.cli.tables import forecast_text, print_facts, short_path, source_text
from flywheel.config.file import Config, source_at
from flywheel.config.ingest import JsonlSource, StudioSource
from flywheel.daemon.configured_source import apply_model_rules
from flywheel.daemon.forecast import Forecast, forecast
from flywheel.errors import EXIT_FAILED, ConfigError
from flywheel.sources.ingestion import Ingestion
from flywheel.store import ledger
from flywheel.store.task_file import export_sources
from flywheel.system.process import tune_process
from flywheel.system.terminal import escape_terminal


@app.command()
def ingest(
    config: ConfigOption = None,
    source: Annotated[
        list[Path] | None, typer.Option(metavar="DB", help="Read this database instead of the configured sources.")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Append the tasks to this file.")] = None,
    sweep: Annotated[
        bool,
        typer.Option("--sweep", help="Full scan: compare all rows and lines with the ledger, not only new ones."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Read new replies from the sources and turn them into tasks."""
    configured = settings = load_config(config, names_sources=bool(source))
    if source:
        settings = settings.model_copy(update={"sources": [StudioSource(path=absolute(path)) for path in source]})
    elif settings.project is not None:
        # Sources of Flywheel's own files may come later. AgentJet's have to be there.
        made = [each.path for each in settings.sources if isinstance(each, JsonlSource) and each.dataset]
        for path in (each.path for each in settings.sources if isinstance(each, StudioSource | JsonlSource)):
            if not path.exists() and path not in made:
                hint = f"Correct it in {settings.file}; a relative path starts at {settings.project}."
                raise ConfigError(f"read {path}", "there is no such file", hint)
    if out != configured.task_file:
        require_outside_state(configured, out)
    # The configured combination was checked when the configuration was loaded.
    if out or source:
        appended = absolute(out or settings.task_file)
        if (read := source_at(settings, appended)) is not None:
            raise typer.BadParameter(
                f"{appended} is read by the source {read}; Flywheel never writes to a source",
                param_hint="--out" if out else "--source",
            )
    tune_process()
    report, expected, errors = run_async(_ingest(settings, configured, out, sweep))
    if as_json:
        print_json(report | {"forecast": expected and expected.as_json()})
    else:
        shown = escape_terminal(report)
        facts = []
        for each in shown["sources"]:
            warnings = "\n".join(f"warning: {text}" for text in each["warnings"])
            # Errors are on stderr.
            facts.append(("source", source_text({**each, "error": "", "warning": warnings})))
        facts.append(("tasks", f"{shown['tasks']:,} ({shown['new']:,} new) in {short_path(shown['out'])}"))
        print_facts(facts + ([("forecast", forecast_text(expected))] if expected else []))
    for error in errors:
        complain(error)
    if errors:
        raise typer.Exit(EXIT_FAILED)


async def _ingest(
    config: Config, configured: Config, out: Path | None, sweep: bool
) -> tuple[dict[str, Any], Forecast | None, list[str]]:
    """The report, the forecast of the `configured` settings if they have a trainer, and errors of sources."""
    async with open_state(config, lock=True) as store:
        if configured.has_trainer:
            # Before new tasks, which follow today's settings: a state without tasks has nothing to look at.
            await apply_model_rules(store, configured)
        ingestion = Ingestion(store, config, export_tasks=out is None)
        try:
            async with beside(of_sources(ingestion)):
                reports = await ingestion.run(final=True, sweep=sweep)
            if out is not None:
                await export_sources(store, out, [report.source_id for report in reports])
            known = {row.id: row._asdict() for row in await store.read(ledger.all_sources)}
            expected = await store.read(forecast, configured) if configured.has_trainer else None
        finally:
            await ingestion.close()
    report = {
        "sources": [
            report.as_json() | {key: known.get(report.source_id, _UNKNOWN)[key] for key in _UNKNOWN}
            for report in reports
        ],
        "tasks": sum(report.counts.tasks for report in reports),
        "new": sum(report.new for report in reports),
        "out": str(out or config.task_file),
    }
    return report, expected, [str(report.error) for report in reports if report.error is not None]


_UNKNOWN: dict[str, Any] = {"condition": "not stored", "open_traces": 0, "longest_read_ms": 0.0}
"""For a source whose condition could not be stored."""
