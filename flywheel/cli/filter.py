"""`flywheel filter`: judge pending tasks, or show what the judge would do."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flywheel.cli.app import (
    ConfigOption,
    JsonOption,
    app,
    complain,
    find_config,
    load_config,
    print_json,
    run_async,
)
from flywheel.config import Config
from flywheel.errors import EXIT_FAILED

if TYPE_CHECKING:
    from flywheel.daemon.filtering import FilterReport, Judged
    from flywheel.store.database import Store


@app.command(name="filter")
def filter_tasks(
    config: ConfigOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Ask the judge, but write nothing anywhere.")] = False,
    rubric: Annotated[Path | None, typer.Option(metavar="FILE", help="Use this rubric.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Judge this many tasks at most.")] = None,
    rejudge: Annotated[
        bool, typer.Option("--rejudge", help="Also judge again what another rubric or judge accepted or rejected.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Judge pending tasks with the rubric; new replies of configured sources are read first."""
    settings = load_config(config)
    has_sources = find_config(config) is not None
    report, verdicts = run_async(_filter(settings, rubric, dry_run, limit, has_sources, rejudge))
    if as_json:
        print_json(_as_json(report, verdicts, dry_run))
    else:
        _print(report, verdicts, dry_run)
    if report.error is not None:
        complain(report.error)
        raise typer.Exit(EXIT_FAILED)


async def _filter(
    config: Config, rubric: Path | None, dry_run: bool, limit: int | None, has_sources: bool, rejudge: bool
) -> tuple[FilterReport, list[dict[str, Any]]]:
    from flywheel.daemon.lock import InstanceLock
    from flywheel.store.database import Store

    if dry_run:
        # Everything happens to a copy in memory, by the same code: what is shown is what would be done.
        store = await Store.copy(config.state_dir)
        try:
            return await _judge(store, config, rubric, limit, has_sources, rejudge, export=False)
        finally:
            await store.close()
    with InstanceLock(config.state_dir):
        store = await Store.open(config.state_dir)
        try:
            return await _judge(store, config, rubric, limit, has_sources, rejudge, export=True)
        finally:
            await store.close()


async def _judge(
    store: Store,
    config: Config,
    rubric: Path | None,
    limit: int | None,
    has_sources: bool,
    rejudge: bool,
    *,
    export: bool,
) -> tuple[FilterReport, list[dict[str, Any]]]:
    from flywheel.daemon.filtering import Filtering, exchange_of
    from flywheel.daemon.ingestion import Ingestion
    from flywheel.judge.rubric_file import load_rubric
    from flywheel.store import judging

    filtering = Filtering(store, config, rubric=load_rubric(rubric) if rubric is not None else None)
    await store.write(judging.release_all, "its process died")
    if has_sources:
        ingestion = Ingestion(store, config, export_tasks=export)
        try:
            for source in await ingestion.run(final=True):
                if source.error is not None:
                    complain(source.error)
        finally:
            await ingestion.close()
    found: dict[int, dict[str, Any]] = {}

    def on_judged(judged: Judged) -> None:
        verdict, repeats = judged.verdict, judged.repeats
        found[judged.task.id] = {
            "task_id": judged.task.key,
            "span_id": judged.task.line["metadata"]["span_id"],
            "outcome": verdict.outcome.value if verdict else "held" if judged.held else "dead",
            "score": verdict.score if verdict else None,
            "failed": list(verdict.failed) if verdict else [],
            "reason": (verdict.reason or verdict.error) if verdict else judged.error,
            "estimated_tokens": filtering.grader.preview(exchange_of(judged.task.line)),
            "reused": judged.reused,
            "repeats": repeats
            and {"task_id": repeats.key, "similarity": repeats.similarity, "method": repeats.method},
        }

    report = await filtering.run(limit=limit, on_judged=on_judged, rejudge=rejudge)
    return report, [found[task] for task in sorted(found)]


def _as_json(report: FilterReport, verdicts: list[dict[str, Any]], dry_run: bool) -> dict[str, Any]:
    return {
        "judged": report.judged,
        "accepted": report.accepted,
        "rejected": report.rejected,
        "undecided": report.undecided,
        "dead": report.dead,
        "held": report.held,
        "reused": report.reused,
        "changed": report.changed,
        "verdicts": verdicts,
        "usage": {
            "calls": report.calls,
            "prompt_tokens": report.prompt_tokens,
            "completion_tokens": report.completion_tokens,
        },
        "estimated_tokens": sum(verdict["estimated_tokens"] for verdict in verdicts),
        "dry_run": dry_run,
        "error": str(report.error) if report.error else None,
    }


def _print(report: FilterReport, verdicts: list[dict[str, Any]], dry_run: bool) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    colours = {"accepted": "green", "rejected": "red", "undecided": "yellow", "dead": "magenta", "held": "blue"}
    if verdicts:
        table = Table("task", "score", "verdict", "failed", "reason", "tokens ≈")
        for verdict in verdicts:
            score = "–" if verdict["score"] is None else f"{verdict['score']:.2f}"
            table.add_row(
                verdict["task_id"],
                score,
                Text(verdict["outcome"], style=colours[verdict["outcome"]]),
                ", ".join(verdict["failed"]) or "–",
                Text(verdict["reason"]),
                str(verdict["estimated_tokens"]),
            )
        console.print(table)
    ends = f"{report.accepted} accepted, {report.rejected} rejected, {report.undecided} undecided"
    cost = f"{report.calls} calls, {report.prompt_tokens + report.completion_tokens} tokens"
    total = f"{report.judged} judged: {ends}; {cost}{'; dry run: nothing was written' if dry_run else ''}"
    console.print(total if verdicts else "no task is due", markup=False, highlight=False)
