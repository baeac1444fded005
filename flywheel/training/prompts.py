"""Prompts of a round: token ids made once, which of them a step takes, and the seed of each rollout.

Owns no model and no tokenizer: the rollout engine turns messages into tokens.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flywheel.round import RoundTask


@dataclass(frozen=True, slots=True)
class Prompt:
    """A task with its prompt as the model's own chat template renders it, ready for a reply."""

    task: RoundTask
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Asked:
    """The prompts that a round asks, and why it leaves out each other task, by its id."""

    prompts: list[Prompt]
    left_out: dict[str, str]


def asked(
    prompts: Sequence[Prompt], refused: Mapping[str, str], *, max_model_len: int, max_completion_tokens: int
) -> Asked:
    """The prompts that leave room for a whole completion, each once, where it came last: the same one again is no
    evidence of its own. `refused` are tasks of which the chat template makes none."""
    room = max_model_len - max_completion_tokens
    newest = {prompt.token_ids: prompt for prompt in prompts}
    kept: list[Prompt] = []
    left_out = {task: f"the chat template refuses it ({why})" for task, why in refused.items()}
    for prompt in prompts:
        task, length, last = prompt.task.task_id, len(prompt.token_ids), newest[prompt.token_ids]
        if length > room:
            left_out[task] = f"its prompt has {length} tokens, and rollout.max_model_len leaves room for {room}"
        elif last is not prompt:
            left_out[task] = f"its prompt is that of {last.task.task_id}"
        else:
            kept.append(prompt)
    return Asked(kept, left_out)


def schedule(count: int, *, per_step: int, steps: int, seed: int) -> list[list[int]]:
    """Which of `count` prompts each step takes: those that were taken least, chance deciding between equals. So every
    prompt is taken equally often, within one, and none again in a step while there are others."""
    if count < 1:
        raise ValueError("there is no prompt to schedule")
    rng = random.Random(seed)
    taken = [0] * count
    plan = []
    for _ in range(steps):
        step: list[int] = []
        while len(step) < per_step:
            order = sorted(range(count), key=lambda index: (taken[index], rng.random()))
            for index in order[: per_step - len(step)]:
                taken[index] += 1
                step.append(index)
        plan.append(step)
    return plan


def seed_of(*parts: int | str) -> int:
    """A seed in 0…2³¹-1 that depends on all parts, and on nothing else: not on the process, the order or the time."""
    digest = hashlib.sha256("\0".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1
