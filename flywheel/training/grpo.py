"""TRL's GRPO with the rollouts of our own engines.

Differences from the GRPO paper (DeepSeekMath, arXiv 2402.03300) and from TRL's defaults:

1.  Completions come from vLLM engines that hold this step's adapter, not from the trainer's model. Their numerics
    differ a little, so TRL's importance-sampling correction (truncated or masked ratios of trainer to engine, here
    TRL's default `sequence_mask` at 3) is enabled. TRL enables it with `use_vllm`, which would also start vLLM;
    `RoundTrainer` therefore sets the flag after construction and replaces TRL's weight sync. The mean difference is
    reported as `logprob_gap`.
2.  One optimizer step per batch of rollouts (mu = 1) unless `training.updates_per_batch` is larger. In the first step
    on a batch the policy equals the old policy, so only later steps can reach the clip range.
3.  Token losses are summed over the batch and divided by its tokens (`dapo`), not averaged per completion first, and
    the upper clip is wider than the lower one. Both are settings.
4.  No KL term unless `training.beta` is set.
5.  A rollout without a reward (undecided judge, failed engine) has advantage 0 and is excluded from its group's mean
    and deviation; it never counts as reward 0. Its tokens still count in `dapo`'s denominator.
6.  The prompts of each step are fixed before the round, each used equally often, instead of sampled at random.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from flywheel.config import Config
from flywheel.errors import TrainError
from flywheel.training.rollout import Batch


class RoundTrainer(GRPOTrainer):  # type: ignore[misc]
    """GRPOTrainer that gets completions from `roll_out(step)` and publishes weights with `sync_weights()`.

    `step` counts from 0. Raises TrainError when TRL's tensors do not match the tokens that the engines returned.
    """

    def __init__(
        self, *, roll_out: Callable[[int], Batch], sync_weights: Callable[[], None], **arguments: Any
    ) -> None:
        self._roll_out = roll_out
        self._batch: Batch | None = None
        super().__init__(reward_funcs=given_reward, rollout_func=self._rollouts, **arguments)
        self.vllm_generation = _Sync(sync_weights)
        self._last_loaded_step = -1
        self.use_vllm = True

    def _rollouts(self, prompts: Sequence[str], trainer: GRPOTrainer) -> dict[str, list[Any]]:
        batch = self._batch = self._roll_out(trainer.state.global_step // self.num_iterations)
        if len(batch.rollouts) != len(prompts):
            raise RuntimeError(f"TRL asked for {len(prompts)} completions and was given {len(batch.rollouts)}")
        return trl_fields(batch, trainer.processing_class.eos_token_id)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        assert self._batch is not None
        check_tokens(self._batch, output)
        return output


class _Sync:
    """The object that TRL calls to synchronise weights before it generates."""

    def __init__(self, sync_weights: Callable[[], None]) -> None:
        self.sync_weights = sync_weights


def given_reward(reward: list[float | None], **_: Any) -> list[float | None]:
    """Returns the rewards of the rollouts; TRL treats None as "no reward"."""
    return reward


def trl_fields(batch: Batch, eos_token_id: int) -> dict[str, list[Any]]:
    """A batch in the form of TRL's `rollout_func`. TRL's tensors need a token in every row: a failed rollout becomes
    an end-of-turn token that the mask hides."""
    fields: dict[str, list[Any]] = {
        "prompt_ids": [],
        "completion_ids": [],
        "logprobs": [],
        "env_mask": [],
        "reward": [],
    }
    for rollout in batch.rollouts:
        completion = rollout.completion
        failed = not completion.token_ids
        fields["prompt_ids"].append(list(rollout.request.prompt.token_ids))
        fields["completion_ids"].append([eos_token_id] if failed else list(completion.token_ids))
        fields["logprobs"].append([None] if failed else list(completion.logprobs))
        fields["env_mask"].append([0] if failed else [1] * len(completion.token_ids))
        fields["reward"].append(rollout.reward)
    return fields


def check_tokens(batch: Batch, output: dict[str, Any]) -> None:
    """Raise TrainError unless the tokens in TRL's tensors that carry loss are exactly the engines' tokens."""
    mask = (output["completion_mask"] * output["tool_mask"]).bool()  # (B, T)
    for row, rollout in enumerate(batch.rollouts):
        trained = output["completion_ids"][row][mask[row]].tolist()
        prompt = output["prompt_ids"][row][output["prompt_mask"][row].bool()].tolist()
        if trained != list(rollout.completion.token_ids) or prompt != list(rollout.request.prompt.token_ids):
            raise TrainError(
                "train on a step's rollouts",
                f"the trainer's tokens of task {rollout.request.prompt.task.task_id} are not those of its rollout",
                "This is a fault of the program or of the installed TRL; check that its version is a supported one.",
            )


def grpo_config(
    settings: Config, directory: Path, *, seed: int, model_dtype: torch.dtype, longest: int
) -> GRPOConfig:
    """TRL's arguments from our settings; `longest` is the maximum length of a completion in tokens."""
    training, rollout = settings.training, settings.rollout
    gpu = torch.cuda.is_available()
    return GRPOConfig(
        output_dir=str(directory),
        seed=seed,
        max_steps=training.steps * training.updates_per_batch,
        num_iterations=training.updates_per_batch,
        learning_rate=training.learning_rate,
        lr_scheduler_type="linear",
        warmup_steps=training.warmup_steps * training.updates_per_batch,
        max_grad_norm=training.max_grad_norm,
        per_device_train_batch_size=training.micro_batch_size,
        gradient_accumulation_steps=training.prompts_per_step * training.group_size // training.micro_batch_size,
        num_generations=training.group_size,
        max_completion_length=longest,
        temperature=rollout.temperature,
        beta=training.beta,
        epsilon=training.clip_epsilon,
        epsilon_high=training.clip_epsilon_high,
        loss_type=training.loss_type,
        scale_rewards=training.scale_rewards,
        shuffle_dataset=False,
        # Autocast only for half-precision weights: a float32 model stays exact.
        bf16=model_dtype == torch.bfloat16,
        fp16=model_dtype == torch.float16,
        use_cpu=not gpu,
        # Gradient checkpointing saves memory, which is scarce only on GPUs.
        gradient_checkpointing=gpu,
        dataloader_pin_memory=gpu,
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def rows(steps: int, prompts_per_step: int) -> Dataset:
    """The dataset that TRL requires. Prompts of a step are planned elsewhere, so a row is only a position in a
    step."""
    return Dataset.from_dict({"prompt": [str(place) for place in range(steps * prompts_per_step)]})


class StepLog(TrainerCallback):  # type: ignore[misc]
    """Hands TRL's figures of each step's last update to `on_step(step, figures)`; `step` counts from 1.

    Raises TrainError when a figure of an update is not a number.
    """

    def __init__(self, on_step: Callable[[int, dict[str, Any]], None]) -> None:
        self._on_step = on_step

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if not logs or "loss" not in logs or "grad_norm" not in logs:
            return
        step, update = divmod(state.global_step - 1, args.num_iterations)
        wrong = [name for name in ("loss", "grad_norm") if not math.isfinite(float(logs[name]))]
        if wrong or update == args.num_iterations - 1:
            self._on_step(step + 1, logs)
        if wrong:
            raise TrainError(
                f"take step {step + 1} of the round",
                f"{wrong[0]} is {logs[wrong[0]]}",
                "Lower training.learning_rate or training.max_grad_norm.",
            )
