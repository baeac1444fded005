"""The rubric diff: which verdicts another rubric would flip, and what it would take to judge everything by it.

Works on a copy of the state. Both sides use what is stored where that holds; what both have to know is asked once.
Filter chains are no part of it, but for what they take out of a task.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from flywheel.config import JudgeSettings
from flywheel.daemon.judge_setup import exchange_of
from flywheel.daemon.signals import aside
from flywheel.daemon.task_result import Preview
from flywheel.errors import FlywheelError, JudgeError
from flywheel.filtering.pii import Redactor
from flywheel.judge.budget import Budget
from flywheel.judge.grader import CallEstimate, Grader, PendingJudgeCall
from flywheel.rubric import Criterion, Rubric
from flywheel.store import claims, verdicts
from flywheel.store.claims import Claimed
from flywheel.store.database import Store
from flywheel.verdict import CriterionResult, Exchange, Outcome, Verdict

BATCH: Final = 256


@dataclass(frozen=True, slots=True)
class Compared:
    """One task under both rubrics. `paid` is what had to be asked for that; the new one would take `again` with what
    is stored, and `from_nothing` without."""

    task: Claimed
    old: Verdict
    new: Verdict
    paid: tuple[Verdict, ...]
    again: CallEstimate
    from_nothing: CallEstimate

    @property
    def is_decided(self) -> bool:
        return Outcome.UNDECIDED not in (self.old.outcome, self.new.outcome)

    @property
    def flips(self) -> bool:
        return self.is_decided and self.old.outcome is not self.new.outcome


@dataclass(slots=True)
class DiffReport:
    """Judging all of them by the new rubric would take `again` with what is stored, and `from_nothing` without."""

    compared: list[Compared] = field(default_factory=list)
    again: Preview = field(default_factory=Preview)
    from_nothing: Preview = field(default_factory=Preview)
    error: FlywheelError | None = None


@dataclass(frozen=True, slots=True)
class _Pair:
    new: Claimed
    old: Claimed
    exchange: Exchange


class RubricDiff:
    """Two graders with the same settings, on every task that a rubric can be tried on."""

    def __init__(
        self, store: Store, old: Grader, new: Grader, settings: JudgeSettings, redact: Redactor | None = None
    ) -> None:
        """`redact` takes out of a task what no judge is to see."""
        self._store = store
        self._redact = redact
        self._old = old
        self._new = new
        self._settings = settings
        self._stop = threading.Event()

    async def preview(self, limit: int | None) -> Preview:
        """What `run` would take, without asking anybody."""
        total = Preview()
        async for pair in self._pairs(limit):
            total.add(*await asyncio.to_thread(self._needed, pair))
        return total

    async def run(self, limit: int | None, on_compared: Callable[[], None] | None = None) -> DiffReport:
        """Judge by both, as many at once as the settings allow. A judge that fails ends it, with what there is, and
        so does `halt`."""
        report = DiffReport()
        spent = await self._store.read(verdicts.tokens_today)
        budget = Budget(self._settings.budget, lambda: spent)
        threads = self._settings.max_thread
        pending: set[asyncio.Future[Compared]] = set()
        failed = asked = 0
        last = ""

        async def collect(most: int) -> None:
            nonlocal pending, failed, asked, last
            while len(pending) > most:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                broken = [error for each in done if (error := each.exception()) is not None]
                for each in done:
                    if each.exception() is not None:
                        continue
                    compared = each.result()
                    report.compared.append(compared)
                    report.again.add(compared.again)
                    report.from_nothing.add(compared.from_nothing)
                    if on_compared is not None:
                        on_compared()
                    away = compared.old.unreachable or compared.new.unreachable
                    asked += bool(compared.paid)
                    failed = failed + 1 if away else 0 if compared.paid else failed
                    last = (compared.old.error or compared.new.error) if away else last
                    if failed >= threads and not self._stop.is_set():
                        raise _away(failed, last)
                if broken:
                    raise broken[0]

        try:
            async for pair in self._pairs(limit):
                await collect(threads - 1)
                if self._stop.is_set():
                    break
                pending.add(asyncio.ensure_future(aside(partial(self._compare, pair, budget))))
            await collect(0)
            if failed and failed == asked and not self._stop.is_set():
                raise _away(failed, last)
        except FlywheelError as error:
            report.error = error
            self._stop.set()
            await asyncio.gather(*pending, return_exceptions=True)
        except BaseException:
            self._stop.set()
            for each in pending:
                each.cancel()
            raise
        report.compared.sort(key=lambda each: each.task.id)
        return report

    async def halt(self) -> None:
        """Begin no other call; what is in flight is waited for, and `run` ends with what there is."""
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
        paid: list[Verdict] = []

        def judged(grader: Grader, task: Claimed, earlier: Sequence[Verdict]) -> Verdict:
            if task.stored is not None:
                return task.stored
            begun = grader.begin(pair.exchange, earlier)
            if not isinstance(begun, PendingJudgeCall):
                return begun
            if self._stop.is_set():
                return Verdict(Outcome.UNDECIDED, None, error="the comparison was stopped")
            with budget.hold(self._stop) as pay:
                verdict = grader.finish(begun, self._stop)
                pay(verdict)
            paid.append(verdict)
            return verdict

        again = CallEstimate() if pair.new.stored else self._new.estimate(pair.exchange, pair.new.earlier)
        new = judged(self._new, pair.new, pair.new.earlier)
        same = self._new.judge_hash == self._old.judge_hash and new.outcome is not Outcome.UNDECIDED
        old = judged(self._old, pair.old, (new, *pair.old.earlier) if same else pair.old.earlier)
        return Compared(pair.new, old, new, tuple(paid), again, self._new.estimate(pair.exchange))

    def _needed(self, pair: _Pair) -> tuple[CallEstimate, CallEstimate]:
        new = old = CallEstimate()
        if pair.new.stored is None:
            new = self._new.estimate(pair.exchange, pair.new.earlier)
        if pair.old.stored is None:
            same = new.calls > 0 and self._new.judge_hash == self._old.judge_hash
            asked = frozenset(self._new.hashes.values()) if same else frozenset()
            old = self._old.estimate(pair.exchange, pair.old.earlier, asked)
        return new, old


def _away(failed: int, error: str) -> JudgeError:
    return JudgeError(
        "go on comparing",
        f"the judge failed {failed} times in a row, last so: {error}",
        "Try again when the judge is back; what is stored needs no call.",
        retryable=True,
    )


SAME: Final = 1e-9


@dataclass(frozen=True, slots=True)
class RubricChange:
    """One difference; `criterion` is empty for what is about the whole rubric."""

    criterion: str
    what: str


@dataclass(frozen=True, slots=True)
class Contribution:
    """What a criterion gave to the old and to the new score; None where it has no result. `why` may have parts."""

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
    if old.judge != new.judge:
        before, after = old.judge.model_dump(), new.judge.model_dump()
        told = ", ".join(
            f"{key} {_told(before.get(key))} → {_told(after.get(key))}" for key in _differing(before, after)
        )
        found.append(RubricChange("", f"judge: {told}"))
    olds, news = ({each.id: each for each in rubric.every} for rubric in (old, new))
    for name in dict.fromkeys([*news, *olds]):
        if what := ", ".join(_criterion_changes(olds.get(name), news.get(name))):
            found.append(RubricChange(name, what))
    if not found and old.hash != new.hash:
        found.append(RubricChange("", "the order of the criteria, or a file that they use"))
    return found


def contributions(old: Rubric, new: Rubric, was: Verdict, now: Verdict) -> list[Contribution]:
    """The criteria whose contribution to the score changed, those first that changed themselves."""
    olds, news = ({each.id: each for each in rubric.every} for rubric in (old, new))
    before, after = _results(was), _results(now)
    shares = _share(old), _share(new)
    found = []
    for name in dict.fromkeys([*news, *olds]):
        gave = _gave(olds.get(name), before.get(name), shares[0])
        gives = _gave(news.get(name), after.get(name), shares[1])
        why = [
            *_criterion_changes(olds.get(name), news.get(name)),
            *_choice_changes(before.get(name), after.get(name)),
            *_stops(olds.get(name), news.get(name), before.get(name), after.get(name)),
        ]
        if why or abs((gives or 0.0) - (gave or 0.0)) > SAME:
            found.append((not why, Contribution(name, gave, gives, ", ".join(why) or "its share of the score")))
    return [each for _, each in sorted(found, key=lambda pair: (pair[0], -abs(pair[1].difference)))]


def _differing(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    return [key for key in dict.fromkeys([*before, *after]) if before.get(key) != after.get(key)]


def _told(value: object) -> str:
    return "–" if value is None else str(value)


def _share(rubric: Rubric) -> float:
    return sum(each.weight for each in rubric.every if each.weight > 0)


def _results(verdict: Verdict) -> dict[str, CriterionResult]:
    return {result.criterion: result for result in verdict.results}


def _gave(criterion: Criterion | None, result: CriterionResult | None, share: float) -> float | None:
    return None if criterion is None or result is None else round(criterion.weight * result.value / share, 9)


def _criterion_changes(old: Criterion | None, new: Criterion | None) -> list[str]:
    if old is None or new is None:
        return ["new"] if old is None else ["removed"]
    found = []
    if old.type != new.type:
        found.append(f"{old.type} → {new.type}")
    elif old.value != new.value:
        found.append("reworded" if new.asks_the_judge else "another value")
    elif _rest(old) != _rest(new):
        found.append("other options")
    if dict(old.scale) != dict(new.scale):
        found.append("other choices" if list(old.scale) != list(new.scale) else "other values of its choices")
    if old.weight != new.weight:
        found.append(f"weight {old.weight:g} → {new.weight:g}")
    if old.required != new.required:
        found.append("required now" if new.required else "no longer required")
    return found


def _rest(criterion: Criterion) -> dict[str, object]:
    return criterion.model_dump(include={"reference", "min", "max", "match"})


def _choice_changes(was: CriterionResult | None, now: CriterionResult | None) -> list[str]:
    if was is None or now is None or was.choice == now.choice:
        return []
    return [f"{was.choice} → {now.choice}"]


def _stops(
    old: Criterion | None, new: Criterion | None, was: CriterionResult | None, now: CriterionResult | None
) -> list[str]:
    """A failed required criterion decides by itself."""
    stopped = old is not None and old.required and was is not None and not was.passed
    stops = new is not None and new.required and now is not None and not now.passed
    return [] if stops == stopped else ["it fails and is required" if stops else "it does not stop it any more"]
