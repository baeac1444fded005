"""The grader: one exchange in, one verdict out, by one rubric and one judge."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from types import MappingProxyType

from flywheel.config import JudgeSettings
from flywheel.errors import CheckError, JudgeError
from flywheel.judge import prompt
from flywheel.judge.client import NEVER, JudgeClient, judge_of
from flywheel.judge.judge_call import JudgeCall, JudgeCallResult
from flywheel.rubric import FLAT_ID, Criterion, Rubric
from flywheel.rubric.checks import ask_the_judge, check_all
from flywheel.verdict import CriterionResult, Exchange, Judgement, Outcome, Verdict

FIRST, AGAIN = "first", "again"


@dataclass(frozen=True, slots=True)
class CallEstimate:
    """What a verdict would take: calls, the criteria they ask about, and about how many prompt tokens they send.

    A close score is asked for again, which takes so many calls `more`, and so is a reply that cannot be read: neither
    is known before.
    """

    calls: int = 0
    criteria: int = 0
    prompt_tokens: int = 0
    more: int = 0


@dataclass(frozen=True, slots=True)
class PendingJudgeCall:
    """An exchange that the judge has to be asked about: what cost nothing is done, and took so many seconds."""

    exchange: Exchange
    free: tuple[CriterionResult, ...]
    recall: EarlierResults
    seconds: float = 0.0


class _AskError(Exception):
    """The judge would have to be asked."""


class Grader:
    """Grades by a rubric. Thread-safe: no verdict knows of another."""

    def __init__(self, rubric: Rubric, settings: JudgeSettings, client: JudgeClient | None = None) -> None:
        self.rubric = rubric
        self.client = client or JudgeClient(judge_of(rubric, settings))
        self._inquiry = JudgeCall(rubric, settings, self.client)
        self.hashes = criterion_hashes(rubric)
        self._required = frozenset(criterion.id for criterion in rubric.every if criterion.required)
        asked = f"{self._inquiry.temperature}\0{self._inquiry.max_tokens}\0{prompt.VERSION}"
        self.judge_hash = hashlib.sha256(f"{self.client.identity}\0{asked}".encode()).hexdigest()[:16]

    def grade(self, exchange: Exchange, stop: threading.Event = NEVER, earlier: Sequence[Verdict] = ()) -> Verdict:
        """The verdict. What costs nothing is checked first, and a failed required check saves the call.

        The judge is asked only about what `earlier` verdicts of it, the newest first, do not say already.
        A judge that gives no readable answer leaves it undecided; `stop` ends its retries. Raises JudgeError (not
        retryable) when no other exchange would fare better: a wrong key, an unknown model.
        """
        begun = self.begin(exchange, earlier)
        return self.finish(begun, stop) if isinstance(begun, PendingJudgeCall) else begun

    def recall(self, exchange: Exchange, earlier: Sequence[Verdict]) -> Verdict | None:
        """The verdict if no call is needed for it, else None."""
        begun = self.begin(exchange, earlier)
        return None if isinstance(begun, PendingJudgeCall) else begun

    def begin(self, exchange: Exchange, earlier: Sequence[Verdict] = ()) -> Verdict | PendingJudgeCall:
        """The part of `grade` that costs nothing: the verdict, or what is left for `finish`."""
        started = time.monotonic()
        try:
            free = check_all(self.rubric, exchange)
        except CheckError as broken:
            return self._undecided(str(broken), (), [], started)
        if self._fails_required(free):
            return self._verdict(Judgement(Outcome.REJECTED, 0.0, free), [], started)
        if not self.rubric.asked:
            return self._verdict(self._judgement(JudgeCallResult(), free, FIRST), [], started)
        asking = PendingJudgeCall(exchange, free, EarlierResults(self.rubric, self.hashes, earlier))
        try:
            return self._voted(asking, None, started)
        except _AskError:
            return replace(asking, seconds=time.monotonic() - started)

    def finish(self, asking: PendingJudgeCall, stop: threading.Event = NEVER) -> Verdict:
        """The part of `grade` that asks the judge."""
        return self._voted(asking, stop, time.monotonic() - asking.seconds)

    def _voted(self, asking: PendingJudgeCall, stop: threading.Event | None, started: float) -> Verdict:
        """The verdict. Raises _AskError when the judge is needed for it and there is no `stop`."""
        free = asking.free
        judgements: list[Judgement] = []
        try:
            chosen = self._vote(asking.exchange, free, judgements, stop, asking.recall)
        except JudgeError as failure:
            # What earlier calls of it have cost is on record with the verdict.
            if not failure.retryable and not any(each.calls for each in judgements):
                raise
            return self._undecided(str(failure), free, judgements, started, unreachable=failure.retryable)
        if chosen is None:
            errors = [each.error for each in judgements if each.error]
            error = errors[-1] if errors else f"there is no majority: {tally(judgements)}"
            return self._undecided(error, free, judgements, started)
        return self._verdict(chosen, judgements, started)

    def preview(self, exchange: Exchange) -> int:
        """About how many prompt tokens judging would send; 0 if no call would be made."""
        return self.needs(exchange).prompt_tokens

    def needs(self, exchange: Exchange, earlier: Sequence[Verdict] = (), asked: Collection[str] = ()) -> CallEstimate:
        """What `grade` would take, as far as that can be known without asking; `asked` are hashes of criteria that
        the judge will have been asked about by then."""
        if not ask_the_judge(self.rubric, exchange):
            return CallEstimate()
        if earlier and self.recall(exchange, earlier) is not None:
            return CallEstimate()
        recall = EarlierResults(self.rubric, self.hashes, earlier)
        settings = self.rubric.judge
        missing = [
            [each for each in self._missing(recall.of(FIRST, place)) if self.hashes[each.id] not in asked]
            for place in range(settings.repeats)
        ]
        close: list[list[Criterion]] = []
        if settings.escalate:
            close = [self._missing(recall.of(AGAIN, place)) for place in range(settings.escalate.repeats)]
        if not any(missing) and not asked and close:
            # Then it is the second look that is not known yet.
            missing, close = close, []
        sets = [criteria for criteria in missing if criteria]
        return CallEstimate(
            sum(len(self._inquiry.calls(criteria)) for criteria in sets),
            sum(map(len, sets)),
            sum(self._inquiry.estimate_tokens(exchange, criteria) for criteria in sets),
            sum(len(self._inquiry.calls(criteria)) for criteria in close if criteria),
        )

    def _missing(self, known: Mapping[str, CriterionResult]) -> list[Criterion]:
        return [criterion for criterion in self.rubric.asked if criterion.id not in known]

    def _vote(
        self,
        exchange: Exchange,
        free: tuple[CriterionResult, ...],
        judgements: list[Judgement],
        stop: threading.Event | None,
        recall: EarlierResults,
    ) -> Judgement | None:
        """Ask as often as the rubric wants, adding to `judgements`; the one that speaks for the majority, or None.

        Raises JudgeError when no reply came, and _AskError when one is needed and there is no `stop`.
        """
        seeds = count()

        def ask(times: int, stage: str) -> Judgement | None:
            for place in range(times):
                # The first is asked without a seed: what is asked once need not be asked differently.
                seed = next(seeds) or None
                known = recall.of(stage, place)
                findings = JudgeCallResult()
                if missing := self._missing(known):
                    if stop is None:
                        raise _AskError
                    findings = self._inquiry.run(exchange, missing, seed, stop)
                if not findings.error:
                    findings.results = self._merged(known, findings.results)
                judgements.append(self._judgement(findings, free, stage))
                if findings.failure is not None:
                    raise findings.failure
            return majority(judgements[-times:])

        settings = self.rubric.judge
        chosen = ask(settings.repeats, FIRST)
        if chosen is None or settings.escalate is None or not self._is_close(chosen, settings.escalate.band):
            return chosen
        return ask(settings.escalate.repeats, AGAIN)

    def _merged(
        self, known: Mapping[str, CriterionResult], asked: Sequence[CriterionResult]
    ) -> tuple[CriterionResult, ...]:
        """What was known and what was asked, in the order of the rubric."""
        every = {**known, **{each.criterion: replace(each, hash=self.hashes[each.criterion]) for each in asked}}
        return tuple(every[criterion.id] for criterion in self.rubric.asked)

    def _is_close(self, judgement: Judgement, band: tuple[float, float]) -> bool:
        # A failed required criterion is no matter of the score.
        score = judgement.score
        return score is not None and band[0] <= score <= band[1] and not self._fails_required(judgement.results)

    def _judgement(self, findings: JudgeCallResult, free: tuple[CriterionResult, ...], stage: str) -> Judgement:
        outcome, score, results = Outcome.UNDECIDED, None, (*free, *findings.results)
        if not findings.error:
            score = self.rubric.score({result.criterion: result.value for result in results})
            accepted = score >= self.rubric.threshold and not self._fails_required(results)
            outcome = Outcome.ACCEPTED if accepted else Outcome.REJECTED
        return Judgement(
            outcome,
            score,
            results,
            error=findings.error,
            judge=findings.judge,
            stage=stage,
            calls=findings.calls,
            prompt_tokens=findings.prompt_tokens,
            completion_tokens=findings.completion_tokens,
            estimated_tokens=findings.estimated_tokens,
        )

    def _verdict(self, chosen: Judgement, judgements: Sequence[Judgement], started: float) -> Verdict:
        reason = self._reason(chosen)
        if len(judgements) > 1:
            reason = f"{reason} (judged {len(judgements)} times: {tally(judgements)})"
        return Verdict(
            chosen.outcome, chosen.score, chosen.results, reason, "", *_cost(judgements, started),
            judgements=tuple(judgements),
        )  # fmt: skip

    @staticmethod
    def _undecided(
        error: str,
        free: tuple[CriterionResult, ...],
        judgements: Sequence[Judgement],
        started: float,
        *,
        unreachable: bool = False,
    ) -> Verdict:
        return Verdict(
            Outcome.UNDECIDED, None, free, "", error, *_cost(judgements, started), unreachable,
            judgements=tuple(judgements),
        )  # fmt: skip

    def _fails_required(self, results: Sequence[CriterionResult]) -> bool:
        return any(not result.passed and result.criterion in self._required for result in results)

    def _reason(self, chosen: Judgement) -> str:
        """One line for a person: why it failed, or what the judge liked."""
        model = {criterion.id for criterion in self.rubric.asked}
        told = [r for r in chosen.results if not r.passed] or [r for r in chosen.results if r.criterion in model]
        text = "; ".join(f"{result.criterion}: {result.reason}" for result in told)
        if chosen.outcome is Outcome.REJECTED and all(result.passed for result in chosen.results):
            text = f"score {chosen.score or 0.0:.2f} is below {self.rubric.threshold:g}; {text}"
        return text

    def close(self) -> None:
        self.client.close()


def _cost(judgements: Sequence[Judgement], started: float) -> tuple[int, int, int, float]:
    """Calls, prompt tokens, completion tokens, seconds."""
    calls = sum(each.calls for each in judgements)
    sent = sum(each.prompt_tokens for each in judgements)
    received = sum(each.completion_tokens for each in judgements)
    return calls, sent, received, round(time.monotonic() - started, 4)


def criterion_hash(criterion: Criterion, *, alone: bool) -> str:
    """Changes with all that the judge is told of a criterion, and with being asked in a call of its own (`alone`)."""
    told = [criterion.type, str(criterion.value).strip(), list(criterion.scale), criterion.id == FLAT_ID, alone]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]


def criterion_hashes(rubric: Rubric) -> Mapping[str, str]:
    """The hashes of the criteria that the judge decides, by their ids."""
    alone = rubric.judge.per_criterion
    return MappingProxyType({each.id: criterion_hash(each, alone=alone) for each in rubric.asked})


class EarlierResults:
    """What earlier verdicts of one judge on one exchange say about a rubric's criteria.

    Opinions that were asked for because a score was close are kept apart from those that are asked for of every task.
    """

    def __init__(self, rubric: Rubric, hashes: Mapping[str, str], earlier: Sequence[Verdict]) -> None:
        """`earlier` are decided verdicts, the newest first."""
        self._rubric = rubric
        self._hashes = hashes
        # Verdicts hold copies of what they recalled themselves: opinions of two verdicts are not to be added up.
        self._said: dict[tuple[str, str], list[CriterionResult]] = {}
        wanted = set(hashes.values())
        for verdict in earlier:
            for key, results in _opinions(verdict, wanted).items():
                if len(results) > len(self._said.get(key, ())):
                    self._said[key] = results

    def of(self, stage: str, place: int) -> dict[str, CriterionResult]:
        """The results that hold of the opinion number `place` of a stage, by criterion."""
        found = {}
        for criterion in self._rubric.asked:
            told = self._hashes[criterion.id]
            said = self._said.get((stage, told), ())
            if place < len(said):
                was = said[place]
                value = criterion.scale[was.choice]
                passed = criterion.passes(value)
                found[criterion.id] = CriterionResult(criterion.id, was.choice, value, passed, was.reason, told)
        return found


def _opinions(verdict: Verdict, wanted: set[str]) -> dict[tuple[str, str], list[CriterionResult]]:
    found: dict[tuple[str, str], list[CriterionResult]] = {}
    for judgement in verdict.judgements:
        seen = set()
        for result in judgement.results:
            # Two criteria that say the same have one opinion each, and one of them is enough.
            if result.hash in wanted and result.hash not in seen:
                seen.add(result.hash)
                found.setdefault((judgement.stage, result.hash), []).append(result)
    return found


def majority(judgements: Sequence[Judgement]) -> Judgement | None:
    """The judgement that speaks for more than half of all, also of those that could not be used; None if none does.

    It is the one with the middle score of its side: its results explain the outcome, and its score is on that side
    of the threshold.
    """
    for outcome in (Outcome.ACCEPTED, Outcome.REJECTED):
        side = sorted((each for each in judgements if each.outcome is outcome), key=lambda each: each.score or 0.0)
        if 2 * len(side) > len(judgements):
            return side[(len(side) - 1) // 2]
    return None


def tally(judgements: Sequence[Judgement]) -> str:
    """How they voted, for a person."""
    counts = {outcome.value: sum(each.outcome is outcome for each in judgements) for outcome in Outcome}
    return ", ".join(f"{number} {outcome}" for outcome, number in counts.items() if number)
