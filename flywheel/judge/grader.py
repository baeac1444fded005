"""The grader: one exchange in, one verdict out, by one rubric and one judge."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Sequence
from itertools import count

from flywheel.config import JudgeSettings
from flywheel.errors import CheckError, JudgeError
from flywheel.judge import prompt
from flywheel.judge.checks import ask_the_judge, check_all
from flywheel.judge.client import NEVER, JudgeClient, judge_of
from flywheel.judge.inquiry import Findings, Inquiry
from flywheel.judge.vote import majority, tally
from flywheel.rubric import Rubric
from flywheel.verdict import CriterionResult, Exchange, Judgement, Outcome, Verdict

FIRST, AGAIN = "first", "again"


class Grader:
    """Grades by a rubric. Thread-safe: no verdict knows of another."""

    def __init__(self, rubric: Rubric, settings: JudgeSettings, client: JudgeClient | None = None) -> None:
        self.rubric = rubric
        self.client = client or JudgeClient(judge_of(rubric, settings))
        self._inquiry = Inquiry(rubric, settings, self.client)
        self._required = frozenset(criterion.id for criterion in rubric.every if criterion.required)
        asked = f"{self._inquiry.temperature}\0{self._inquiry.max_tokens}\0{prompt.VERSION}"
        self.judge_hash = hashlib.sha256(f"{self.client.identity}\0{asked}".encode()).hexdigest()[:16]

    def grade(self, exchange: Exchange, stop: threading.Event = NEVER) -> Verdict:
        """The verdict. What costs nothing is checked first, and a failed required check saves the call.

        A judge that gives no readable answer leaves it undecided; `stop` ends its retries. Raises JudgeError (not
        retryable) when no other exchange would fare better: a wrong key, an unknown model.
        """
        started = time.monotonic()
        try:
            free = check_all(self.rubric, exchange)
        except CheckError as broken:
            return self._undecided(str(broken), (), [], started)
        if self._fails_required(free):
            return self._verdict(Judgement(Outcome.REJECTED, 0.0, free), [], started)
        if not self.rubric.asked:
            return self._verdict(self._judgement(Findings(), free, FIRST), [], started)
        judgements: list[Judgement] = []
        try:
            chosen = self._vote(exchange, free, judgements, stop)
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
        if not ask_the_judge(self.rubric, exchange):
            return 0
        return self.rubric.judge.repeats * self._inquiry.estimate_tokens(exchange)

    def _vote(
        self,
        exchange: Exchange,
        free: tuple[CriterionResult, ...],
        judgements: list[Judgement],
        stop: threading.Event,
    ) -> Judgement | None:
        """Ask as often as the rubric wants, adding to `judgements`; the one that speaks for the majority, or None.

        Raises JudgeError when no reply came.
        """
        seeds = count()

        def ask(times: int, stage: str) -> Judgement | None:
            for _ in range(times):
                # The first is asked without a seed: what is asked once need not be asked differently.
                findings = self._inquiry.run(exchange, next(seeds) or None, stop)
                judgements.append(self._judgement(findings, free, stage))
                if findings.failure is not None:
                    raise findings.failure
            return majority(judgements[-times:])

        settings = self.rubric.judge
        chosen = ask(settings.repeats, FIRST)
        if chosen is None or settings.escalate is None or not self._is_close(chosen, settings.escalate.band):
            return chosen
        return ask(settings.escalate.repeats, AGAIN)

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
