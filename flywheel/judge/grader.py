"""The grader: one exchange in, one verdict out, by one rubric and one judge."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count

from flywheel.config import JudgeSettings
from flywheel.errors import CheckError, JudgeError
from flywheel.judge import prompt
from flywheel.judge.client import NEVER, JudgeClient, judge_of
from flywheel.judge.judge_call import Findings, Inquiry
from flywheel.judge.reuse import Recall, criterion_hashes
from flywheel.judge.vote import majority, tally
from flywheel.rubric import Criterion, Rubric
from flywheel.rubric.checks import ask_the_judge, check_all
from flywheel.verdict import CriterionResult, Exchange, Judgement, Outcome, Verdict

FIRST, AGAIN = "first", "again"


@dataclass(frozen=True, slots=True)
class Needed:
    """What a verdict would take: calls, the criteria they ask about, and about how many prompt tokens they send.

    A close score is asked for again, which takes so many calls `more`, and so is a reply that cannot be read: neither
    is known before.
    """

    calls: int = 0
    criteria: int = 0
    prompt_tokens: int = 0
    more: int = 0


@dataclass(frozen=True, slots=True)
class Asking:
    """An exchange that the judge has to be asked about: what cost nothing is done, and took so many seconds."""

    exchange: Exchange
    free: tuple[CriterionResult, ...]
    recall: Recall
    seconds: float = 0.0


class _AskError(Exception):
    """The judge would have to be asked."""


class Grader:
    """Grades by a rubric. Thread-safe: no verdict knows of another."""

    def __init__(self, rubric: Rubric, settings: JudgeSettings, client: JudgeClient | None = None) -> None:
        self.rubric = rubric
        self.client = client or JudgeClient(judge_of(rubric, settings))
        self._inquiry = Inquiry(rubric, settings, self.client)
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
        return self.finish(begun, stop) if isinstance(begun, Asking) else begun

    def recall(self, exchange: Exchange, earlier: Sequence[Verdict]) -> Verdict | None:
        """The verdict if no call is needed for it, else None."""
        begun = self.begin(exchange, earlier)
        return None if isinstance(begun, Asking) else begun

    def begin(self, exchange: Exchange, earlier: Sequence[Verdict] = ()) -> Verdict | Asking:
        """The part of `grade` that costs nothing: the verdict, or what is left for `finish`."""
        started = time.monotonic()
        try:
            free = check_all(self.rubric, exchange)
        except CheckError as broken:
            return self._undecided(str(broken), (), [], started)
        if self._fails_required(free):
            return self._verdict(Judgement(Outcome.REJECTED, 0.0, free), [], started)
        if not self.rubric.asked:
            return self._verdict(self._judgement(Findings(), free, FIRST), [], started)
        asking = Asking(exchange, free, Recall(self.rubric, self.hashes, earlier))
        try:
            return self._voted(asking, None, started)
        except _AskError:
            return replace(asking, seconds=time.monotonic() - started)

    def finish(self, asking: Asking, stop: threading.Event = NEVER) -> Verdict:
        """The part of `grade` that asks the judge."""
        return self._voted(asking, stop, time.monotonic() - asking.seconds)

    def _voted(self, asking: Asking, stop: threading.Event | None, started: float) -> Verdict:
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

    def needs(self, exchange: Exchange, earlier: Sequence[Verdict] = (), asked: Collection[str] = ()) -> Needed:
        """What `grade` would take, as far as that can be known without asking; `asked` are hashes of criteria that
        the judge will have been asked about by then."""
        if not ask_the_judge(self.rubric, exchange):
            return Needed()
        if earlier and self.recall(exchange, earlier) is not None:
            return Needed()
        recall = Recall(self.rubric, self.hashes, earlier)
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
        return Needed(
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
        recall: Recall,
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
                findings = Findings()
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

    def _judgement(self, findings: Findings, free: tuple[CriterionResult, ...], stage: str) -> Judgement:
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
