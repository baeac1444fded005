"""TRL's losses on rows and pairs of token sequences of our own, each with a mask of the tokens that the policy wrote.

TRL's trainers are made for their losses alone (`_compute_loss`): none of them ever trains, generates, renders or
saves. `PolicyStep` has the optimizer and the processes. A further loss has the form of `Loss`.

Differences of GRPO here from its paper (DeepSeekMath, arXiv 2402.03300) and from TRL's defaults:

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

A recorded reply (SFT) is a row with advantage 1 and without an engine.

Sources of DPO's losses: DPO (arXiv 2305.18290), conservative DPO for `label_smoothing` (E. Mitchell, 2023), SLiC-HF
for `hinge` (arXiv 2305.10425), and IPO (arXiv 2310.12036), which TRL divides by the number of tokens.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from datasets import Dataset
from trl import import_utils

from flywheel.config.file import Config
from flywheel.config.training import DpoSettings, Stage
from flywheel.training.data.samples import (
    Pair,
    Sample,
    StepSize,
    TrainingRow,
    micro_batches,
    token_counts,
    token_weights,
)
from flywheel.training.engine.policy import adapter_dtype_kept

# TRL imports vLLM where it is installed, which takes longer than all the rest, and needs it only to generate.
import_utils.is_vllm_available = lambda *_, **__: False
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer  # noqa: E402
from trl.models.utils import disable_gradient_checkpointing  # noqa: E402
from trl.trainer import utils as trl_utils  # noqa: E402

# Where there is no Triton, TRL computes the output layer for the prompt and the padding, too: some devices compile
# anew for each number of tokens. A CPU does not. It decides this there, and nothing else.
trl_utils._use_triton = lambda _: True

NO_ENGINE: Final = math.inf
"""Stands for the log-probability of a recorded token, which no engine generated."""


@dataclass(slots=True)
class MicroBatch:
    """Items of a step, rows or pairs, that pass the model together.

    Attributes:
        tensors: By name. Their first dimension is that of items; those without a dimension are of the whole step.
        lengths: Tokens of each item, of a pair those of its longer reply.
        width: Tokens of each item in the tensors, with padding.
    """

    tensors: dict[str, torch.Tensor]
    lengths: tuple[int, ...]
    width: int

    @property
    def tokens(self) -> int:
        """With padding."""
        return len(self.lengths) * self.width

    def divided(self, max_tokens: int) -> Iterator[MicroBatch]:
        """Copies of its parts of at most so many tokens with padding, at least an item each. What the first update of
        a step has set stays with its items."""
        size = max(1, max_tokens // self.width)
        for at in range(0, len(self.lengths), size):
            part = slice(at, at + size)
            tensors = {name: value[part] if value.dim() else value for name, value in self.tensors.items()}
            yield MicroBatch(tensors, self.lengths[part], self.width)


class Loss(Protocol):
    """A loss of a step, for some kind of items.

    Attributes:
        model: The policy.
        args: Transformers' arguments, of which `gradient_checkpointing` and its own count.
        everyone: accelerate, for all processes.
        figures: Names of the sums that `part` returns. The others are divided by the first one, a number.
        updates: Optimizer steps on the items of a step.
    """

    model: Any
    args: Any
    everyone: Any
    figures: tuple[str, ...]
    updates: int

    def batches(self, items: Sequence[Any], size: StepSize, max_tokens: int) -> list[MicroBatch]:
        """This process's items of a step in micro-batches of at most so many tokens with padding, or of one item.
        `size` is that of the whole step."""

    def part(self, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """The part of a micro-batch in the loss of the step, (), and its `figures`, (F,)."""


class OneProcess:
    """accelerate for a loss of TRL, which gathers its figures in each micro-batch. Here each process has its own
    alone: they differ in their number of micro-batches, and must not wait for each other in them."""

    num_processes = 1

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)

    def gather(self, figures: Any, **_: Any) -> Any:
        return figures

    gather_for_metrics = reduce = gather


class RowLoss(GRPOTrainer):  # type: ignore[misc]
    """GRPO's loss of rows; of recorded rows, the mean negative log-likelihood of their tokens."""

    def __init__(self, model: Any, settings: Config, tokenizer: Any, longest: int, arguments: dict[str, Any]) -> None:
        """`longest` is the maximum length of a completion in tokens. `arguments` are transformers'."""
        self._training = training = settings.training
        args = GRPOConfig(
            **arguments,
            # An item of TRL's dataset is not used. TRL wants two of each.
            per_device_train_batch_size=2,
            num_generations=2,
            max_completion_length=longest,
            temperature=settings.rollout.temperature,
            beta=training.beta,
            epsilon=training.clip_epsilon,
            epsilon_high=training.clip_epsilon_high,
            # The weights of tokens are in the mask; their weighted sum over the step is what `dapo` computes.
            loss_type="dapo",
        )
        with adapter_dtype_kept(model):
            super().__init__(model, _no_reward, args, _unused("prompt"), processing_class=tokenizer)
        self._batch: dict[str, torch.Tensor] | None = None
        _prepare(self)
        self.updates = training.updates_per_batch
        means = ("entropy", "ratio_mean", "ratio_capped_share", "logprob_gap", "nll", "clipped_share")
        # TRL averages over micro-batches of different sizes.
        self.figures = ("trained_tokens", *means, *(("kl",) if self.beta else ()))

    def batches(self, rows: Sequence[TrainingRow], size: StepSize, max_tokens: int) -> list[MicroBatch]:
        if not size.tokens:
            return []
        longest, kind = self.max_completion_length, self._training.loss_type
        counts = token_counts(rows)
        weights = token_weights(counts, kind, tokens=size.tokens, rollouts=size.items, longest=longest)
        return [self._batch_of(batch, weights, size.tokens) for batch in micro_batches(rows, max_tokens)]

    def _batch_of(self, rows: Sequence[TrainingRow], weights: dict[int, float], tokens: int) -> MicroBatch:
        """Rows as TRL's loss takes them. `weights` are those of each rollout's tokens, `tokens` the normaliser.

        TRL's prompt is as many tokens as are context in all rows; its tool mask has the weight of each trained token,
        and 0 for later context.
        """
        trained = [row.sample.trained for row in rows]
        context = min(places[0] for places in trained)
        ids, attention = padded([row.sample for row in rows], self._tokenizer.pad_token_id)  # (B, context + T)
        mask, engine = torch.zeros(ids.shape), torch.zeros(ids.shape)
        for place, (row, places) in enumerate(zip(rows, trained, strict=True)):
            logprobs = row.sample.logprobs
            mask[place, places] = weights.get(row.rollout, 0.0)
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
        tensors = {name: value.to(self.everyone.device) for name, value in found.items()}
        return MicroBatch(tensors, tuple(row.tokens for row in rows), ids.shape[1])

    def part(self, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = batch.tensors
        if self.beta and "ref_per_token_logps" not in inputs:
            inputs["ref_per_token_logps"] = self._reference(inputs)
        self._batch = inputs
        try:
            loss = self._compute_loss(self.model, inputs)
        finally:
            self._batch = None
            # TRL's own figures, of this process's micro-batches.
            self._metrics["train"].clear()
        return loss, inputs.pop("sums")

    def nll(self, batch: MicroBatch) -> torch.Tensor:
        """The negative log-likelihood of the trained tokens of a micro-batch, in nats, and their number: (2,)."""
        trained = batch.tensors["tool_mask"] > 0
        return torch.stack([-self._logps(batch.tensors)[trained].sum(), trained.sum()])

    def _reference(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Log-probabilities of the policy that the round started from, (B, T), which TRL keeps as adapter `ref`."""
        policy = self.everyone.unwrap_model(self.model)
        reference = "ref" if "ref" in policy.peft_config else None
        with (
            torch.no_grad(),
            disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs),
            trl_utils.use_adapter(policy, adapter_name=reference),
        ):
            return self._logps(inputs)

    def _logps(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Log-probabilities of the completions, (B, T)."""
        ids, mask = (torch.cat([inputs[f"prompt_{of}"], inputs[f"completion_{of}"]], dim=1) for of in ("ids", "mask"))
        logps, *_ = self._get_per_token_logps_and_entropies(self.model, ids, mask, inputs["completion_ids"].size(1))
        return logps

    def _get_per_token_logps_and_entropies(self, *arguments: Any, **options: Any) -> Any:
        """The forward pass of the loss. From its result come the inputs of the loss that depend on it, which
        `_compute_loss` reads after this."""
        logps, entropies, aux_loss = super()._get_per_token_logps_and_entropies(*arguments, **options)
        if self._batch is not None:
            self._correct(self._batch, logps.detach(), entropies.detach())
        return logps, entropies, aux_loss

    def _correct(self, batch: dict[str, torch.Tensor], logps: torch.Tensor, entropies: torch.Tensor) -> None:
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
        batch["sums"] = torch.stack([trained.sum(), *(figure.sum() for figure in figures)])

    def _clipped(self, advantages: torch.Tensor, ratio: torch.Tensor) -> torch.Tensor:
        """Which tokens the clip range leaves without a gradient, (B, T), by their ratio to the old policy, (B, T).
        Advantages are (B,) or (B, T)."""
        advantages = advantages.reshape(len(advantages), -1)
        low, high = ratio < 1 - self.epsilon_low, ratio > 1 + self.epsilon_high
        return (low & (advantages < 0)) | (high & (advantages > 0))


class PairLoss(DPOTrainer):  # type: ignore[misc]
    """DPO's loss of pairs. The reference is the policy that it is made with, of which TRL copies the adapter."""

    figures = ("pairs", "rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins", "entropy")
    updates = 1

    def __init__(self, model: Any, settings: Config, tokenizer: Any, longest: int, arguments: dict[str, Any]) -> None:
        """As that of `RowLoss`. TRL's own truncation is not used."""
        args = DPOConfig(**arguments, **loss_arguments(settings.training.dpo), max_length=None)
        dataset = _unused("prompt", "chosen", "rejected")
        with adapter_dtype_kept(model):
            super().__init__(model, None, args, train_dataset=dataset, processing_class=tokenizer)
        _prepare(self)

    def batches(self, pairs: Sequence[Pair], size: StepSize, max_tokens: int) -> list[MicroBatch]:
        return [self._batch_of(batch, size.items) for batch in micro_batches(pairs, max_tokens)]

    def _batch_of(self, pairs: Sequence[Pair], whole: int) -> MicroBatch:
        """Pairs of a step of so many, each its chosen and its rejected reply: (B, 2, T). TRL's own mask is 1 on
        everything behind the prompt, also on what tools answered."""
        samples = [sample for pair in pairs for sample in (pair.chosen, pair.rejected)]
        ids, attention = padded(samples, self._tokenizer.pad_token_id)
        mask = torch.zeros_like(ids)
        for place, sample in enumerate(samples):
            mask[place, sample.trained] = 1
        found = {"input_ids": ids, "attention_mask": attention, "completion_mask": mask}
        tensors = {name: value.view(len(pairs), 2, -1) for name, value in found.items()}
        tensors = {name: value.to(self.everyone.device) for name, value in tensors.items()}
        tensors["whole"] = torch.tensor(whole)
        return MicroBatch(tensors, tuple(pair.tokens // 2 for pair in pairs), 2 * ids.shape[1])

    def part(self, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        names, pairs = ("input_ids", "attention_mask", "completion_mask"), len(batch.lengths)
        # Parts of a divided micro-batch have no padding of other parts.
        own = {name: batch.tensors[name][..., : max(batch.lengths)] for name in names}
        # TRL has all chosen replies first: (2B, T).
        inputs = {name: value.transpose(0, 1).flatten(0, 1) for name, value in own.items()}
        try:
            # TRL's loss is the mean over the pairs of the micro-batch, and so are its figures.
            loss = self._compute_loss(self.model, inputs, False) * (pairs / int(batch.tensors["whole"]))
            means = [self._metrics["train"][name][0] for name in self.figures[1:]]
        finally:
            self._metrics["train"].clear()
        return loss, torch.tensor([1.0, *means], device=loss.device) * pairs


def made_loss(
    stage: Stage,
    model: Any,
    settings: Config,
    tokenizer: Any,
    *,
    seed: int,
    compute_dtype: torch.dtype,
    longest: int,
    gradient_checkpointing: bool | None = None,
) -> RowLoss | PairLoss:
    """The loss of a stage. `settings` are those of the stage, `longest` is the maximum length of a completion in
    tokens. In half precision `compute_dtype` is that of autocast; a float32 model with float32 stays exact. Gradient
    checkpointing saves memory, which is scarce only on GPUs: by default it is used there."""
    gpu = torch.cuda.is_available()
    arguments = {
        # Nothing is written there.
        "output_dir": tempfile.gettempdir(),
        "seed": seed,
        "bf16": compute_dtype == torch.bfloat16,
        "fp16": compute_dtype == torch.float16,
        "use_cpu": not gpu,
        "gradient_checkpointing": gpu if gradient_checkpointing is None else gradient_checkpointing,
        # TRL asks for it where a dataset has no length.
        "max_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    return (PairLoss if stage == "dpo" else RowLoss)(model, settings, tokenizer, longest, arguments)


def padded(samples: Sequence[Sample], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens of samples, padded on the right, and their attention mask: (B, T) each."""
    shape = len(samples), max(len(sample.token_ids) for sample in samples)
    ids, attention = torch.full(shape, pad), torch.zeros(shape, dtype=torch.long)
    for place, sample in enumerate(samples):
        length = len(sample.token_ids)
        ids[place, :length] = torch.tensor(sample.token_ids)
        attention[place, :length] = 1
    return ids, attention


def loss_arguments(dpo: DpoSettings) -> dict[str, Any]:
    """The loss of pairs as arguments of TRL.

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


def _prepare(loss: Any) -> None:
    """Set what transformers' loop sets and TRL's losses read, which no loop does here."""
    loss.everyone, loss.accelerator = loss.accelerator, OneProcess(loss.accelerator)
    loss.current_gradient_accumulation_steps = 1
    if loss.args.gradient_checkpointing:
        loss.model.gradient_checkpointing_enable(loss.args.gradient_checkpointing_kwargs)


def _unused(*columns: str) -> Any:
    """The dataset that TRL requires. It is never read, so that nothing of it is rendered."""
    return Dataset.from_dict({name: ["unused"] for name in columns}).to_iterable_dataset()


def _no_reward(**_: Any) -> list[None]:
    """TRL requires a reward function. Rows have their advantages, so it is never called."""
    raise RuntimeError("TRL asked for rewards; its version is not a supported one")
