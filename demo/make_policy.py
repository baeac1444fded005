"""Makes the demo's policy, the checkpoint in `demo/policy/`: `python -m demo.make_policy [DIRECTORY]`.

A Qwen3 of 0.6 million float32 parameters, made from nothing but the questions of `flywheel.cli.demo.questions` and
this file's seed in some minutes on two cores. It is supervised on answers that are boxed 30 % of the time and right
88 % of the time, so that it knows how to do better than it does: what GRPO needs to show a gain.

Owns the recipe. Nothing else in the demo needs this module, or torch.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import torch

from demo.tiny_model import END, START, batch, make_model, make_tokenizer, row, supervise
from flywheel.cli.demo.questions import SYSTEM_PROMPT, Question, questions, sample

SEED: Final = 20
BOXED_SHARE: Final = 0.3
RIGHT_SHARE: Final = 0.88
STEPS: Final = 1600
BATCH: Final = 64
LEARNING_RATE: Final = 3e-3

SENTENCES: Final = ("{}", "It is {}.", "The answer is {}.")
CHAT_TEMPLATE: Final = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)


def answer(question: Question, rng: random.Random) -> str:
    """One supervised answer: mostly right, sometimes boxed."""
    value = question.answer
    if rng.random() >= RIGHT_SHARE:
        value = max(0, value + rng.choice((-10, -2, -1, 1, 2, 10)))
        value += value == question.answer
    number = f"\\boxed{{{value}}}" if rng.random() < BOXED_SHARE else str(value)
    return rng.choice(SENTENCES).format(number)


def conversation(turns: int, rng: random.Random) -> list[dict[str, str]]:
    """So many questions and answers, with and without the demo's system prompt."""
    messages = [{"role": "system", "content": SYSTEM_PROMPT}] if rng.random() < 0.7 else []
    for _ in range(turns):
        question = sample(rng)
        messages += [
            {"role": "user", "content": question.text},
            {"role": "assistant", "content": answer(question, rng)},
        ]
    return messages


def corpus(rng: random.Random) -> Iterator[str]:
    yield from ("system\n", "user\n", "assistant\n", SYSTEM_PROMPT)
    for question in questions():
        yield question.text
        yield answer(question, rng)


def pieces(messages: list[dict[str, str]]) -> Iterator[tuple[str, bool]]:
    """The conversation as the template renders it, with whether the assistant speaks."""
    for message in messages:
        yield f"{START}{message['role']}\n", False
        yield f"{message['content']}{END}", message["role"] == "assistant"
        yield "\n", False


def make(directory: Path) -> None:
    rng = random.Random(SEED)
    torch.manual_seed(SEED)
    tokenizer = make_tokenizer(corpus(rng), CHAT_TEMPLATE)
    model = make_model(tokenizer)

    def next_batch(_step: int) -> dict[str, torch.Tensor]:
        # One length per batch: with mixed ones most of the work would be padding.
        turns = rng.choices((1, 2, 3), (0.8, 0.15, 0.05))[0]
        return batch([row(pieces(conversation(turns, rng)), tokenizer) for _ in range(BATCH)], tokenizer)

    supervise(model, next_batch, steps=STEPS, learning_rate=LEARNING_RATE)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Make the demo's tiny policy.")
    parser.add_argument("directory", type=Path, nargs="?", default=Path(__file__).parent / "policy")
    make(parser.parse_args().directory)
