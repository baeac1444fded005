"""Supervised fine-tuning (SFT) on recorded replies, through the trainer that GRPO has.

A recorded reply is a row with advantage 1 and without engine: the loss of a batch is then the mean negative
log-likelihood of its tokens, at temperature 1, without clipping and without a KL term. Batches are drawn without
replacement in every epoch.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from flywheel.config import Config
from flywheel.training.data.round_progress import Meter, Metrics
from flywheel.training.data.samples import RecordedReply, TrainingRow

FIGURES = ("grad_norm", "learning_rate")


def sft_settings(settings: Config, replies: int) -> Config:
    """The settings with which the trainer does SFT on so many replies: those of GRPO that would change the loss are
    set to what makes it a mean over tokens."""
    sft = settings.training.sft
    training = {
        "steps": sft.epochs * math.ceil(replies / sft.batch_size),
        "learning_rate": sft.learning_rate,
        "scheduler": sft.scheduler,
        "warmup_steps": sft.warmup_steps,
        "beta": 0.0,
        "updates_per_batch": 1,
        "loss_type": "dapo",
        "importance": "truncated",
    }
    return settings.model_copy(
        update={
            "training": settings.training.model_copy(update=training),
            "rollout": settings.rollout.model_copy(update={"temperature": 1.0}),
        }
    )


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


class SftRun:
    """The steps of an SFT stage, as the trainer calls for them."""

    def __init__(
        self, settings: Config, directory: Path, replies: Sequence[RecordedReply], seed: int, before: int
    ) -> None:
        """Earlier stages took so many steps `before`, from which the numbers of these go on."""
        self._before = before
        sft = settings.training.sft
        self._steps, self._epochs = settings.training.steps, sft.epochs
        self._replies = replies
        self._batches = minibatches(len(replies), sft.batch_size, sft.epochs, seed)
        self._metrics = Metrics(directory, settings.training.tensorboard)
        self._meter = Meter(directory, steps=before + self._steps)
        self._meter.enter("training")
        self._started = time.monotonic()
        self.measure: Callable[[], float | None] = lambda: None
        """Measures the loss on held-out replies."""

    def rows(self, step: int) -> list[TrainingRow]:
        return rows_of([self._replies[number] for number in self._batches[step]])

    def report(self, step: int, logs: Mapping[str, float]) -> None:
        """Write the metrics line of a completed step, which counts from 1."""
        per_epoch = self._steps // self._epochs
        held_out = self.measure() if step % per_epoch == 0 else None
        now = time.monotonic()
        self._metrics.step(
            self._before + step,
            self._before + self._steps,
            {
                "stage": "sft",
                "epoch": step / per_epoch,
                "replies": len(self._batches[step - 1]),
                "loss": logs.get("rows/nll"),
                **({} if held_out is None else {"held_out_loss": held_out}),
                **{name: logs.get(name) for name in FIGURES},
                "entropy": logs.get("rows/entropy"),
                "trained_tokens": int(logs.get("rows/trained_tokens", 0)),
                "seconds": {"train": now - self._started},
            },
        )
        self._started = now
        self._meter.stepped(self._before + step, None, collecting_seconds=0.0)
