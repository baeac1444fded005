"""TRL's DPO on pairs of token sequences of our own, each with a mask of the tokens that the policy wrote.

TRL keeps the loss, the reference adapter, the optimizer loop and reporting. `PairTrainer` replaces what TRL would
render, mask and truncate: its own mask is 1 on everything behind the prompt, also on what tools answered.

The reference is the policy that the stage starts from: TRL copies the adapter of the model that it is given. Sources
of the losses: DPO (arXiv 2305.18290), conservative DPO for `label_smoothing` (E. Mitchell, 2023), SLiC-HF for
`hinge` (arXiv 2305.10425), and IPO (arXiv 2310.12036), which TRL divides by the number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from trl import DPOConfig, DPOTrainer

from flywheel.config.file import Config
from flywheel.config.training import DpoSettings
from flywheel.training.data.samples import Pair, micro_batches
from flywheel.training.engine.policy import adapter_dtype_kept
from flywheel.training.optim.grpo import AdapterCheckpoints, shared_arguments
from flywheel.training.optim.out_of_memory import fitting, micro_batch
from flywheel.training.optim.ranks import add_gradients, by_itself, total

PairBatch = dict[str, torch.Tensor]
"""`input_ids`, `attention_mask` and `completion_mask`, each (2B, T): B chosen replies, then their rejected ones."""
MEANS: Final = ("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins")
"""TRL's figures of a micro-batch that are means over its pairs."""


class PairTrainer(AdapterCheckpoints, DPOTrainer):  # type: ignore[misc]
    """DPOTrainer that trains on `pairs_of(step)`; `step` counts from 0."""

    def __init__(self, *, pairs_of: Callable[[int], Sequence[Pair]], settings: Config, **arguments: Any) -> None:
        self._pairs_of = pairs_of
        training = settings.training
        self._micro_batch_tokens = (
            training.micro_batch_tokens or training.micro_batch_size * settings.rollout.max_model_len
        )
        with adapter_dtype_kept(arguments["model"]):
            super().__init__(data_collator=list, **arguments)

    def _prepare_dataset(self, dataset: Any, *_: Any) -> Any:
        """Items are numbers of steps, of which there is nothing to render."""
        return dataset

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Forward and backward passes of a whole step, repeated in smaller micro-batches where they run out of memory
        (`fitting`). Returns its loss, the mean over its pairs. Raises TrainError where a single pair does not fit."""
        model.train()
        pairs = self._pairs_of(self.state.global_step)
        [number] = total(self.accelerator, len(pairs))
        # The model itself: one wrapped as DDP may wait for other processes.
        passes = partial(self._passes, self.model, pairs, int(number))
        with by_itself(self.accelerator):
            loss, self._micro_batch_tokens = fitting(self, model, self._micro_batch_tokens, passes)
        add_gradients(self.accelerator, model.parameters())
        self._add_figures(number)
        return self.accelerator.reduce(loss, reduction="sum")

    def _passes(self, model: Any, pairs: Sequence[Pair], number: int, max_tokens: int) -> torch.Tensor:
        """The passes of pairs, of a step of so many in all processes, in micro-batches of at most so many tokens.
        Returns their part of the step's loss. Raises MemoryShortError."""
        batches = micro_batches(pairs, max_tokens)
        loss = torch.zeros((), device=self.accelerator.device)
        for batch in batches:
            longest = batch[0].tokens
            with micro_batch(len(batch), len(batch) * longest, longest // 2):
                with self.compute_loss_context_manager():
                    tensors = pair_tensors(batch, pad=self._tokenizer.pad_token_id, device=self.accelerator.device)
                    part = self._compute_loss(model, tensors, False) * (len(batch) / number)
                self.accelerator.backward(part)
            loss += part.detach()
        # TRL takes the mean over micro-batches, which differ in their number of pairs.
        for name in MEANS:
            values = self._metrics["train"][name]
            self._metrics["train"][name] = [
                sum(value * len(batch) for value, batch in zip(values, batches, strict=True))
            ]
        return loss

    def _add_figures(self, pairs: float) -> None:
        """Hand the means over the step's pairs, of all processes, to TRL's log; entropy is one over micro-batches."""
        figures, entropies = self._metrics["train"], self._metrics["train"]["entropy"]
        *sums, entropy, batches = total(
            self.accelerator, *(figures[name][0] for name in MEANS), sum(entropies), len(entropies)
        )
        for name, value in zip(MEANS, sums, strict=True):
            figures[name] = [value / pairs]
        figures["entropy"] = [entropy / batches]


def pair_tensors(pairs: Sequence[Pair], *, pad: int, device: torch.device | str) -> PairBatch:
    """A micro-batch as TRL's loss takes it, padded on the right."""
    samples = [*(pair.chosen for pair in pairs), *(pair.rejected for pair in pairs)]
    shape = len(samples), max(len(sample.token_ids) for sample in samples)
    ids = torch.full(shape, pad)  # (2B, T)
    attention, completion = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
    for row, sample in enumerate(samples):
        length = len(sample.token_ids)
        ids[row, :length] = torch.tensor(sample.token_ids)
        attention[row, :length] = 1
        completion[row, sample.trained] = 1
    tensors = {"input_ids": ids, "attention_mask": attention, "completion_mask": completion}
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def dpo_config(settings: Config, directory: Path, *, seed: int, compute_dtype: torch.dtype) -> DPOConfig:
    """TRL's arguments from settings of a DPO stage (`stage_settings`), whose `training.steps` are all updates."""
    training = settings.training
    return DPOConfig(
        **shared_arguments(settings, directory, seed=seed, compute_dtype=compute_dtype),
        **loss_arguments(training.dpo),
        # An item of TRL's dataset is a whole step, which `PairTrainer` divides itself.
        per_device_train_batch_size=1,
        remove_unused_columns=False,
        max_length=None,
    )


def loss_arguments(dpo: DpoSettings) -> dict[str, Any]:
    """The loss as arguments of TRL.

    TRL 1.16 does not smooth the labels of `sigmoid`. With a = -log σ(β Δ), b = -log σ(-β Δ) and smoothing ε,
    conservative DPO is (1 - ε) a + ε b, and TRL's `robust` is ((1 - ε) a - ε b) / (1 - 2 ε). So the first is
    2 (1 - ε) times `sigmoid` minus 1 - 2 ε times `robust`.
    """
    epsilon = dpo.label_smoothing
    if not epsilon:
        return {"beta": dpo.beta, "loss_type": [dpo.loss_type]}
    return {
        "beta": dpo.beta,
        "loss_type": ["sigmoid", "robust"],
        "loss_weights": [2 * (1 - epsilon), -(1 - 2 * epsilon)],
        "label_smoothing": epsilon,
    }
