"""Judge calls: ask the judge about criteria of a rubric, and once more after an unreadable reply."""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Sequence
from typing import Final

from flywheel.config import JudgeSettings
from flywheel.errors import JudgeError
from flywheel.judge import prompt
from flywheel.judge.answer import UnreadableError, read, response_format
from flywheel.judge.chat_completions import Reply
from flywheel.judge.client import JudgeClient
from flywheel.judge.rubric import Criterion, Rubric
from flywheel.judge.usage import CallsInFlight
from flywheel.records.batch import storable
from flywheel.records.verdict import CriterionResult, Exchange, Judgement, Outcome

REMEMBERED: Final = 16_384
"""How many of the last nonces are known."""
ANSWER_SHOWN: Final = 500
"""Characters of an unreadable reply that are kept."""
CHECK: Final = re.compile(r"""\bcheck\\?["']\s*:\s*\\?["']([0-9a-f]{16})\b""", re.IGNORECASE)


class _NoReplyError(Exception):
    """There is no text to read, and another call would not bring one."""


class JudgeCall:
    """Asks the judge about a rubric's criteria: all in one call, or one call each. Thread-safe."""

    def __init__(
        self, rubric: Rubric, settings: JudgeSettings, client: JudgeClient, calls: CallsInFlight | None
    ) -> None:
        self._rubric = rubric
        self._client = client
        self._calls_in_flight = calls
        self._nonces: deque[str] = deque(maxlen=REMEMBERED)
        self.temperature = rubric.judge.temperature if settings.temperature is None else settings.temperature
        self.max_tokens = settings.max_tokens or rubric.judge.max_tokens

    def run(
        self, exchange: Exchange, criteria: Sequence[Criterion], seed: int | None, stop: threading.Event
    ) -> tuple[Judgement, JudgeError | None]:
        """Ask about these criteria of the rubric; `stop` ends the retries.

        Returns the results and what the calls used, without an outcome; and the failure when no reply came at all.
        """
        replies: list[tuple[Reply, int]] = []
        found: list[CriterionResult] = []
        error, answer, failure = "", "", None
        try:
            for group in self.groups(criteria):
                found += self._ask(exchange, group, seed, replies, stop)
        except (UnreadableError, _NoReplyError) as problem:
            error = f"the judge's reply cannot be used: {problem}"
            answer = storable(" ".join(replies[-1][0].text.split())[:ANSWER_SHOWN])
        except JudgeError as failed:
            error, failure = str(failed), failed
        called = Judgement(
            Outcome.UNDECIDED,
            None,
            () if error else tuple(found),
            error,
            judge=next((reply.judge for reply, _ in reversed(replies) if reply.judge), ""),
            calls=sum(reply.calls for reply, _ in replies),
            prompt_tokens=sum(reply.prompt_tokens for reply, _ in replies),
            completion_tokens=sum(reply.completion_tokens for reply, _ in replies),
            # An estimate without usage cannot be compared.
            estimated_tokens=sum(estimate * reply.calls for reply, estimate in replies if reply.prompt_tokens),
            answer=answer,
        )
        return called, failure

    def groups(self, criteria: Sequence[Criterion]) -> list[tuple[Criterion, ...]]:
        """The criteria of each call."""
        return [(each,) for each in criteria] if self._rubric.judge.per_criterion else [tuple(criteria)]

    def estimate_tokens(self, exchange: Exchange, criteria: Sequence[Criterion]) -> int:
        """The prompt tokens that asking about these criteria sends, approximately."""
        sent = [prompt.messages(self._rubric, exchange, criteria=group) for group in self.groups(criteria)]
        return sum(prompt.estimate_tokens(messages) for messages in sent)

    def _ask(
        self,
        exchange: Exchange,
        criteria: tuple[Criterion, ...],
        seed: int | None,
        replies: list[tuple[Reply, int]],
        stop: threading.Event,
    ) -> tuple[CriterionResult, ...]:
        """One call. After an unreadable reply the judge is told the problem and asked once more.

        `replies` gets every reply, with the estimated tokens of its prompt.
        A reply that ignores the requested format does not count: the next format is tried first.
        """
        problem = ""
        while True:
            nonce = prompt.new_nonce()
            self._nonces.append(nonce)
            messages = prompt.messages(self._rubric, exchange, criteria=criteria, problem=problem, nonce=nonce)
            estimated_tokens = prompt.estimate_tokens(messages)
            if self._calls_in_flight is not None:
                self._calls_in_flight.add(estimated_tokens)
            reply = self._client.ask(
                messages,
                response_format=response_format(criteria),
                temperature=self.temperature,
                max_tokens=self.max_tokens,
                seed=seed,
                stop=stop,
            )
            replies.append((reply, estimated_tokens))
            try:
                return self._read(criteria, reply, nonce, str(messages[-1]["content"]))
            except UnreadableError as error:
                if error.formless and not reply.cut_off and self._client.note_ignored_format(reply):
                    continue
                if problem:
                    raise
                problem = str(error)

    def _read(
        self, criteria: Sequence[Criterion], reply: Reply, nonce: str, shown: str
    ) -> tuple[CriterionResult, ...]:
        cut_off = f" (it was cut off at judge.max_tokens = {self.max_tokens})" if reply.cut_off else ""
        if reply.problem:
            raise _NoReplyError(f"{reply.problem}{cut_off}")
        # A cache or proxy can repeat the reply to another call.
        others = {match.lower() for match in CHECK.findall(reply.text)} - {nonce}
        if others and not others.isdisjoint(self._nonces.copy()):
            raise UnreadableError(f"it is the reply to another call (does {reply.judge} cache replies?)")
        try:
            return read(criteria, reply.text, nonce=nonce, shown=shown)
        except UnreadableError as error:
            raise UnreadableError(f"{error}{cut_off}", formless=error.formless) from error
