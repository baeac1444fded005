"""The grader: one exchange in, one verdict out, by one rubric and one judge.

Free checks come first; the judge is asked only about criteria without a reusable result. A result of an earlier
verdict can be reused while the judge would be told the same about its criterion: its statement, its choices and their
order, and whether it is asked alone. Weights, order, values of choices, ids and the threshold are applied anew.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from flywheel.config.judge import JudgeSettings
from flywheel.errors import CheckError, CostlyCheckError, JudgeError
from flywheel.judge import prompt
from flywheel.judge.answer import UnreadableError, read, response_format
from flywheel.judge.chat_completions import JudgeReply
from flywheel.judge.client import JudgeClient, settings_for
from flywheel.judge.rubric.checks import check_all, fails_required
from flywheel.judge.rubric.criterion import Criterion
from flywheel.judge.rubric.rubric import FLAT_ID, Rubric
from flywheel.judge.usage import CallsInFlight
from flywheel.records.task import storable
from flywheel.records.verdict import CriterionResult, Exchange, Judgement, Outcome, Verdict
from flywheel.system.http_client import NEVER

REMEMBERED: Final = 16_384
"""How many of the last nonces are known."""
ANSWER_SHOWN: Final = 500
"""Characters of an unreadable reply that are kept."""
FIRST, AGAIN = "first", "again"
SAID: Final = 200
"""Characters of an unreadable answer in an error."""
NOT_ASKED: Final = Judgement(Outcome.UNDECIDED, None)
"""What the judge says where it is not asked."""
CHECK: Final = re.compile(r"""\bcheck\\?["']\s*:\s*\\?["']([0-9a-f]{16})\b""", re.IGNORECASE)


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
        self._max_attempts = settings.max_attempts

    def run(
        self, exchange: Exchange, criteria: Sequence[Criterion], seed: int | None, stop: threading.Event
    ) -> tuple[Judgement, JudgeError | None]:
        """Ask about these criteria of the rubric; `stop` ends the retries.

        Returns the results and what the calls used, without an outcome; and the failure when no reply came at all.
        """
        replies: list[tuple[JudgeReply, int]] = []
        found: list[CriterionResult] = []
        error, answer, failure = "", "", None
        try:
            for group in self.groups(criteria):
                said = self._ask(exchange, group, seed, replies, stop)
                if isinstance(said, str):
                    error = f"the judge's reply cannot be used: {said}"
                    answer = storable(" ".join(replies[-1][0].text.split())[:ANSWER_SHOWN])
                    break
                found += said
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
        replies: list[tuple[JudgeReply, int]],
        stop: threading.Event,
    ) -> tuple[CriterionResult, ...] | str:
        """One call: the results, or why its last reply has none.

        A reply without a verdict is an attempt like one that failed; the next one tells the judge the problem. A
        second one that was cut off is the last.

        `replies` gets every reply, with the estimated tokens of its prompt.
        """
        problem, left, cut_off = "", self._max_attempts, False
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
                attempts=left,
            )
            replies.append((reply, estimated_tokens))
            left -= reply.attempts
            said = self._read(criteria, reply, nonce)
            if not isinstance(said, str) or reply.is_final or left <= 0 or (cut_off and reply.cut_off):
                return said
            cut_off = cut_off or reply.cut_off
            # What the judge says in place of an answer may quote the task.
            problem = "" if reply.problem else said

    def _read(
        self, criteria: Sequence[Criterion], reply: JudgeReply, nonce: str
    ) -> tuple[CriterionResult, ...] | str:
        problem = reply.problem
        if not problem:
            # A cache or proxy can repeat the reply to another call.
            others = {match.lower() for match in CHECK.findall(reply.text)} - {nonce}
            if others and not others.isdisjoint(self._nonces.copy()):
                return f"it is the reply to another call (does {reply.judge} cache replies?)"
            try:
                return read(criteria, reply.text, nonce=nonce)
            except UnreadableError as error:
                problem = str(error)
        return f"{problem} (it was cut off at judge.max_tokens = {self.max_tokens})" if reply.cut_off else problem


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


EarlierResults = Mapping[tuple[str, str], list[CriterionResult]]
"""Results of earlier verdicts that can be reused, by stage and criterion hash."""


@dataclass(frozen=True, slots=True)
class PlannedJudgement:
    """One judgement of a stage: what earlier verdicts say of its criteria, by id, and which must be asked about."""

    stage: str
    known: Mapping[str, CriterionResult]
    asked: tuple[Criterion, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """What a verdict takes that needs a judge call.

    Attributes:
        checked: The results of the checks, which are done and took this many `seconds`.
        stages: The judgements that vote, and those that vote if the score is close.
        needed: The judgements that ask the judge, as far as that is known.
        perhaps: Those that ask it if the score is close.
    """

    exchange: Exchange
    checked: tuple[CriterionResult, ...]
    stages: tuple[tuple[PlannedJudgement, ...], ...]
    needed: tuple[PlannedJudgement, ...] = ()
    perhaps: tuple[PlannedJudgement, ...] = ()
    seconds: float = 0.0


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
        self.unreadable = 0
        """Verdicts in a row for which the judge was paid and of which no answer could be read."""
        self._max_unreadable = settings.max_unreadable
        self._last_unreadable = NOT_ASKED
        self.hashes: dict[str, str] = {}
        """Hashes of what the judge is told about each criterion that it decides, by criterion id."""
        for each in rubric.asked:
            is_alone = rubric.judge.per_criterion
            described = json.dumps(
                [each.type, str(each.value).strip(), list(each.scale), each.id == FLAT_ID, is_alone]
            )
            self.hashes[each.id] = hashlib.sha256(described.encode()).hexdigest()[:16]
        described = f"{self.client.identity}\0{self._call.temperature}\0{self._call.max_tokens}\0{prompt.VERSION}"
        self.judge_hash = hashlib.sha256(described.encode()).hexdigest()[:16]

    @property
    def unusable(self) -> JudgeError | None:
        """Why the judge cannot be used, if none of its last `judge.max_unreadable` answers could be read."""
        if self.unreadable < self._max_unreadable:
            return None
        last = self._last_unreadable
        said = f"; it said: {last.answer[:SAID]}" if last.answer else ""
        return JudgeError(
            f"use the judge {last.judge or self.client.endpoints[0].config}",
            f"{self.unreadable} times in a row no answer could be read. The last time: {last.error}{said}",
            "`flywheel doctor --ask-judge` asks it one question. Set another judge.model, or more judge.max_tokens.",
        )

    def grade(self, exchange: Exchange, stop: threading.Event = NEVER, earlier: Sequence[Verdict] = ()) -> Verdict:
        """The verdict. A failed required check saves the judge call.

        `earlier` are verdicts of this judge, newest first, whose results are reused. A judge without a readable reply
        leaves the exchange undecided; `stop` ends its retries. Raises JudgeError (not retryable) when every other
        exchange would fail too: a wrong key, an unknown model.
        """
        begun = self.begin(exchange, earlier)
        return self.finish(begun, stop) if isinstance(begun, Plan) else begun

    def begin(self, exchange: Exchange, earlier: Sequence[Verdict] = ()) -> Verdict | Plan:
        """The free part of `grade`: the verdict if it needs no call, or the plan by which `finish` asks the judge."""
        started = time.monotonic()
        try:
            checked = check_all(self.rubric, exchange)
        except CheckError as error:
            verdict = self._verdict(Judgement(Outcome.UNDECIDED, None, error=str(error)), [], started)
            return replace(verdict, broken=isinstance(error, CostlyCheckError))
        if fails_required(self.rubric, checked):
            return self._verdict(Judgement(Outcome.REJECTED, 0.0, checked), [], started)
        if not self.rubric.asked:
            return self._verdict(self._judgement(NOT_ASKED, checked, PlannedJudgement(FIRST, {}, ())), [], started)
        reusable, settings = self._reusable(earlier), self.rubric.judge
        first = self._planned(FIRST, settings.repeats, reusable)
        again = self._planned(AGAIN, settings.escalate.repeats, reusable) if settings.escalate else ()
        needed, perhaps = (tuple(planned for planned in stage if planned.asked) for stage in (first, again))
        if not needed:
            chosen = majority([self._judgement(NOT_ASKED, checked, planned) for planned in first])
            needed, perhaps = perhaps if self._is_close(chosen) else (), ()
        plan = Plan(exchange, checked, (first, again), needed, perhaps, time.monotonic() - started)
        return plan if needed else self.finish(plan)

    def finish(self, plan: Plan, stop: threading.Event = NEVER) -> Verdict:
        """The part of `grade` that asks the judge."""
        started = time.monotonic() - plan.seconds
        judgements: list[Judgement] = []
        chosen, failure = None, None
        for stage in plan.stages:
            for planned in stage:
                called = NOT_ASKED
                if planned.asked:
                    # The first call has no seed: without a repetition, nothing has to differ.
                    called, failure = self._call.run(plan.exchange, planned.asked, len(judgements) or None, stop)
                judgements.append(self._judgement(called, plan.checked, planned))
                if failure is not None:
                    break
            chosen = majority(judgements[-len(stage) :]) if failure is None else None
            if not self._is_close(chosen):
                break
        # The cost of earlier calls is recorded with the verdict.
        if failure is not None and not failure.retryable and not any(each.calls for each in judgements):
            raise failure
        if chosen is None:
            errors = [each.error for each in judgements if each.error]
            error = errors[-1] if errors else f"there is no majority: {tally(judgements)}"
            chosen = Judgement(Outcome.UNDECIDED, None, plan.checked, error=error)
        return self._verdict(chosen, judgements, started, unreachable=failure is not None and failure.retryable)

    def estimate(self, exchange: Exchange, earlier: Sequence[Verdict] = ()) -> CallEstimate:
        """What `grade` would take."""
        plan = self.begin(exchange, earlier)
        if not isinstance(plan, Plan):
            return CallEstimate()
        sets = [planned.asked for planned in plan.needed]
        return CallEstimate(
            sum(len(self._call.groups(criteria)) for criteria in sets),
            sum(map(len, sets)),
            sum(self._call.estimate_tokens(exchange, criteria) for criteria in sets),
            sum(len(self._call.groups(planned.asked)) for planned in plan.perhaps),
        )

    def _is_close(self, chosen: Judgement | None) -> bool:
        """Whether further judgements decide. A failed required criterion decides whatever the score is."""
        escalate = self.rubric.judge.escalate
        if escalate is None or chosen is None or chosen.score is None:
            return False
        lowest, highest = escalate.band
        return lowest <= chosen.score <= highest and not fails_required(self.rubric, chosen.results)

    def _judgement(
        self, called: Judgement, checked: tuple[CriterionResult, ...], planned: PlannedJudgement
    ) -> Judgement:
        """The judgement of a whole set of results: those of the checks, known ones, and those of the judge."""
        if called.error:
            return replace(called, results=checked, stage=planned.stage)
        asked = {each.criterion: replace(each, hash=self.hashes[each.criterion]) for each in called.results}
        every = {**planned.known, **asked}
        results = (*checked, *(every[criterion.id] for criterion in self.rubric.asked))
        score = self.rubric.score({result.criterion: result.value for result in results})
        accepted = score >= self.rubric.threshold and not fails_required(self.rubric, results)
        outcome = Outcome.ACCEPTED if accepted else Outcome.REJECTED
        return replace(called, outcome=outcome, score=score, results=results, stage=planned.stage)

    def _verdict(
        self, chosen: Judgement, judgements: Sequence[Judgement], started: float, *, unreachable: bool = False
    ) -> Verdict:
        """The verdict with a reason in one line: the failed criteria, or what the judge says of those it accepts."""
        reason = ""
        if chosen.outcome is not Outcome.UNDECIDED:
            failed = [result for result in chosen.results if not result.passed]
            described = failed or [result for result in chosen.results if result.criterion in self.hashes]
            reason = "; ".join(f"{result.criterion}: {result.reason}" for result in described)
            if chosen.outcome is Outcome.REJECTED and not failed:
                reason = f"score {chosen.score or 0.0:.2f} is below {self.rubric.threshold:g}; {reason}"
            if len(judgements) > 1:
                reason = f"{reason} (judged {len(judgements)} times: {tally(judgements)})"
        verdict = Verdict(
            chosen.outcome,
            chosen.score,
            chosen.results,
            reason,
            chosen.error,
            calls=sum(each.calls for each in judgements),
            prompt_tokens=sum(each.prompt_tokens for each in judgements),
            completion_tokens=sum(each.completion_tokens for each in judgements),
            latency_seconds=round(time.monotonic() - started, 4),
            unreachable=unreachable,
            judgements=tuple(judgements),
        )
        if verdict.calls:
            # Threads may lose one of each other's counts: then one verdict more is needed.
            if not all(each.error for each in judgements):
                self.unreadable = 0
            elif verdict.is_failed_attempt:
                self.unreadable += 1
                self._last_unreadable = judgements[-1]
        return verdict

    def _reusable(self, earlier: Sequence[Verdict]) -> EarlierResults:
        """What decided verdicts of this judge on one exchange, newest first, say of the criteria.

        Results of the second stage, for close scores, are separate from those of the first.
        """
        reusable: dict[tuple[str, str], list[CriterionResult]] = {}
        wanted = set(self.hashes.values())
        for verdict in earlier:
            found: dict[tuple[str, str], list[CriterionResult]] = {}
            for judgement in verdict.judgements:
                # Two criteria with the same hash have the same result: one of them is enough.
                by_hash = {result.hash: result for result in reversed(judgement.results) if result.hash in wanted}
                for each, result in by_hash.items():
                    found.setdefault((judgement.stage, each), []).append(result)
            # A verdict holds copies of the results that it reused: those of two verdicts are not added up.
            reusable |= {key: results for key, results in found.items() if len(results) > len(reusable.get(key, ()))}
        return reusable

    def _planned(self, stage: str, times: int, reusable: EarlierResults) -> tuple[PlannedJudgement, ...]:
        """The judgements of a stage, one after another."""
        known: list[dict[str, CriterionResult]] = [{} for _ in range(times)]
        for criterion in self.rubric.asked:
            results = reusable.get((stage, self.hashes[criterion.id]), ())
            for each, result in zip(known, results, strict=False):
                value = criterion.scale[result.choice]
                passed = criterion.passes(value)
                each[criterion.id] = replace(result, criterion=criterion.id, value=value, passed=passed)
        asked = self.rubric.asked
        return tuple(
            PlannedJudgement(stage, each, tuple(one for one in asked if one.id not in each)) for each in known
        )

    def close(self) -> None:
        self.client.close()


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
