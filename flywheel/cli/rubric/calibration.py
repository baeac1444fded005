"""`flywheel rubric calibrate` and `suggest`: measure agreement with labelled replies; draft a rubric from them."""

from __future__ import annotations

import asyncio
from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flywheel.cli.app import open_state, this_person
from flywheel.errors import FlywheelError, JudgeError
from flywheel.system.signals import unless_stopped
from flywheel.system.terminal import escape_terminal, quantity

if TYPE_CHECKING:
    from flywheel.config.file import Config
    from flywheel.daemon.judging.judging_report import Cost, JudgingEstimate
    from flywheel.judge.calibration import Calibration
    from flywheel.judge.grader import Grader
    from flywheel.judge.labels import LabelFile
    from flywheel.judge.rubric.rubric import Rubric
    from flywheel.judge.usage import Budget
    from flywheel.records.verdict import Verdict
    from flywheel.store.kernel.database import Store

EXCERPT = 300
"""Characters of the texts of a disagreement."""


async def run(config: Config, file: Path, labels: Path, repeats: int, *, quiet: bool) -> dict[str, Any]:
    """Judge the labels, store the outcome, and report it as one JSON object."""
    from flywheel.cli.progress_bars import of_tasks
    from flywheel.daemon.judging.judge_setup import check_independence, judge_settings
    from flywheel.daemon.judging.judging_report import CostEstimator, cost_of
    from flywheel.judge.calibration import calibrate
    from flywheel.judge.filters.chain import chain_of
    from flywheel.judge.grader import Grader
    from flywheel.judge.rubric.file import load_rubric
    from flywheel.judge.usage import Budget, BudgetSpentError, Purpose
    from flywheel.store import calibrations, judge_usage, verdicts
    from flywheel.store.labels import import_labels

    rubric = load_rubric(file, "Name a rubric in YAML.")
    check_independence(config, rubric)
    # With the settings of the chain's `llm_evaluate`, as tasks are judged.
    settings = judge_settings(config, chain_of(config))
    loop = asyncio.get_running_loop()
    # The state is opened before the judge is paid. The daemon may run: rows are only added.
    with closing(Grader(rubric, settings)) as grader:
        async with open_state(config) as store:
            given = await read_label_file(labels, store)
            await store.write(import_labels, given.by_task(this_person()))
            spent = await store.read(judge_usage.tokens_today)
            budget = Budget(settings.budget, lambda: spent)
            estimator = await CostEstimator.of(store, grader.judge_hash, settings.prices)
            cost = estimator.cost(await asyncio.to_thread(_preview, grader, given, repeats))
            _check_budget(len(given.labels), repeats, cost, f"calibrate {file}", budget, quiet=quiet)
            with of_tasks("judging", len(given.labels) * repeats, quiet=quiet) as step:

                def on_verdict(verdict: Verdict) -> None:
                    # At once, so that the usage is stored even if the calibration fails.
                    asyncio.run_coroutine_threadsafe(
                        store.write(judge_usage.book_verdict, verdict, Purpose.CALIBRATION, settings.prices), loop
                    ).result()
                    step()

                judging = partial(calibrate, grader, given.labels, settings.max_thread, repeats=repeats,
                                  on_verdict=on_verdict, budget=budget)  # fmt: skip
                try:
                    outcome = await unless_stopped(judging, config.daemon.drain_seconds, f"calibrate {file}")
                except BudgetSpentError as error:
                    raise _over_budget(f"calibrate {file}", error.why) from error
            if not outcome.n:
                raise JudgeError(
                    f"calibrate {file}",
                    f"none of the {len(given.labels)} replies was decided: {outcome.undecided[0][1]}",
                    "Nothing is stored.",
                )
            endpoint = grader.client.endpoints[0].config
            judge = endpoint.model
            await store.write(verdicts.record_judge, grader.judge_hash, judge, endpoint.base_url)
            await store.write(
                calibrations.record,
                rubric_id=rubric.id,
                rubric_hash=rubric.hash,
                judge_hash=grader.judge_hash,
                judge_model=judge,
                n=outcome.n,
                undecided=len(outcome.undecided),
                agreement=outcome.confusion.agreement,
                kappa=outcome.kappa.value,
                kappa_low=outcome.kappa.low,
                kappa_high=outcome.kappa.high,
            )
            bar = settings.min_kappa
            shortfall = await store.read(calibrations.shortfall, rubric.hash, grader.judge_hash, bar)
    report = calibration_json(file, rubric, judge, given, outcome, shortfall)
    return report | {"cost": cost_of(**report["usage"], prices=settings.prices).price}


def _preview(grader: Grader, given: LabelFile, repeats: int) -> JudgingEstimate:
    """The expected calls and tokens of judging the labels."""
    from flywheel.daemon.judging.judging_report import JudgingEstimate

    total = JudgingEstimate()
    for label in given.labels:
        needed = grader.estimate(label.exchange)
        for _ in range(repeats):
            total.add(needed)
    return total


def _check_budget(replies: int, repeats: int, cost: Cost, attempted: str, budget: Budget, *, quiet: bool) -> None:
    """Print the expected cost. Raises BudgetSpentError if the budget has less left."""
    from rich.console import Console

    from flywheel.cli.tables import estimated

    estimate = estimated(cost.json())
    if not quiet:
        times = f", {repeats} times each" if repeats > 1 else ""
        console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
        console.print(f"{quantity(replies, 'reply', 'replies')}{times}: {estimate}", style="dim")
    left = budget.left()
    if left is not None and cost.prompt_tokens + cost.completion_tokens > left:
        raise _over_budget(attempted, f"it would take {estimate}, and the budget has {max(0, left):,} tokens left")


def _over_budget(attempted: str, why: str) -> FlywheelError:
    from flywheel.judge.usage import BudgetSpentError

    hint = "Use fewer labels or repeats, wait until midnight UTC, or raise judge.budget. No calibration is stored."
    return BudgetSpentError(attempted, why, hint, retryable=True)


async def suggest(config: Config, labels: Path, name: str) -> str:
    """The text of a drafted rubric."""
    from flywheel.daemon.judging.judge_setup import check_independence
    from flywheel.judge.client import JudgeClient
    from flywheel.judge.suggestion import draft

    check_independence(config)
    async with open_state(config) as store:
        given = await read_label_file(labels, store)
    with closing(JudgeClient(config.judge)) as client:
        return await unless_stopped(
            partial(draft, client, given.labels, name), config.daemon.drain_seconds, "draft a rubric"
        )


async def read_label_file(path: Path, store: Store) -> LabelFile:
    """The labels of a file, whose lines can name tasks of the state. Raises ConfigError."""
    from flywheel.judge.labels import read_labels
    from flywheel.store import calibrations

    loop = asyncio.get_running_loop()

    def lookup(keys: list[str]) -> dict[str, dict[str, Any]]:
        return asyncio.run_coroutine_threadsafe(store.read(calibrations.lines_of, keys), loop).result()

    return await asyncio.to_thread(read_labels, path, lookup)


def calibration_json(
    file: Path, rubric: Rubric, judge: str, given: LabelFile, outcome: Calibration, shortfall: str | None
) -> dict[str, Any]:
    """The report of `--json`, without the cost."""
    from flywheel.daemon.judging.judging_report import USAGE

    table = outcome.confusion
    return {
        "rubric": rubric.id,
        "file": str(file),
        "rubric_hash": rubric.hash,
        "judge": judge,
        "labels": len(given.labels),
        "left_out": given.left_out,
        "judged": outcome.n,
        "undecided": [{"name": label.name, "error": error} for label, error in outcome.undecided],
        "confusion": table.rows,
        "agreement": table.agreement,
        "base_rate": table.base_rate,
        "judge_rate": table.judge_rate,
        "kappa": asdict(outcome.kappa),
        "repeats": outcome.repeats,
        "consistency": {"pairs": outcome.consistency, "unanimous": outcome.unanimous},
        "worst": [
            {
                "name": each.label.name,
                "query": each.label.exchange.query,
                "answer": each.label.exchange.answer,
                "label": "accept" if each.label.accept else "reject",
                "label_reason": each.label.reason,
                "verdict": each.verdict.outcome.value,
                "score": each.verdict.score,
                "failed": list(each.verdict.failed),
                "reason": each.verdict.reason,
                "margin": each.margin,
            }
            for each in outcome.worst
        ],
        "usage": {name: getattr(outcome, name) for name in USAGE},
        "shortfall": shortfall,
    }


def show(report: dict[str, Any]) -> None:
    """Print the report."""
    from flywheel.cli.tables import Row, rows_table, spent, stdout
    from flywheel.system.terminal import excerpt

    console = stdout()
    report = escape_terminal(report)
    text = quantity(report["judged"], "reply", "replies")
    if report["left_out"]:
        text += f", {quantity(report['left_out'], 'line')} without an answer or a verdict excluded"
    console.print(f"rubric {report['rubric']} judged by {report['judge']}: {text}")
    rows = [
        Row((f"human: {label}", str(row["accepted"]), str(row["rejected"])))
        for label, row in report["confusion"].items()
    ]
    console.print(rows_table(("", "judge: accept", "judge: reject"), rows, fold=()))
    kappa, base = report["kappa"], report["base_rate"]
    if kappa["value"] is None:
        console.print("Cohen's kappa is not defined: all labels and all verdicts are the same")
    else:
        interval = "" if kappa["low"] is None else f" (95 % interval {kappa['low']:.2f} to {kappa['high']:.2f})"
        console.print(f"Cohen's kappa {kappa['value']:.2f}{interval}")
    console.print(
        f"agreement {report['agreement']:.0%}; accepted: human {base:.0%}, judge {report['judge_rate']:.0%};"
        f" a constant verdict would agree on {max(base, 1 - base):.0%}"
    )
    if (pairs := report["consistency"]["pairs"]) is not None:
        console.print(
            f"over {report['repeats']} repeats the judge agrees with itself on {pairs:.0%} of pairs,"
            f" and in all repeats on {report['consistency']['unanimous']:.0%} of replies"
        )
    for each in report["undecided"]:
        console.print(f"undecided: {each['name']}: {each['error']}")
    if report["worst"]:
        console.print(f"\nthe worst disagreements ({len(report['worst'])}):")
    for number, each in enumerate(report["worst"], 1):
        reason = f" ({each['label_reason']})" if each["label_reason"] else ""
        score = "" if each["score"] is None else f", score {each['score']:.2f}"
        console.print(f"\n{number}. {each['name']}: human: {each['label']}{reason}; judge: {each['verdict']}{score}")
        for name, key in (("question", "query"), ("answer", "answer"), ("judge", "reason")):
            console.print(f"   {name + ':':<9} {excerpt(each[key], EXCERPT)}")
    console.print(f"\n{spent(report['usage'], 0, report['cost'])}")
    if report["shortfall"]:
        console.print(report["shortfall"])
