"""Comparison of two rubrics or judges: two passes of the judging on one copy of the state, and their difference.

The second pass reuses what the judge said in the first. A filter chain only redacts the tasks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from pydantic import BaseModel

from flywheel.config.file import Config
from flywheel.daemon.judging.judge_setup import exchange_of
from flywheel.daemon.judging.judging import TaskJudging
from flywheel.daemon.judging.judging_report import (
    CostEstimator,
    JudgingEstimate,
    JudgingReport,
    TaskResult,
    cost_of,
)
from flywheel.daemon.judging.quality_bar import Case
from flywheel.judge.grader import CallEstimate
from flywheel.judge.rubric.criterion import Criterion
from flywheel.judge.rubric.rubric import Rubric
from flywheel.records.verdict import Outcome, Verdict
from flywheel.store import claims
from flywheel.store.claims import Claimed
from flywheel.store.kernel.bulk import chunks
from flywheel.store.kernel.database import Store
from flywheel.system.signals import Stop
from flywheel.system.terminal import excerpt
from flywheel.training.gate.intervals import Paired, compare

TASKS_PER_THREAD: Final = 8
"""Tasks that both rubrics judge before the next ones, for each thread that calls the judge: a stopped comparison has
those so far."""
EXCERPT: Final = 240
"""Characters of a question or an answer of a flip."""
ERROR_PROBABILITY: Final = 0.025
"""Of each bound of the difference between the accepted shares: the interval holds it at 95 %."""
SHOWN: Final = 40
"""Characters of two values of a rubric that are shown."""
TOLERANCE: Final = 1e-9
"""Contributions that differ by less are equal."""


class Comparison:
    """Judges every task by two rubrics. The state must be a copy: tasks become due in it, wherever they stand.

    Attributes:
        stop: Ask for it to begin no other call.
        report: What both passes used, and the error that ended them early.
        cases: Each compared task by the new rubric.
        tasks: How many tasks the state has; of these, rubrics can be tried on `triable`.
    """

    def __init__(self, store: Store, config: Config, old: Rubric, new: Rubric) -> None:
        """Raises ConfigError for a judge that cannot be used."""
        self._store = store
        self.old, self.new = (TaskJudging(store, config, rubric=each, redacts_only=True) for each in (old, new))
        self.stop = Stop(config.daemon.drain_seconds)
        self.report = JudgingReport()
        self.cases: list[Case] = []
        self.flips: list[dict[str, Any]] = []
        self.tasks = 0
        self.triable: list[int] = []
        self._states: dict[int, str] = {}
        self._pairs: list[Paired] = []
        self._decided = self._asked = 0
        self._with_cache, self._without_cache = JudgingEstimate(), JudgingEstimate()

    @property
    def judge(self) -> str:
        """The model that judges by the new rubric."""
        return str(self.new.grader.client.endpoints[0].config.model)

    async def prepare(self, limit: int | None) -> int:
        """Look at the state; the number of tasks to compare, at most `limit`."""
        self.tasks, self._states = await self._store.read(claims.triable)
        self.triable = list(self._states)[:limit]
        return len(self.triable)

    async def preview(self) -> tuple[JudgingEstimate, JudgingEstimate]:
        """What each pass would take alone, that of the new rubric first, without any request. The second one takes
        less where the first has asked the same."""
        await self._store.write(claims.make_due, self.triable)
        return await self.new.preview(), await self.old.preview()

    async def run(self, step: Callable[[], None]) -> JudgingReport:
        """Compare all tasks; `step` is called for each verdict. A failing judge or `stop` ends it early."""
        try:
            for page in chunks(self.triable, TASKS_PER_THREAD * self.new.judge.max_thread):
                new = await self._pass(self.new, page, step)
                # What one of them leaves undecided cannot flip.
                old = await self._pass(self.old, [task for task in new if _reward(new[task]) is not None], step)
                # Functions of a rubric, which may take their time, run for the estimates.
                await asyncio.to_thread(self._count, new, old)
        finally:
            self.new.grader.close()
            self.old.grader.close()
        return self.report

    async def _pass(
        self, judging: TaskJudging, page: Sequence[int], step: Callable[[], None]
    ) -> dict[int, TaskResult]:
        found: dict[int, TaskResult] = {}

        def note(result: TaskResult) -> None:
            found[result.task.id] = result
            step()

        if page and self.report.error is None and not self.stop.is_set():
            await self._store.write(claims.make_due, page)
            self.report.join(await judging.run(stop=self.stop, on_judged=note))
        return found

    def _count(self, new: Mapping[int, TaskResult], old: Mapping[int, TaskResult]) -> None:
        for task in sorted(new):
            self._add(new[task], old.get(task))

    def _add(self, new: TaskResult, old: TaskResult | None) -> None:
        """Count a task, unless it waits for its second verdict."""
        task, rewards = new.task, (_reward(new), _reward(old))
        if old is None and rewards[0] is not None:
            return
        self.cases.append(Case.of_result(self.new.rubric.id, new))
        self._asked += any(_was_asked(each) for each in (new, old) if each is not None)
        self._decided += None not in rewards
        exchange, grader = exchange_of(task.line), self.new.grader
        self._with_cache.add(CallEstimate() if task.stored else grader.estimate(exchange, task.earlier))
        self._without_cache.add(grader.estimate(exchange))
        self._pairs.append(Paired(task.key, (rewards[0],), (rewards[1],), self.cases[-1].conversation))
        if {*rewards} == {0.0, 1.0} and old is not None and old.verdict is not None and new.verdict is not None:
            self.flips.append(self._flip(task, old.verdict, new.verdict))

    def _flip(self, task: Claimed, old: Verdict, new: Verdict) -> dict[str, Any]:
        return {
            "task_id": task.key,
            "state": self._states[task.id],
            **{
                name: {"outcome": each.outcome.value, "score": each.score, "reason": each.reason}
                for name, each in (("old", old), ("new", new))
            },
            "why": contributions(self.old.rubric, self.new.rubric, old, new),
            "query": excerpt(task.line["main_query"], EXCERPT),
            "answer": excerpt(task.line["answer"], EXCERPT),
        }

    def json(self, names: tuple[str, str], estimator: CostEstimator) -> dict[str, Any]:
        """The record of `filter --against`. `names` are those of the old and the new rubric or judge."""
        rubrics = {"old": self.old.rubric, "new": self.new.rubric}
        accepted = compare(self._pairs, samples=1, alpha=ERROR_PROBABILITY, needed=0.0, seed=0)
        return {
            **{
                side: {"name": name, "id": rubric.id, "hash": rubric.hash}
                for name, (side, rubric) in zip(names, rubrics.items(), strict=True)
            },
            "changes": changes(**rubrics),
            "tasks": self.tasks,
            "left_aside": self.tasks - len(self._states),
            "not_reached": len(self._states) - len(self.cases),
            "compared": len(self.cases),
            "same": self._decided - len(self.flips),
            "undecided": len(self.cases) - self._decided,
            "flips": self.flips,
            "accepted": {
                "old": accepted.deployed_mean,
                "new": accepted.candidate_mean,
                "difference": accepted.gain,
                **{name: getattr(accepted, name) for name in ("lower", "upper", "tasks", "conversations")},
            },
            "judge_all": {
                "without_cache": estimator.cost(self._without_cache).json(),
                "with_cache": estimator.cost(self._with_cache).json(),
            },
            "usage": self.report.usage,
            "reused": len(self.cases) - self._asked,
            "cost": cost_of(**self.report.usage, prices=estimator.prices).price,
            "dry_run": True,
            "error": str(self.report.error) if self.report.error else None,
        }


def _reward(result: TaskResult | None) -> float | None:
    """Whether a task is accepted; None where that is not decided."""
    if result is None or result.verdict is None or result.verdict.outcome is Outcome.UNDECIDED:
        return None
    return float(result.verdict.outcome is Outcome.ACCEPTED)


def _was_asked(result: TaskResult) -> bool:
    return any(each is not None and bool(each.calls or each.unreachable) for each in (result.verdict, result.paid))


def changes(old: Rubric, new: Rubric) -> list[dict[str, str]]:
    """All differences that can change a verdict; `criterion` is empty for one of the whole rubric."""
    found = []
    if old.threshold != new.threshold:
        found.append({"criterion": "", "what": f"threshold {old.threshold:g} → {new.threshold:g}"})
    if settings := _changed(old.judge, new.judge):
        found.append({"criterion": "", "what": f"judge: {', '.join(settings)}"})
    olds, news = ({each.id: each for each in rubric.every} for rubric in (old, new))
    for name in dict.fromkeys([*news, *olds]):
        if what := ", ".join(_criterion_changes(olds.get(name), news.get(name))):
            found.append({"criterion": name, "what": what})
    if not found and old.hash != new.hash:
        found.append({"criterion": "", "what": "the order of the criteria, or a file that they use"})
    return found


def contributions(old: Rubric, new: Rubric, was: Verdict, now: Verdict) -> list[dict[str, Any]]:
    """Why the score differs: the threshold, then the criteria that contribute another part, changed ones first; None
    where one has no result."""
    olds, news = _parts(old, was), _parts(new, now)
    found: list[tuple[bool, float, dict[str, Any]]] = []
    for name in dict.fromkeys([*news, *olds]):
        before, after = olds.get(name, _Part()), news.get(name, _Part())
        why = _criterion_changes(before.criterion, after.criterion)
        if None not in (before.choice, after.choice) and before.choice != after.choice:
            why.append(f"{before.choice} → {after.choice}")
        if before.rejects != after.rejects:
            why.append("it fails and is required" if after.rejects else "it no longer rejects by itself")
        difference = abs((after.score or 0.0) - (before.score or 0.0))
        if why or difference > TOLERANCE:
            text = ", ".join(why) or "its share of the score"
            each = {"criterion": name, "old": before.score, "new": after.score, "why": text}
            found.append((not why, -difference, each))
    parts = [each for _, _, each in sorted(found, key=lambda part: part[:2])]
    if old.threshold == new.threshold:
        return parts
    text = f"threshold {old.threshold:g} → {new.threshold:g}"
    return [{"criterion": "", "old": old.threshold, "new": new.threshold, "why": text}, *parts]


class _Part(NamedTuple):
    """A criterion under one rubric, its choice and contribution, None without a result. One that fails and is
    required `rejects`: then the score does not matter."""

    criterion: Criterion | None = None
    choice: str | None = None
    score: float | None = None
    rejects: bool = False


def _parts(rubric: Rubric, verdict: Verdict) -> dict[str, _Part]:
    results = {result.criterion: result for result in verdict.results}
    total = sum(each.weight for each in rubric.every if each.weight > 0)
    found = {each.id: _Part(each) for each in rubric.every}
    for each in rubric.every:
        if (result := results.get(each.id)) is not None:
            score = round(each.weight * result.value / total, 9)
            found[each.id] = _Part(each, result.choice, score, each.required and not result.passed)
    return found


def _criterion_changes(old: Criterion | None, new: Criterion | None) -> list[str]:
    if old is None or new is None:
        return ["new"] if old is None else ["removed"]
    return _changed(old, new)


def _changed(old: BaseModel, new: BaseModel) -> list[str]:
    """What differs between two models: numbers and names as `name old → new`, of longer values the name alone."""
    before, after, found = old.model_dump(), new.model_dump(), []
    for name in dict.fromkeys([*before, *after]):
        was, now = (each.get(name) for each in (before, after))
        if was != now:
            texts = f"{_text(was)} → {_text(now)}"
            found.append(f"{name} {texts}" if len(texts) <= SHOWN else f"another {name}")
    return found


def _text(value: object) -> str:
    return "–" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
