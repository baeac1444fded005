"""The grader: one exchange in, one verdict out, by one rubric and one judge."""

from __future__ import annotations

import hashlib
import threading
import time
from dataclasses import dataclass

from flywheel.config import JudgeSettings
from flywheel.errors import JudgeError
from flywheel.judge import prompt
from flywheel.judge.answer import UnreadableError, read, response_format
from flywheel.judge.checks import check
from flywheel.judge.client import NEVER, JudgeClient
from flywheel.judge.completion import Reply
from flywheel.rubric import Rubric
from flywheel.verdict import CriterionResult, Exchange, Outcome, Verdict


@dataclass(slots=True)
class _Bill:
    """What the calls of one verdict cost."""

    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def add(self, reply: Reply) -> None:
        self.calls += reply.calls
        self.prompt_tokens += reply.prompt_tokens
        self.completion_tokens += reply.completion_tokens


class _NoTextError(Exception):
    """There is no reply to read, and asking again would not bring one."""


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

    def grade(self, exchange: Exchange, stop: threading.Event = NEVER) -> Verdict:
        """The verdict. What costs nothing is checked first, and a failed required check saves the call.

        A judge that gives no readable answer leaves it undecided; `stop` ends its retries. Raises JudgeError (not
        retryable) when no other exchange would fare better: a wrong key, an unknown model.
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
                asked = self._ask(exchange, bill, stop)
            except (UnreadableError, _NoTextError) as problem:
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

    def _ask(self, exchange: Exchange, bill: _Bill, stop: threading.Event) -> tuple[CriterionResult, ...]:
        """The judge's results; after an unreadable reply it is asked once more, and told what was wrong.

        Raises UnreadableError, JudgeError.
        """
        try:
            return self._read(self._call(exchange, "", bill, stop))
        except UnreadableError as unreadable:
            problem = str(unreadable)
        return self._read(self._call(exchange, problem, bill, stop))

    def _call(self, exchange: Exchange, problem: str, bill: _Bill, stop: threading.Event) -> Reply:
        reply = self._client.ask(
            prompt.messages(self.rubric, exchange, problem=problem),
            response_format=self._format,
            temperature=self._temperature,
            max_tokens=self._max_tokens,
            stop=stop,
        )
        bill.add(reply)
        if reply.problem:
            raise _NoTextError(reply.problem)
        return reply

    def _read(self, reply: Reply) -> tuple[CriterionResult, ...]:
        try:
            return read(self.rubric, reply.text)
        except UnreadableError as problem:
            if not reply.cut_off:
                raise
            raise UnreadableError(f"{problem} (it was cut off at judge.max_tokens = {self._max_tokens})") from problem

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
