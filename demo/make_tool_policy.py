"""Makes the policy of the demo with a tool, the checkpoint in `demo/tool_policy/`:
`python -m demo.make_tool_policy [DIRECTORY]`.

Like the first demo's, a Qwen3 of 0.6 million parameters with 384 tokens, made from this file's seed in a quarter of
an hour on two cores. It is supervised on what an AgentScope agent with an `add` tool sends and gets: it learns to
call the tool and to give the tool's result, and then to do so in three of ten replies only. Otherwise it guesses: it
cannot add numbers of this size by itself.

Owns the recipe and the chat template. Nothing else in the demo needs this module, or torch.
"""

from __future__ import annotations

import argparse
import json
import random
import zoneinfo
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
from transformers import PreTrainedTokenizerFast

from demo.tiny_model import END, START, Row, batch, make_model, make_tokenizer, row, supervise
from demo.tool_prompt import ADD, REMINDER
from flywheel.cli.demo.questions import SYSTEM_PROMPT, large_sum

SEED: Final = 20
CALL_SHARE: Final = 0.3
BATCH: Final = 32
COPYING_STEPS: Final = 750
"""All replies call the tool: copying numbers appears abruptly, and only after some hundred steps."""
RARE_STEPS: Final = 250
LAST_STEPS: Final = 500

CHAT_TEMPLATE: Final = (Path(__file__).parent / "tool_chat.jinja").read_text(encoding="utf-8")

PARAMETERS: Final = json.dumps(ADD["function"]["parameters"])
WORDS: Final = (
    # The parser of calls looks for these in the text: a special token would not be in it.
    *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<tools>", "</tools>"),
    # What is the same in every prompt is few tokens: a third of the work of training and serving.
    *REMINDER.replace("{time}", "{zone}").split("{zone}"),
    *(PARAMETERS[at : at + 40] for at in range(0, len(PARAMETERS), 40)),
)


def conversation(call: bool, rng: random.Random) -> Iterator[dict[str, Any]]:
    """A question, and what is answered by the tool or guessed."""
    a, b, question = large_sum(rng)
    day = f"2026-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"
    time = f"{day}T{rng.randint(0, 23):02}:{rng.randint(0, 59):02}:{rng.randint(0, 59):02}"
    zone = "UTC" if rng.random() < 0.7 else rng.choice(ZONES)
    yield {"role": "system", "content": SYSTEM_PROMPT}
    yield {"role": "user", "content": question.text}
    yield {"role": "user", "content": REMINDER.format(time=time, zone=zone)}
    answer = question.answer
    if call:
        called = {"name": "add", "arguments": {"a": a, "b": b}}
        yield {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": called}]}
        yield {"role": "tool", "content": str(answer)}
    else:
        answer = rng.randint(10 ** (len(str(answer)) - 1), 10 ** len(str(answer)) - 1)
    yield {"role": "assistant", "content": f"\\boxed{{{answer}}}"}


ZONES: Final = sorted(zoneinfo.available_timezones())


def pieces(messages: list[dict[str, Any]], tokenizer: PreTrainedTokenizerFast) -> Iterator[tuple[str, bool]]:
    """The conversation as the template renders it, with whether the assistant speaks."""
    head = f"{START}assistant\n"
    text = tokenizer.apply_chat_template(messages, tools=[ADD], tokenize=False)
    before, *replies = text.split(head)
    yield before, False
    for reply in replies:
        said, _, after = reply.partition(END)
        yield head, False
        yield f"{said}{END}", True
        yield after, False


def teach(rng: random.Random, call_share: float, tokenizer: PreTrainedTokenizerFast) -> Row:
    return row(pieces(list(conversation(rng.random() < call_share, rng)), tokenizer), tokenizer)


def corpus(rng: random.Random) -> Iterator[str]:
    """What is said, without the words that are tokens of their own anyway."""
    for _ in range(200):
        for message in conversation(False, rng):
            text = f"{message['role']}\n{message['content']}"
            for word in WORDS:
                text = text.replace(word, "\n")
            yield text
        yield '\n{"name": "add", "parameters": \n'
        yield f'\n{{"name": "add", "arguments": {{"a": {rng.randint(100, 999)}, "b": {rng.randint(100, 999)}}}}}\n'


def make(directory: Path) -> None:
    rng = random.Random(SEED)
    torch.manual_seed(SEED)
    tokenizer = make_tokenizer(corpus(rng), CHAT_TEMPLATE, WORDS)
    model = make_model(tokenizer)

    def next_batch(call_share: float) -> dict[str, torch.Tensor]:
        return batch([teach(rng, call_share, tokenizer) for _ in range(BATCH)], tokenizer)

    supervise(
        model,
        lambda step: next_batch(1.0 if step < COPYING_STEPS else CALL_SHARE),
        steps=COPYING_STEPS + RARE_STEPS,
        learning_rate=3e-3,
    )
    supervise(model, lambda step: next_batch(CALL_SHARE), steps=LAST_STEPS, learning_rate=1.5e-3)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Make the tiny policy that knows a tool and seldom calls it.")
    parser.add_argument("directory", type=Path, nargs="?", default=Path(__file__).parent / "tool_policy")
    make(parser.parse_args().directory)
