"""What an evaluation measures, and its report: the figures of a model's answers, and how another model's differ."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from sqlalchemy import Connection

from flywheel.config.file import Config
from flywheel.daemon.evaluation import (
    HELD_OUT,
    Evaluation,
    evaluation_settings,
    folder_named,
    held_out_tasks,
    is_evaluation,
    model_named,
    tasks_of_file,
)
from flywheel.daemon.evaluation_answers import EXCERPT, Answers, answers_in, difference, flips
from flywheel.daemon.judging.judge_setup import rubric_of, rubric_of_target
from flywheel.daemon.judging.judging_report import USAGE, cost_of
from flywheel.daemon.judging.quality_bar import Quality, QualityBar, metrics_of
from flywheel.errors import ConfigError
from flywheel.judge.agent_metrics import SCORE, requested_metrics
from flywheel.store.verdicts import usage_of_judge
from flywheel.system.terminal import escape_terminal, excerpt, quantity


@dataclass(frozen=True, slots=True)
class Asked:
    """What is asked for. `against` may be the directory of an earlier evaluation, `benchmark` is a file or
    `held-out`, and `metrics` are all without names."""

    model: str
    base_url: str | None
    api_key: str
    against: str | None
    against_base_url: str | None
    benchmark: str
    limit: int | None
    samples: int
    target: str | None
    metrics: str | None

    def settings(self, config: Config) -> Config:
        """Those of the target that is named, of the one whose alias is measured, or of the first one. Raises
        ConfigError."""
        targets = config.by_target()
        if self.target is not None and self.target not in targets:
            hint = (
                f"The targets are {', '.join(targets)}." if config.targets else "The configuration has no `targets`."
            )
            raise ConfigError("evaluate a model", f"there is no target {self.target}", hint)
        named = next((own for own in targets.values() if own.model.alias == self.model), None)
        own = targets[self.target] if self.target is not None else named or next(iter(targets.values()))
        return evaluation_settings(own, self.samples)


@dataclass(frozen=True, slots=True)
class Plan:
    """`ours` is compared with `theirs`, or with the answers in the directory `earlier`. `used` is what the judge's
    earlier calls used."""

    ours: Evaluation
    theirs: Evaluation | None
    earlier: Path | None
    metrics: tuple[str, ...]
    used: dict[str, int]

    @classmethod
    def of(cls, asked: Asked, config: Config, conn: Connection | None) -> Self:
        """What is to be measured; without a state, `conn` is None. Raises FlywheelError, before anything is paid
        for."""
        settings = asked.settings(config)
        rubric = rubric_of_target(settings, rubric_of(settings))
        names = requested_metrics(asked.metrics or "all", [criterion.id for criterion in rubric.every])
        if asked.benchmark == HELD_OUT:
            assert conn is not None
            benchmark = held_out_tasks(conn, settings, asked.limit)
        else:
            benchmark = tasks_of_file(Path(asked.benchmark), settings, asked.limit)

        def of(name: str, url: str | None) -> Evaluation:
            measured = model_named(name, settings, conn, url, asked.api_key)
            made = Evaluation(measured, benchmark, rubric, settings)
            made.check()
            return made

        ours, theirs, earlier = of(asked.model, asked.base_url), None, None
        if asked.against is not None:
            if asked.against_base_url is None and is_evaluation(folder := folder_named(asked.against)):
                earlier = folder
            else:
                theirs = of(asked.against, asked.against_base_url)
        used = dict.fromkeys((*USAGE, "estimated_tokens"), 0)
        if conn is not None:
            used = usage_of_judge(conn, ours.judge_hash)
        return cls(ours, theirs, earlier, (SCORE, *names), used)

    def estimate(self) -> dict[str, Any]:
        """What it would cost. Both have the same tasks and the same judge."""
        models = sum(each is not None and not each.is_known for each in (self.ours, self.theirs))
        tasks = len(self.ours.benchmark.tasks)
        answers = models * tasks * (self.ours.settings.gate.samples or 1)
        return {"tasks": tasks, "answers": answers, **self.ours.estimate(self.used, models).json()}

    async def run(self, answers_of: Callable[[Evaluation], Awaitable[Answers]]) -> Report:
        answers, theirs = await answers_of(self.ours), None
        if self.theirs is not None:
            theirs = await answers_of(self.theirs)
        elif self.earlier is not None:
            theirs = answers_in(self.earlier)
        return Report(self, answers, theirs)


@dataclass(frozen=True, slots=True)
class Report:
    """The report of a plan. `theirs` are the answers that are compared with."""

    plan: Plan
    answers: Answers
    theirs: Answers | None

    def quality(self, bar: QualityBar) -> Quality:
        """The result of a bar, which a model whose answers are mostly cut off misses, too; its reports are written.
        Raises ExportError."""
        # A case for each answer; of several to one task, with its number.
        cases = [
            answer.case if len(own) == 1 else replace(answer.case, task=f"{name} ({number})")
            for name, own in self.answers.by_task.items()
            for number, answer in enumerate(own, 1)
        ]
        is_mostly_cut_off = 2 * len(self.answers.cut_off) > len(cases)
        failures = self.cut_off[:1] if bar.fail_under is not None and is_mostly_cut_off else []
        named = f"{self.plan.ours.model.name} on {self.plan.ours.benchmark.name}"
        return bar.report(cases, notes=[named, *self.notes, *self.cut_off], failures=failures)

    @property
    def cut_off(self) -> list[str]:
        """How many answers of each model were cut off without text, and by which setting."""
        sides = ((self.plan.ours, self.answers), (self.plan.theirs, self.theirs))
        return [_cut_off(model, answers) for model, answers in sides if model and answers and answers.cut_off]

    @property
    def notes(self) -> list[str]:
        """How many answers failed and how many tasks could not be asked, and the first of each."""
        found = []
        if failed := self.answers.failed:
            why = excerpt(escape_terminal(failed[0].failed), EXCERPT)
            first = f"the first, {failed[0].task.task_id}: {why}"
            found.append(f"{quantity(len(failed), 'answer')} failed and counted 0; {first}")
        if left_out := self.answers.left_out:
            task, why = next(iter(left_out.items()))
            found.append(f"{quantity(len(left_out), 'task')} cannot be used; the first, {task}: {why}")
        return found

    def json(self) -> dict[str, Any]:
        ours, answers = self.plan.ours, self.answers
        seed, accepted = ours.settings.training.seed, [answer.accepted for answer in answers.every]
        usage = answers.result.usage
        calls = {name: usage.get(f"judge_{name}", 0) for name in USAGE}
        return {
            "model": ours.model.json(),
            "benchmark": {"name": ours.benchmark.name, "tasks": len(answers.by_task), "left_out": answers.left_out},
            "rubric": {"id": ours.rubric.id, "hash": ours.rubric.hash},
            "answers": len(accepted),
            "accepted": accepted.count(True),
            "rejected": accepted.count(False),
            "undecided": accepted.count(None),
            "failed": len(answers.failed),
            "cut_off": len(answers.cut_off),
            "metrics": metrics_of(answers.cases, self.plan.metrics, seed),
            "against": self._against(seed),
            "usage": {**calls, "tokens_generated": usage.get("rollout_tokens") or usage.get("completion_tokens", 0)},
            "cost": cost_of(**calls, prices=ours.settings.judge.prices).price,
            "seconds": answers.result.seconds,
            "directory": str(ours.directory),
        }

    def _against(self, seed: int) -> dict[str, Any] | None:
        if self.theirs is None:
            return None
        named = self.plan.theirs.model.json() if self.plan.theirs is not None else {"name": str(self.plan.earlier)}
        names = self.plan.metrics
        return {
            "model": named,
            "metrics": metrics_of(self.theirs.cases, names, seed),
            "differences": {name: difference(name, self.answers, self.theirs, seed) for name in names},
            "flips": flips(self.answers, self.theirs),
        }


def _cut_off(evaluation: Evaluation, answers: Answers) -> str:
    found, rollout = answers.cut_off, evaluation.settings.rollout
    limit = "serving.max_model_len"
    if evaluation.model.remote is not None:
        limit = "the endpoint's own limit of tokens (its default for max_tokens, or its context)"
    limit += f" or rollout.timeout_seconds ({rollout.timeout_seconds:g}) ended them"
    if all(answer.line["turns"] >= rollout.max_turns for answer in found):
        limit = f"rollout.max_turns ({rollout.max_turns}) ended them"
    were = "was" if len(found) == 1 else "were"
    every = quantity(len(answers.every), "answer")
    return f"{len(found):,} of {every} of {evaluation.model.name} {were} cut off without text: {limit}"
