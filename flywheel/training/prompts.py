"""Prompts of a round: token ids made once, which of them a step takes, and the seed of each rollout.

Owns no model and no tokenizer: the rollout engine turns messages into tokens.
"""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from flywheel.round import RoundTask


@dataclass(frozen=True, slots=True)
class Prompt:
    """A task with its prompt as the model's own chat template renders it, ready for a reply."""

    task: RoundTask
    token_ids: tuple[int, ...]


def fitting(prompts: Sequence[Prompt], *, max_model_len: int, max_completion_tokens: int) -> list[Prompt]:
    """The prompts that leave room for a whole completion."""
    room = max_model_len - max_completion_tokens
    return [prompt for prompt in prompts if len(prompt.token_ids) <= room]


def schedule(count: int, *, per_step: int, steps: int, seed: int) -> list[list[int]]:
    """Which of `count` prompts each step takes: every prompt is taken equally often (within one), and no prompt
    twice in a step while there are enough different ones."""
    if count < 1:
        raise ValueError("there is no prompt to schedule")
    stream = _shuffled_for_ever(count, seed)
    waiting: deque[int] = deque()
    plan = []
    for _ in range(steps):
        chosen: list[int] = []
        passed: list[int] = []
        while len(chosen) < per_step:
            index = waiting.popleft() if waiting else next(stream)
            # A prompt that comes round again within the step waits for the next one.
            if index in chosen and len(set(chosen)) < min(count, per_step):
                passed.append(index)
            else:
                chosen.append(index)
        waiting.extendleft(reversed(passed))
        plan.append(chosen)
    return plan


def _shuffled_for_ever(count: int, seed: int) -> Iterator[int]:
    rng = random.Random(seed)
    order = list(range(count))
    while True:
        rng.shuffle(order)
        yield from order


def seed_of(*parts: int | str) -> int:
    """A seed in 0…2³¹-1 that depends on all parts, and on nothing else: not on the process, the order or the time."""
    digest = hashlib.sha256("\0".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1
