"""The grader: one exchange in, one verdict out, by one rubric and one judge.

Free checks come first; the judge is asked only about criteria without a reusable result. A result of an earlier
verdict can be reused while the judge would be told the same about its criterion: its statement, its choices and their
order, and whether it is asked alone. Weights, order, values of choices, ids and the threshold are applied anew.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from flywheel.config import JudgeSettings
from flywheel.errors import CheckError, JudgeError
from flywheel.judge import prompt
from flywheel.judge.client import NEVER, JudgeClient, settings_for
from flywheel.judge.judge_call import JudgeCall, JudgeCallResult
from flywheel.judge_usage import CallsInFlight
from flywheel.rubric import FLAT_ID, Criterion, Rubric
from flywheel.rubric.checks import ask_the_judge, check_all
from flywheel.verdict import CriterionResult, Exchange, Judgement, Outcome, Verdict

FIRST, AGAIN = "first", "again"


@dataclass(frozen=True, slots=True)
class CallEstimate:
    """What a verdict would take.

    Attributes:
        criteria: The number of criteria that the calls ask about.
        prompt_tokens: The prompt tokens that they send, approximately.
        more: Further calls if the score is close. A call after an unreadable reply is not included.
    """

    calls: int = 0
    criteria: int = 0
    prompt_tokens: int = 0
    more: int = 0


@dataclass(frozen=True, slots=True)
class PendingJudgeCall:
    """An exchange that needs a judge call; the free checks are done and took this many seconds."""

    exchange: Exchange
    checked: tuple[CriterionResult, ...]
    earlier: EarlierResults
    seconds: float = 0.0


class _CallNeededError(Exception):
    """The verdict needs a judge call."""


class Grader:
    """Grades by a rubric. Thread-safe."""

    def __init__(
        self,
        rubric: Rubric,
        settings: JudgeSettings,
        client: JudgeClient | None = None,
        calls: CallsInFlight | None = None,
    ) -> None:
        """`calls` counts each call before it is sent."""
        self.rubric = rubric
        self.client = client or JudgeClient(settings_for(rubric, settings))
        self._call = JudgeCall(rubric, settings, self.client, calls)
        self.hashes = criterion_hashes(rubric)
        self._required = frozenset(criterion.id for criterion in rubric.every if criterion.required)
        told = f"{self.client.identity}\0{self._call.temperature}\0{self._call.max_tokens}\0{prompt.VERSION}"
        self.judge_hash = hashlib.sha256(told.encode()).hexdigest()[:16]

    def grade(self, exchange: Exchange, stop: threading.Event = NEVER, earlier: Sequence[Verdict] = ()) -> Verdict:
        """The verdict. A failed required check saves the judge call.

        `earlier` are verdicts of this judge, newest first, whose results are reused. A judge without a readable reply
        leaves the exchange undecided; `stop` ends its retries. Raises JudgeError (not retryable) when every other
        exchange would fail too: a wrong key, an unknown model.
        """
        begun = self.begin(exchange, earlier)
        return self.finish(begun, stop) if isinstance(begun, PendingJudgeCall) else begun

    def reuse(self, exchange: Exchange, earlier: Sequence[Verdict]) -> Verdict | None:
        """The verdict if it needs no call, else None."""
        begun = self.begin(exchange, earlier)
        return None if isinstance(begun, PendingJudgeCall) else begun

    def begin(self, exchange: Exchange, earlier: Sequence[Verdict] = ()) -> Verdict | PendingJudgeCall:
        """The free part of `grade`: the verdict, or what `finish` needs to ask the judge."""
        started = time.monotonic()
        try:
            checked = check_all(self.rubric, exchange)
        except CheckError as error:
            return self._undecided(str(error), (), [], started)
        if self._fails_required(checked):
            return self._verdict(Judgement(Outcome.REJECTED, 0.0, checked), [], started)
        if not self.rubric.asked:
            return self._verdict(self._judgement(JudgeCallResult(), checked, FIRST), [], started)
        pending = PendingJudgeCall(exchange, checked, EarlierResults(self.rubric, self.hashes, earlier))
        try:
            return self._decide(pending, None, started)
        except _CallNeededError:
            return replace(pending, seconds=time.monotonic() - started)

    def finish(self, pending: PendingJudgeCall, stop: threading.Event = NEVER) -> Verdict:
        """The part of `grade` that asks the judge."""
        return self._decide(pending, stop, time.monotonic() - pending.seconds)

    def estimate(
        self, exchange: Exchange, earlier: Sequence[Verdict] = (), asked: Collection[str] = ()
    ) -> CallEstimate:
        """What `grade` would take. `asked` are hashes of criteria that will have been asked about by then."""
        if not ask_the_judge(self.rubric, exchange):
            return CallEstimate()
        if earlier and self.reuse(exchange, earlier) is not None:
            return CallEstimate()
        known = EarlierResults(self.rubric, self.hashes, earlier)
        settings = self.rubric.judge
        first = [
            [each for each in self._missing(known.of(FIRST, place)) if self.hashes[each.id] not in asked]
            for place in range(settings.repeats)
        ]
        again: list[list[Criterion]] = []
        if settings.escalate:
            again = [self._missing(known.of(AGAIN, place)) for place in range(settings.escalate.repeats)]
        if again and not any(first) and not asked:
            # All first results are known: the second stage is what is missing.
            first, again = again, []
        sets = [criteria for criteria in first if criteria]
        return CallEstimate(
            sum(len(self._call.groups(criteria)) for criteria in sets),
            sum(map(len, sets)),
            sum(self._call.estimate_tokens(exchange, criteria) for criteria in sets),
            sum(len(self._call.groups(criteria)) for criteria in again if criteria),
        )

    def _missing(self, known: Mapping[str, CriterionResult]) -> list[Criterion]:
        return [criterion for criterion in self.rubric.asked if criterion.id not in known]

    def _decide(self, pending: PendingJudgeCall, stop: threading.Event | None, started: float) -> Verdict:
        """The verdict of the majority. Raises _CallNeededError when a call is needed and `stop` is None."""
        escalate = self.rubric.judge.escalate
        judgements: list[Judgement] = []
        try:
            chosen = self._repeat(pending, FIRST, self.rubric.judge.repeats, judgements, stop)
            if chosen is not None and escalate is not None and self._is_close(chosen, escalate.band):
                chosen = self._repeat(pending, AGAIN, escalate.repeats, judgements, stop)
        except JudgeError as failure:
            # The cost of earlier calls is recorded with the verdict.
            if not failure.retryable and not any(each.calls for each in judgements):
                raise
            return self._undecided(str(failure), pending.checked, judgements, started, unreachable=failure.retryable)
        if chosen is None:
            errors = [each.error for each in judgements if each.error]
            error = errors[-1] if errors else f"there is no majority: {tally(judgements)}"
            return self._undecided(error, pending.checked, judgements, started)
        return self._verdict(chosen, judgements, started)

    def _repeat(
        self,
        pending: PendingJudgeCall,
        stage: str,
        times: int,
        judgements: list[Judgement],
        stop: threading.Event | None,
    ) -> Judgement | None:
        """Add this many judgements of a stage to `judgements`. Returns that of the majority, or None.

        Raises JudgeError when no reply came.
        """
        for place in range(times):
            known = pending.earlier.of(stage, place)
            result = JudgeCallResult()
            if missing := self._missing(known):
                if stop is None:
                    raise _CallNeededError
                # The first call has no seed: without a repetition, nothing has to differ.
                result = self._call.run(pending.exchange, missing, len(judgements) or None, stop)
            if not result.error:
                asked = {each.criterion: replace(each, hash=self.hashes[each.criterion]) for each in result.results}
                every = {**known, **asked}
                result.results = tuple(every[criterion.id] for criterion in self.rubric.asked)
            judgements.append(self._judgement(result, pending.checked, stage))
            if result.failure is not None:
                raise result.failure
        return majority(judgements[-times:])

    def _is_close(self, judgement: Judgement, band: tuple[float, float]) -> bool:
        # A failed required criterion decides whatever the score is.
        score = judgement.score
        return score is not None and band[0] <= score <= band[1] and not self._fails_required(judgement.results)

    def _judgement(self, called: JudgeCallResult, checked: tuple[CriterionResult, ...], stage: str) -> Judgement:
        outcome, score, results = Outcome.UNDECIDED, None, (*checked, *called.results)
        if not called.error:
            score = self.rubric.score({result.criterion: result.value for result in results})
            accepted = score >= self.rubric.threshold and not self._fails_required(results)
            outcome = Outcome.ACCEPTED if accepted else Outcome.REJECTED
        return Judgement(
            outcome,
            score,
            results,
            error=called.error,
            judge=called.judge,
            stage=stage,
            calls=called.calls,
            prompt_tokens=called.prompt_tokens,
            completion_tokens=called.completion_tokens,
            estimated_tokens=called.estimated_tokens,
        )

    def _verdict(self, chosen: Judgement, judgements: Sequence[Judgement], started: float) -> Verdict:
        """The verdict with a reason in one line: the failed criteria, or what the judge says of those it accepts."""
        asked = {criterion.id for criterion in self.rubric.asked}
        failed = [result for result in chosen.results if not result.passed]
        told = failed or [result for result in chosen.results if result.criterion in asked]
        reason = "; ".join(f"{result.criterion}: {result.reason}" for result in told)
        if chosen.outcome is Outcome.REJECTED and not failed:
            reason = f"score {chosen.score or 0.0:.2f} is below {self.rubric.threshold:g}; {reason}"
        if len(judgements) > 1:
            reason = f"{reason} (judged {len(judgements)} times: {tally(judgements)})"
        return Verdict(chosen.outcome, chosen.score, chosen.results, reason, **_cost(judgements, started))

    @staticmethod
    def _undecided(
        error: str,
        checked: tuple[CriterionResult, ...],
        judgements: Sequence[Judgement],
        started: float,
        *,
        unreachable: bool = False,
    ) -> Verdict:
        cost = _cost(judgements, started)
        return Verdict(Outcome.UNDECIDED, None, checked, error=error, unreachable=unreachable, **cost)

    def _fails_required(self, results: Sequence[CriterionResult]) -> bool:
        return any(not result.passed and result.criterion in self._required for result in results)

    def close(self) -> None:
        self.client.close()


def _cost(judgements: Sequence[Judgement], started: float) -> dict[str, Any]:
    """The fields of a verdict on what it took."""
    return {
        "calls": sum(each.calls for each in judgements),
        "prompt_tokens": sum(each.prompt_tokens for each in judgements),
        "completion_tokens": sum(each.completion_tokens for each in judgements),
        "latency_seconds": round(time.monotonic() - started, 4),
        "judgements": tuple(judgements),
    }


def majority(judgements: Sequence[Judgement]) -> Judgement | None:
    """The judgement for more than half of all, unusable ones included; None without a majority.

    It is the one with the median score of its outcome: its results explain the outcome, and its score is on the same
    side of the threshold.
    """
    for outcome in (Outcome.ACCEPTED, Outcome.REJECTED):
        alike = sorted((each for each in judgements if each.outcome is outcome), key=lambda each: each.score or 0.0)
        if 2 * len(alike) > len(judgements):
            return alike[(len(alike) - 1) // 2]
    return None


def tally(judgements: Sequence[Judgement]) -> str:
    """The votes by outcome, for a message."""
    counts = {outcome.value: sum(each.outcome is outcome for each in judgements) for outcome in Outcome}
    return ", ".join(f"{number} {outcome}" for outcome, number in counts.items() if number)


def criterion_hashes(rubric: Rubric) -> Mapping[str, str]:
    """Hashes of what the judge is told about each criterion that it decides, by criterion id."""
    hashes = {}
    for each in rubric.asked:
        is_alone = rubric.judge.per_criterion
        told = [each.type, str(each.value).strip(), list(each.scale), each.id == FLAT_ID, is_alone]
        hashes[each.id] = hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]
    return MappingProxyType(hashes)


class EarlierResults:
    """The results of earlier verdicts, by one judge on one exchange, that a rubric can reuse.

    Results of the second stage, for close scores, are separate from those of the first.
    """

    def __init__(self, rubric: Rubric, hashes: Mapping[str, str], earlier: Sequence[Verdict]) -> None:
        """`earlier` are decided verdicts, newest first."""
        self._rubric = rubric
        self._hashes = hashes
        self._results: dict[tuple[str, str], list[CriterionResult]] = {}
        wanted = set(hashes.values())
        for verdict in earlier:
            found: dict[tuple[str, str], list[CriterionResult]] = {}
            for judgement in verdict.judgements:
                # Two criteria with the same hash have the same result: one of them is enough.
                by_hash = {result.hash: result for result in reversed(judgement.results) if result.hash in wanted}
                for each, result in by_hash.items():
                    found.setdefault((judgement.stage, each), []).append(result)
            # A verdict holds copies of the results that it reused: those of two verdicts are not added up.
            for key, results in found.items():
                if len(results) > len(self._results.get(key, ())):
                    self._results[key] = results

    def of(self, stage: str, place: int) -> dict[str, CriterionResult]:
        """The results of the judgement at this place of a stage, by criterion id."""
        found = {}
        for criterion in self._rubric.asked:
            results = self._results.get((stage, self._hashes[criterion.id]), ())
            if place < len(results):
                value = criterion.scale[results[place].choice]
                passed = criterion.passes(value)
                found[criterion.id] = replace(results[place], criterion=criterion.id, value=value, passed=passed)
        return found
