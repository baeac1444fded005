"""One round on a running Ray session: start engines and trainer, train stage after stage, compare, and measure the
probe. The loop of a stage is in `loop`."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flywheel.config.file import Config
from flywheel.config.training import PlannedStage
from flywheel.judge.usage import Purpose
from flywheel.records.round import ADAPTER_DIR, AdapterRef, RoundResult, RoundSpec, Suite
from flywheel.system.signals import check_stopped
from flywheel.training.data.graded_rollouts import GradedRollouts
from flywheel.training.data.prompts import Prompt
from flywheel.training.data.rollout import add_usage
from flywheel.training.data.round_progress import Meter, Metrics
from flywheel.training.data.stages import adapter_of, ended_stages, stage_adapter, tasks_by_stage, why_unused
from flywheel.training.engine import ray_cluster
from flywheel.training.engine.engine import StartedEngine
from flywheel.training.engine.policy import AdapterFiles, copy_adapter, is_unchanged
from flywheel.training.optim.collector import Collector, Grade
from flywheel.training.optim.held_out_evaluation import GateComparison, answer_alone
from flywheel.training.optim.probe_measurement import make_probe
from flywheel.training.optim.rollout_grading import Pause, has_judge, without_judge
from flywheel.training.optim.round_steps import RoundSteps, roll_out
from flywheel.training.optim.stage_checks import FIRST_LOOK, found_to_learn
from flywheel.training.worker import processes
from flywheel.training.worker.loop import loop_of
from flywheel.training.worker.processes import EngineAdapters, Trainers
from flywheel.training.worker.round_prompts import PlannedPrompts, RoundPrompts
from flywheel.training.worker.stage import StageItems, StageWork
from flywheel.training.worker.users_agent import UsersAgent

log = logging.getLogger("flywheel.training.worker")

MakeGrade = Callable[[RoundSpec, Path, Purpose, Pause], Grade]


class Round:
    """One round on a running Ray session."""

    def __init__(self, spec: RoundSpec, directory: Path, settings: Config, make_grade: MakeGrade) -> None:
        self.spec, self.directory, self.settings = spec, directory, settings
        self.metrics = Metrics(directory)
        self.meter = Meter(directory, steps=settings.training.steps if spec.trains or spec.debug else 0)
        self._make_grade = make_grade if has_judge(settings) and spec.rubric else without_judge
        self._grade = self._grade_for(Purpose.ROUNDS if spec.debug else Purpose.GATES)
        self.training = ended_stages(spec.parent, settings.training.planned, directory)
        self.engines: list[Any] = []
        """Without those that are lost, see `lost_engines`."""
        self.started: list[Any] = []
        """Engines that have to be stopped, also those that are lost."""
        self.trainers: Trainers | None = None
        self.adapters = EngineAdapters(self.engines)
        self.agent = UsersAgent(spec, settings, self.engines, self.adapters)
        self.prompts = RoundPrompts(spec, settings, self.engines)
        self.about = StartedEngine("none", 0)
        self.planned = PlannedPrompts()
        self.seconds: dict[str, float] = {}
        self.usage: dict[str, int] = {}

    def start(self) -> None:
        """Start engines and trainer."""
        existing = [self.spec.parent, self.spec.candidate, *(each.adapter for each in self.agent.frozen)]
        trains = self.spec.trains and len(self.training.stages) < len(self.settings.training.stages)
        self.about, self.trainers = processes.start(
            self.spec,
            self.settings,
            self.started,
            adapters=existing,
            frozen=len(self.agent.frozen),
            trains=trains,
            files=self.agent.files,
        )
        self.engines[:] = self.started

    def run(self) -> RoundResult:
        """Raises FlywheelError."""
        with self._timed("start"):
            self.start()
            processes.use_tools(self.spec, self.settings, self.engines)
            self.agent.use(self.settings)
            self.planned = self.prompts.plan(self.about.context)
        train, compared = self.planned.train, self.planned.compared
        if self.planned.refusal:
            return self._result("refused", reason=self.planned.refusal)
        about = self._try_agent()
        if self.spec.evaluates:
            return self._evaluate(self.planned.held_out)
        if (candidate := self.spec.candidate) is not None:
            return self._compare(Path(candidate.path), compared, about, outcome="compared", candidate=candidate)
        self.metrics.phase("training", prompts=len(train), left_out=len(self.planned.left_out), **about)
        if self.spec.debug:
            return self._debug(train)
        with self._timed("train"):
            self._train(train, compared)
        figures = self.training.figures(self.spec, self.settings, self.directory)
        self.planned.left_out.update(self.training.left_out)
        if self.training.refusal:
            return self._result("refused", **figures)
        assert self.training.adapter is not None
        made = Path(self.training.adapter.path)
        if self.spec.test is None:
            self.planned.unmeasured.update(self.training.unmeasured)
            return self._result("trained", adapter=self._kept(made), **figures)
        return self._compare(made, compared, {}, outcome="trained", **figures)

    def _try_agent(self) -> dict[str, Any]:
        """Let the user's agent, if there is one, show that it works, which decides what reward counts. Returns what
        `metrics.jsonl` says of it."""
        if self.agent.program is None:
            return {}
        with self._timed("trial"):
            tasks = self.planned.train or self.prompts.to_train(self.spec.held_out).prompts
            self.settings, about = self.agent.trial(tasks, self.settings, self.directory)
        if not has_judge(self.settings):
            self._make_grade, self._grade = without_judge, without_judge()
        return about

    def _train(self, prompts: Sequence[Prompt], held_out: Sequence[Prompt]) -> None:
        """Run the stages that have not ended. One without a signal is skipped if another one has trained; the round
        is refused if none has."""
        training, stages = self.training, self.settings.training.planned
        by_stage = tasks_by_stage([prompt.task for prompt in prompts], stages, self.spec.seed)
        prompt_of = {prompt.task.task_id: prompt for prompt in prompts}
        unused = prompt_of.keys() - {task.task_id for own in by_stage for task in own}
        training.left_out |= {task: why_unused(prompt_of[task].task, stages) for task in sorted(unused)}
        for stage, tasks in [*zip(stages, by_stage, strict=True)][len(training.stages) :]:
            own = [prompt_of[task.task_id] for task in tasks]
            log.info("stage %d of %d, %s: %d tasks", stage.number, len(stages), stage.kind, len(own))
            self._run_stage(stage, own, held_out)
        if not any(each.outcome == "trained" for each in training.stages):
            training.refusal = training.stages[-1].reason
        self.usage = training.usage
        if self.trainers is not None:
            self.trainers.end()

    def _run_stage(self, stage: PlannedStage, prompts: Sequence[Prompt], held_out: Sequence[Prompt]) -> None:
        training, parent = self.training, self.training.adapter
        adapter = stage_adapter(self.directory, stage)
        adapter.parent.mkdir(parents=True, exist_ok=True)
        assert self.trainers is not None
        settings = self.settings.model_copy(update={"training": stage.training})
        of_round = self.spec, settings, self.directory, training, self.trainers, self.adapters, self.meter
        work, before = StageWork(*of_round, folder=adapter.parent, name=stage.name), training.steps
        # A process of the trainer may die while the judge is waited for.
        with self._collector(self._grade_for(Purpose.ROUNDS), self.trainers.check) as collector:
            loop, refusal = loop_of(stage.kind, StageItems(work, self.engines, collector), prompts, held_out)
            steps, why = training.steps - before, ""
            if loop is not None:
                loop.run()
                steps, why, refusal = steps + loop.trained, loop.ended, loop.refusal
        if loop is not None and not refusal and is_unchanged(adapter, Path(parent.path) if parent else None):
            refusal = "no step changed a weight: the learning rate is too small, or no example gave a gradient"
        elif loop is not None:
            training.with_gradient |= loop.with_gradient
        made = None if refusal else adapter_of(f"{self.spec.round_id}-{stage.name.replace(' ', '-')}", adapter)
        training.end_stage(stage.name, len(prompts), steps, refusal or why, made)
        training.write(adapter.parent)

    def _kept(self, made: Path) -> AdapterRef:
        """The adapter in a folder as that of the round."""
        copy_adapter(made, self.directory / ADAPTER_DIR)
        return adapter_of(self.spec.round_id, self.directory / ADAPTER_DIR)

    def _compare(self, made: Path, held_out: list[Prompt], about: Mapping[str, Any], **figures: Any) -> RoundResult:
        """The result, with other `figures`, of the adapter in the folder `made`, compared with the parent. `about` is
        for `metrics.jsonl`."""
        adapter = self._kept(made)
        with self._timed("evaluate"):
            self.metrics.phase("evaluating", prompts=len(held_out), **about)
            rewards = {"reward_first": figures.get("reward_first"), "reward": figures.get("reward_last")}
            done = figures.get("steps", 0)  # SFT and DPO take other numbers of steps than `training.steps`.
            gate = GateComparison(self.spec, self.settings, self.directory, self._collector_of)
            answers = gate.answers(held_out, self.planned.suites)
            self.meter.enter("evaluating", answers, step=done, steps=done, **rewards)
            candidate = self.adapters.load(adapter.name, AdapterFiles.read(Path(adapter.path)))
            deployed = self.adapters.load_saved(self.spec.parent)
            comparison = gate.of(held_out, self.planned.suites, (candidate, deployed))
            self.usage = add_usage(self.usage, gate.usage)
            probe = ray_cluster.anywhere(
                self.engines,
                lambda engine: make_probe(engine, held_out, candidate, deployed, max_model_len=self.about.context),
            )
        return self._result(adapter=adapter, comparison=comparison, probe=probe, **figures)

    def _debug(self, prompts: list[Prompt]) -> RoundResult:
        """Rollouts of the first steps, as many as a round needs to see whether anything can be learned."""
        adapter, count = self.adapters.load_saved(self.spec.parent), min(FIRST_LOOK, self.settings.training.steps)
        with self._timed("train"), self._collector(self._grade) as collector:
            steps = RoundSteps(self.spec, self.settings, self.directory, prompts, collector)
            batches = list(roll_out(steps, adapter, self.meter, count=count))
        for batch in batches:
            self.training.count(batch)
        means = [batch.summary()["reward_mean"] for batch in batches]
        self.training.rolled_out(self.settings.training, len(batches), means[0], means[-1])
        self.usage = self.training.usage
        return self._result(
            "debug",
            reason=found_to_learn(batches, self.settings.rollout),
            steps=len(batches),
            sampling=self.training.sampling(self.settings),
            reward_first=means[0],
            reward_last=means[-1],
        )

    def _evaluate(self, prompts: list[Prompt]) -> RoundResult:
        """Let one adapter, or the base model, answer the held-out tasks."""
        adapter, settings = self.adapters.load_saved(self.spec.parent), self.settings
        self.metrics.phase("evaluating", prompts=len(prompts))
        self.meter.enter("evaluating", settings.gate.samples_for(len(prompts)) * len(prompts))
        with self._timed("evaluate"), self._collector(self._grade) as collector:
            self.usage = answer_alone(prompts, adapter, self.spec, settings, collector, self.directory)
        return self._result("evaluated")

    def _collector_of(self, suite: Suite | None) -> Collector:
        """For the gate. It grades by the round's rubric, or by that of the suite."""
        is_own = suite is not None and suite.rubric != self.spec.rubric
        return self._collector(self._grade_for(Purpose.GATES, suite) if is_own else self._grade)

    def _grade_for(self, purpose: Purpose, suite: Suite | None = None) -> Grade:
        spec = self.spec if suite is None else self.spec.model_copy(update={"rubric": suite.rubric})
        return self._make_grade(spec, self.directory, purpose, self.meter.pause)

    def _collector(self, grade: Grade, check: Callable[[], None] = check_stopped) -> Collector:
        store = GradedRollouts(self.directory)
        return Collector.of(self.settings, self.engines, grade, meter=self.meter, store=store, check=check)

    @contextlib.contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        self.seconds[part] = round(time.monotonic() - started, 3)

    def _result(self, outcome: Any, **fields: Any) -> RoundResult:
        return RoundResult(
            round_id=self.spec.round_id,
            outcome=outcome,
            left_out=self.planned.unmeasured if self.spec.evaluates else self.planned.left_out,
            unmeasured=self.planned.unmeasured,
            inexact=self.planned.inexact,
            seconds=self.seconds,
            usage=self.usage,
            versions=self.about.versions,
            device=self.about.device,
            **fields,
        )
