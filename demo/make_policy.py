"""Makes the demo's policy, the checkpoint in `demo/policy/`: `python -m demo.make_policy [DIRECTORY]`.

A Qwen3 of 0.6 million float32 parameters with a byte-level BPE of 384 tokens, made from nothing but the questions of
`demo.questions` and this file's seed in some minutes on two cores. It is supervised on answers that are boxed 30 % of
the time and right 88 % of the time, so that it knows how to do better than it does: what GRPO needs to show a gain.

Owns the recipe. Nothing else in the demo needs this module, or torch.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from demo.questions import SYSTEM_PROMPT, Question, questions, sample

SEED: Final = 20
BOXED_SHARE: Final = 0.3
RIGHT_SHARE: Final = 0.88
STEPS: Final = 1600
BATCH: Final = 64
LEARNING_RATE: Final = 3e-3
REPORT_EVERY: Final = 100

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
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


def make_tokenizer(rng: random.Random) -> PreTrainedTokenizerFast:
    def corpus() -> Iterator[str]:
        yield from ("system\n", "user\n", "assistant\n", SYSTEM_PROMPT)
        for question in questions():
            yield question.text
            yield answer(question, rng)

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        corpus(),
        trainers.BpeTrainer(
            vocab_size=384,
            special_tokens=[PAD, START, END],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token=PAD, eos_token=END, clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=384,
            hidden_size=128,
            intermediate_size=224,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            dtype="float32",
        )
    )
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True, temperature=1.0
    )
    return model


def encode(messages: list[dict[str, str]], tokenizer: PreTrainedTokenizerFast) -> tuple[list[int], list[int]]:
    """Token ids of a conversation, and labels that are -100 wherever the assistant does not speak."""
    ids: list[int] = []
    labels: list[int] = []
    for message in messages:
        head = tokenizer.encode(f"{START}{message['role']}\n", add_special_tokens=False)
        body = tokenizer.encode(f"{message['content']}{END}", add_special_tokens=False)
        tail = tokenizer.encode("\n", add_special_tokens=False)
        ids += head + body + tail
        spoken = body if message["role"] == "assistant" else [-100] * len(body)
        labels += [-100] * len(head) + spoken + [-100] * len(tail)
    return ids, labels


def batch(tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> dict[str, torch.Tensor]:
    # One length per batch: with mixed ones most of the work would be padding.
    turns = rng.choices((1, 2, 3), (0.8, 0.15, 0.05))[0]
    rows = [encode(conversation(turns, rng), tokenizer) for _ in range(BATCH)]
    width = max(len(ids) for ids, _ in rows)
    return {
        "input_ids": torch.tensor([ids + [tokenizer.pad_token_id] * (width - len(ids)) for ids, _ in rows]),
        "attention_mask": torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids, _ in rows]),
        "labels": torch.tensor([labels + [-100] * (width - len(labels)) for _, labels in rows]),
    }


def make(directory: Path) -> None:
    rng = random.Random(SEED)
    torch.manual_seed(SEED)
    tokenizer = make_tokenizer(rng)
    model = make_model(tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=STEPS, pct_start=0.05)
    model.train()
    for step in range(STEPS):
        loss = model(**batch(tokenizer, rng)).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % REPORT_EVERY == 0 or step == STEPS - 1:
            print(f"step {step:4d}  loss {loss.item():.3f}", flush=True)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Make the demo's tiny policy.")
    parser.add_argument("directory", type=Path, nargs="?", default=Path(__file__).parent / "policy")
    make(parser.parse_args().directory)
