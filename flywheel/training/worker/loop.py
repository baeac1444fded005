"""The steps of a stage: what a step trains on, a step of the trainer, its figures, a checkpoint.

`Reinforcement` is GRPO on rollouts; `Epochs` is SFT on recorded replies, or DPO on pairs. The worker has the loop and
writes all files of it; the trainer knows rows, optimizer and bytes, and the engines know prompts and adapters.

A stage that an earlier worker has begun goes on from its last checkpoint. The complete steps behind it are trained
again from their stored rollouts.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Generic, Literal, TypeVar

from flywheel.config.training import Stage
from flywheel.training.data.prompts import Prompt
from flywheel.training.data.rollout import LoadedAdapter, RolloutBatch, mean
from flywheel.training.data.rollout_file import step_files
from flywheel.training.data.round_progress import Metrics, read_steps
from flywheel.training.data.samples import Pair, RecordedReply, TrainingRow, longest_of, minibatches, rows_of
from flywheel.training.data.step_figures import of_items, of_rollouts
from flywheel.training.engine.policy import appear
from flywheel.training.optim.collector import Collector
from flywheel.training.optim.round_steps import RoundSteps
from flywheel.training.optim.stage_checks import (
    IN_A_ROW,
    CollapsedError,
    RoundRefusedError,
    StageChecks,
    UntrainedError,
)
from flywheel.training.worker.processes import refuse_not_finite
from flywheel.training.worker.stage import StageItems, StageWork, stage_settings, steps_of

log = logging.getLogger("flywheel.training.worker")

Batch = TypeVar("Batch")


class Loop(ABC, Generic[Batch]):
    """The loop of one stage."""

    def __init__(self, stage: Stage, work: StageWork, longest: int) -> None:
        """`longest` is the number of tokens of the longest completion."""
        self.stage, self.work, self._longest = stage, work, longest
        self.steps, self.before = work.settings.training.steps, work.training.steps
        """Earlier steps of the round were so many, `before`, from which the numbers of these go on."""
        self._metrics = Metrics(work.directory)
        self._step_began = 0.0
        self.trained = 0
        """How many steps had something to train."""
        self.with_gradient: set[str] = set()
        """Ids of the tasks that were trained on."""
        self.refusal = self.ended = ""
        """Why there is no adapter, or why training ended early."""

    def run(self) -> None:
        """Take all steps, and write the adapter after the last one. Raises FlywheelError."""
        self.take_steps()
        self.keep_adapter()

    def take_steps(self) -> None:
        for step in range(self.begin(), self.steps):
            batch = self.collect(step)
            figures = self.work.trainers.step(self.items(step, batch))
            self.record(step, batch, figures)
            refuse_not_finite(step + 1, figures)
            self.work.save_checkpoint(step + 1, self.steps)

    @abstractmethod
    def collect(self, step: int) -> Batch:
        """What a step, counted from 0, has."""

    @abstractmethod
    def items(self, step: int, batch: Batch) -> Sequence[Any]:
        """What of it is trained on."""

    @abstractmethod
    def record(self, step: int, batch: Batch, figures: Mapping[str, float]) -> None:
        """Write the figures of a step that was taken."""

    @property
    def most_steps(self) -> int | None:
        """The last checkpoint that it can go on from, in steps; None if any."""
        return None

    def begin(self) -> int:
        """Let the trainer go on from its last usable checkpoint. Returns how many steps that contains."""
        done = self.work.begin(self.stage, self.steps, self._longest, self.most_steps)
        self._step_began = time.monotonic()
        return done

    def keep_adapter(self) -> None:
        appear(self.work.adapter, self.work.trainers.write_adapter)

    def _since_last_step(self) -> float:
        """Seconds since the last step, or since the first one began."""
        began, self._step_began = self._step_began, time.monotonic()
        return self._step_began - began


class Reinforcement(Loop[RolloutBatch]):
    """GRPO on rollouts of prompts. With `training.overlap`, engines generate the rollouts of the next step, by the
    weights that they have, while those of a step are judged and trained on."""

    def __init__(self, work: StageWork, prompts: Sequence[Prompt], collector: Collector) -> None:
        super().__init__("grpo", work, max(prompt.max_tokens for prompt in prompts))
        self._collector = collector
        self._rollouts = RoundSteps(work.spec, work.settings, work.directory, prompts, collector, self.before)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="generate")
        self._ahead: dict[int, Future[Callable[[], RolloutBatch]]] = {}
        self._loaded: list[LoadedAdapter] = []
        self._seconds: dict[str, float] = {}
        self._judge_seconds = 0.0
        self._checks = StageChecks(work.settings)
        self._done = self._taken = 0
        self.reward_first: float | None = None
        self.reward_last: float | None = None

    def run(self) -> None:
        """As of every loop; it may also end early, or without an adapter. Raises FlywheelError."""
        try:
            self.take_steps()
        except CollapsedError as reason:
            self._take_back(str(reason))
        except UntrainedError as reason:
            self.ended = str(reason)
        except RoundRefusedError as reason:
            self.refusal = str(reason)
        finally:
            self.close()
        if not self.refusal and not self.trained:
            self.refusal = self.ended or self._checks.untrained
        if not self.refusal and not self.work.adapter.exists():
            self.keep_adapter()
        while self._loaded:
            self.work.adapters.unload(self._loaded.pop())
        # Rollouts of a step behind the last one may be stored, too.
        taken = max(self._taken, sum(int(path.stem) > self.before for path in step_files(self.work.directory)))
        self.work.training.rolled_out(self.work.settings.training, taken, self.reward_first, self.reward_last)

    def close(self) -> None:
        """End what runs ahead. An engine dies of a request for an adapter that is unloaded meanwhile."""
        self._collector.close()
        self._thread.shutdown(wait=True, cancel_futures=True)

    def begin(self) -> int:
        done = super().begin()
        self._metrics.remove(self.work.name, self.before + len(self._rollouts.stored))
        self.recall(done)
        self._step_began = time.monotonic()
        return done

    @property
    def most_steps(self) -> int | None:
        """The last checkpoint that it can go on from, in steps; None if any. Rollouts of the first step that is not
        stored are by the weights before it. With overlap, they are by those before the last stored one, and some of
        them are perhaps graded."""
        stored = len(self._rollouts.stored)
        return None if stored == self.steps else max(0, stored - self.work.settings.training.overlap)

    def recall(self, done: int) -> None:
        """Count the steps that the checkpoint contains by their stored rollouts."""
        entropies = {line["step"]: line.get("entropy") for line in read_steps(self.work.directory)} if done else {}
        for step in range(done):
            batch = self.collect(step)
            self.items(step, batch)
            self._count(step, batch)
            self._checks.recalled(batch, entropies.get(self.before + step + 1))
        if done:
            log.info("%s goes on from its checkpoint after step %d", self.work.spec.round_id, self.before + done)
        now = {"step": self.before + done, "reward_first": self.reward_first, "reward": self.reward_last}
        self.work.meter.enter("training", self._rollouts.count, steps=self.before + self.steps, **now)

    def collect(self, step: int) -> RolloutBatch:
        """The graded rollouts of a step: those that an earlier worker has stored, or new ones."""
        began = time.monotonic()
        until = min(step + self.work.settings.training.overlap, self.steps - 1)
        missing = [each for each in range(step, until + 1) if each not in self._rollouts.stored]
        if new := [each for each in missing if each not in self._ahead]:
            adapter = self._load()
            for each in new:
                self._ahead[each] = self._thread.submit(self._rollouts.generate, each, adapter)
        asked = time.monotonic()
        ahead = self._ahead.pop(step, None)
        generated = ahead.result() if ahead is not None else self._rollouts.generate(step, None)
        batch = self._rollouts.graded(step, generated)
        taken = time.monotonic()
        ended = min(max(asked, batch.generated_at or asked), taken)
        self._seconds = {"sync": asked - began, "generate": ended - asked, "grade": taken - ended}
        return batch

    def _load(self) -> LoadedAdapter:
        """Load the current weights into the engines, which may be generating by those before."""
        files = self.work.trainers.adapter()
        while len(self._loaded) > self.work.settings.training.overlap:
            self.work.adapters.unload(self._loaded.pop(0))
        self._loaded.append(self.work.adapters.load(f"{self.work.spec.round_id}-step", files))
        return self._loaded[-1]

    def items(self, step: int, batch: RolloutBatch) -> list[TrainingRow]:
        """Raises RoundRefusedError when the round must end after these rollouts, and TrainError."""
        training = self.work.settings.training
        self._taken = step + 1
        self.work.training.count(batch)
        try:
            self._checks.rolled_out(batch)
        except RoundRefusedError:
            self._write_figures(step, batch, {})
            raise
        rows = batch.rows(training.scale_rewards, mask_truncated=training.mask_truncated)
        self.with_gradient |= {batch.rollouts[row.rollout].request.prompt.task.task_id for row in rows}
        self._checks.begun(self.before + step + 1, batch, rows)
        return rows

    def record(self, step: int, batch: RolloutBatch, figures: Mapping[str, float]) -> None:
        """Raises RoundRefusedError when the policy has collapsed or had nothing to train, and TrainError."""
        self._write_figures(step, batch, figures)
        self._count(step, batch)
        self.work.meter.stepped(self.before + step + 1, self.reward_last)
        self._checks.trained(batch, figures)

    def _count(self, step: int, batch: RolloutBatch) -> None:
        self._done = step + 1
        self.trained += not self._checks.untrained_in_a_row
        self.reward_last = mean(batch.rewards)
        self.reward_first = self.reward_first if step else self.reward_last

    def _write_figures(self, step: int, batch: RolloutBatch, figures: Mapping[str, float]) -> None:
        """Write the metrics line of a step. Without `figures`, it was not trained on."""
        seconds = {**self._seconds, "train": max(0.0, self._since_last_step() - sum(self._seconds.values()))}
        judged, self._judge_seconds = self._judge_seconds, self._collector.judge_seconds
        line = of_rollouts(batch, figures, self.work.settings, seconds, self._judge_seconds - judged)
        self._metrics.step(self.before + step + 1, self.before + self.steps, {**line, "stage": self.work.name})

    def _take_back(self, reason: str) -> None:
        """Keep the adapter before the collapse, if there is one and the gate may have it."""
        # The rollouts of the first of these steps are already by weights that have collapsed.
        good = self.work.checkpoint(self._done - IN_A_ROW - 1 - self.work.settings.training.overlap)
        if self.work.settings.training.on_collapse != "gate" or good is None:
            self.refusal = reason
            return
        self.ended = f"{reason}; its adapter is that of step {steps_of(good)}"
        self.work.trainers.restore(good)


class Epochs(Loop[list[Any]]):
    """SFT on recorded replies, or DPO on pairs, in epochs."""

    def __init__(
        self,
        stage: Literal["sft", "dpo"],
        work: StageWork,
        items: Sequence[RecordedReply] | Sequence[Pair],
        held_out: Sequence[RecordedReply] = (),
    ) -> None:
        """`held_out` are replies of which only the loss is measured, after each epoch."""
        work = replace(work, settings=stage_settings(work.settings, stage, len(items)))
        super().__init__(stage, work, longest_of(items))
        self._items, self._held_out, own = list[Any](items), held_out, getattr(work.settings.training, stage)
        self._batches, self._epochs = minibatches(len(items), own.batch_size, own.epochs, work.spec.seed), own.epochs

    def run(self) -> None:
        super().run()
        self.trained = self.steps
        self.work.training.steps += self.steps
        self.with_gradient = {item.task_id for item in self._items}

    def begin(self) -> int:
        self.work.meter.enter("training", steps=self.before + self.steps)
        return super().begin()

    def collect(self, step: int) -> list[Any]:
        return [self._items[number] for number in self._batches[step]]

    def items(self, step: int, batch: list[Any]) -> Sequence[Any]:
        return rows_of(batch) if self.stage == "sft" else batch

    def record(self, step: int, batch: list[Any], figures: Mapping[str, float]) -> None:
        per_epoch, number = self.steps // self._epochs, self.before + step + 1
        line = of_items(self.stage, (step + 1) / per_epoch, len(batch), figures)
        if self._held_out and (step + 1) % per_epoch == 0:
            line["held_out_loss"] = self.work.trainers.nll([rows_of(self._held_out)])[0]
        line["seconds"] = {"train": self._since_last_step()}
        self._metrics.step(number, self.before + self.steps, {**line, "stage": self.work.name})
        self.work.meter.stepped(number, None)


def loop_of(
    stage: Stage, items: StageItems, prompts: Sequence[Prompt], held_out: Sequence[Prompt]
) -> tuple[Loop[Any] | None, str]:
    """The loop of a stage; without anything to train on, the reason. `held_out` are prompts of whose replies SFT
    measures the loss."""
    if stage == "grpo":
        return (
            (Reinforcement(items.work, prompts, items.collector), "") if prompts else (None, "no task is left for it")
        )
    if stage == "dpo":
        found = items.pairs(prompts)
        why = ": ".join(filter(None, (f"none of {len(prompts)} tasks has a better and a worse reply", found.reasons)))
        return (Epochs("dpo", items.work, found.pairs), "") if found.pairs else (None, why)
    replies, why = items.replies(prompts)
    if why:
        return None, why
    measured, chosen = items.measured(held_out), items.chosen(prompts, replies)
    why = f"none of {len(replies)} replies is left by its loss"
    return (Epochs("sft", items.work, chosen, measured), "") if chosen else (None, why)
