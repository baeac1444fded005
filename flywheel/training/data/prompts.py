"""Prompts of a round: which tasks can be asked, which prompts each step uses, and the seed of each rollout.

Has no model and no tokenizer: the rollout engine renders messages to tokens.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from flywheel.records.round import RoundTask
from flywheel.records.task import METADATA

NEEDED: Final = 0.99
"""The share of traced replies that are not longer than the longest rollout."""
TOLERANCE: Final = 16
"""Tolerance in tokens between a prompt and the recorded one: a template may contain the date."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A task with its rendered prompt, which of a task for the user's agent is only an example. Its traced reply had
    `needs` tokens (0: unknown); a rollout has at most `max_tokens` (0: as many as the server allows)."""

    task: RoundTask
    token_ids: tuple[int, ...]
    needs: int = 0
    max_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Asked:
    """The prompts of a round, and the reason for each excluded task, by id."""

    prompts: list[Prompt]
    left_out: dict[str, str]
    inexact: dict[str, str] = field(default_factory=dict)
    """Tasks whose prompt length differs from the recorded one."""


def asked(
    prompts: Sequence[Prompt],
    refused: Mapping[str, str],
    *,
    max_model_len: int,
    max_completion_tokens: int | None = None,
    by_reply: bool = False,
) -> Asked:
    """The prompts to train on: those that leave room for a completion. Without `max_completion_tokens`, that is the
    length of the traced reply, and rollouts are limited to the 99th percentile of traced replies or the rest of the
    context. `refused` are tasks that the chat template refuses. Rollouts of the user's agent have at most
    `max_completion_tokens` or `max_model_len` tokens in all of their calls. Of several tasks with one prompt the last
    is kept; with `by_reply`, which is for training on recorded replies, of those that have the same replies, too."""
    kept, left_out, inexact = _each_once(prompts, refused, by_reply=by_reply)
    longest = max_completion_tokens or longest_needed([prompt.needs for prompt in kept]) or max_model_len
    fitting: list[Prompt] = []
    for prompt in kept:
        if prompt.task.agent == "program":
            fitting.append(replace(prompt, max_tokens=max_completion_tokens or max_model_len))
            continue
        needed = max_completion_tokens or min(prompt.needs, longest) or 1
        if _has_room(prompt, max_model_len, needed, "rollout.max_model_len", left_out):
            room = max_model_len - len(prompt.token_ids)
            fitting.append(replace(prompt, max_tokens=min(longest, room)))
    return Asked(fitting, left_out, inexact)


def asked_as_served(prompts: Sequence[Prompt], refused: Mapping[str, str], *, context: int) -> Asked:
    """The prompts that a server with this context (in tokens) would answer."""
    kept, left_out, inexact = _each_once(prompts, refused)
    # Two tokens: measuring one token of an answer needs one more.
    fitting = [
        each
        for each in kept
        if each.task.agent == "program" or _has_room(each, context, 2, "the server's context", left_out)
    ]
    return Asked(fitting, left_out, inexact)


def longest_needed(needs: Sequence[int]) -> int:
    """The 99th percentile of the known lengths, itself one of them; 0 when none is known."""
    known = sorted(length for length in needs if length > 0)
    return known[math.ceil(NEEDED * len(known)) - 1] if known else 0


def _each_once(
    prompts: Sequence[Prompt], refused: Mapping[str, str], *, by_reply: bool = False
) -> tuple[list[Prompt], dict[str, str], dict[str, str]]:
    """The last occurrence of each prompt, because repetitions are no independent evidence; the reasons of excluded
    tasks; and those whose length differs from the recorded prompt."""
    inexact = {
        prompt.task.task_id: f"its prompt has {len(prompt.token_ids)} tokens, and the model was sent {sent}"
        for prompt in prompts
        if (sent := prompt.task.prompt_tokens)
        and abs(len(prompt.token_ids) - sent) > TOLERANCE
        and prompt.task.agent != "program"
    }
    exact = [prompt for prompt in prompts if prompt.task.task_id not in inexact]
    identities = [_identity(prompt, by_reply=by_reply) for prompt in exact]
    newest = dict(zip(identities, exact, strict=True))
    left_out = {task: f"the chat template refuses it ({why})" for task, why in refused.items()} | inexact
    kept: list[Prompt] = []
    for prompt, identity in zip(exact, identities, strict=True):
        last = newest[identity]
        if last is prompt:
            kept.append(prompt)
        else:
            left_out[prompt.task.task_id] = f"its prompt is that of {last.task.task_id}"
    return kept, left_out, inexact


def _identity(prompt: Prompt, *, by_reply: bool) -> object:
    """Equal for prompts of which one is a repetition; with `by_reply` only if their replies are equal as well. The
    user's agent gets the whole task: of that, everything counts but what its trace says of itself."""
    task = prompt.task
    if by_reply:
        return prompt.token_ids, json.dumps([task.reply, task.rejected], sort_keys=True, default=str)
    if task.agent != "program":
        return prompt.token_ids
    asked = {name: value for name, value in task.line.items() if name not in ("task_id", "answer", "metadata")}
    own = {name: value for name, value in (task.line.get("metadata") or {}).items() if name not in METADATA}
    return json.dumps([task.exchange.query, task.exchange.line, task.prompt, asked, own], sort_keys=True, default=str)


def _has_room(prompt: Prompt, context: int, needed: int, name: str, left_out: dict[str, str]) -> bool:
    """Whether this many tokens fit after the prompt; otherwise the reason is recorded."""
    length, room = len(prompt.token_ids), context - needed
    if length > room:
        left_out[prompt.task.task_id] = f"its prompt has {length} tokens, and {name} leaves room for {room}"
    return length <= room


def schedule(count: int, *, per_step: int, steps: int, seed: int) -> list[list[int]]:
    """Which of `count` prompts each step uses: the least used ones, ties broken at random. Every prompt is used
    equally often (within one), and no prompt twice in a step while there are others."""
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
    """A seed in 0…2³¹-1 that depends only on the parts, not on process, order or time."""
    digest = hashlib.sha256("\0".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1
