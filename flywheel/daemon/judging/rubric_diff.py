"""Comparison of two rubrics: what differs, which verdicts flip, and what judging all tasks by the new one would take.

Works on a copy of the state. Both graders reuse stored results where they are valid; what both need is asked once. A
filter chain only redacts the tasks.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple

from flywheel.config.judge import JudgeSettings
from flywheel.daemon.judging.judge_setup import exchange_of
from flywheel.daemon.judging.judging_report import JudgingEstimate
from flywheel.errors import FlywheelError, JudgeError
from flywheel.judge.filters.pii import Redactor
from flywheel.judge.grader import CallEstimate, Grader
from flywheel.judge.rubric.criterion import Criterion
from flywheel.judge.rubric.rubric import Rubric
from flywheel.judge.usage import Budget
from flywheel.records.verdict import Exchange, Outcome, Verdict
from flywheel.store import claims, judge_usage
from flywheel.store.claims import Claimed
from flywheel.store.kernel.database import Store
from flywheel.system.signals import in_daemon_thread

BATCH: Final = 256
TOLERANCE: Final = 1e-9
"""Contributions that differ by less are equal."""


@dataclass(frozen=True, slots=True)
class Compared:
    """One task under both rubrics.

    Attributes:
        asked: The verdicts that the judge was asked for.
        with_cache: What the new verdict would take with stored results.
        without_cache: What it would take without.
    """

    task: Claimed
    old: Verdict
    new: Verdict
    asked: tuple[Verdict, ...]
    with_cache: CallEstimate
    without_cache: CallEstimate

    @property
    def is_decided(self) -> bool:
        return Outcome.UNDECIDED not in (self.old.outcome, self.new.outcome)

    @property
    def flips(self) -> bool:
        return self.is_decided and self.old.outcome is not self.new.outcome


@dataclass(slots=True)
class DiffReport:
    """All compared tasks, and what judging them by the new rubric would take, with stored results and without."""

    compared: list[Compared] = field(default_factory=list)
    with_cache: JudgingEstimate = field(default_factory=JudgingEstimate)
    without_cache: JudgingEstimate = field(default_factory=JudgingEstimate)
    error: FlywheelError | None = None


@dataclass(frozen=True, slots=True)
class _Pair:
    """One task with the stored verdicts by each rubric."""

    new: Claimed
    old: Claimed
    exchange: Exchange


class RubricDiff:
    """Grades every task with two graders of the same settings."""

    def __init__(
        self, store: Store, old: Grader, new: Grader, settings: JudgeSettings, redact: Redactor | None = None
    ) -> None:
        """`redact` removes what the judge must not see from a task."""
        self._store = store
        self._redact = redact
        self._old = old
        self._new = new
        self._settings = settings
        self._stop = threading.Event()

    async def preview(self, limit: int | None) -> JudgingEstimate:
        """What `run` would take, without a call."""
        total = JudgingEstimate()
        async for pair in self._pairs(limit):
            total.add(*await asyncio.to_thread(self._estimate, pair))
        return total

    async def run(self, limit: int | None, on_compared: Callable[[], None] | None = None) -> DiffReport:
        """Grade by both rubrics, with as many calls in flight as the settings allow.

        A failing judge or `halt` ends it early; the report has what was compared until then.
        """
        report = DiffReport()
        spent = await self._store.read(judge_usage.tokens_today)
        budget = Budget(self._settings.budget, lambda: spent)
        slots = asyncio.Semaphore(self._settings.max_thread)
        # Failures in a row, all comparisons that asked the judge, and the last failure.
        failed = asked = 0
        last = ""

        def end(error: FlywheelError) -> None:
            if report.error is None and not self._stop.is_set():
                report.error = error
                self._stop.set()

        async def compare(pair: _Pair) -> None:
            nonlocal failed, asked, last
            try:
                compared = await in_daemon_thread(partial(self._compare, pair, budget))
            except FlywheelError as error:
                return end(error)
            finally:
                slots.release()
            report.compared.append(compared)
            report.with_cache.add(compared.with_cache)
            report.without_cache.add(compared.without_cache)
            if on_compared is not None:
                on_compared()
            asked += bool(compared.asked)
            if compared.old.unreachable or compared.new.unreachable:
                failed, last = failed + 1, compared.old.error or compared.new.error
                if failed >= self._settings.max_thread:
                    end(_unavailable(failed, last))
            elif compared.asked:
                failed = 0
            if (unusable := self._new.unusable or self._old.unusable) is not None:
                end(unusable)

        try:
            async with asyncio.TaskGroup() as group:
                async for pair in self._pairs(limit):
                    await slots.acquire()
                    if self._stop.is_set():
                        break
                    group.create_task(compare(pair))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            if failed and failed == asked:
                end(_unavailable(failed, last))
            self._stop.set()
        report.compared.sort(key=lambda each: each.task.id)
        return report

    async def halt(self) -> None:
        """Begin no other call. Calls in flight are waited for; then `run` returns."""
        self._stop.set()

    async def _pairs(self, limit: int | None) -> AsyncIterator[_Pair]:
        left = limit if limit is not None else 1 << 62
        after = 0
        while left > 0:
            size = min(left, BATCH)
            new, old = [
                await self._store.read(claims.triable, size, after, grader.rubric.hash, grader.judge_hash)
                for grader in (self._new, self._old)
            ]
            if not new:
                return
            after = new[-1].id
            left -= len(new)
            for by_new, by_old in zip(new, old, strict=True):
                line = self._redact(by_new.line) if self._redact else by_new.line
                yield _Pair(by_new, by_old, exchange_of(line))

    def _compare(self, pair: _Pair, budget: Budget) -> Compared:
        asked: list[Verdict] = []

        def judged(grader: Grader, task: Claimed, earlier: Sequence[Verdict]) -> Verdict:
            if task.stored is not None:
                return task.stored
            begun = grader.begin(pair.exchange, earlier)
            if isinstance(begun, Verdict):
                return begun
            if self._stop.is_set():
                return Verdict(Outcome.UNDECIDED, None, error="the comparison was stopped")
            budget.check()
            verdict = grader.finish(begun, self._stop)
            budget.book(verdict.tokens)
            asked.append(verdict)
            return verdict

        with_cache = CallEstimate() if pair.new.stored else self._new.estimate(pair.exchange, pair.new.earlier)
        new = judged(self._new, pair.new, pair.new.earlier)
        is_reusable = self._new.judge_hash == self._old.judge_hash and new.outcome is not Outcome.UNDECIDED
        old = judged(self._old, pair.old, (new, *pair.old.earlier) if is_reusable else pair.old.earlier)
        return Compared(pair.new, old, new, tuple(asked), with_cache, self._new.estimate(pair.exchange))

    def _estimate(self, pair: _Pair) -> tuple[CallEstimate, CallEstimate]:
        new = old = CallEstimate()
        if pair.new.stored is None:
            new = self._new.estimate(pair.exchange, pair.new.earlier)
        if pair.old.stored is None:
            is_reusable = new.calls > 0 and self._new.judge_hash == self._old.judge_hash
            asked = frozenset(self._new.hashes.values()) if is_reusable else frozenset()
            old = self._old.estimate(pair.exchange, pair.old.earlier, asked)
        return new, old


def _unavailable(failed: int, error: str) -> JudgeError:
    return JudgeError(
        "go on comparing",
        f"the judge failed {failed} times in a row, the last time with: {error}",
        "Try again when the judge is available; stored verdicts need no call.",
        retryable=True,
    )


@dataclass(frozen=True, slots=True)
class RubricChange:
    """One difference; `criterion` is empty for one of the whole rubric."""

    criterion: str
    what: str


@dataclass(frozen=True, slots=True)
class Contribution:
    """What a criterion contributed to the old and to the new score; None where it has no result."""

    criterion: str
    old: float | None
    new: float | None
    why: str

    @property
    def difference(self) -> float:
        return (self.new or 0.0) - (self.old or 0.0)


def changes(old: Rubric, new: Rubric) -> list[RubricChange]:
    """All differences that can change a verdict."""
    found = []
    if old.threshold != new.threshold:
        found.append(RubricChange("", f"threshold {old.threshold:g} → {new.threshold:g}"))
    before, after = old.judge.model_dump(), new.judge.model_dump()
    settings = []
    for key in dict.fromkeys([*before, *after]):
        values = ["–" if each.get(key) is None else str(each[key]) for each in (before, after)]
        if before.get(key) != after.get(key):
            settings.append(f"{key} {' → '.join(values)}")
    if settings:
        found.append(RubricChange("", f"judge: {', '.join(settings)}"))
    olds, news = ({each.id: each for each in rubric.every} for rubric in (old, new))
    for name in dict.fromkeys([*news, *olds]):
        if what := ", ".join(_criterion_changes(olds.get(name), news.get(name))):
            found.append(RubricChange(name, what))
    if not found and old.hash != new.hash:
        found.append(RubricChange("", "the order of the criteria, or a file that they use"))
    return found


def contributions(old: Rubric, new: Rubric, was: Verdict, now: Verdict) -> list[Contribution]:
    """The criteria whose contribution to the score differs, changed criteria first."""
    olds, news = _parts(old, was), _parts(new, now)
    found = []
    for name in dict.fromkeys([*news, *olds]):
        before, after = olds.get(name, _DiffPart()), news.get(name, _DiffPart())
        why = _criterion_changes(before.criterion, after.criterion)
        if None not in (before.choice, after.choice) and before.choice != after.choice:
            why.append(f"{before.choice} → {after.choice}")
        if before.rejects != after.rejects:
            why.append("it fails and is required" if after.rejects else "it no longer rejects by itself")
        if why or abs((after.score or 0.0) - (before.score or 0.0)) > TOLERANCE:
            text = ", ".join(why) or "its share of the score"
            found.append((not why, Contribution(name, before.score, after.score, text)))
    return [each for _, each in sorted(found, key=lambda pair: (pair[0], -abs(pair[1].difference)))]


class _DiffPart(NamedTuple):
    """A criterion under one rubric, its choice and contribution, None without a result. One that fails and is
    required `rejects`: then the score does not matter."""

    criterion: Criterion | None = None
    choice: str | None = None
    score: float | None = None
    rejects: bool = False


def _parts(rubric: Rubric, verdict: Verdict) -> dict[str, _DiffPart]:
    results = {result.criterion: result for result in verdict.results}
    total = sum(each.weight for each in rubric.every if each.weight > 0)
    found = {each.id: _DiffPart(each) for each in rubric.every}
    for each in rubric.every:
        if (result := results.get(each.id)) is not None:
            score = round(each.weight * result.value / total, 9)
            found[each.id] = _DiffPart(each, result.choice, score, each.required and not result.passed)
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
