"""The grader: one exchange in, one verdict out, by one rubric and one judge."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass

from flywheel.config import JudgeSettings
from flywheel.errors import JudgeError
from flywheel.judge import prompt
from flywheel.judge.answer import UnreadableError, read, response_format
from flywheel.judge.checks import check
from flywheel.judge.client import JudgeClient, Reply
from flywheel.rubric import Rubric
from flywheel.trace import ChatMessage
from flywheel.verdict import CriterionResult, Exchange, Outcome, Verdict

CORRECTION = "That reply cannot be used: {problem}. Reply again with the whole JSON object and nothing else."


@dataclass(slots=True)
class _Bill:
    """What the calls of one verdict cost."""

    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def add(self, reply: Reply) -> None:
        self.calls += 1
        self.prompt_tokens += reply.prompt_tokens
        self.completion_tokens += reply.completion_tokens


class Grader:
    """Grades by a rubric. Thread-safe: no verdict knows of another."""

    def __init__(self, rubric: Rubric, settings: JudgeSettings, client: JudgeClient | None = None) -> None:
        self.rubric = rubric
        self._client = client or JudgeClient(settings)
        self._format = response_format(rubric)
        given = rubric.judge
        self._temperature = given.temperature if settings.temperature is None else settings.temperature
        self._max_tokens = settings.max_tokens or given.max_tokens
        who = f"{self._client.base_url}\0{settings.model}\0{self._temperature}\0{self._max_tokens}"
        self.judge_hash = hashlib.sha256(who.encode()).hexdigest()[:16]

    def grade(self, exchange: Exchange) -> Verdict:
        """The verdict. What costs nothing is checked first, and a failed required check saves the call.

        A judge that gives no readable answer leaves it undecided. Raises JudgeError (not retryable) when no other
        exchange would fare better: a wrong key, an unknown model.
        """
        started = time.monotonic()
        bill = _Bill()
        free = [check(criterion, exchange) for criterion in self.rubric.every if not criterion.asks_the_judge]
        required = {criterion.id for criterion in self.rubric.every if criterion.required}
        hopeless = any(not result.passed and result.criterion in required for result in free)
        unreachable, error = False, ""
        asked: tuple[CriterionResult, ...] = ()
        if self.rubric.asked and not hopeless:
            try:
                asked = self._ask(exchange, bill)
            except UnreadableError as problem:
                error = f"the judge's reply cannot be used: {problem}"
            except JudgeError as failure:
                if not failure.retryable:
                    raise
                unreachable, error = True, str(failure)
        cost = (bill.calls, bill.prompt_tokens, bill.completion_tokens, round(time.monotonic() - started, 4))
        if error:
            return Verdict(Outcome.UNDECIDED, None, tuple(free), "", error, *cost, unreachable)
        results = (*free, *asked)
        score = 0.0 if hopeless else self.rubric.score({result.criterion: result.value for result in results})
        accepted = not hopeless and score >= self.rubric.threshold and not self._fails_required(results, required)
        outcome = Outcome.ACCEPTED if accepted else Outcome.REJECTED
        return Verdict(outcome, score, results, self._reason(results, score, accepted), "", *cost)

    def preview(self, exchange: Exchange) -> int:
        """About how many prompt tokens a call would have; 0 if none would be made."""
        required = [c for c in self.rubric.every if c.required and not c.asks_the_judge]
        if not self.rubric.asked or not all(check(criterion, exchange).passed for criterion in required):
            return 0
        return prompt.estimate_tokens(prompt.messages(self.rubric, exchange))

    def _ask(self, exchange: Exchange, bill: _Bill) -> tuple[CriterionResult, ...]:
        """The judge's results; an unreadable reply is shown to the judge once. Raises UnreadableError, JudgeError."""
        messages = prompt.messages(self.rubric, exchange)
        reply = self._call(messages, bill)
        if reply.problem:
            raise UnreadableError(reply.problem)
        try:
            return read(self.rubric, reply.text)
        except UnreadableError as problem:
            correction = CORRECTION.format(problem=problem)
        again = self._call(
            [*messages, {"role": "assistant", "content": reply.text}, {"role": "user", "content": correction}], bill
        )
        if again.problem:
            raise UnreadableError(again.problem)
        return read(self.rubric, again.text)

    def _call(self, messages: list[ChatMessage], bill: _Bill) -> Reply:
        reply = self._client.ask(
            messages, response_format=self._format, temperature=self._temperature, max_tokens=self._max_tokens
        )
        bill.add(reply)
        return reply

    @staticmethod
    def _fails_required(results: tuple[CriterionResult, ...], required: set[str]) -> bool:
        return any(not result.passed and result.criterion in required for result in results)

    def _reason(self, results: tuple[CriterionResult, ...], score: float, accepted: bool) -> str:
        """One line for a person: why it failed, or what the judge liked."""
        model = {criterion.id for criterion in self.rubric.asked}
        told = [r for r in results if not r.passed] or [r for r in results if r.criterion in model]
        text = "; ".join(f"{result.criterion}: {result.reason}" for result in told)
        if not accepted and all(result.passed for result in results):
            text = f"score {score:.2f} is below {self.rubric.threshold:g}; {text}"
        return text

    def close(self) -> None:
        self._client.close()
