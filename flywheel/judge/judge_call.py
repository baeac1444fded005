"""One judgement of one exchange: the calls that it takes, and one more where a reply could not be read."""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from flywheel.config import JudgeSettings
from flywheel.errors import JudgeError
from flywheel.judge import prompt
from flywheel.judge.answer import UnreadableError, read, response_format
from flywheel.judge.client import JudgeClient
from flywheel.judge.prompt import new_nonce
from flywheel.judge.response import Reply
from flywheel.rubric import Criterion, Rubric
from flywheel.verdict import CriterionResult, Exchange


@dataclass(slots=True)
class JudgeCallResult:
    """What the judge said, if it could be read, and what that cost, in any case.

    `failure` is set when no reply came at all; `error` says why there are no results, in both cases.
    """

    results: tuple[CriterionResult, ...] = ()
    error: str = ""
    failure: JudgeError | None = None
    judge: str = ""
    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    estimated_tokens: int = 0

    def bill(self, reply: Reply, estimated_tokens: int) -> None:
        # Only what can be compared: an endpoint may not tell what it used, and each call of a reply is billed.
        self.estimated_tokens += estimated_tokens * reply.calls if reply.prompt_tokens else 0
        self.calls += reply.calls
        self.prompt_tokens += reply.prompt_tokens
        self.completion_tokens += reply.completion_tokens
        self.judge = reply.judge or self.judge


class _NoTextError(Exception):
    """There is no reply to read, and asking again would not bring one."""


class JudgeCall:
    """Asks the judge about a rubric's criteria: all in one call, or each in its own. Thread-safe."""

    def __init__(self, rubric: Rubric, settings: JudgeSettings, client: JudgeClient) -> None:
        self._rubric = rubric
        self._client = client
        self._nonces = NonceHistory()
        self._formats: dict[tuple[str, ...], dict[str, Any]] = {}
        self.temperature = rubric.judge.temperature if settings.temperature is None else settings.temperature
        self.max_tokens = settings.max_tokens or rubric.judge.max_tokens

    def run(
        self, exchange: Exchange, criteria: Sequence[Criterion], seed: int | None, stop: threading.Event
    ) -> JudgeCallResult:
        """Ask about these criteria of the rubric."""
        findings = JudgeCallResult()
        results: list[CriterionResult] = []
        try:
            for some in self.calls(criteria):
                results += self._ask(exchange, some, self._format(some), seed, findings, stop)
        except (UnreadableError, _NoTextError) as problem:
            findings.error = f"the judge's reply cannot be used: {problem}"
        except JudgeError as failure:
            findings.error, findings.failure = str(failure), failure
        else:
            findings.results = tuple(results)
        return findings

    def calls(self, criteria: Sequence[Criterion]) -> list[tuple[Criterion, ...]]:
        """The criteria of each call that asking about these takes."""
        return [(each,) for each in criteria] if self._rubric.judge.per_criterion else [tuple(criteria)]

    def estimate_tokens(self, exchange: Exchange, criteria: Sequence[Criterion]) -> int:
        """About how many prompt tokens one judgement by these criteria sends."""
        sent = [prompt.messages(self._rubric, exchange, criteria=some) for some in self.calls(criteria)]
        return sum(prompt.estimate_tokens(messages) for messages in sent)

    def _format(self, criteria: tuple[Criterion, ...]) -> dict[str, Any]:
        key = tuple(each.id for each in criteria)
        if key not in self._formats:
            self._formats[key] = response_format(criteria)
        return self._formats[key]

    def _ask(
        self,
        exchange: Exchange,
        criteria: Sequence[Criterion],
        form: dict[str, Any],
        seed: int | None,
        findings: JudgeCallResult,
        stop: threading.Event,
    ) -> tuple[CriterionResult, ...]:
        """The judge's results; after an unreadable reply it is asked once more, and told what was wrong.

        A reply that did not come as it was asked for is no answer yet: the next means are tried before that.
        """
        problem = ""
        while True:
            nonce = self._nonces.new()
            messages = prompt.messages(self._rubric, exchange, criteria=criteria, problem=problem, nonce=nonce)
            reply = self._client.ask(
                messages,
                response_format=form,
                temperature=self.temperature,
                max_tokens=self.max_tokens,
                seed=seed,
                stop=stop,
            )
            findings.bill(reply, prompt.estimate_tokens(messages))
            if reply.problem:
                raise _NoTextError(self._told(reply.problem, reply))
            try:
                return self._read(criteria, reply, nonce, str(messages[-1]["content"]))
            except UnreadableError as unreadable:
                if unreadable.formless and not reply.cut_off and self._client.ignored(reply):
                    continue
                if problem:
                    raise
                problem = str(unreadable)

    def _read(
        self, criteria: Sequence[Criterion], reply: Reply, nonce: str, shown: str
    ) -> tuple[CriterionResult, ...]:
        if self._nonces.is_of_another(reply.text, nonce):
            raise UnreadableError(f"it is the reply to another call (does {reply.judge} keep replies?)")
        try:
            return read(criteria, reply.text, nonce=nonce, shown=shown)
        except UnreadableError as problem:
            if not reply.cut_off:
                raise
            raise UnreadableError(self._told(str(problem), reply)) from problem

    def _told(self, problem: str, reply: Reply) -> str:
        return f"{problem} (it was cut off at judge.max_tokens = {self.max_tokens})" if reply.cut_off else problem


REMEMBERED: Final = 16_384
"""So many of the last calls are known."""
CHECK: Final = re.compile(r"""\bcheck\\?["']\s*:\s*\\?["']([0-9a-f]{16})\b""", re.IGNORECASE)


class NonceHistory:
    """Draws nonces and remembers them. Thread-safe."""

    def __init__(self) -> None:
        self._last: deque[str] = deque()
        self._known: set[str] = set()
        self._lock = threading.Lock()

    def new(self) -> str:
        nonce = new_nonce()
        with self._lock:
            self._last.append(nonce)
            self._known.add(nonce)
            if len(self._last) > REMEMBERED:
                self._known.discard(self._last.popleft())
        return nonce

    def is_of_another(self, reply: str, nonce: str) -> bool:
        """Whether a reply to the call with this nonce repeats that of another call."""
        given = {match.lower() for match in CHECK.findall(reply)} - {nonce}
        return any(other in self._known for other in given)
