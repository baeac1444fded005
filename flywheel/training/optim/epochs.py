"""Stages that train on a fixed set of items in epochs: SFT on recorded replies, DPO on pairs of replies.

A recorded reply is a row of GRPO's trainer with advantage 1 and without engine: the loss of a batch is then the mean
negative log-likelihood of its tokens, at temperature 1, without clipping and without a KL term. Batches are drawn
without replacement in every epoch.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Literal

from flywheel.config.file import Config
from flywheel.config.training import DpoSettings, SftSettings
from flywheel.training.data.samples import Pair, RecordedReply, TrainingRow

LIKE_SFT = {"beta": 0.0, "updates_per_batch": 1, "loss_type": "dapo", "importance": "truncated"}
"""Settings of GRPO that make its loss a mean over tokens."""


def stage_settings(settings: Config, stage: Literal["sft", "dpo"], items: int) -> Config:
    """The settings with which a trainer trains on so many items in this stage: its learning rate and schedule, and
    for SFT those of GRPO that would change the loss."""
    own = own_settings(settings, stage)
    training = {
        "steps": own.epochs * math.ceil(items / own.batch_size),
        "learning_rate": own.learning_rate,
        "scheduler": own.scheduler,
        "warmup_steps": own.warmup_steps,
        **(LIKE_SFT if stage == "sft" else {}),
    }
    rollout = settings.rollout.model_copy(update={"temperature": 1.0})
    return settings.model_copy(update={"training": settings.training.model_copy(update=training), "rollout": rollout})


def own_settings(settings: Config, stage: Literal["sft", "dpo"]) -> SftSettings | DpoSettings:
    """The section of the settings that is the stage's own."""
    return settings.training.sft if stage == "sft" else settings.training.dpo


def rows_of(replies: Sequence[RecordedReply]) -> list[TrainingRow]:
    """The rows of a batch. A reply of several samples is one rollout."""
    return [TrainingRow(number, sample, 1.0) for number, reply in enumerate(replies) for sample in reply.samples]


def longest_of(items: Sequence[RecordedReply] | Sequence[Pair]) -> int:
    """Number of tokens of the longest recorded reply; 0 for pairs, whose loss does not depend on it."""
    lengths = (len(sample.token_ids) for item in items for sample in getattr(item, "samples", ()))
    return max(lengths, default=0)


def minibatches(count: int, size: int, epochs: int, seed: int) -> list[list[int]]:
    """Numbers below `count` in batches of `size`, the last of an epoch perhaps smaller. Each epoch has all of them,
    in an order that depends on the seed and the epoch."""
    batches = []
    for epoch in range(epochs):
        order = list(range(count))
        random.Random(f"{seed}/{epoch}").shuffle(order)
        batches += [order[start : start + size] for start in range(0, count, size)]
    return batches
