"""Comparison of two rubrics or judges: two passes of the judging on one copy of the state, and their difference.

The second pass reuses what the judge said in the first. A filter chain only redacts the tasks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from flywheel.config.file import Config
from flywheel.daemon.judging.judge_setup import exchange_of
from flywheel.daemon.judging.judging import TaskJudging
from flywheel.daemon.judging.judging_report import (
    USAGE,
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
from flywheel.store.kernel.bulk import chunks
from flywheel.store.kernel.database import Store
from flywheel.system.terminal import excerpt
from flywheel.training.gate.intervals import Paired, compare

TASKS_PER_THREAD: Final = 8
"""Tasks that both rubrics judge before the next ones, for each thread that calls the judge: a stopped comparison has
those so far."""
EXCERPT: Final = 240
"""Characters of a question or an answer of a flip."""
ERROR_PROBABILITY: Final = 0.025
"""Of each bound of the difference between the accepted shares: the interval holds it at 95 %."""
TOLERANCE: Final = 1e-9
"""Contributions that differ by less are equal."""


class Comparison:
    """Judges every task by two rubrics. The state must be a copy: tasks become due in it, wherever they stand.

    Attributes:
        stop: Set it to begin no other call.
        report: What both passes used, and the error that ended them early.
        cases: Each compared task by the new rubric.
        tasks: How many tasks the state has; of these, rubrics can be tried on `triable`.
    """

    def __init__(self, store: Store, config: Config, old: Rubric, new: Rubric) -> None:
        """Raises ConfigError for a judge that cannot be used."""
        self._store = store
        self.old, self.new = (TaskJudging(store, config, rubric=each, redacts_only=True) for each in (old, new))
        self.stop = threading.Event()
        self.report = JudgingReport()
        self.cases: list[Case] = []
        self.flips: list[dict[str, Any]] = []
        self.tasks, self.triable = 0, list[int]()
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
                old = await self._pass(self.old, [task for task in new if _is_decided(new[task])], step)
                for task in sorted(new):
                    self._add(new[task], old.get(task))
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

    def _add(self, new: TaskResult, old: TaskResult | None) -> None:
        """Count a task, unless it waits for its second verdict."""
        task, is_decided = new.task, old is not None and _is_decided(old)
        if old is None and _is_decided(new):
            return
        self.cases.append(Case.of_result(self.new.rubric.id, new))
        self._asked += any(_was_asked(each) for each in (new, old) if each is not None)
        self._decided += is_decided
        exchange, grader = exchange_of(task.line), self.new.grader
        self._with_cache.add(CallEstimate() if task.stored else grader.estimate(exchange, task.earlier))
        self._without_cache.add(grader.estimate(exchange))
        rewards = tuple((None if each is None else _reward(each),) for each in (new, old))
        self._pairs.append(Paired(task.key, *rewards, self.cases[-1].conversation))
        if is_decided and old is not None and new.outcome != old.outcome:
            self.flips.append(self._flip(old, new))

    def _flip(self, old: TaskResult, new: TaskResult) -> dict[str, Any]:
        line, sides = new.task.line, {"old": old.verdict, "new": new.verdict}
        assert old.verdict is not None and new.verdict is not None
        return {
            "task_id": new.task.key,
            "state": self._states[new.task.id],
            **{
                name: {"outcome": each.outcome.value, "score": each.score, "reason": each.reason}
                for name, each in sides.items()
                if each is not None
            },
            "why": contributions(self.old.rubric, self.new.rubric, old.verdict, new.verdict),
            "query": excerpt(line["main_query"], EXCERPT),
            "answer": excerpt(line["answer"], EXCERPT),
        }

    def json(self, names: tuple[str, str], estimator: CostEstimator) -> dict[str, Any]:
        """The record of `filter --against`. `names` are those of the old and the new rubric or judge."""
        rubrics = {"old": self.old.rubric, "new": self.new.rubric}
        accepted = compare(self._pairs, samples=1, alpha=ERROR_PROBABILITY, needed=0.0, seed=0)
        usage = {name: getattr(self.report, name) for name in USAGE}
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
            "usage": usage,
            "reused": len(self.cases) - self._asked,
            "cost": cost_of(**usage, prices=estimator.prices).price,
            "dry_run": True,
            "error": str(self.report.error) if self.report.error else None,
        }


def _is_decided(result: TaskResult) -> bool:
    return result.verdict is not None and result.verdict.outcome is not Outcome.UNDECIDED


def _reward(result: TaskResult) -> float | None:
    return float(result.outcome == Outcome.ACCEPTED.value) if _is_decided(result) else None


def _was_asked(result: TaskResult) -> bool:
    return any(each is not None and bool(each.calls or each.unreachable) for each in (result.verdict, result.paid))


def changes(old: Rubric, new: Rubric) -> list[dict[str, str]]:
    """All differences that can change a verdict; `criterion` is empty for one of the whole rubric."""
    found = []
    if old.threshold != new.threshold:
        found.append({"criterion": "", "what": f"threshold {old.threshold:g} → {new.threshold:g}"})
    before, after = (
        {name: "–" if value is None else str(value) for name, value in rubric.judge.model_dump().items()}
        for rubric in (old, new)
    )
    settings = [
        f"{name} {before.get(name, '–')} → {after.get(name, '–')}"
        for name in dict.fromkeys([*before, *after])
        if before.get(name) != after.get(name)
    ]
    if settings:
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
    changed, others = [], []
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
            (changed if why else others).append((difference, each))
    found = [each for group in (changed, others) for _, each in sorted(group, key=lambda pair: -pair[0])]
    if old.threshold != new.threshold:
        text = f"threshold {old.threshold:g} → {new.threshold:g}"
        found.insert(0, {"criterion": "", "old": old.threshold, "new": new.threshold, "why": text})
    return found


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
    found, common = [], set(Criterion.model_fields)
    if old.type != new.type:
        found.append(f"{old.type} → {new.type}")
    elif old.value != new.value:
        found.append("reworded" if new.asks_the_judge else "another value")
    elif old.model_dump(exclude=common) != new.model_dump(exclude=common):
        found.append("other options")
    if dict(old.scale) != dict(new.scale):
        found.append("other choices" if list(old.scale) != list(new.scale) else "other values of its choices")
    if old.weight != new.weight:
        found.append(f"weight {old.weight:g} → {new.weight:g}")
    if old.required != new.required:
        found.append("required now" if new.required else "no longer required")
    return found
