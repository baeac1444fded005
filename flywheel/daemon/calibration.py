"""Calibrations: the judge decides about labelled replies, and how far it agrees with people is stored. And rubrics
that the judge drafts from such replies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from flywheel.config.file import Config
from flywheel.daemon.judging.judge_setup import check_independence, judge_settings
from flywheel.daemon.judging.judging_report import USAGE, Cost, CostEstimator, JudgingEstimate, cost_of
from flywheel.errors import FlywheelError, JudgeError
from flywheel.judge.calibration import Calibration, calibrate
from flywheel.judge.client import JudgeClient
from flywheel.judge.filters.chain import chain_of
from flywheel.judge.grader import Grader
from flywheel.judge.labels import LabelFile
from flywheel.judge.rubric.file import load_rubric
from flywheel.judge.rubric.rubric import Rubric
from flywheel.judge.suggestion import draft
from flywheel.judge.usage import Budget, BudgetSpentError, Purpose
from flywheel.records.verdict import Verdict
from flywheel.store import calibrations, judge_usage, verdicts
from flywheel.store.kernel.database import Store
from flywheel.store.labels import import_labels, read_label_file
from flywheel.system.signals import unless_stopped

Opened = Callable[[], AbstractAsyncContextManager[Store]]
"""Opens the state."""
Progress = Callable[[int], AbstractContextManager[Callable[[], None]]]
"""Shows how many of so many replies are judged; each call of what it yields counts one."""


@dataclass(frozen=True, slots=True)
class CalibrationReport:
    """`shortfall` says why the rubric must not be trained on, if so."""

    file: Path
    rubric: Rubric
    judge: str
    given: LabelFile
    outcome: Calibration
    cost: Cost
    shortfall: str | None

    def as_json(self) -> dict[str, Any]:
        outcome = self.outcome
        found = outcome.agreement.as_json()
        return {
            "rubric": self.rubric.id,
            "file": str(self.file),
            "rubric_hash": self.rubric.hash,
            "judge": self.judge,
            "labels": len(self.given.labels),
            "left_out": self.given.left_out,
            "judged": found.pop("n"),
            "undecided": [{"name": label.name, "error": error} for label, error in outcome.undecided],
            **found,
            "base_rate": outcome.agreement.base_rate,
            "judge_rate": outcome.agreement.judge_rate,
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
            "usage": {name: getattr(self.cost, name) for name in USAGE},
            "shortfall": self.shortfall,
            "cost": self.cost.price,
        }


async def calibrate_rubric(
    config: Config,
    opened: Opened,
    file: Path,
    labels: Path,
    by: str,
    *,
    repeats: int,
    on_estimate: Callable[[int, Cost], str],
    progress: Progress,
) -> CalibrationReport:
    """Judge the labels, and store them and the outcome. `by` labelled where the file does not say who did.

    `on_estimate` is told the number of replies and the expected cost, and returns it in words. Raises ConfigError for
    a wrong file, BudgetSpentError if the budget does not suffice, and JudgeError if no reply was decided.
    """
    attempted = f"calibrate {file}"
    rubric = load_rubric(file, "Name a rubric in YAML.")
    check_independence(config, rubric)
    # With the settings of the chain's `llm_evaluate`, as tasks are judged.
    settings = judge_settings(config, chain_of(config))
    loop = asyncio.get_running_loop()
    # The state is opened before the judge is paid. The daemon may run: rows are only added.
    with closing(Grader(rubric, settings)) as grader:
        async with opened() as store:
            given = await read_label_file(store, labels)
            await store.write(import_labels, given.by_task(by))
            spent = await store.read(judge_usage.tokens_today)
            budget = Budget(settings.budget, lambda: spent)
            estimator = await CostEstimator.of(store, grader.judge_hash, settings.prices)
            cost = estimator.cost(await asyncio.to_thread(_preview, grader, given, repeats))
            estimate, left = on_estimate(len(given.labels), cost), budget.left()
            if left is not None and cost.prompt_tokens + cost.completion_tokens > left:
                why = f"it would take {estimate}, and the budget has {max(0, left):,} tokens left"
                raise _over_budget(attempted, why)
            with progress(len(given.labels) * repeats) as step:

                def on_verdict(verdict: Verdict) -> None:
                    # At once, so that the usage is stored even if the calibration fails.
                    asyncio.run_coroutine_threadsafe(
                        store.write(judge_usage.book_verdict, verdict, Purpose.CALIBRATION, settings.prices), loop
                    ).result()
                    step()

                judging = partial(calibrate, grader, given.labels, settings.max_thread, repeats=repeats,
                                  on_verdict=on_verdict, budget=budget)  # fmt: skip
                try:
                    outcome = await unless_stopped(judging, config.daemon.drain_seconds, attempted)
                except BudgetSpentError as error:
                    raise _over_budget(attempted, error.why) from error
            agreement, kappa = outcome.agreement, outcome.agreement.kappa
            if not agreement.n:
                why = f"none of the {len(given.labels)} replies was decided: {outcome.undecided[0][1]}"
                raise JudgeError(attempted, why, "Nothing is stored.")
            endpoint = grader.client.endpoints[0].config
            await store.write(verdicts.record_judge, grader.judge_hash, endpoint.model, endpoint.base_url)
            await store.write(
                calibrations.record,
                rubric_id=rubric.id,
                rubric_hash=rubric.hash,
                judge_hash=grader.judge_hash,
                judge_model=endpoint.model,
                n=agreement.n,
                undecided=len(outcome.undecided),
                agreement=agreement.share,
                kappa=kappa.value,
                kappa_low=kappa.low,
                kappa_high=kappa.high,
            )
            bar = settings.min_kappa
            shortfall = await store.read(calibrations.shortfall, rubric.hash, grader.judge_hash, bar)
    used = cost_of(outcome.calls, outcome.prompt_tokens, outcome.completion_tokens, settings.prices)
    return CalibrationReport(file, rubric, endpoint.model, given, outcome, used, shortfall)


def _preview(grader: Grader, given: LabelFile, repeats: int) -> JudgingEstimate:
    """The expected calls and tokens of judging the labels."""
    total = JudgingEstimate()
    for label in given.labels:
        needed = grader.estimate(label.exchange)
        for _ in range(repeats):
            total.add(needed)
    return total


def _over_budget(attempted: str, why: str) -> FlywheelError:
    hint = "Use fewer labels or repeats, wait until midnight UTC, or raise judge.budget. No calibration is stored."
    return BudgetSpentError(attempted, why, hint, retryable=True)


async def draft_rubric(config: Config, opened: Opened, labels: Path, name: str) -> str:
    """The text of a rubric of this name, which the judge drafts from labels. Raises ConfigError and JudgeError."""
    check_independence(config)
    async with opened() as store:
        given = await read_label_file(store, labels)
    with closing(JudgeClient(config.judge)) as client:
        drafting = partial(draft, client, given.labels, name)
        return await unless_stopped(drafting, config.daemon.drain_seconds, "draft a rubric")
