"""The figures of a step in `metrics.jsonl`: of its rollouts or items, and of its update."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flywheel.config.file import Config
from flywheel.config.training import Stage
from flywheel.training.data.rollout import RolloutBatch
from flywheel.training.data.round_progress import TOKEN_MEANS, UPDATE_FIGURES


def of_rollouts(
    batch: RolloutBatch,
    figures: Mapping[str, float],
    settings: Config,
    seconds: Mapping[str, float],
    judge_seconds: float,
) -> dict[str, Any]:
    """Of a step of GRPO, given the trainer's figures of its last update, what it waited for (`step_times`), and how
    long the judge has worked."""
    usage, generating = batch.usage(), batch.seconds.get("generate", 0.0)
    trained = figures.get("trained_tokens", 0.0)
    return {
        **batch.summary(),
        **{name: figures.get(name) for name in (*UPDATE_FIGURES, *TOKEN_MEANS)},
        "stage": "grpo",
        "masked_share": 1 - trained / max(usage["rollout_tokens"], 1),
        "trained_tokens": int(trained),
        "temperature": settings.rollout.temperature,
        "tokens_per_second": usage["rollout_tokens"] / max(generating, 1e-9),
        "overlap": settings.training.overlap,
        "seconds": dict(seconds),
        "busy": {"engines": generating, "judge": judge_seconds, "trainer": seconds["train"]},
    }


def of_items(stage: Stage, epoch: float, count: int, figures: Mapping[str, float]) -> dict[str, Any]:
    """Of a step of SFT on so many replies, or of DPO on so many pairs. For pairs, rewards are beta times the gain in
    log-probability over the reference; `margin` is that of the chosen reply minus that of the rejected one."""
    about = {"stage": stage, "epoch": epoch}
    update = {name: figures.get(name) for name in ("grad_norm", "learning_rate", "entropy")}
    if stage == "sft":
        trained = int(figures.get("trained_tokens", 0))
        return {**about, "replies": count, "loss": figures.get("nll"), "trained_tokens": trained, **update}
    names = {"chosen": "chosen", "rejected": "rejected", "margin": "margins", "accuracy": "accuracies"}
    rewards = {name: figures.get(f"rewards/{theirs}") for name, theirs in names.items()}
    return {**about, "pairs": count, "loss": figures.get("loss"), **rewards, **update}
