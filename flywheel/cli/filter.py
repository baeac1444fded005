"""`flywheel filter`: judge pending tasks or those of a file, compare two rubrics or judges, estimate the cost."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

import typer

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
from flywheel.cli.quality_bar import (
    Case,
    CaseOutcome,
    ConfidenceOption,
    FailUnderOption,
    JunitOption,
    MaxUndecidedOption,
    QualityBar,
    SummaryOption,
)
from flywheel.cli.recorded_metrics import MetricsOption, RecordedMetrics, lines_of
from flywheel.errors import EXIT_FAILED, EXIT_USAGE, ConfigError, FlywheelError
from flywheel.system.process import tune_process

if TYPE_CHECKING:
    from flywheel.config.file import Config
    from flywheel.daemon.forecast import Forecast
    from flywheel.daemon.judging.judging import TaskJudging
    from flywheel.daemon.judging.judging_report import Cost, TaskResult
    from flywheel.daemon.judging.rubric_diff import Compared
    from flywheel.judge.rubric.rubric import Rubric
    from flywheel.records.verdict import Verdict
    from flywheel.store.kernel.database import Store

PREVIEWED: Final = 2_000
"""A dry run of up to this many tasks first prints an estimate."""
EXCERPT: Final = 240
"""Characters of a question or an answer of a flip."""
USAGE: Final = ("calls", "prompt_tokens", "completion_tokens")
COUNTS: Final = ("judged", "accepted", "rejected", "undecided", "dead", "held", "reused", "changed")
NAME_ONE: Final = "Name a rubric in YAML."
ERROR_PROBABILITY: Final = 0.025
"""Of each bound of the difference between two rubrics or judges: the interval holds it at 95 %."""


@dataclass(frozen=True, slots=True)
class _Options:
    """The options of the command line."""

    config: Config
    dry_run: bool
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
    """What is shown, the error that ended it early, the cases, and the id of the rubric."""

    shown: dict[str, Any]
    error: FlywheelError | None
    cases: list[Case]
    rubric: str


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
            help="Judge every row of this task file instead of the sources: no state is read or made.",
            readable=False,
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, metavar="N", help="Judge at most this many tasks.")] = None,
    rejudge: Annotated[
        bool,
        typer.Option(
            "--rejudge",
            help="Also judge tasks that another rubric or judge has decided, and run functions of the rubric again.",
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
        typer.Option(
            metavar="MODEL", help="Compare with this judge, at the same endpoint, as --against does with a rubric."
        ),
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
    bar = QualityBar(fail_under, confidence, max_undecided, junit, summary)
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
        settings, stores_nothing, rubric, limit, rejudge, as_json, quiet or as_json, asks, tasks, metrics
    )
    tune_process()
    if estimate:
        judged = _Judged(run_async(_estimate(options)), None, [], "")
    elif compares:
        judged = run_async(_compare(options, against, against_judge))
    else:
        judged = run_async(_filter(options))
    shown, error = judged.shown, judged.error
    quality = None
    if bar.is_asked:
        quality = bar.report(_cases(judged, options), notes=_notes(shown), error=str(error or ""))
        shown["quality"] = quality.json()
    if as_json:
        if error is None and options.failures:
            shown["error"] = str(options.failures[0])
        print_json(shown)
    elif not quiet:
        _print(shown, has_prices=settings.judge.prices is not None)
        more = [f"quality: {quality.sentence}"] if quality is not None else []
        typer.echo("".join(f"{line}\n" for line in [*lines_of(shown.get("metrics", {})), *more]), nl=False)
    if error is not None:
        complain(error)
        raise typer.Exit(error.exit_code)
    if options.failures:
        raise typer.Exit(EXIT_FAILED)
    if quality is not None and quality.error is not None:
        complain(quality.error)
        raise typer.Exit(quality.error.exit_code)


def _cases(judged: _Judged, options: _Options) -> list[Case]:
    """The cases, with those of the file's tasks that an error kept from being judged."""
    if judged.error is None:
        return judged.cases
    known = {case.task for case in judged.cases}
    why = f"not judged: {judged.error}"
    missing = [key for key in options.keys if key not in known]
    return [*judged.cases, *(Case(judged.rubric, key, CaseOutcome.UNDECIDED, reason=why) for key in missing)]


def _notes(shown: dict[str, Any]) -> list[str]:
    """What the summary says of a comparison."""
    if "flips" not in shown:
        return []
    from flywheel.cli.tables import accepted_shares

    return [f"{shown['old']['name']} → {shown['new']['name']}: {accepted_shares(shown)}"]


@asynccontextmanager
async def _state(options: _Options) -> AsyncIterator[Store]:
    """The state after reading the sources: a copy for a dry run, otherwise the real one, locked. One in memory for a
    file of tasks."""
    from flywheel.daemon.configured_source import apply_model_rules
    from flywheel.daemon.judging.judging import recover
    from flywheel.sources.ingestion import Ingestion
    from flywheel.store import claims

    if options.tasks is not None:
        async with _state_of_file(options, options.tasks) as store:
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


@asynccontextmanager
async def _state_of_file(options: _Options, file: Path) -> AsyncIterator[Store]:
    """A state in memory with a task for each row of a file. Raises ConfigError."""
    from flywheel.records.task import Batch
    from flywheel.sources.jsonl.record import entries_of, rows_of_file
    from flywheel.store import ledger
    from flywheel.store.kernel.database import Store

    attempted = f"read tasks to judge from {file}"
    if not (entries := entries_of(rows_of_file(file, attempted), attempted)):
        raise ConfigError(attempted, "it is empty", "Name a file with one task per line.")
    options.keys.extend(entry.key for entry in entries[: options.limit])
    store = await Store.empty()
    try:
        source = await store.write(ledger.source_id, str(file), "jsonl")
        batch = Batch(None, tuple(entries))
        await store.write(ledger.record_batch, source, batch, train_ratio=1.0, split_seed=0)
        yield store
    finally:
        await store.close()


def _filtering(store: Store, options: _Options) -> TaskJudging:
    from flywheel.daemon.judging.judging import TaskJudging
    from flywheel.judge.rubric.file import load_rubric
    from flywheel.judge.usage import CallsInFlight

    return TaskJudging(
        store,
        options.config,
        rubric=load_rubric(options.rubric, NAME_ONE) if options.rubric is not None else None,
        calls=None if options.dry_run else CallsInFlight(options.config.state_dir),
    )


async def _filter(options: _Options) -> _Judged:
    from flywheel.cli.progress_bars import of_tasks
    from flywheel.daemon.judging.judge_setup import exchange_of
    from flywheel.daemon.judging.judging_report import CostEstimator, cost_of
    from flywheel.store import verdicts
    from flywheel.system.signals import StopSignals

    stop = threading.Event()
    interruption = StopSignals(options.config.daemon.drain_seconds)

    async with _state(options) as store:
        filtering = _filtering(store, options)
        total = await filtering.count(limit=options.limit, rejudge=options.rejudge)
        expected = await _forecast(store, options, 0 if filtering.by_chain else total)
        prices = options.config.judge.prices
        if options.dry_run and not options.quiet and 0 < total <= PREVIEWED:
            preview = await filtering.preview(limit=options.limit, rejudge=options.rejudge)
            estimator = await CostEstimator.of(store, filtering.grader.judge_hash, prices)
            _print_estimate(preview.tasks, preview.free, estimator.cost(preview))
        shown: dict[int, dict[str, Any]] = {}
        cases: dict[int, Case] = {}
        criteria = [criterion.id for criterion in filtering.rubric.every]
        metrics = RecordedMetrics(options.metrics, criteria) if options.metrics is not None else None
        with of_tasks("judging", total, quiet=options.quiet) as step:

            def on_judged(judged: TaskResult) -> None:
                # Only --json reports the estimated tokens of each task, which take time to compute.
                grader = filtering.grader_of(judged)
                is_estimated = options.as_json and not filtering.by_chain
                tokens = grader.estimate(exchange_of(judged.task.line)).prompt_tokens if is_estimated else 0
                shown[judged.task.id] = verdict_json(judged, filtering, tokens)
                cases[judged.task.id] = case_of(judged, grader.rubric)
                if metrics is not None:
                    metrics.add(judged)
                step()

            judging_all = filtering.run(limit=options.limit, stop=stop, on_judged=on_judged, rejudge=options.rejudge)
            report = await interruption.during(judging_all, stop.set)
        if warning := await store.read(verdicts.none_accepted, options.config.filter.warn_window):
            complain(f"warning: {warning}")
    if interruption.by is not None:
        left = "Nothing was written." if options.dry_run else "Verdicts are stored; the other tasks are unchanged."
        stopped = interruption.error("judge all that is due", left)
        if report is None:
            raise stopped
        report.error = stopped
    assert report is not None
    usage = {name: getattr(report, name) for name in USAGE}
    told = {
        "due": total,
        **{name: getattr(report, name) for name in COUNTS},
        "verdicts": [shown[task] for task in sorted(shown)],
        "usage": usage,
        "cost": cost_of(**usage, prices=prices).price,
        "estimated_tokens": sum(verdict["estimated_tokens"] for verdict in shown.values()),
        "dry_run": options.dry_run,
        "forecast": expected and expected.as_json(),
        "error": str(report.error) if report.error else None,
    }
    if metrics is not None:
        told["metrics"] = metrics.as_json(options.config.training.seed)
        for why in metrics.wrong:
            complain(f"warning: {why}")
    return _Judged(told, report.error, [cases[task] for task in sorted(cases)], filtering.rubric.id)


async def _forecast(store: Store, options: _Options, total: int) -> Forecast | None:
    """Print what rounds could train on, before the judge is asked about `total` tasks; None where nothing is trained.
    Ends the command if that is nothing, and a person does not want to go on."""
    from flywheel.cli.tables import forecast_text
    from flywheel.daemon.forecast import forecast

    if options.tasks is not None or not options.config.has_trainer:
        return None
    expected = await store.read(forecast, options.config)
    is_asked = options.asks and total > 0 and not expected.usable
    if is_asked or not options.quiet:
        typer.echo(forecast_text(expected))
    if is_asked:
        _confirm()
    return expected


def _confirm() -> None:
    from flywheel.system.signals import use_default

    before = signal.getsignal(signal.SIGINT)
    # The event loop's own handler would not interrupt the question.
    use_default(signal.SIGINT)
    try:
        if not typer.confirm("No round could train on what is judged. Ask the judge anyway?", err=True):
            raise typer.Exit(EXIT_FAILED)
    finally:
        signal.signal(signal.SIGINT, before)


async def _estimate(options: _Options) -> dict[str, Any]:
    from flywheel.daemon.judging.judging_report import CostEstimator

    async with _state(options) as store:
        filtering = _filtering(store, options)
        estimator = await CostEstimator.of(store, filtering.grader.judge_hash, options.config.judge.prices)
        preview = await filtering.preview(limit=options.limit, rejudge=options.rejudge)
    filtering.grader.close()
    expected = cost_json(estimator.cost(preview))
    return {"estimate": {"tasks": preview.tasks, "without_a_call": preview.free, **expected}, "dry_run": True}


async def _compare(options: _Options, against: Path | None, judge: str | None) -> _Judged:
    """Compare with the rubric in a file, with another model as the judge, or with both."""
    from flywheel.cli.progress_bars import of_tasks
    from flywheel.daemon.judging.judging import TaskJudging
    from flywheel.daemon.judging.judging_report import CostEstimator, cost_of
    from flywheel.daemon.judging.rubric_diff import DiffReport, RubricDiff, changes
    from flywheel.judge.rubric.file import load_rubric
    from flywheel.store import claims
    from flywheel.system.signals import StopSignals

    earlier = load_rubric(against, NAME_ONE) if against is not None else None
    # They are those of the configured judge.
    prices = options.config.judge.prices if judge is None else None
    async with _state(options) as store:
        new = _filtering(store, options)
        earlier = earlier or new.rubric
        if judge is not None:
            # Its own model takes the place of the configured one.
            by_judge = earlier.judge.model_copy(update={"model": judge})
            earlier = earlier.model_copy(update={"judge": by_judge})
        old = TaskJudging(store, options.config, rubric=earlier)
        tasks, triable = await store.read(claims.count_triable)
        total = triable if options.limit is None else min(triable, options.limit)
        diff = RubricDiff(store, old.grader, new.grader, new.judge, new.redact)
        estimator = await CostEstimator.of(store, new.grader.judge_hash, prices)
        if not options.quiet and 0 < total <= PREVIEWED:
            preview = await diff.preview(options.limit)
            _print_estimate(preview.tasks, preview.free, estimator.cost(preview))
        interruption = StopSignals(options.config.daemon.drain_seconds)
        try:
            with of_tasks("comparing", total, quiet=options.quiet) as step:
                found = await interruption.during(diff.run(options.limit, step), diff.halt)
        finally:
            new.grader.close()
            old.grader.close()
    report = found or DiffReport()
    if interruption.by is not None:
        report.error = interruption.error("compare all tasks", "Nothing was written.")
        if found is None:
            raise report.error
    asked = [verdict for compared in report.compared for verdict in compared.asked]
    usage = {name: sum(getattr(each, name) for each in asked) for name in USAGE}
    path = options.rubric or options.config.filter.rubric
    names = [path.name, path.name]
    if against is not None:
        names = [path.name, against.name] if path.name != against.name else [str(path), str(against)]
    if judge is not None:
        names = [f"{names[0]} by {new.grader.client.endpoints[0].config.model}", f"{names[1]} by {judge}"]
    told = {
        "old": {"name": names[1], "id": earlier.id, "hash": earlier.hash},
        "new": {"name": names[0], "id": new.rubric.id, "hash": new.rubric.hash},
        "changes": [asdict(each) for each in changes(earlier, new.rubric)],
        "tasks": tasks,
        "left_aside": tasks - triable,
        "not_reached": triable - len(report.compared),
        "compared": len(report.compared),
        "same": sum(each.is_decided and not each.flips for each in report.compared),
        "undecided": sum(not each.is_decided for each in report.compared),
        "flips": [flip_json(each, old, new) for each in report.compared if each.flips],
        "accepted": accepted_json(report.compared),
        "judge_all": {
            "without_cache": cost_json(estimator.cost(report.without_cache)),
            "with_cache": cost_json(estimator.cost(report.with_cache)),
        },
        "usage": usage,
        "reused": sum(not each.asked for each in report.compared),
        "cost": cost_of(**usage, prices=prices).price,
        "dry_run": True,
        "error": str(report.error) if report.error else None,
    }
    cases = [Case.of(new.rubric.id, each.task.key, each.new) for each in report.compared]
    return _Judged(told, report.error, cases, new.rubric.id)


def _print_estimate(tasks: int, free: int, cost: Cost) -> None:
    from rich.console import Console

    from flywheel.cli.tables import estimated, tasks_to_judge

    text = f"{tasks_to_judge(tasks, free)}: {estimated(cost_json(cost))}"
    Console(stderr=True, highlight=False, markup=False).print(text, style="dim")


def _print(shown: dict[str, Any], *, has_prices: bool) -> None:
    from flywheel.cli import tables

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


def verdict_json(judged: TaskResult, filtering: TaskJudging, tokens: int) -> dict[str, Any]:
    verdict, repeats = judged.verdict, judged.repeats
    return {
        "task_id": judged.task.key,
        "span_id": judged.task.line["metadata"]["span_id"],
        "outcome": verdict.outcome.value if verdict else "held" if judged.held else "dead",
        "score": verdict.score if verdict else None,
        "failed": list(verdict.failed) if verdict else [],
        "reason": (verdict.reason or verdict.error) if verdict else judged.error,
        "criteria": [
            {name: getattr(result, name) for name in ("criterion", "choice", "value", "passed", "reason")}
            | {"by_judge": result.criterion in filtering.grader_of(judged).hashes}
            for result in (verdict.results if verdict else ())
        ],
        "estimated_tokens": tokens,
        "reused": judged.reused,
        "repeats": repeats and {"task_id": repeats.key, "similarity": repeats.similarity, "method": repeats.method},
    }


def case_of(judged: TaskResult, rubric: Rubric) -> Case:
    """The case of a task: filtered if the chain rejected it, undecided if it is a dead letter."""
    from flywheel.records.verdict import Outcome
    from flywheel.store.verdicts import CHAIN

    verdict = judged.verdict
    if verdict is None and not judged.held:
        return Case(rubric.id, judged.task.key, CaseOutcome.UNDECIDED, reason=judged.error)
    if verdict is None or (verdict.outcome is Outcome.REJECTED and judged.rubric_hash.startswith(CHAIN)):
        reason = verdict.reason if verdict else "a burst of near-identical questions"
        return Case(rubric.id, judged.task.key, CaseOutcome.FILTERED, reason=reason)
    return Case.of(rubric.id, judged.task.key, verdict)


def accepted_json(compared: Sequence[Compared]) -> dict[str, Any]:
    """The accepted shares of tasks that both sides decided, and the interval of their difference, by conversation."""
    from flywheel.records.task import conversation_key
    from flywheel.records.verdict import Outcome
    from flywheel.training.gate.intervals import Paired, compare

    def reward(verdict: Verdict) -> float | None:
        return None if verdict.outcome is Outcome.UNDECIDED else float(verdict.outcome is Outcome.ACCEPTED)

    pairs = [
        Paired(
            each.task.key,
            (reward(each.new),),
            (reward(each.old),),
            conversation_key(each.task.line["metadata"]["conversation_id"], each.task.line["metadata"]["trace_id"]),
        )
        for each in compared
    ]
    found = compare(pairs, samples=1, alpha=ERROR_PROBABILITY, needed=0.0, seed=0)
    return {
        "old": found.deployed_mean,
        "new": found.candidate_mean,
        "difference": found.gain,
        "lower": found.lower,
        "upper": found.upper,
        "tasks": found.tasks,
        "conversations": found.conversations,
    }


def flip_json(compared: Compared, old: TaskJudging, new: TaskJudging) -> dict[str, Any]:
    from flywheel.daemon.judging.rubric_diff import contributions
    from flywheel.system.terminal import excerpt

    line = compared.task.line
    before, after = old.rubric.threshold, new.rubric.threshold
    why = [asdict(each) for each in contributions(old.rubric, new.rubric, compared.old, compared.new)]
    if before != after:
        why.insert(0, {"criterion": "", "old": before, "new": after, "why": f"threshold {before:g} → {after:g}"})
    return {
        "task_id": compared.task.key,
        "state": compared.task.was.value,
        **{
            rubric: {"outcome": verdict.outcome.value, "score": verdict.score, "reason": verdict.reason}
            for rubric, verdict in (("old", compared.old), ("new", compared.new))
        },
        "why": why,
        "query": excerpt(line["main_query"], EXCERPT),
        "answer": excerpt(line["answer"], EXCERPT),
    }


def cost_json(cost: Cost) -> dict[str, Any]:
    return {
        **{name: getattr(cost, name) for name in USAGE},
        "cost": cost.price,
        "learned_from": cost.learned_from,
        "more_calls_if_close": cost.more,
    }
