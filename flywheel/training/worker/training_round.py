"""One round on a running Ray session: start engines and trainer, train, compare, and measure the probe."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, overload

from flywheel.config.file import Config
from flywheel.config.training import RewardSettings
from flywheel.errors import TrainError
from flywheel.judge.usage import Purpose
from flywheel.records.program_run import RunResult
from flywheel.records.reasons import in_one_clause
from flywheel.records.round import (
    ADAPTER_DIR,
    LONGEST_SYSTEM_PROMPT,
    AdapterRef,
    Comparison,
    FrozenTarget,
    RoundResult,
    RoundSpec,
    RoundTask,
    Sampling,
    Suite,
    SuiteComparison,
    SystemPrompt,
)
from flywheel.serving.server.vllm_command import chat_arguments
from flywheel.system.files import write_json
from flywheel.system.terminal import quantity
from flywheel.training.data.graded_rollouts import GradedRollouts
from flywheel.training.data.loss_selection import read_selection, why_set_aside
from flywheel.training.data.prompts import Asked, Prompt, asked, asked_as_served
from flywheel.training.data.rollout import Completion, LoadedAdapter, RolloutRequest, add_usage
from flywheel.training.data.rollout_file import write_answers
from flywheel.training.data.round_directory import REWARD_FILE
from flywheel.training.data.round_progress import Meter, Metrics
from flywheel.training.data.stages import adapter_of
from flywheel.training.engine import ray_cluster
from flywheel.training.engine.adapter_files import AdapterFiles
from flywheel.training.engine.engine import Engine, EngineSettings, StartedEngine
from flywheel.training.engine.gpu_placement import place_on_gpus
from flywheel.training.engine.policy import copy_adapter, rank
from flywheel.training.gate.gate import TRIPWIRES
from flywheel.training.gate.paired_comparison import Paired, compare, compare_criterion, compare_suite
from flywheel.training.optim.collector import Collector, Grade
from flywheel.training.optim.held_out_evaluation import Pairs, answer, check_enough, most_open, requests
from flywheel.training.optim.probe_measurement import make_probe
from flywheel.training.optim.rollout_grading import Pause, has_judge, rubric_of, without_judge
from flywheel.training.optim.round_steps import roll_out_only, step_requests
from flywheel.training.optim.trainer import Trainer
from flywheel.training.program.other_models import listed, undecided
from flywheel.training.program.program_pool import decided_reward, program_of
from flywheel.training.program.program_rollout import ProgramSetup
from flywheel.training.recorded.recorded_rollout import ToolSetup
from flywheel.training.worker.round_stages import Stages, ended_stages, files_of
from flywheel.training.worker.trainer_process import TrainerProcesses

log = logging.getLogger("flywheel.training.worker")

TRIALS: Final = 3
"""Tasks on which the user's agent is tried before training."""

MOST_SYSTEM_PROMPTS: Final = 10

MakeGrade = Callable[[RoundSpec, Path, Purpose, Pause], Grade]


class Round:
    """One round on a running Ray session."""

    def __init__(self, spec: RoundSpec, directory: Path, settings: Config, make_grade: MakeGrade) -> None:
        self.spec, self.directory, self.settings = spec, directory, settings
        self.metrics = Metrics(directory)
        self.meter = Meter(directory, steps=settings.training.steps if spec.trains or spec.debug else 0)
        self.program = program_of(settings)
        if not has_judge(settings) or not spec.rubric:
            make_grade = without_judge
        self._grade_by = make_grade
        self.make_grade: Callable[[Path, Pause], Grade] = partial(_make_grade, make_grade, spec)
        purpose = Purpose.ROUNDS if spec.debug else Purpose.GATES
        self.grade = make_grade(spec, directory, purpose, self.meter.pause)
        self.ended = ended_stages(spec, settings, directory)
        # Steps use the numbers before these: an engine must never get one twice.
        self._numbers = itertools.count(settings.training.steps + 1)
        self._frozen: dict[str, LoadedAdapter | None] | None = None
        self._noted_models: set[str] = set()
        self.engines: list[Any] = []
        """Without those that are lost, see `lost_engines`."""
        self.started: list[Any] = []
        """Actors that have to be stopped: all engines, and processes of the trainer with a copy of the directory."""
        self.trainers: TrainerProcesses | None = None
        self.seconds: dict[str, float] = {}
        self.usage: dict[str, int] = {}
        self.about = StartedEngine("none", 0)
        self.left_out: dict[str, str] = {}
        self.unmeasured: dict[str, str] = {}
        self.inexact: dict[str, str] = {}
        self.suites: list[tuple[Suite, list[Prompt]]] = []

    def start(self) -> None:
        """Start engines and trainer side by side."""
        rollout, training = self.settings.rollout, self.settings.training
        has_trainer = self.spec.trains and len(self.ended.stages) < len(training.stages)
        placement = place_on_gpus(
            rollout.engines,
            ray_cluster.gpus(),
            trainers=training.workers if has_trainer else 0,
            tensor_parallel=rollout.tensor_parallel,
        )
        places = ray_cluster.Places(placement, self.settings.ray.placement_seconds)
        server = tuple(chat_arguments(self.spec.base_model, self.settings.serving))
        threads = ray_cluster.cpu_threads()
        for gpu_share in placement.engines:
            engine = EngineSettings(
                model=self.spec.base_model,
                max_model_len=rollout.max_model_len,
                max_lora_rank=rank(self._adapters(), training.lora),
                more_adapters=len(self.frozen),
                seed=self.spec.seed,
                gpu_memory_utilization=gpu_share.memory(rollout.gpu_memory_utilization),
                kv_cache_gib=rollout.cpu_kv_cache_gib,
                cpu_threads=threads,
                server=server,
                tensor_parallel=rollout.tensor_parallel,
                imitates=has_trainer and _imitates(self.spec, training.stages),
            )
            self.engines.append(ray_cluster.start(Engine, engine, gpus=gpu_share.share, within=places.at(gpu_share)))
        if self.settings.ray.address is None:
            # The processes of the trainer compute at the same time.
            threads = max(1, threads // training.workers)
        self.started = list(self.engines)
        members = [
            ray_cluster.start(
                Trainer,
                self.spec,
                str(self.directory),
                threads,
                number,
                gpus=gpu_share.share,
                within=places.at(gpu_share),
                calls=1 if self.settings.ray.address is None else 2,
            )
            for number, gpu_share in enumerate(placement.trainers)
        ]
        files = [path for path in self.program.files if Path(path).is_absolute()] if self.program is not None else []
        ray_cluster.gather(self.engines, members, self.settings, self.spec.base_model, files)
        ray_cluster.wait([engine.check_memory.remote() for engine in self.engines])
        meeting = ray_cluster.on_all(members[:1], "meet") if len(members) > 1 else None
        starting = [engine.start.remote() for engine in self.engines]
        if members:
            self.trainers = TrainerProcesses(members, self.directory)
            self.trainers.place()
            self.started += self.trainers.copies
            starting += [member.start.remote(files_of(self.ended.adapter), meeting) for member in members]
        started = ray_cluster.wait(starting)[: rollout.engines]
        self.about = replace(started[0], context=min(engine.context for engine in started))

    def _use_tools(self) -> None:
        """Tell the engines how tools answer in training, and in the gate, where a miss always ends the rollout."""
        rollout, spec = self.settings.rollout, self.spec
        finish_tools, tools = tuple(rollout.finish_tools), rollout.tools
        training = ToolSetup(
            shared=spec.shared,
            on_miss=tools.on_miss,
            finish_tools=finish_tools,
            max_turns=rollout.max_turns,
        )
        gate = replace(training, shared=spec.shared_gate, on_miss="end")
        ray_cluster.everywhere(self.engines, lambda engine: engine.use_tools.remote(training, gate))

    def _use_program(self) -> None:
        """Start the user's agent on the engines, if rollouts run one, with the models of all targets."""
        config = self.settings
        if self.program is None:
            return
        alias = config.model.alias
        trained = self.spec.target or alias
        if self._frozen is None:
            self._frozen = {each.alias: self._load(each.adapter) for each in self.frozen}
        setup = ProgramSetup(
            models={trained: alias, **{each.target: each.alias for each in self.frozen}},
            trained=trained,
            frozen=self._frozen,
            max_turns=config.rollout.max_turns,
            needs_reward=config.rollout.weights.workflow > 0,
            rewards_loops=config.rollout.loop_reward is not None,
        )
        settings = config.model_dump(mode="json")
        found, *_ = ray_cluster.everywhere(self.engines, lambda engine: engine.use_program.remote(settings, setup))
        log.info("the agent of rollouts: %s", found)

    def note_models(self) -> dict[str, int]:
        """How often the user's agent has asked for each model so far. Logs new names, and warns once a round of each
        that the policy answers only because nothing says who does."""
        asked: Counter[str] = Counter()
        if self.program is not None:
            for found in ray_cluster.everywhere(self.engines, lambda engine: engine.asked_models.remote()):
                asked.update(found)
            new = {name: times for name, times in asked.items() if name not in self._noted_models}
            self._noted_models |= new.keys()
            if new:
                log.info("models that the agent asks for: %s", listed(new))
            if why := undecided(self.program, new):
                log.warning("%s", why)
        return dict(asked)

    @property
    def frozen(self) -> list[FrozenTarget]:
        """The targets that the user's agent may ask beside the one that is trained."""
        return self.spec.frozen if self.program is not None else []

    def _adapters(self) -> list[AdapterRef | None]:
        """Those that exist before the round: of the parent, of a candidate, of the other targets."""
        return [self.spec.parent, self.spec.candidate, *(each.adapter for each in self.frozen)]

    def asked(self, tasks: Sequence[RoundTask]) -> Asked:
        """The tasks that can be trained on: rendered by the model's template, short enough, without duplicates."""
        rollout, stages = self.settings.rollout, self.settings.training.stages
        return asked(
            *self._encoded(tasks),
            max_model_len=rollout.max_model_len,
            max_completion_tokens=rollout.max_completion_tokens,
            # No prompt is asked: two replies to one prompt are two examples.
            by_reply=stages == ["sft"] or ("grpo" not in stages and all(task.rejected for task in tasks)),
        )

    def asked_as_served(self, tasks: Sequence[RoundTask]) -> Asked:
        """The held-out tasks that the server would answer."""
        return asked_as_served(*self._encoded(tasks), context=self.about.context)

    def _asked_of(self, suite: Suite) -> list[Prompt]:
        """The tasks of a suite that the server would answer. Raises TrainError if they are too few for its margin."""
        found = self.asked_as_served(suite.tasks)
        for task, why in found.left_out.items():
            log.warning("%s is not asked: %s", task, why)
        if suite.margin is not None:
            check_enough(found.prompts, self.spec, self.settings.gate.min_tasks, suite)
        return found.prompts

    def _encoded(self, tasks: Sequence[RoundTask]) -> tuple[list[Prompt], dict[str, str]]:
        prompts, refused = ray_cluster.anywhere(
            self.engines, lambda engine: ray_cluster.wait([engine.encode.remote(list(tasks))])[0]
        )
        if tasks and len(refused) == len(tasks):
            first = next(f"{task}: {why}" for task, why in refused.items())
            raise TrainError(
                f"render the prompts of {self.spec.round_id}",
                f"the chat template refuses all {len(tasks)} tasks; the first: {first}",
                "Check the base model's chat template, and the one in serving.extra_args if there is one.",
            )
        return prompts, refused

    def run(self) -> RoundResult:
        with self._timed("start"):
            self.start()
            self._use_tools()
            self._use_program()
            train = self.asked(self.spec.train) if self.spec.train else Asked([], {})
            gate = Asked([], {}) if self.spec.debug else self.asked_as_served(self.spec.held_out)
        prompts, self.left_out, self.unmeasured = train.prompts, self.spec.left_out | train.left_out, gate.left_out
        held_out = gate.prompts[-self.settings.gate.max_tasks :]
        for task, why in {**gate.left_out, **self.left_out}.items():
            log.warning("%s is left out: %s", task, why)
        self.inexact = train.inexact | gate.inexact
        is_compared = self.spec.test is not None and not self.spec.debug
        needed = self.settings.gate.min_tasks if is_compared else 0
        if (train.inexact and not prompts) or (gate.inexact and len(held_out) < needed):
            # A result and not a failure: these tasks are marked, and the next round uses others.
            return self._too_few_exact(len(prompts), len(held_out))
        if not prompts and (self.spec.trains or self.spec.debug):
            raise TrainError(
                f"train {self.spec.round_id}",
                f"none of its {len(self.spec.train)} tasks can be trained on: {in_one_clause(train.left_out)}",
                "Raise rollout.max_model_len or lower rollout.max_completion_tokens.",
            )
        if is_compared:
            # Checked before hours are spent on a candidate that could only be rejected.
            check_enough(held_out, self.spec, needed)
            self.suites = [(suite, self._asked_of(suite)) for suite in self.spec.suites]
        if prompts:
            log.info("rollouts take up to %d tokens", max(prompt.max_tokens for prompt in prompts))
        about: dict[str, Any] = {}
        if self.program is not None:
            with self._timed("trial"):
                asked_now = prompts or self.asked(self.spec.held_out).prompts
                run = self._try_program(asked_now)
                about = {"models": self.note_models(), **self._decide_reward(run)}
        if self.spec.evaluates:
            self.left_out = gate.left_out
            return self._evaluate(gate.prompts)
        if (candidate := self.spec.candidate) is not None:
            return self._gated(Path(candidate.path), held_out, about, outcome="compared", candidate=candidate)
        self.metrics.phase("training", prompts=len(prompts), left_out=len(self.left_out), **about)
        if self.spec.debug:
            return self._debug(prompts)
        with self._timed("train"):
            gate_rollouts = self._gate_rollouts(held_out) if is_compared else 0
            running = self.engines, self.trainers, self.make_grade, self._load, gate_rollouts
            trained = Stages(self.spec, self.settings, self.directory, *running).run(prompts, held_out, self.ended)
            self._end_trainer()
        self.usage = trained.usage
        lines = read_selection(self.directory) if self.spec.pool is not None else []
        released = [line["task_id"] for line in lines if line["outcome"] == "released"]
        set_aside = {line["task_id"]: why_set_aside(line) for line in lines if line["outcome"] == "set aside"}
        self.left_out |= trained.left_out | set_aside
        self.unmeasured = gate.left_out | ({} if is_compared else trained.unmeasured)
        others = trained.with_gradient | set(released)
        asked = [task.task_id for task in self.spec.train if task.task_id not in others]
        without_gradient = [*asked, *self.spec.left_out]
        figures: dict[str, Any] = {
            "stages": trained.stages,
            "partly": trained.partly,
            "reason": trained.reason,
            "steps": sum(each.steps for each in trained.stages),
            "sampling": self._sampling(trained.rollout_steps, trained.system_prompts)
            if trained.rollout_steps
            else None,
            "released": released,
            "without_gradient": without_gradient,
            "reward_first": trained.reward_first,
            "reward_last": trained.reward_last,
        }
        if trained.refusal:
            return self._result("refused", **figures)
        assert trained.adapter is not None
        made = Path(trained.adapter.path)
        if not is_compared:
            return self._result("trained", adapter=self._kept(made), **figures)
        return self._gated(made, held_out, {}, outcome="trained", **figures)

    def _end_trainer(self) -> None:
        if self.trainers is not None:
            self.trainers.end()

    def _kept(self, made: Path) -> AdapterRef:
        """The adapter in a folder as that of the round."""
        copy_adapter(made, self.directory / ADAPTER_DIR)
        return adapter_of(self.spec.round_id, self.directory / ADAPTER_DIR)

    def _gated(self, made: Path, held_out: list[Prompt], about: Mapping[str, Any], **figures: Any) -> RoundResult:
        """The result, with other `figures`, of the adapter in the folder `made`, compared with the parent. `about` is
        for `metrics.jsonl`."""
        adapter = self._kept(made)
        with self._timed("evaluate"):
            self.metrics.phase("evaluating", prompts=len(held_out), **about)
            rewards = {"reward_first": figures.get("reward_first"), "reward": figures.get("reward_last")}
            done = figures.get("steps", 0)  # SFT and DPO take other numbers of steps than `training.steps`.
            self.meter.enter("evaluating", self._gate_rollouts(held_out), step=done, steps=done, **rewards)
            candidate, deployed = self._load(adapter), self._load(self.spec.parent)
            comparison = self._compare(held_out, candidate, deployed)
            probe = ray_cluster.anywhere(
                self.engines,
                lambda engine: make_probe(engine, held_out, candidate, deployed, max_model_len=self.about.context),
            )
        return self._result(adapter=adapter, comparison=comparison, probe=probe, **figures)

    def _gate_rollouts(self, held_out: list[Prompt]) -> int:
        """How many answers the gate compares, those of suites included."""
        compared = [held_out, *(prompts for _, prompts in self.suites)]
        return sum(2 * self.settings.gate.samples_for(len(each)) * len(each) for each in compared)

    @overload
    def _load(self, adapter: AdapterRef) -> LoadedAdapter: ...

    @overload
    def _load(self, adapter: AdapterRef | None) -> LoadedAdapter | None: ...

    def _load(self, adapter: AdapterRef | None) -> LoadedAdapter | None:
        """Load the adapter on every engine; None is the base model, which needs no loading."""
        if adapter is None:
            return None
        number = next(self._numbers)
        files = AdapterFiles.read(Path(adapter.path))
        return ray_cluster.load(self.engines, f"{adapter.name}-{number}", number, files)

    def _too_few_exact(self, train: int, held_out: int) -> RoundResult:
        self._end_trainer()
        task, first = next(iter(self.inexact.items()))
        return self._result(
            "refused",
            reason=f"the prompts of {len(self.inexact)} tasks are not what the model was sent, which leaves {train}"
            f" for training and {held_out} for the gate; the first, {task}: {first}. They are left out from now on"
            " (training.inexact_prompts)",
        )

    def _decide_reward(self, run: RunResult | None) -> dict[str, str]:
        """Let a first run decide which reward counts for the whole round, unless the settings do. Returns what
        `metrics.jsonl` says."""
        rollout, path = self.settings.rollout, self.directory / REWARD_FILE
        if rollout.reward is not None:
            return {}
        if not path.exists():
            # Not by a later worker: the stored rollouts have the rewards of this decision.
            decided, why = decided_reward(run) if run is not None else (None, "")
            write_json(path, {"reward": decided and decided.model_dump(), "reward_by": why})
        stored = json.loads(path.read_bytes())
        if stored["reward"] is None:
            return {}
        reward, why = RewardSettings.model_validate(stored["reward"]), stored["reward_by"]
        self.settings = self.settings.model_copy(update={"rollout": rollout.model_copy(update={"reward": reward})})
        if not has_judge(self.settings):
            self.make_grade = without_judge
            self.grade = without_judge()
        # From now on, a run without what counts is a failure.
        self._use_program()
        if self.trainers is not None:
            self.trainers.call("use_settings", self.settings.model_dump(mode="json"))
        if why:
            log.info("%s", why)
        return {"reward_by": why} if why else {}

    def _try_program(self, prompts: Sequence[Prompt]) -> RunResult | None:
        """Run the user's agent on a task, and on two others if it fails. Returns what a whole run returned; None if
        each reached a limit. Raises TrainError if it fails on each."""
        of_groups = step_requests(prompts[:TRIALS], 0, self.spec, self.settings, None)
        requests = of_groups[:: self.settings.training.group_size]
        failures: list[Completion] = []
        is_cut = False
        for some in filter(None, (requests[:1], requests[1:])):
            made: list[Completion] = ray_cluster.anywhere(self.engines, partial(_generated, some))
            failures += (failed := [completion for completion in made if completion.error])
            is_cut |= len(failed) < len(made)
            for completion in made:
                run: RunResult | None = completion.run
                if run is not None and run.cause is None and not completion.error:
                    return run
        if is_cut:
            return None
        raise TrainError(
            f"run the agent of {self.spec.round_id} (rollout.agent)",
            f"it failed on {quantity(len(failures), 'task')} before training; the first: {failures[0].error}",
            "Correct it; `flywheel workflow check` runs it once. Its output is in the worker's log.",
            # The engine, and not the agent, may have failed.
            retryable=any(each.needs_reward for each in failures),
        )

    def _debug(self, prompts: list[Prompt]) -> RoundResult:
        adapter = self._load(self.spec.parent)
        with self._timed("train"), self._collector() as collector:
            debug = roll_out_only(self.spec, self.settings, self.directory, prompts, collector, adapter, self.meter)
        self.usage = debug.usage
        return self._result(
            "debug",
            reason=debug.summary,
            steps=debug.steps,
            sampling=self._sampling(debug.steps, debug.system_prompts),
            reward_first=debug.reward_first,
            reward_last=debug.reward_last,
        )

    def _evaluate(self, prompts: list[Prompt]) -> RoundResult:
        """Let one adapter, or the base model, answer the held-out tasks."""
        adapter, settings = self._load(self.spec.parent), self.settings
        asked = requests(prompts, (adapter,), self.spec, settings, settings.gate.samples_for(len(prompts)))
        self.metrics.phase("evaluating", prompts=len(prompts))
        self.meter.enter("evaluating", len(asked))
        with self._timed("evaluate"), self._collector() as collector:
            batch = collector.collect(asked, most_open=most_open(settings))
        write_answers(self.directory, batch.rollouts)
        self.usage = batch.usage()
        return self._result("evaluated")

    def _compare(self, prompts: list[Prompt], candidate: LoadedAdapter, deployed: LoadedAdapter | None) -> Comparison:
        gate = self.settings.gate
        assert self.spec.test is not None
        with self._collector() as collector:
            answers = answer(prompts, (candidate, deployed), self.spec, self.settings, collector, self.directory)
        self.usage = add_usage(self.usage, answers.usage)

        paired = partial(_paired, prompts)
        compared = partial(
            compare,
            samples=gate.samples_for(len(prompts)),
            alpha=self.spec.test.alpha,
            needed=gate.min_gain,
            seed=self.spec.seed,
            limits=answers.limits,
        )
        whole, (candidate_missed, deployed_missed) = compared(paired(answers.rewards)), answers.missed
        candidate_failed, deployed_failed = answers.failed
        at_bound = compared(paired(answers.at_bound)) if deployed_missed or deployed_failed else None
        by_measure = partial(compare_criterion, confidence=gate.confidence, seed=self.spec.seed)
        criteria = [
            by_measure(criterion.id, paired(answers.values[criterion.id]), takes_away=criterion.weight < 0)
            for criterion in (rubric_of(self.spec).every if answers.values else ())
            if criterion.id in answers.values
        ]
        tripwires = [by_measure(name, paired(answers.tripwires[name]), takes_away=False) for name in TRIPWIRES]
        return whole.model_copy(
            update={
                "criteria": criteria,
                # What no answer tells is not listed.
                "tripwires": [each for each in tripwires if each.tasks],
                "suites": [self._compare_on(*each, (candidate, deployed)) for each in self.suites],
                "candidate_missed": candidate_missed,
                "deployed_missed": deployed_missed,
                "candidate_failed": candidate_failed,
                "deployed_failed": deployed_failed,
                "lower_at_bound": at_bound and at_bound.lower,
            }
        )

    def _compare_on(
        self, suite: Suite, prompts: list[Prompt], sides: tuple[LoadedAdapter, LoadedAdapter | None]
    ) -> SuiteComparison:
        with self._collector(suite) as collector:
            answers = answer(prompts, sides, self.spec, self.settings, collector, self.directory)
        self.usage = add_usage(self.usage, answers.usage)
        confidence, seed = self.settings.gate.confidence, self.spec.seed
        return compare_suite(suite.name, _paired(prompts, answers.rewards), confidence=confidence, seed=seed)

    def _collector(self, suite: Suite | None = None) -> Collector:
        """It grades by the round's rubric, or by that of the suite."""
        grade = self.grade
        if suite is not None and suite.rubric != self.spec.rubric and has_judge(self.settings):
            own = self.spec.model_copy(update={"rubric": suite.rubric})
            grade = self._grade_by(own, self.directory, Purpose.GATES, self.meter.pause)
        return Collector.of(self.settings, self.engines, grade, self.meter, GradedRollouts(self.directory))

    def _sampling(self, steps: int, system_prompts: Mapping[str, int]) -> Sampling:
        rollout, training = self.settings.rollout, self.settings.training
        most = sorted(system_prompts.items(), key=lambda item: (-item[1], item[0]))[:MOST_SYSTEM_PROMPTS]
        return Sampling(
            temperature=rollout.temperature,
            steps=steps,
            prompts=rollout.prompts_asked(training.prompts_per_step),
            group_size=training.group_size,
            system_prompts=[
                SystemPrompt(text=text[:LONGEST_SYSTEM_PROMPT], rollouts=rollouts) for text, rollouts in most
            ],
            further_system_prompts=len(system_prompts) - len(most),
        )

    @contextlib.contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        self.seconds[part] = round(time.monotonic() - started, 3)

    def _result(self, outcome: Any, **fields: Any) -> RoundResult:
        return RoundResult(
            round_id=self.spec.round_id,
            outcome=outcome,
            left_out=self.left_out,
            unmeasured=self.unmeasured,
            inexact=self.inexact,
            seconds=self.seconds,
            usage=self.usage,
            versions=self.about.versions,
            device=self.about.device,
            **fields,
        )


def _imitates(spec: RoundSpec, stages: Sequence[str]) -> bool:
    """Whether all that a round trains on are recorded replies."""
    return all(stage == "sft" or (stage == "dpo" and all(task.has_pair for task in spec.train)) for stage in stages)


def _make_grade(make_grade: MakeGrade, spec: RoundSpec, directory: Path, pause: Pause) -> Grade:
    """For rollouts to learn from, in the process and the directory where they are graded."""
    return make_grade(spec, directory, Purpose.ROUNDS, pause)


def _generated(requests: Sequence[RolloutRequest], engine: Any) -> list[Completion]:
    return ray_cluster.wait([engine.generate.remote(request) for request in requests])


def _paired(prompts: Sequence[Prompt], pairs: Pairs) -> list[Paired]:
    return [
        Paired(prompt.task.task_id, *sides, prompt.task.conversation)
        for prompt, sides in zip(prompts, pairs, strict=True)
    ]
