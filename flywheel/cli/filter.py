"""`flywheel filter`: judge pending tasks or those of a file, compare two rubrics or judges, estimate the cost."""

from __future__ import annotations

import signal
import sys
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import typer
from rich.console import Console

from flywheel.cli import tables
from flywheel.cli.app import (
    ConfigOption,
    JsonOption,
    app,
    complain,
    load_config,
    open_state,
    print_json,
    require_outside_state,
    run_async,
)
from flywheel.cli.progress_bars import of_tasks
from flywheel.cli.quality_bar import (
    ConfidenceOption,
    FailUnderOption,
    JunitOption,
    MaxUndecidedOption,
    MetricsOption,
    SummaryOption,
    metric_lines,
    quality_bar,
)
from flywheel.config.file import Config
from flywheel.daemon.configured_source import apply_model_rules
from flywheel.daemon.forecast import Forecast, forecast
from flywheel.daemon.judging.comparison import Comparison
from flywheel.daemon.judging.judge_setup import exchange_of, rubric_of
from flywheel.daemon.judging.judging import TaskJudging, recover, state_of
from flywheel.daemon.judging.judging_report import (
    COUNTS,
    Cost,
    CostEstimator,
    JudgingEstimate,
    JudgingReport,
    TaskResult,
    cost_of,
)
from flywheel.daemon.judging.quality_bar import Case, measured, metrics_of, unjudged
from flywheel.errors import EXIT_FAILED, EXIT_USAGE, ConfigError, FlywheelError
from flywheel.judge.agent_metrics import requested_metrics
from flywheel.judge.rubric.file import load_rubric
from flywheel.judge.rubric.rubric import Rubric
from flywheel.judge.usage import CallsInFlight
from flywheel.sources.ingestion import Ingestion
from flywheel.sources.jsonl.record import entries_of, rows_of_file
from flywheel.store import claims, verdicts
from flywheel.store.kernel.database import Store
from flywheel.system.process import tune_process
from flywheel.system.signals import Stop, use_default

PREVIEWED: Final = 2_000
"""A dry run of up to this many tasks first prints an estimate."""


@dataclass(frozen=True, slots=True)
class _Options:
    """The options of the command line."""

    config: Config
    dry_run: bool
    """Store nothing."""
    estimate: bool
    """Ask no judge."""
    rubric: Path | None
    limit: int | None
    rejudge: bool
    as_json: bool
    quiet: bool
    """Show no progress, no estimate and no result."""
    asks: bool = False
    """Ask a person before the judge is paid for tasks that no round could train on."""
    tasks: Path | None = None
    """A file of tasks, which takes the place of the sources and of the state."""
    metrics: str | None = None
    """Names of metrics of the replies."""
    failures: list[FlywheelError] = field(default_factory=list)
    """Errors of sources that could not be read; tasks of the others are judged."""
    keys: list[str] = field(default_factory=list)
    """The ids of the file's tasks that are to be judged."""


class _Judged(NamedTuple):
    """What is shown, the error that ended it early, the cases, and what the summary says beside them."""

    shown: dict[str, Any]
    error: FlywheelError | None = None
    cases: Sequence[Case] = ()
    notes: Sequence[str] = ()


@app.command(name="filter")
def filter_tasks(
    config: ConfigOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Ask the judge, but store nothing.")] = False,
    rubric: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Use this rubric instead of the configured one.", readable=False),
    ] = None,
    tasks: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Judge every row of this task file instead of the sources. No state is read or created.",
            readable=False,
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, metavar="N", help="Judge at most this many tasks.")] = None,
    rejudge: Annotated[
        bool,
        typer.Option(
            "--rejudge",
            help="Also judge again what another rubric or judge decided, and rerun the rubric's functions.",
        ),
    ] = False,
    against: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Compare with this rubric on all tasks: show which verdicts change and why; store nothing.",
            readable=False,
        ),
    ] = None,
    against_judge: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Compare with this judge model at the same endpoint, like --against."),
    ] = None,
    fail_under: FailUnderOption = None,
    confidence: ConfidenceOption = None,
    max_undecided: MaxUndecidedOption = None,
    junit: JunitOption = None,
    summary: SummaryOption = None,
    metrics: MetricsOption = None,
    estimate: Annotated[
        bool, typer.Option("--estimate", help="Estimate calls, tokens and cost without calling the judge.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print only warnings and errors.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Read new replies from the configured sources, then judge pending tasks."""
    compares = against is not None or against_judge is not None
    bar = quality_bar(fail_under, confidence, max_undecided, junit, summary)
    wrong = {
        "--against compares all tasks: use it without --estimate and --rejudge": compares and (estimate or rejudge),
        "--tasks stores no verdict: use it with --dry-run": tasks is not None
        and not (dry_run or estimate or compares),
        "--estimate judges nothing: use it without a quality bar and its reports": estimate and bar.is_asked,
        "--metrics measures replies that are judged: use it without --estimate and --against": metrics is not None
        and (estimate or compares),
    }
    for message in (message for message, is_so in wrong.items() if is_so):
        typer.echo(f"flywheel: {message}", err=True)
        raise typer.Exit(EXIT_USAGE)
    settings = load_config(config, names_sources=tasks is not None)
    require_outside_state(settings, junit, summary)
    stores_nothing, streams = dry_run or estimate or compares, (sys.stdin, sys.stdout, sys.stderr)
    asks = not (yes or as_json) and all(each is not None and each.isatty() for each in streams)
    options = _Options(
        settings, stores_nothing, estimate, rubric, limit, rejudge, as_json, quiet or as_json, asks, tasks, metrics
    )
    tune_process()
    work = _compare(options, against, against_judge) if compares else _filter(options)
    shown, error, cases, notes = run_async(work)
    quality = None
    if bar.is_asked:
        quality = bar.report(cases, notes=notes, error=str(error or ""))
        shown["quality"] = quality.json()
    if as_json:
        if error is None and options.failures:
            shown["error"] = str(options.failures[0])
        print_json(shown)
    elif not quiet:
        _print(shown, has_prices=settings.judge.prices is not None)
        more = [f"quality: {quality.sentence}"] if quality is not None else []
        typer.echo("".join(f"{line}\n" for line in [*metric_lines(shown.get("metrics", {})), *more]), nl=False)
    if error is None and options.failures:
        raise typer.Exit(EXIT_FAILED)
    if failed := error or (quality and quality.error):
        complain(failed)
        raise typer.Exit(failed.exit_code)


@asynccontextmanager
async def _state(options: _Options) -> AsyncIterator[Store]:
    """The state after reading the sources: a copy for a dry run, otherwise the real one, locked. One in memory for a
    file of tasks."""
    if options.tasks is not None:
        attempted = f"read tasks to judge from {options.tasks}"
        if not (entries := entries_of(rows_of_file(options.tasks, attempted), attempted)):
            raise ConfigError(attempted, "it is empty", "Name a file with one task per line.")
        options.keys.extend(entry.key for entry in entries[: options.limit])
        async with state_of(entries) as store:
            yield store
        return
    # A dry run executes the same code on the copy.
    async with open_state(options.config, "copy" if options.dry_run else "open", lock=not options.dry_run) as store:
        if options.dry_run:
            # In the copy, tasks that a running daemon is judging become pending.
            await store.write(claims.release_all, "not judged")
        else:
            await recover(store, options.config.state_dir, options.config.judge)
        if options.config.has_trainer:
            # Before new tasks, which follow today's settings: a state without tasks has nothing to look at.
            await apply_model_rules(store, options.config)
        ingestion = Ingestion(store, options.config, export_tasks=not options.dry_run)
        try:
            for source in await ingestion.run(final=True):
                if source.error is not None:
                    complain(source.error)
                    options.failures.append(source.error)
        finally:
            await ingestion.close()
        yield store


def _rubric(file: Path | None) -> Rubric | None:
    return load_rubric(file, "Name a rubric in YAML.") if file is not None else None


async def _until_signal(work: Coroutine[Any, Any, JudgingReport], stop: Stop, what: str, left: str) -> JudgingReport:
    """The report of the judging, which a signal stops; its error says so then. Raises StoppedError without one."""
    report = await stop.during(work)
    if stop.by is not None:
        stopped = stop.error(what, left)
        if report is None:
            raise stopped
        report.error = stopped
    assert report is not None
    return report


async def _filter(options: _Options) -> _Judged:
    async with _state(options) as store:
        calls = None if options.dry_run else CallsInFlight(options.config.state_dir)
        filtering = TaskJudging(store, options.config, rubric=_rubric(options.rubric), calls=calls)
        prices = options.config.judge.prices
        estimator = await CostEstimator.of(store, filtering.grader.judge_hash, prices)
        if options.estimate:
            preview = await filtering.preview(limit=options.limit, rejudge=options.rejudge)
            filtering.grader.close()
            counts = {"tasks": preview.tasks, "without_a_call": preview.free}
            return _Judged({"estimate": {**counts, **estimator.cost(preview).json()}, "dry_run": True})
        total = await filtering.count(limit=options.limit, rejudge=options.rejudge)
        expected = await _forecast(store, options, 0 if filtering.by_chain else total)
        if options.dry_run and not options.quiet and 0 < total <= PREVIEWED:
            preview = await filtering.preview(limit=options.limit, rejudge=options.rejudge)
            _print_estimate(preview, estimator.cost(preview))
        shown: dict[int, dict[str, Any]] = {}
        found: dict[int, Case] = {}
        wrong: list[str] = []
        criteria = [criterion.id for criterion in filtering.rubric.every]
        names = requested_metrics(options.metrics, criteria) if options.metrics is not None else ()
        with of_tasks("judging", total, quiet=options.quiet) as step:

            def on_judged(judged: TaskResult) -> None:
                # Only --json reports the estimated tokens of each task, which take time to compute.
                grader = filtering.grader_of(judged)
                is_estimated = options.as_json and not filtering.by_chain
                tokens = grader.estimate(exchange_of(judged.task.line)).prompt_tokens if is_estimated else 0
                case = Case.of_result(grader.rubric.id, judged)
                found[judged.task.id] = measured(case, judged, wrong) if names else case
                shown[judged.task.id] = judged.json(grader.hashes, tokens)
                step()

            stop = Stop(options.config.daemon.drain_seconds)
            judging = filtering.run(limit=options.limit, stop=stop, on_judged=on_judged, rejudge=options.rejudge)
            left = "Nothing was written." if options.dry_run else "Verdicts are stored, other tasks are unchanged."
            report = await _until_signal(judging, stop, "judge all that is due", left)
        if warning := await store.read(verdicts.none_accepted, options.config.filter.warn_window):
            complain(f"warning: {warning}")
    cases = [found[task] for task in sorted(found)]
    told = {
        "due": total,
        **{name: getattr(report, name) for name in COUNTS},
        "verdicts": [shown[task] for task in sorted(shown)],
        "usage": report.usage,
        "cost": cost_of(**report.usage, prices=prices).price,
        "estimated_tokens": sum(verdict["estimated_tokens"] for verdict in shown.values()),
        "dry_run": options.dry_run,
        "forecast": expected and expected.as_json(),
        "error": str(report.error) if report.error else None,
    }
    if options.metrics is not None:
        told["metrics"] = metrics_of(cases, names, options.config.training.seed)
        for why in wrong:
            complain(f"warning: {why}")
    return _Judged(told, report.error, unjudged(cases, filtering.rubric.id, options.keys, report.error))


async def _forecast(store: Store, options: _Options, total: int) -> Forecast | None:
    """Print what rounds could train on, before the judge is asked about `total` tasks; None where nothing is trained.
    Ends the command if that is nothing, and a person does not want to go on."""
    if options.tasks is not None or not options.config.has_trainer:
        return None
    expected = await store.read(forecast, options.config)
    is_asked = options.asks and total > 0 and not expected.usable
    if is_asked or not options.quiet:
        typer.echo(tables.forecast_text(expected))
    if is_asked:
        _confirm()
    return expected


def _confirm() -> None:
    before = signal.getsignal(signal.SIGINT)
    # The event loop's own handler would not interrupt the question.
    use_default(signal.SIGINT)
    try:
        if not typer.confirm("No round could train on these tasks. Call the judge anyway?", err=True):
            raise typer.Exit(EXIT_FAILED)
    finally:
        signal.signal(signal.SIGINT, before)


async def _compare(options: _Options, against: Path | None, judge: str | None) -> _Judged:
    """Compare with the rubric in a file, with another model as the judge, or with both."""
    config = options.config
    earlier = _rubric(against)
    # They are those of the configured judge.
    prices = config.judge.prices if judge is None else None
    async with _state(options) as store:
        new = _rubric(options.rubric) or rubric_of(config)
        old = earlier or new
        if judge is not None:
            # Its own model takes the place of the configured one.
            old = old.model_copy(update={"judge": old.judge.model_copy(update={"model": judge})})
        comparison = Comparison(store, config, old, new)
        total = await comparison.prepare(options.limit)
        path = options.rubric or config.filter.rubric
        other = against or path
        names = (other.name, path.name) if other == path or other.name != path.name else (str(other), str(path))
        if judge is not None:
            names = f"{names[0]} by {judge}", f"{names[1]} by {comparison.judge}"
        estimator = await CostEstimator.of(store, comparison.new.grader.judge_hash, prices)
        if not options.quiet and 0 < total <= PREVIEWED:
            by_new, by_old = await comparison.preview()
            _print_estimate(by_new, estimator.cost(by_new), f"{names[1]}: ")
            _print_estimate(by_old, estimator.cost(by_old), f"{names[0]}, less what both ask: ")
        with of_tasks("comparing", 2 * total, quiet=options.quiet) as step:
            work = comparison.run(step)
            report = await _until_signal(work, comparison.stop, "compare all tasks", "Nothing was written.")
    told = comparison.json(names, estimator)
    notes = [f"{names[0]} → {names[1]}: {tables.accepted_shares(told)}"]
    return _Judged(told, report.error, unjudged(comparison.cases, new.id, options.keys, report.error), notes)


def _print_estimate(expected: JudgingEstimate, cost: Cost, before: str = "") -> None:
    text = f"{before}{tables.tasks_to_judge(expected.tasks, expected.free)}: {tables.estimated(cost.json())}"
    Console(stderr=True, highlight=False, markup=False).print(text, style="dim")


def _print(shown: dict[str, Any], *, has_prices: bool) -> None:
    console = tables.stdout()
    if (estimate := shown.get("estimate")) is not None:
        console.print(tables.tasks_to_judge(estimate["tasks"], estimate["without_a_call"]))
        console.print(tables.estimated(estimate))
        if estimate["calls"]:
            console.print(f"({tables.estimate_basis(estimate)})")
    elif "flips" in shown:
        tables.rubric_diff(console, shown)
        console.print("dry run: nothing was written")
    elif not shown["verdicts"]:
        console.print(f"{shown['due']:,} due, none judged" if shown["due"] else "no task is due")
    else:
        if console.is_terminal and not shown["dry_run"]:
            tables.reasons_without_verdict(console, shown["verdicts"])
        else:
            tables.verdict_table(console, shown["verdicts"])
            console.print()
        console.print(tables.totals(shown))
        console.print(tables.spent(shown["usage"], shown["reused"], shown["cost"]))
        if shown["dry_run"]:
            console.print("dry run: nothing was written")
        elif console.is_terminal:
            console.print(
                "`flywheel tasks` lists the verdicts, and `flywheel show TASK` has the reasons", style="dim"
            )
    if not has_prices and shown["dry_run"]:
        console.print("`judge.prices` in the configuration adds what it costs", style="dim")
