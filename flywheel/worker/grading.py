"""Grading rollouts: within what the daemon lends, written down as it is paid, and waiting when the judge is away."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Final

from flywheel.config import Config, JudgeBudget
from flywheel.judge.budget import Budget, BudgetSpentError
from flywheel.judge.grader import Grader, PendingJudgeCall
from flywheel.judge_usage import Allowance, Purpose, UsageFile, Used, today
from flywheel.round import RoundSpec
from flywheel.rubric import Rubric
from flywheel.training.collector import Grade
from flywheel.verdict import Exchange, Verdict
from flywheel.worker.patience import Patience, Pause

TRIES: Final = 3
"""How often the judge is asked about an exchange on which it fails while it answers about others."""
NEVER: Final = threading.Event()


def rubric_of(spec: RoundSpec) -> Rubric:
    """The round's rubric. Raises ConfigError."""
    from flywheel.rubric.file import parse_rubric

    return parse_rubric(spec.rubric, f"the rubric of {spec.round_id}")


def build_grade(spec: RoundSpec, round_dir: Path, purpose: Purpose, pause: Pause) -> Grade:
    """The round's rubric as a callable. Raises ConfigError for a rubric or a judge that cannot work."""
    settings = Config.model_validate(spec.settings)
    patience = Patience(settings.training.judge_wait_seconds, pause)
    return Grading(Grader(rubric_of(spec), settings.judge), settings.judge.budget, round_dir, purpose, patience)


class Lent(Budget):
    """What the daemon lends: its `allowance.json`, of which all is used that stands in the round's `usage.jsonl`."""

    def __init__(self, limits: JudgeBudget, round_dir: Path) -> None:
        super().__init__(limits)
        self._dir = round_dir
        self._file = UsageFile(round_dir)
        self._read_to = self._used = 0

    def refused(self) -> str:
        """Why nothing may be spent; empty when something may."""
        with self._changed:
            return next((why for used, limit, why, _ in self._rows() if used >= limit), "")

    def _rows(self) -> Iterator[tuple[int, int, str, str]]:
        # A worker that nobody has lent anything was started by hand.
        if (allowance := Allowance.read(self._dir)) is not None:
            found, self._read_to = self._file.read(self._read_to)
            self._used += sum(used.tokens for used in found)
            yield self._used, allowance.tokens, allowance.why, ""


class Grading:
    """Grades exchanges. Thread-safe.

    What an outage of the judge leaves undecided is asked again when the judge is back. An exchange on which it fails
    while it answers about another one is left undecided.
    """

    def __init__(
        self, grader: Grader, limits: JudgeBudget, round_dir: Path, purpose: Purpose, patience: Patience
    ) -> None:
        self._grader, self._purpose, self._patience = grader, purpose, patience
        self._budget = Lent(limits, round_dir)
        self._file = UsageFile(round_dir)
        self._answered: PendingJudgeCall | None = None

    def __call__(self, exchange: Exchange) -> Verdict:
        """Raises JudgeError when no exchange would fare better: a wrong key, an unknown model."""
        begun = self._grader.begin(exchange)
        if isinstance(begun, Verdict):
            return begun
        for _ in range(TRIES):
            answers = self._patience.answers
            verdict = self._paid(begun)
            if not verdict.unreachable:
                self._patience.answered()
                self._answered = begun
                return verdict
            probe = self._answered or begun
            # Without what to do about it, which is another thing for tasks than for rounds.
            why = f"the judge is away ({verdict.error.partition('. ')[0][:300]})"
            if not self._patience.until_back(answers, why, partial(self._answers, probe)):
                break
        return verdict

    def _answers(self, probe: PendingJudgeCall) -> bool:
        return not self._paid(probe).unreachable

    def _paid(self, begun: PendingJudgeCall) -> Verdict:
        """One verdict of the judge, written down before anybody sees it."""
        while True:
            try:
                self._budget.enter(NEVER)
                break
            except BudgetSpentError:
                self._patience.until_room(self._budget.refused)
        verdict = None
        try:
            verdict = self._grader.finish(begun)
            if verdict.calls:
                counts = verdict.calls, verdict.prompt_tokens, verdict.completion_tokens
                self._file.append(Used(today(), self._purpose, *counts))
        finally:
            self._budget.leave(verdict)
        return verdict
