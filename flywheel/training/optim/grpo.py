"""TRL's GRPO on rows of our own: rollouts of our engines, of any number and length, with a mask for each token.

TRL keeps the loss, the optimizer loop, accelerate and reporting. `RoundTrainer` replaces what TRL would generate,
score and divide into equal parts. A training step is a whole step of a round, in micro-batches by a token budget.

Differences from the GRPO paper (DeepSeekMath, arXiv 2402.03300) and from TRL's defaults:

1.  Completions come from vLLM engines that hold this step's adapter, not from the trainer's model. Their numerics
    differ a little. Either the loss of each token is multiplied by its ratio of trainer to engine, truncated
    (`training.importance: truncated`), or the engine's log-probabilities are the old policy (`engine`). Neither needs
    a forward pass besides the loss's own. The mean difference is reported as `logprob_gap`.
2.  One optimizer step per batch of rollouts (mu = 1) unless `training.updates_per_batch` is larger. With `truncated`,
    the policy equals the old policy in the first step on a batch, so only later steps can reach the clip range.
3.  Token losses are summed over the step and divided by its trained tokens (`dapo`), not averaged per completion
    first, and the upper clip is wider than the lower one. Both are settings.
4.  No KL term unless `training.beta` is set.
5.  Advantages are divided by a deviation of at least 0.1. Groups with fewer than 4 rewards or rewards within 0.02 are
    dropped, and a rollout without a reward (undecided judge, failed engine) leaves its group smaller; neither is part
    of the loss or of its denominator. `rollout.reward.range` multiplies both numbers for a workflow's rewards.
6.  The prompts of each step are fixed before the round, each used equally often, instead of sampled at random.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from datasets import Dataset
from transformers import Trainer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import use_adapter

from flywheel.config.file import Config
from flywheel.errors import TrainError
from flywheel.training.data.samples import TrainingRow, micro_batches, token_counts, token_weights
from flywheel.training.engine.policy import adapter_dtype_kept
from flywheel.training.optim.out_of_memory import fitting, micro_batch
from flywheel.training.optim.ranks import add_gradients, by_itself, total

MicroBatch = dict[str, torch.Tensor]
"""The inputs of TRL's loss by name."""
PREFIX: Final = "rows/"
"""Prefix of the figures of an update that `RoundTrainer` adds to TRL's."""
MEANS: Final = ("entropy", "ratio_mean", "ratio_capped_share", "logprob_gap", "nll", "clipped_share", "kl")
"""Those that are means over the trained tokens of the step. TRL averages over micro-batches of different sizes. The
last one is there only with `training.beta`."""
NO_ENGINE: Final = math.inf
"""Stands for the log-probability of a recorded token, which no engine generated."""


class AdapterCheckpoints(Trainer):  # type: ignore[misc]
    """A trainer whose checkpoints have the trained adapter alone, and the random numbers of each process."""

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        # PEFT would write the reference policy of TRL beside it, in a folder. Transformers then reads only folders,
        # and would go on from the first weights with the optimizer of the last.
        policy = self.accelerator.unwrap_model(self.model)
        policy.save_pretrained(output_dir or self.args.output_dir, selected_adapters=["default"])

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        # Before rank 0 writes the file by which a checkpoint is whole.
        self.accelerator.wait_for_everyone()

    def create_model_card(self, *_: Any, **__: Any) -> None:
        """TRL's, with each checkpoint, would be an empty template."""


class RoundTrainer(AdapterCheckpoints, GRPOTrainer):  # type: ignore[misc]
    """GRPOTrainer that trains on the rows of `roll_out(step)`; `step` counts from 0.

    Each process of a distributed run has rows of its own. Rows of one rollout must be in one process.
    """

    def __init__(
        self,
        *,
        roll_out: Callable[[int], Sequence[TrainingRow]],
        settings: Config,
        **arguments: Any,
    ) -> None:
        self._roll_out = roll_out
        self._training = settings.training
        self._micro_batch_tokens = (
            settings.training.micro_batch_tokens
            or settings.training.micro_batch_size * settings.rollout.max_model_len
        )
        self._collected = -1
        self._micro_batches: list[MicroBatch] = []
        self._current: MicroBatch | None = None
        with adapter_dtype_kept(arguments["model"]):
            super().__init__(reward_funcs=no_reward, **arguments)

    def _prepare_inputs(self, generation_batch: Any) -> list[MicroBatch]:
        """The micro-batches of this step; those of the same step again for its further updates."""
        step = self.state.global_step // self.num_iterations
        if step != self._collected:
            self._micro_batches = self._tensors(self._roll_out(step))
            self._collected = step
        return self._micro_batches

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Forward and backward passes of a whole step, repeated in smaller micro-batches where they run out of memory
        (`fitting`). Returns its loss. Raises TrainError for a row that does not fit alone."""
        model.train()
        self._prepare_inputs(inputs)
        # The model itself: one wrapped as DDP may wait for other processes.
        passes = partial(self._passes, self.model)
        with by_itself(self.accelerator):
            (loss, stats), self._micro_batch_tokens = fitting(self, model, self._micro_batch_tokens, passes)
        add_gradients(self.accelerator, model.parameters())
        loss = self.accelerator.reduce(loss, reduction="sum")
        self._step += 1
        self._report(stats)
        return loss

    def _passes(self, model: Any, max_tokens: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The passes of the step in micro-batches of at most so many tokens. Returns its loss and the figures of each
        micro-batch. Raises MemoryShortError."""
        # These are copies: after a failed attempt, the inputs are what they were.
        batches = [part for batch in self._micro_batches for part in self._divided(batch, max_tokens)]
        loss = torch.zeros((), device=self.accelerator.device)
        stats: list[torch.Tensor] = []
        for batch in batches:
            lengths = batch["prompt_mask"].sum(1) + batch["completion_mask"].sum(1)  # (B,)
            with micro_batch(len(lengths), len(lengths) * width(batch), int(lengths.max())):
                if self.beta and "ref_per_token_logps" not in batch:
                    batch["ref_per_token_logps"] = self._reference(batch)
                self._current = batch
                try:
                    with self.compute_loss_context_manager():
                        part = self._compute_loss(model, batch)
                finally:
                    self._current = None
                self.accelerator.backward(part)
            loss += part.detach()
            stats.append(batch.pop("stats"))
        self._micro_batches = batches
        return loss, stats

    def _divided(self, batch: MicroBatch, max_tokens: int) -> list[MicroBatch]:
        """A micro-batch as several of at most so many tokens with padding, at least a row each. What the first update
        has set stays with its rows."""
        rows = len(batch["completion_ids"])
        size = max(1, max_tokens // width(batch))
        return [
            {name: value[at : at + size] if value.dim() else value for name, value in batch.items()}
            for at in range(0, rows, size)
        ]

    def _tensors(self, rows: Sequence[TrainingRow]) -> list[MicroBatch]:
        """The rows as inputs of TRL's loss, whose normaliser is the number of trained tokens of all processes."""
        counts = token_counts(rows)
        tokens, rollouts = map(int, total(self.accelerator, sum(counts.values()), len(counts)))
        if not tokens:
            return []
        weights = token_weights(
            counts, self._training.loss_type, tokens=tokens, rollouts=rollouts, longest=self.max_completion_length
        )
        # TRL takes the mean over processes, of which each divides by its share of the tokens.
        normalizer = tokens * self.accelerator.num_processes
        pad, device = self._tokenizer.pad_token_id, self.accelerator.device
        return [
            tensors(batch, weights, normalizer, pad=pad, device=device)
            for batch in micro_batches(rows, self._micro_batch_tokens)
        ]

    def _reference(self, batch: MicroBatch) -> torch.Tensor:
        """Log-probabilities of the policy that the round started from, which TRL keeps as adapter `ref`."""
        policy = self.accelerator.unwrap_model(self.model)
        reference = "ref" if "ref" in policy.peft_config else None
        with (
            torch.no_grad(),
            disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs),
            use_adapter(policy, adapter_name=reference),
        ):
            return self._logps(batch)

    def mean_nll(self, rows: Sequence[TrainingRow]) -> float | None:
        """Mean negative log-likelihood of the trained tokens of rows, in nats; None without any. No other process
        takes part."""
        self.model.eval()
        summed = tokens = 0.0
        with torch.no_grad(), self.compute_loss_context_manager(), by_itself(self.accelerator):
            for batch in self._tensors(rows):
                trained = batch["tool_mask"] > 0
                summed -= float(self._logps(batch)[trained].sum())
                tokens += float(trained.sum())
        return summed / tokens if tokens else None

    def _logps(self, batch: dict[str, Any]) -> torch.Tensor:
        """Log-probabilities of the completions, (B, T)."""
        ids, mask = (torch.cat([batch[f"prompt_{of}"], batch[f"completion_{of}"]], dim=1) for of in ("ids", "mask"))
        logps, *_ = self._get_per_token_logps_and_entropies(self.model, ids, mask, batch["completion_ids"].size(1))
        return logps

    def _get_per_token_logps_and_entropies(self, *arguments: Any, **options: Any) -> Any:
        """The forward pass of the loss. From its result come the inputs of the loss that depend on it, which
        `_compute_loss` reads after this."""
        logps, entropies, aux_loss = super()._get_per_token_logps_and_entropies(*arguments, **options)
        if self._current is not None:
            self._correct(self._current, logps.detach(), entropies.detach())
        return logps, entropies, aux_loss

    def _correct(self, batch: MicroBatch, logps: torch.Tensor, entropies: torch.Tensor) -> None:
        """Set the old policy and the importance weights of a micro-batch, once; and the figures of this update."""
        trained, engine = batch["tool_mask"] > 0, batch["engine_logps"]  # (B, T)
        # Recorded replies have no engine: a ratio of 1 makes their loss the negative log-likelihood.
        engine = torch.where(engine == NO_ENGINE, logps, engine)
        if "first_logps" not in batch:
            # Before the first update the policy is the old policy.
            batch["first_logps"] = logps
            if self._training.importance == "engine":
                batch["old_per_token_logps"] = engine
            else:
                batch["old_per_token_logps"] = logps
                weights = (logps - engine).exp().clamp(max=self._training.importance_cap)
                # The loss is linear in the advantage, whose sign this keeps.
                batch["advantages"] = batch["advantages"][:, None] * torch.where(trained, weights, 1.0)  # (B, T)
        ratio, gap = (logps - engine)[trained].exp(), (batch["first_logps"] - engine)[trained].abs()
        of_update = (logps - batch["old_per_token_logps"]).exp()  # (B, T)
        capped, clipped = ratio > self._training.importance_cap, self._clipped(batch["advantages"], of_update)
        figures = [entropies[trained], ratio, capped, gap, -logps[trained], clipped[trained]]
        if self.beta:
            # The estimator and its importance weight are those of the loss.
            of_reference = batch["ref_per_token_logps"] - logps
            figures.append((of_update * (of_reference.exp() - of_reference - 1))[trained])
        batch["stats"] = torch.stack([trained.sum(), *(figure.sum() for figure in figures)])

    def _clipped(self, advantages: torch.Tensor, ratio: torch.Tensor) -> torch.Tensor:
        """Which tokens the clip range leaves without a gradient, (B, T), by their ratio to the old policy, (B, T).
        Advantages are (B,) or (B, T)."""
        advantages = advantages.reshape(len(advantages), -1)
        low, high = ratio < 1 - self.epsilon_low, ratio > 1 + self.epsilon_high
        return (low & (advantages < 0)) | (high & (advantages > 0))

    def _report(self, stats: list[torch.Tensor]) -> None:
        """Hand the means over the step's trained tokens, of all processes, to TRL's log."""
        own = torch.stack(stats).sum(0).tolist() if stats else [0.0] * (len(MEANS) + bool(self.beta))
        batches, tokens, *sums = total(self.accelerator, len(stats), *own)
        if not tokens:
            return
        figures = {name: value / tokens for name, value in zip(MEANS, sums, strict=False)}
        for name, value in {**figures, "trained_tokens": tokens, "micro_batches": batches}.items():
            self._metrics["train"][PREFIX + name].append(value)


class EndAtCheckpoint(TrainerCallback):  # type: ignore[misc]
    """Ends training after a checkpoint, if the file `asks` for it."""

    def __init__(self, asks: Path) -> None:
        self._asks = asks

    def on_save(self, *_: Any, **__: Any) -> None:
        if self._asks.exists():
            raise TrainError(
                "go on with the round",
                "the daemon, which is of another version, has asked its worker to end at this checkpoint",
                "The round is started again from here.",
                retryable=True,
            )


def no_reward(**_: Any) -> list[None]:
    """TRL requires a reward function. Rows have their advantages, so it is never called."""
    raise RuntimeError("TRL asked for rewards; its version is not a supported one")


def tensors(
    rows: Sequence[TrainingRow], weights: dict[int, float], tokens: int, *, pad: int, device: torch.device | str
) -> MicroBatch:
    """A micro-batch as TRL's loss takes it. `weights` are those of each rollout's tokens, `tokens` the normaliser.

    Rows are padded on the right. TRL's prompt is as many tokens as are context in all rows; its tool mask has the
    weight of each trained token, and 0 for later context.
    """
    trained = [row.sample.trained for row in rows]
    context = min(places[0] for places in trained)
    shape = len(rows), max(len(row.sample.token_ids) for row in rows)
    ids = torch.full(shape, pad)  # (B, context + T)
    attention = torch.zeros(shape, dtype=torch.long)
    mask, engine = torch.zeros(shape), torch.zeros(shape)
    for place, (row, places) in enumerate(zip(rows, trained, strict=True)):
        length = len(row.sample.token_ids)
        ids[place, :length] = torch.tensor(row.sample.token_ids)
        attention[place, :length] = 1
        mask[place, places] = weights.get(row.rollout, 0.0)
        logprobs = row.sample.logprobs
        engine[place, places] = torch.tensor([logprobs[at] if logprobs else NO_ENGINE for at in places])
    found = {
        "prompt_ids": ids[:, :context],
        "prompt_mask": attention[:, :context],
        "completion_ids": ids[:, context:],  # (B, T)
        "completion_mask": attention[:, context:],
        "tool_mask": mask[:, context:],
        "engine_logps": engine[:, context:],
        "advantages": torch.tensor([row.advantage for row in rows]),  # (B,)
        "num_items_in_batch": torch.tensor(float(tokens)),
    }
    return {name: value.to(device) for name, value in found.items()}


def width(batch: MicroBatch) -> int:
    """Tokens of each row, with padding."""
    return int(batch["prompt_ids"].shape[1] + batch["completion_ids"].shape[1])


def grpo_config(
    settings: Config, directory: Path, *, seed: int, compute_dtype: torch.dtype, longest: int
) -> GRPOConfig:
    """TRL's arguments from our settings; `longest` is the maximum length of a completion in tokens. In half precision
    `compute_dtype` is that of autocast; a float32 model with float32 stays exact."""
    training, rollout = settings.training, settings.rollout
    updates = training.updates_per_batch
    return GRPOConfig(
        **shared_arguments(settings, directory, seed=seed, compute_dtype=compute_dtype, updates=updates),
        num_iterations=updates,
        # An item of TRL's dataset is a whole step, which `RoundTrainer` divides itself. TRL wants two of each item.
        per_device_train_batch_size=2,
        num_generations=2,
        max_completion_length=longest,
        temperature=rollout.temperature,
        beta=training.beta,
        epsilon=training.clip_epsilon,
        epsilon_high=training.clip_epsilon_high,
        # The weights of tokens are in the mask; their weighted sum over the step is what `dapo` computes.
        loss_type="dapo",
        shuffle_dataset=False,
    )


def shared_arguments(
    settings: Config, directory: Path, *, seed: int, compute_dtype: torch.dtype, updates: int = 1
) -> dict[str, Any]:
    """The arguments that TRL's trainers have in common, as `grpo_config` has them. A step is so many `updates`."""
    training = settings.training
    gpu = torch.cuda.is_available()
    steps = training.steps * updates
    # Below 1 it is a share of all updates.
    warmup = math.ceil(training.warmup_steps * (updates if training.warmup_steps >= 1 else steps))
    return {
        "output_dir": str(directory),
        "seed": seed,
        "learning_rate": training.learning_rate,
        "lr_scheduler_type": training.scheduler,
        "max_steps": steps,
        # The learning rate of the first update of a warm-up is 0. A run that ends in its warm-up may have no other.
        "warmup_steps": min(warmup, steps - 1),
        "max_grad_norm": training.max_grad_norm,
        "gradient_accumulation_steps": 1,
        "bf16": compute_dtype == torch.bfloat16,
        "fp16": compute_dtype == torch.float16,
        "use_cpu": not gpu,
        # Gradient checkpointing saves memory, which is scarce only on GPUs.
        "gradient_checkpointing": gpu,
        "dataloader_pin_memory": gpu,
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "save_strategy": "steps",
        "save_steps": training.save_steps * updates,
        "save_total_limit": 2,
        "report_to": "none",
        "disable_tqdm": True,
    }


def step_dataset(steps: int) -> Dataset:
    """The dataset that TRL requires: an item for each step (of each process, where there are several)."""
    return Dataset.from_dict({"prompt": [str(step) for step in range(steps)]})


class StepLog(TrainerCallback):  # type: ignore[misc]
    """Hands TRL's figures of each step's last update to `on_step(step, figures)`; `step` counts from 1.

    Raises TrainError when a figure of an update is not a number.
    """

    def __init__(self, on_step: Callable[[int, Mapping[str, float]], None]) -> None:
        self._on_step = on_step

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, float] | None = None, **_: Any) -> None:
        if not logs or "loss" not in logs or "grad_norm" not in logs:
            return
        updates = getattr(args, "num_iterations", 1)
        step, update = divmod(state.global_step - 1, updates)
        wrong = [name for name in ("loss", "grad_norm") if not math.isfinite(float(logs[name]))]
        if wrong or update == updates - 1:
            self._on_step(step + 1, logs)
        if wrong:
            raise TrainError(
                f"take step {step + 1} of the round",
                f"{wrong[0]} is {logs[wrong[0]]}",
                "Lower training.learning_rate or training.max_grad_norm.",
            )
