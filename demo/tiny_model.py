"""What the recipes of the demo's policies share: a small tokenizer, a Qwen3 of 0.6 million parameters, supervision.

Owns sizes and the training loop; what a policy is taught is its recipe's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

VOCABULARY: Final = 384
REPORT_EVERY: Final = 100
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

Row = tuple[list[int], list[int]]
"""Token ids, and labels that are -100 wherever the assistant does not speak."""


def make_tokenizer(corpus: Iterator[str], chat_template: str, words: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """A byte-level BPE with single digits. Each of `words` is one token, and no special one."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        corpus,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY - len(words),
            special_tokens=[PAD, START, END],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    bpe.add_tokens([AddedToken(word, normalized=False, special=False) for word in words])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token=PAD, eos_token=END, clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY,
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


def row(pieces: Iterator[tuple[str, bool]], tokenizer: PreTrainedTokenizerFast) -> Row:
    """A conversation in pieces, each with whether the assistant speaks it."""
    ids: list[int] = []
    labels: list[int] = []
    for text, spoken in pieces:
        encoded = tokenizer.encode(text, add_special_tokens=False)
        ids += encoded
        labels += encoded if spoken else [-100] * len(encoded)
    return ids, labels


def batch(rows: Sequence[Row], tokenizer: PreTrainedTokenizerFast) -> dict[str, torch.Tensor]:
    width = max(len(ids) for ids, _ in rows)
    return {
        "input_ids": torch.tensor([ids + [tokenizer.pad_token_id] * (width - len(ids)) for ids, _ in rows]),
        "attention_mask": torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids, _ in rows]),
        "labels": torch.tensor([labels + [-100] * (width - len(labels)) for _, labels in rows]),
    }


def supervise(
    model: Qwen3ForCausalLM,
    next_batch: Callable[[int], dict[str, torch.Tensor]],
    *,
    steps: int,
    learning_rate: float,
) -> None:
    """One cycle of AdamW. `next_batch` is given the step, from 0."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total_steps=steps, pct_start=0.05)
    model.train()
    for step in range(steps):
        loss = model(**next_batch(step)).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % REPORT_EVERY == 0 or step == steps - 1:
            print(f"step {step:4d}  loss {loss.item():.3f}", flush=True)
