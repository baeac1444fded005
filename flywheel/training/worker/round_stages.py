"""The stages of a round, one after the other: what each starts from, the tasks that it trains on, and its end.

A stage has ended when `trained.json` is in its folder. A worker that is started again goes on with the first stage
without it.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import TypeAdapter, ValidationError

from flywheel.config.file import Config
from flywheel.config.training import Stage
from flywheel.records.coreset import text_of
from flywheel.records.reasons import in_one_clause
from flywheel.records.round import AdapterRef, RoundSpec, RoundTask, SamplePool, StageResult
from flywheel.system.files import tree_sha256, write_atomic
from flywheel.training.data.graded_rollouts import GradedRollouts
from flywheel.training.data.loss_selection import by_loss, read_selection, write_selection
from flywheel.training.data.pairs import Pairs
from flywheel.training.data.prompts import Prompt
from flywheel.training.data.rollout import LoadedAdapter, RolloutBatch, add_usage, mean
from flywheel.training.data.round_progress import Meter
from flywheel.training.data.samples import RecordedReply
from flywheel.training.data.stages import TRAINED_FILE, adapter_of, stage_adapter, tasks_by_stage
from flywheel.training.engine import ray_cluster
from flywheel.training.engine.adapter_files import AdapterFiles
from flywheel.training.engine.policy import is_unchanged
from flywheel.training.optim.collector import Collector, Grade
from flywheel.training.optim.rollout_grading import Pause
from flywheel.training.optim.round_steps import RoundSteps, roll_out
from flywheel.training.optim.trainer import Trained

log = logging.getLogger("flywheel.training.worker")


@dataclass(slots=True)
class Training:
    """What the stages of a round ended with so far. `adapter` is that of the last one that trained; with `refusal`
    none has."""

    adapter: AdapterRef | None
    refusal: str = ""
    stages: list[StageResult] = field(default_factory=list)
    steps: int = 0
    rollout_steps: int = 0
    reward_first: float | None = None
    reward_last: float | None = None
    usage: dict[str, int] = field(default_factory=dict)
    system_prompts: Counter[str] = field(default_factory=Counter)
    with_gradient: set[str] = field(default_factory=set)
    left_out: dict[str, str] = field(default_factory=dict)
    """These three are as in `RoundResult`: by the stages, which have rendered the replies."""
    unmeasured: dict[str, str] = field(default_factory=dict)
    partly: dict[str, str] = field(default_factory=dict)

    @property
    def reason(self) -> str:
        """Why there is no adapter, or why the stage that can end early, GRPO, did so."""
        return self.refusal or "".join(each.reason for each in self.stages if each.outcome == "trained")

    def add(self, stage: Stage, trained: Trained, tasks: int, adapter: AdapterRef | None) -> None:
        outcome: Literal["trained", "skipped"] = "trained" if adapter is not None else "skipped"
        why = trained.refusal or trained.ended
        self.stages.append(StageResult(stage=stage, outcome=outcome, reason=why, steps=trained.steps, tasks=tasks))
        # Rollouts of the step that ended a stage are stored with its number, too.
        self.steps += max(trained.steps, trained.rollout_steps)
        self.usage = add_usage(self.usage, trained.usage)
        self.system_prompts.update(trained.system_prompts)
        self.with_gradient |= trained.with_gradient
        if trained.rollout_steps:
            self.rollout_steps = trained.rollout_steps
            self.reward_first, self.reward_last = trained.reward_first, trained.reward_last
        self.adapter = adapter or self.adapter


_TRAINING: Final = TypeAdapter(Training)


def ended_stages(spec: RoundSpec, settings: Config, directory: Path) -> Training:
    """What the first stages ended with, as far as they have ended before."""
    ended = Training(spec.parent)
    for number, stage in enumerate(settings.training.stages, 1):
        path = stage_adapter(directory, number, stage).parent / TRAINED_FILE
        try:
            found = _TRAINING.validate_json(path.read_bytes())
        except (OSError, ValidationError):
            break
        if found.adapter is not None and tree_sha256(Path(found.adapter.path)) != found.adapter.sha256:
            break
        ended = found
    return ended


def files_of(adapter: AdapterRef | None) -> AdapterFiles | None:
    return None if adapter is None else AdapterFiles.read(Path(adapter.path))


class Stages:
    """Those of one round, on running engines and the processes of a trainer that has loaded what the first of them
    starts from."""

    def __init__(
        self,
        spec: RoundSpec,
        settings: Config,
        directory: Path,
        engines: list[Any],
        trainers: Any,
        make_grade: Callable[[Path, Pause], Grade],
        load: Callable[[AdapterRef | None], LoadedAdapter | None],
        gate_rollouts: int,
    ) -> None:
        """`trainers` are `TrainerProcesses`. `load` loads an adapter on every engine. `make_grade` and
        `gate_rollouts` are as in `Trainer.train`."""
        self._spec, self._settings, self._directory = spec, settings, directory
        self._engines, self._trainers, self._make_grade, self._load = engines, trainers, make_grade, load
        self._gate_rollouts = gate_rollouts

    def run(self, prompts: Sequence[Prompt], held_out: Sequence[Prompt], training: Training) -> Training:
        """Run the stages behind those that have ended before with `training`. One without a signal is skipped if
        another one has trained; the round is refused if none has."""
        stages = self._settings.training.stages
        by_stage = tasks_by_stage([prompt.task for prompt in prompts], stages, self._spec.seed)
        prompt_of = {prompt.task.task_id: prompt for prompt in prompts}
        unused = prompt_of.keys() - {task.task_id for own in by_stage.values() for task in own}
        training.left_out |= dict.fromkeys(sorted(unused), "it has no reply to train on")
        ended = len(training.stages)
        for number, stage in list(enumerate(stages, 1))[ended:]:
            own = [prompt_of[task.task_id] for task in by_stage[stage]]
            if number > ended + 1:
                self._trainers.call("load", files_of(training.adapter))
            log.info("stage %d of %d, %s: %d tasks", number, len(stages), stage, len(own))
            path = stage_adapter(self._directory, number, stage)
            path.parent.mkdir(parents=True, exist_ok=True)
            if stage == "sft":
                others = by_stage.get("grpo") or by_stage.get("dpo") or by_stage["sft"]
                asked = [prompt_of[task.task_id] for task in others]
                trained = self._imitate(own, held_out, asked, path, training)
            elif stage == "dpo":
                trained = self._prefer(own, path, training)
            else:
                trained = self._reinforce(own, path, training)
            start = None if training.adapter is None else Path(training.adapter.path)
            if not trained.refusal and is_unchanged(path, start):
                why = "no step changed a weight: the learning rate is too small, or no example gave a gradient"
                trained = replace(trained, refusal=why, with_gradient=frozenset())
            if trained.refusal:
                log.warning("stage %s is skipped: %s", stage, trained.refusal)
            elif trained.ended:
                log.warning("stage %s ended early: %s", stage, trained.ended)
            adapter = None if trained.refusal else adapter_of(f"{self._spec.round_id}-{stage}", path)
            training.add(stage, trained, len(own), adapter)
            write_atomic(path.parent / TRAINED_FILE, _TRAINING.dump_json(training))
        if not any(each.outcome == "trained" for each in training.stages):
            training.refusal = training.stages[-1].reason
        return training

    def _imitate(
        self,
        prompts: Sequence[Prompt],
        held_out: Sequence[Prompt],
        asked: Sequence[Prompt],
        adapter: Path,
        training: Training,
    ) -> Trained:
        """SFT on the replies of `prompts`, unless rollouts of the prompts `asked` show that GRPO has a signal."""
        if self._settings.training.sft.when == "spread_below" and (needless := self._has_spread(asked, training)):
            return Trained(0, None, None, refusal=needless)
        replies, refused = self._replies(prompts)
        self._note(training, "SFT", replies, refused)
        if not replies:
            why = f"none of {len(prompts)} tasks has a reply to train on"
            return Trained(0, None, None, refusal=f"{why}: {in_one_clause(refused)}" if refused else why)
        measured, training.unmeasured = self._replies(held_out)
        if (pool := self._spec.pool) is not None:
            replies = self._chosen(pool, prompts, replies, adapter, training)
        trained: Trained
        trained = self._trainers.call("imitate", replies, measured, adapter, training.steps)
        return trained

    def _note(
        self, training: Training, stage: str, replies: Sequence[RecordedReply], left_out: Mapping[str, str]
    ) -> None:
        """Keep why a stage leaves tasks out, and what of others it does not train on."""
        training.left_out |= left_out
        partly = {each.task_id: "; ".join(each.without) for each in replies if each.without}
        training.partly |= partly
        for task, why in left_out.items():
            log.warning("%s leaves %s out: %s", stage, task, why)
        if partly:
            log.warning("%s does not train on all of %d replies: %s", stage, len(partly), in_one_clause(partly))

    def _chosen(
        self,
        pool: SamplePool,
        prompts: Sequence[Prompt],
        replies: list[RecordedReply],
        adapter: Path,
        training: Training,
    ) -> list[RecordedReply]:
        """The replies that are chosen by their loss under the policy that the stage starts from. A worker that is
        started again goes on with the choice of the first."""
        lines = read_selection(self._directory)
        if not lines:
            measured = self._trainers.call_first("losses", replies, adapter)
            # Nothing of the measurement is left in the policy that is trained.
            self._trainers.call("load", files_of(training.adapter))
            losses = {each.task_id: loss for each, loss in zip(replies, measured, strict=True) if loss is not None}
            tokens = {each.task_id: sum(len(sample.trained) for sample in each.samples) for each in replies}
            said = {each.task.task_id: each.task.exchange for each in prompts}
            texts = {task: text_of(exchange.history, exchange.query) for task, exchange in said.items()}
            lines = by_loss(pool, losses, texts, tokens, self._spec.seed)
            write_selection(self._directory, lines)
        outcomes = {line["task_id"]: line["outcome"] for line in lines}
        log.info("replies by their loss: %s", dict(Counter(outcomes.values())))
        return [each for each in replies if outcomes.get(each.task_id, "").startswith("chosen")]

    def _has_spread(self, prompts: Sequence[Prompt], training: Training) -> str:
        """Why SFT is not needed: enough groups of a step of GRPO have rewards that differ. Empty if it is needed."""
        if not prompts:
            return ""
        meter = Meter(self._directory, steps=1)
        with self._collector(self._settings, meter) as collector:
            steps = RoundSteps(self._spec, self._settings, prompts, collector)
            batch = steps.collect(0, self._load(training.adapter))
        training.usage = add_usage(training.usage, batch.usage())
        share, limit = batch.groups_with_spread / max(1, batch.groups), self._settings.training.sft.spread_below
        if share < limit:
            return ""
        return f"{share:.0%} of {batch.groups} groups have rewards that differ (training.sft.spread_below: {limit:g})"

    def _prefer(self, prompts: Sequence[Prompt], adapter: Path, training: Training) -> Trained:
        """DPO on pairs: recorded ones of the prompts that have them, and rollouts of all others."""
        settings, pairs = self._settings.training, Pairs()
        recorded = [prompt.task for prompt in prompts if prompt.task.has_pair]
        better: list[RecordedReply] = []
        if recorded:
            better, refused = self._recorded(recorded)
            worse, also = self._recorded([task.model_copy(update={"reply": task.rejected}) for task in recorded])
            chosen, rejected = ({reply.task_id: reply for reply in replies} for replies in (better, worse))
            refused = {task: f"its rejected reply: {why}" for task, why in also.items()} | refused
            pairs.add_recorded(recorded, chosen, rejected, refused)
        others = [prompt for prompt in prompts if not prompt.task.has_pair]
        steps = math.ceil(len(others) / settings.prompts_per_step)
        rewards: list[float] = []
        for batch in self._roll_out(others, steps, training) if others else ():
            batch.refuse_failed(settings.max_undecided_share)
            batch.refuse_undecided(settings.max_undecided_share)
            rewards += batch.rewards
            pairs.add_rollouts(batch, settings.dpo.margin)
        pairs.write(adapter.parent)
        if pairs.rollouts:
            log.info("not in a pair: %s", pairs.reasons)
        paired = {pair.task_id for pair in pairs.pairs}
        left_out = {task: why for task, why in pairs.left_out.items() if task not in paired}
        self._note(training, "DPO", [reply for reply in better if reply.task_id in paired], left_out)
        reward = mean(rewards)
        if not pairs.pairs:
            why = f"none of {len(prompts)} tasks has a better and a worse reply"
            return Trained(steps, reward, None, why + (f": {pairs.reasons}" if pairs.reasons else ""), steps)
        trained: Trained
        trained = self._trainers.call("prefer", pairs.pairs, adapter, training.steps + steps)
        return replace(trained, steps=trained.steps + steps, rollout_steps=steps, reward_first=reward)

    def _roll_out(self, prompts: Sequence[Prompt], steps: int, training: Training) -> Iterator[RolloutBatch]:
        """Rollouts of the policy that the stage starts from."""
        spec, directory = self._spec, self._directory
        planned = self._settings.training.model_copy(update={"steps": steps})
        settings = self._settings.model_copy(update={"training": planned})
        meter = Meter(directory, steps=training.steps + steps)
        adapter = self._load(training.adapter)
        with self._collector(settings, meter) as collector:
            about: Any = {"steps": steps, "before": training.steps, "stage": "dpo"}
            for batch in roll_out(spec, settings, directory, prompts, collector, adapter, meter, **about):
                training.usage = add_usage(training.usage, batch.usage())
                training.system_prompts.update(batch.system_prompts)
                yield batch

    def _collector(self, settings: Config, meter: Meter) -> Collector:
        store = GradedRollouts(self._directory)
        return Collector.of(settings, self._engines, self._make_grade(self._directory, meter.pause), meter, store)

    def _replies(self, prompts: Sequence[Prompt]) -> tuple[list[RecordedReply], dict[str, str]]:
        """The replies of tasks that have one, as samples, and why others are not trained on, by task."""
        return self._recorded([prompt.task for prompt in prompts if prompt.task.reply])

    def _recorded(self, tasks: Sequence[RoundTask]) -> tuple[list[RecordedReply], dict[str, str]]:
        """The same of these tasks. A reply with a sample that is too long is none: nothing is cut."""
        limit = self._settings.rollout.max_model_len
        empty = self._settings.training.sft.reasoning == "empty"

        def replies(engine: Any) -> tuple[list[RecordedReply], dict[str, str]]:
            [found] = ray_cluster.wait([engine.recorded_replies.remote(tasks, empty_reasoning=empty)])
            return found  # type: ignore[no-any-return]

        made, refused = ray_cluster.anywhere(self._engines, replies)
        kept = []
        for each in made:
            if (tokens := max((len(sample.token_ids) for sample in each.samples), default=0)) > limit:
                refused[each.task_id] = f"it has {tokens:,} tokens, and rollout.max_model_len is {limit:,}"
            else:
                kept.append(each)
        return kept, refused

    def _reinforce(self, prompts: Sequence[Prompt], adapter: Path, training: Training) -> Trained:
        """GRPO on rollouts of the prompts."""
        if not prompts:
            return Trained(0, None, None, refusal="no task is left for it")
        trained: Trained
        more = self._gate_rollouts, adapter, training.steps
        trained = self._trainers.call("train", prompts, self._engines, self._make_grade, *more)
        return trained
