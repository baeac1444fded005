"""How fast a step trains on rollouts of several turns: merged into one sample each, and as one sample per turn.

`python -m benchmarks.agents` reports it. Both have the same tokens to train on; one sample per turn repeats what the
turns before it had.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

from flywheel.config.file import Config
from flywheel.training.data.samples import CallTokens, TrainingRow, timelines, token_counts

POLICY: Final = Path(__file__).parent.parent / "demo" / "policy"
TURNS: Final = 5
PROMPT, GENERATED, OBSERVED = 200, 60, 60
"""Tokens of the question with its tools, of each message of the policy, and of what a tool answers."""
ROLLOUTS: Final = 8
CONTEXT: Final = 1024
VOCABULARY: Final = range(10, 300)


def merge_speedup(begin: Callable[[], None], quick: bool) -> dict[str, Any]:
    """Tokens trained per second in optimizer steps of both kinds, which take turns."""
    repeats = 1 if quick else 5
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    from transformers import AutoTokenizer

    from flywheel.training.optim.losses import made_loss
    from flywheel.training.optim.policy_step import PolicyStep
    from tests.factories.policy import load_policy

    steps = 2 * (repeats + 1)
    settings = Config.model_validate(
        {
            "training": {"steps": steps, "lora": {"r": 8}},
            "rollout": {"max_model_len": CONTEXT, "max_completion_tokens": TURNS * GENERATED},
        }
    )
    rollouts = [_rollout(seed) for seed in range(2 if quick else ROLLOUTS)]
    merged = _rows(rollouts, lambda calls: [calls])
    by_turn = _rows(rollouts, lambda calls: [[call] for call in calls])
    assert len(merged) == len(rollouts)
    assert token_counts(merged) == token_counts(by_turn)
    seconds: list[float] = []
    model = load_policy(str(POLICY), None, settings.training.lora, seed=1)
    tokenizer, longest = AutoTokenizer.from_pretrained(POLICY), TURNS * GENERATED
    loss = made_loss("grpo", model, settings, tokenizer, seed=1, compute_dtype=model.dtype, longest=longest)
    policy = PolicyStep(loss, settings, steps)
    begin()
    for step in range(steps):
        began = time.perf_counter()
        policy.step(by_turn if step % 2 else merged)
        seconds.append(time.perf_counter() - began)
    tokens = sum(token_counts(merged).values())
    # The first step of each kind warms up.
    fast, slow = median(seconds[2::2]), median(seconds[3::2])
    return {
        "merge_speedup": round(slow / fast, 2),
        "merged_tokens_per_second": round(tokens / fast),
        "by_turn_tokens_per_second": round(tokens / slow),
        "rollouts": len(rollouts),
        "trained_tokens": tokens,
        "merged_tokens": sum(len(row.sample.token_ids) for row in merged),
        "by_turn_tokens": sum(len(row.sample.token_ids) for row in by_turn),
    }


def _rollout(seed: int) -> list[CallTokens]:
    """Turns that follow each other, of random tokens."""
    drawn = random.Random(seed)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(drawn.choices(VOCABULARY, k=count))

    calls: list[CallTokens] = []
    prompt, identity = tokens(PROMPT), ("tools", "user")
    for _ in range(TURNS):
        message = tokens(GENERATED)
        calls.append(CallTokens(prompt, message, (-5.0,) * GENERATED, (None,) * GENERATED, identity, "assistant"))
        prompt, identity = (*prompt, *message, *tokens(OBSERVED)), (*identity, "assistant", "tool")
    return calls


def _rows(
    rollouts: Sequence[list[CallTokens]], divided: Callable[[list[CallTokens]], list[list[CallTokens]]]
) -> list[TrainingRow]:
    return [
        TrainingRow(number, sample, 1.0 if number % 2 else -1.0)
        for number, calls in enumerate(rollouts)
        for part in divided(calls)
        for sample in timelines(part).samples
    ]
