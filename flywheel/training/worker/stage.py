"""What the loop of a stage works with, its checkpoints, and what SFT and DPO train on: recorded replies, those of
them that are chosen by their loss, and pairs of replies."""

from __future__ import annotations

import contextlib
import logging
import math
import zipfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from flywheel.config.file import Config
from flywheel.config.training import DpoSettings, SftSettings, Stage
from flywheel.errors import TrainError
from flywheel.records.coreset import text_of
from flywheel.records.reasons import in_one_clause
from flywheel.records.round import ADAPTER_DIR, RoundSpec, RoundTask
from flywheel.training.data.loss_selection import by_loss, read_selection, write_selection
from flywheel.training.data.pairs import Pairs
from flywheel.training.data.prompts import Prompt
from flywheel.training.data.rollout import mean
from flywheel.training.data.round_directory import CHECKPOINTS_DIR, END_FILE
from flywheel.training.data.round_progress import Meter
from flywheel.training.data.samples import RecordedReply, longest_of, rows_of
from flywheel.training.data.stages import Training
from flywheel.training.engine import ray_cluster
from flywheel.training.engine.policy import AdapterFiles
from flywheel.training.optim.collector import Collector
from flywheel.training.optim.round_steps import RoundSteps, roll_out
from flywheel.training.worker.processes import EngineAdapters, Trainers

log = logging.getLogger("flywheel.training.worker")

LIKE_SFT = {"beta": 0.0, "updates_per_batch": 1, "loss_type": "dapo", "importance": "truncated"}
"""Settings of GRPO that make its loss a mean over tokens."""


@dataclass(frozen=True, slots=True)
class StageWork:
    """What a stage works with.

    Attributes:
        directory: The round's, for figures and rollouts.
        training: What the stages before ended with, to which this one adds.
        folder: The stage's, for checkpoints and its adapter.
        settings: Those of the round, with the stage's own in their place.
        name: The stage's, in figures.
    """

    spec: RoundSpec
    settings: Config
    directory: Path
    training: Training
    trainers: Trainers
    adapters: EngineAdapters
    meter: Meter
    folder: Path
    name: str

    @property
    def parent(self) -> AdapterFiles | None:
        """The adapter that the stage starts from; None for the base model."""
        found = self.training.adapter
        return None if found is None else AdapterFiles.read(Path(found.path))

    @property
    def adapter(self) -> Path:
        """Where the stage's own will be."""
        return self.folder / ADAPTER_DIR

    def checkpoint(self, most: int | None = None) -> Path | None:
        """The last one that is whole, or that of at most so many steps."""
        found = [path for path in self._checkpoints() if most is None or steps_of(path) <= most]
        return next(filter(_is_whole, sorted(found, key=steps_of, reverse=True)), None)

    def begin(self, stage: Stage, steps: int, longest: int, most: int | None = None) -> int:
        """Let the trainer go on from the last checkpoint, or that of at most so many steps; those behind it are
        removed, because they will be written again. The stage has so many `steps`, `longest` is the maximum length of
        a completion in tokens. Returns how many steps the checkpoint contains."""
        found = self.checkpoint(most)
        done = steps_of(found) if found is not None else 0
        for path in self._checkpoints():
            if steps_of(path) > done:
                path.unlink()
        self.trainers.begin(stage, self.settings, steps, longest, self.parent)
        if found is not None:
            self.trainers.restore(found)
        return done

    def save_checkpoint(self, steps: int, last: int) -> None:
        """Save the state after so many steps of `last`, if it is time to. Raises TrainError if the worker is asked to
        end."""
        if steps % self.settings.training.save_steps and steps < last:
            return
        self.trainers.save(self.folder / CHECKPOINTS_DIR, steps)
        if (self.directory / END_FILE).exists():
            raise TrainError(
                "go on with the round",
                "the daemon, which is of another version, has asked its worker to end at this checkpoint",
                "The round is started again from here.",
                retryable=True,
            )

    def _checkpoints(self) -> list[Path]:
        return list((self.folder / CHECKPOINTS_DIR).glob("step-*.zip"))


def steps_of(checkpoint: Path) -> int:
    """The number of steps that a checkpoint contains."""
    return int(checkpoint.stem.removeprefix("step-"))


def _is_whole(checkpoint: Path) -> bool:
    """Whether all of its pieces are as they were written."""
    # What is wrong with a damaged archive has many errors.
    with contextlib.suppress(Exception), zipfile.ZipFile(checkpoint) as pieces:
        if pieces.testzip() is None:
            return True
    log.warning("%s is damaged: it is not used", checkpoint)
    return False


class StageItems:
    """Those of one stage, rendered by the engines. What it leaves out is noted in `work.training`."""

    def __init__(self, work: StageWork, engines: list[Any], collector: Collector) -> None:
        self.work, self.collector, self._engines = work, collector, engines
        self._settings, self._training = work.settings, work.training

    def replies(self, prompts: Sequence[Prompt]) -> tuple[list[RecordedReply], str]:
        """The replies to imitate; without any, the reason."""
        replies, refused = self._recorded([prompt.task for prompt in prompts if prompt.task.reply])
        self._note("SFT", replies, refused)
        why = f"none of {len(prompts)} tasks has a reply to train on"
        return replies, "" if replies else f"{why}: {in_one_clause(refused)}" if refused else why

    def measured(self, prompts: Sequence[Prompt]) -> list[RecordedReply]:
        """The replies of held-out prompts, of which only the loss is measured."""
        replies, self._training.unmeasured = self._recorded([each.task for each in prompts if each.task.reply])
        return replies

    def chosen(self, prompts: Sequence[Prompt], replies: list[RecordedReply]) -> list[RecordedReply]:
        """The replies that are chosen by their loss under the policy that the stage starts from; all if there is
        nothing to choose. A worker that is started again goes on with the choice of the first."""
        if (pool := self.work.spec.pool) is None:
            return replies
        lines = read_selection(self.work.directory)
        if not lines:
            settings = stage_settings(self._settings, "sft", len(replies))
            # Nothing of the measurement is left in the policy that is trained: its stage begins anew.
            about = settings, settings.training.steps, longest_of(replies), self.work.parent
            self.work.trainers.begin("sft", *about)
            found = self.work.trainers.nll([rows_of([reply]) for reply in replies])
            measured = zip(replies, found, strict=True)
            losses = {each.task_id: loss for each, loss in measured if loss is not None}
            tokens = {each.task_id: sum(len(sample.trained) for sample in each.samples) for each in replies}
            said = {each.task.task_id: each.task.exchange for each in prompts}
            texts = {task: text_of(exchange.history, exchange.query) for task, exchange in said.items()}
            lines = by_loss(pool, losses, texts, tokens, self.work.spec.seed)
            write_selection(self.work.directory, lines)
        outcomes = {line["task_id"]: line["outcome"] for line in lines}
        log.info("replies by their loss: %s", dict(Counter(outcomes.values())))
        return [each for each in replies if outcomes.get(each.task_id, "").startswith("chosen")]

    def pairs(self, prompts: Sequence[Prompt]) -> Pairs:
        """Pairs of better and worse replies: recorded ones of the prompts that have them, and rollouts of all others,
        by the policy that the stage starts from."""
        found, training = Pairs(), self._settings.training
        recorded = [prompt.task for prompt in prompts if prompt.task.has_pair]
        better: list[RecordedReply] = []
        if recorded:
            better, refused = self._recorded(recorded)
            worse, also = self._recorded([task.model_copy(update={"reply": task.rejected}) for task in recorded])
            chosen, rejected = ({reply.task_id: reply for reply in replies} for replies in (better, worse))
            refused = {task: f"its rejected reply: {why}" for task, why in also.items()} | refused
            found.add_recorded(recorded, chosen, rejected, refused)
        if others := [prompt for prompt in prompts if not prompt.task.has_pair]:
            count, rewards = math.ceil(len(others) / training.prompts_per_step), list[float]()
            planned = training.model_copy(update={"steps": count})
            settings = self._settings.model_copy(update={"training": planned})
            of_round = self.work.spec, settings, self.work.directory, others, self.collector
            steps = RoundSteps(*of_round, self._training.steps)
            adapter = self.work.adapters.load_saved(self._training.adapter)
            for batch in roll_out(steps, adapter, self.work.meter, count=count, stage=self.work.name):
                self._training.count(batch)
                batch.refuse_failed(training.max_undecided_share)
                batch.refuse_undecided(training.max_undecided_share)
                rewards += batch.rewards
                found.add_rollouts(batch, training.dpo.margin)
            self._training.rolled_out(training, count, mean(rewards), None)
        found.write(self.work.folder)
        if found.rollouts:
            log.info("not in a pair: %s", found.reasons)
        paired = {pair.task_id for pair in found.pairs}
        left_out = {task: why for task, why in found.left_out.items() if task not in paired}
        self._note("DPO", [reply for reply in better if reply.task_id in paired], left_out)
        return found

    def _note(self, stage: str, replies: Sequence[RecordedReply], left_out: Mapping[str, str]) -> None:
        """Keep why a stage leaves tasks out, and what of others it does not train on."""
        self._training.left_out |= left_out
        partly = {each.task_id: "; ".join(each.without) for each in replies if each.without}
        self._training.partly |= partly
        for task, why in left_out.items():
            log.warning("%s leaves %s out: %s", stage, task, why)
        if partly:
            log.warning("%s does not train on all of %d replies: %s", stage, len(partly), in_one_clause(partly))

    def _recorded(self, tasks: Sequence[RoundTask]) -> tuple[list[RecordedReply], dict[str, str]]:
        """The replies of tasks as samples, and why others are not trained on, by task. A reply with a sample that is
        too long is none: nothing is cut."""
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


def stage_settings(settings: Config, stage: Literal["sft", "dpo"], items: int) -> Config:
    """The settings with which a trainer trains on so many items in this stage: its learning rate and schedule, and
    for SFT those of GRPO that would change the loss."""
    own: SftSettings | DpoSettings = getattr(settings.training, stage)
    training = {
        "steps": own.epochs * math.ceil(items / own.batch_size),
        "learning_rate": own.learning_rate,
        "scheduler": own.scheduler,
        "warmup_steps": own.warmup_steps,
        **(LIKE_SFT if stage == "sft" else {}),
    }
    rollout = settings.rollout.model_copy(update={"temperature": 1.0})
    return settings.model_copy(update={"training": settings.training.model_copy(update=training), "rollout": rollout})
