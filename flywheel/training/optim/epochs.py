"""Stages that train on a fixed set of items in epochs: SFT on recorded replies, DPO on pairs of replies.

A recorded reply is a row of GRPO's trainer with advantage 1 and without engine: the loss of a batch is then the mean
negative log-likelihood of its tokens, at temperature 1, without clipping and without a KL term. Batches are drawn
without replacement in every epoch.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from flywheel.config.file import Config
from flywheel.config.training import DpoSettings, SftSettings
from flywheel.training.data.round_progress import Meter, Metrics
from flywheel.training.data.samples import Pair, RecordedReply, TrainingRow

Item = TypeVar("Item", RecordedReply, Pair)

LIKE_SFT = {"beta": 0.0, "updates_per_batch": 1, "loss_type": "dapo", "importance": "truncated"}
"""Settings of GRPO that make its loss a mean over tokens."""


def stage_settings(settings: Config, stage: Literal["sft", "dpo"], items: int) -> Config:
    """The settings with which a trainer trains on so many items in this stage: its learning rate and schedule, and
    for SFT those of GRPO that would change the loss."""
    own = _own(settings, stage)
    training = {
        "steps": own.epochs * math.ceil(items / own.batch_size),
        "learning_rate": own.learning_rate,
        "scheduler": own.scheduler,
        "warmup_steps": own.warmup_steps,
        **(LIKE_SFT if stage == "sft" else {}),
    }
    rollout = settings.rollout.model_copy(update={"temperature": 1.0})
    return settings.model_copy(update={"training": settings.training.model_copy(update=training), "rollout": rollout})


def _own(settings: Config, stage: Literal["sft", "dpo"]) -> SftSettings | DpoSettings:
    return settings.training.sft if stage == "sft" else settings.training.dpo


def rows_of(replies: Sequence[RecordedReply]) -> list[TrainingRow]:
    """The rows of a batch. A reply of several samples is one rollout."""
    return [TrainingRow(number, sample, 1.0) for number, reply in enumerate(replies) for sample in reply.samples]


def minibatches(count: int, size: int, epochs: int, seed: int) -> list[list[int]]:
    """Numbers below `count` in batches of `size`, the last of an epoch perhaps smaller. Each epoch has all of them,
    in an order that depends on the seed and the epoch."""
    batches = []
    for epoch in range(epochs):
        order = list(range(count))
        random.Random(f"{seed}/{epoch}").shuffle(order)
        batches += [order[start : start + size] for start in range(0, count, size)]
    return batches


class Epochs(Generic[Item]):
    """The steps of a stage, as the trainer calls for them."""

    def __init__(
        self,
        stage: Literal["sft", "dpo"],
        settings: Config,
        directory: Path,
        items: Sequence[Item],
        seed: int,
        before: int,
    ) -> None:
        """`settings` are those of the stage. Earlier steps of the round were so many, `before`, from which the
        numbers of these go on."""
        self._stage, self._before = stage, before
        self._items: Sequence[Item] = items
        own = _own(settings, stage)
        self._steps, self._epochs = settings.training.steps, own.epochs
        self._batches = minibatches(len(items), own.batch_size, own.epochs, seed)
        self._metrics = Metrics(directory)
        self._meter = Meter(directory, steps=before + self._steps)
        self._meter.enter("training")
        self._started = time.monotonic()
        self.measure: Callable[[], float | None] = lambda: None
        """Measures the loss on held-out replies."""

    def items(self, step: int) -> list[Item]:
        """Those of a step, which counts from 0."""
        return [self._items[number] for number in self._batches[step]]

    def report(self, step: int, logs: Mapping[str, float]) -> None:
        """Write the metrics line of a completed step, which counts from 1."""
        per_epoch = self._steps // self._epochs
        held_out = self.measure() if step % per_epoch == 0 else None
        now = time.monotonic()
        self._metrics.step(
            self._before + step,
            self._before + self._steps,
            {
                "stage": self._stage,
                "epoch": step / per_epoch,
                "replies" if self._stage == "sft" else "pairs": len(self._batches[step - 1]),
                **self._loss(logs),
                **({} if held_out is None else {"held_out_loss": held_out}),
                **{name: logs.get(name) for name in ("grad_norm", "learning_rate")},
                "entropy": logs.get("rows/entropy" if self._stage == "sft" else "entropy"),
                "seconds": {"train": now - self._started},
            },
        )
        self._started = now
        self._meter.stepped(self._before + step, None, collecting_seconds=0.0)

    def _loss(self, logs: Mapping[str, float]) -> dict[str, Any]:
        """The figures of the loss. For pairs, TRL's rewards are beta times the gain in log-probability over the
        reference; `margin` is that of the chosen reply minus that of the rejected one."""
        if self._stage == "sft":
            return {"loss": logs.get("rows/nll"), "trained_tokens": int(logs.get("rows/trained_tokens", 0))}
        names = {"chosen": "chosen", "rejected": "rejected", "margin": "margins", "accuracy": "accuracies"}
        return {"loss": logs.get("loss"), **{name: logs.get(f"rewards/{theirs}") for name, theirs in names.items()}}
