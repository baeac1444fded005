"""A small policy, rows to train it on, and what is seen of its training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flywheel.config.file import Config
from flywheel.config.training import LoraSettings, Stage
from flywheel.training.data.samples import Sample, TrainingRow
from flywheel.training.engine.policy import AdapterFiles
from flywheel.training.worker.processes import refuse_not_finite
from tests.factories.round import POLICY

if TYPE_CHECKING:
    from flywheel.training.optim.policy_step import PolicyStep

TRAINING = {
    "steps": 1,
    "learning_rate": 1e-2,
    "max_grad_norm": 1e9,
    "lora": {"r": 8},
    "micro_batch_tokens": 10_000,
}
TEMPERATURE = 0.8
LONGEST = 16


def made_settings(**training: Any) -> Config:
    return Config.model_validate(
        {
            "training": {**TRAINING, **training},
            "rollout": {"max_completion_tokens": LONGEST, "max_model_len": 64, "temperature": TEMPERATURE},
        }
    )


def policy(base: Path = POLICY) -> Any:
    """A policy in float32 with an adapter that has an effect."""
    import torch

    from tests.factories.policy import load_policy

    model = load_policy(str(base), None, LoraSettings(r=8, alpha=16), seed=1, dtype="float32")
    torch.manual_seed(3)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.05)
    return model


def logps_of(model: Any, sample: Sample) -> Any:
    """Log-probabilities of the tokens of a sample but the first, one after the other in plain torch."""
    import torch

    ids = torch.tensor([sample.token_ids])
    logits = model(ids).logits[0, :-1].float() / TEMPERATURE
    return torch.stack([logits[at] - logits[at].logsumexp(-1) for at in range(len(ids[0]) - 1)]).gather(
        1, ids[0, 1:, None]
    )[:, 0]


@cache
def exact(sample: Sample) -> tuple[float, ...]:
    import torch

    with torch.no_grad():
        return tuple(logps_of(policy(), sample).tolist())


SHIFTS = (0.0, 0.4, -0.3, 1.5, -1.6)
"""By how much the engine's logprobs differ from the trainer's, in nats."""


def sample(*parts: Sequence[int], missing: Sequence[int] = (), shifted: bool = True) -> Sample:
    """Context and generated tokens in turn; the engine gave no logprob for the `missing` places."""
    ids = tuple(token for part in parts for token in part)
    mask = tuple(bool(place % 2) for place, part in enumerate(parts) for _ in part)
    bare = Sample(ids, mask, (None,) * len(ids))
    given = (0.0, *exact(bare))
    return Sample(
        ids,
        mask,
        tuple(
            given[at] + (SHIFTS[at % len(SHIFTS)] if shifted else 0) if own and at not in missing else None
            for at, own in enumerate(mask)
        ),
    )


@cache
def rows() -> tuple[TrainingRow, ...]:
    """Five rollouts: some of several samples, turns with observations between them, and tokens without a logprob."""
    return (
        TrainingRow(0, sample((1, 20, 21, 22, 23), (40, 41, 42, 2), (70, 71, 72), (44, 45, 2)), 1.2),
        TrainingRow(0, sample((1, 20, 21, 22, 23, 24), (50, 51, 2)), 1.2),
        TrainingRow(1, sample((1, 20, 21), (43, 2), missing=(3,)), -0.7),
        TrainingRow(2, sample((1, 30, 31), (60, 61, 62, 63, 64, 65, 66, 2)), -1.1),
        TrainingRow(3, sample((1, 30, 31), (67, 2)), 0.6),
        TrainingRow(3, sample((1, 30, 31, 67, 2, 80), (68, 69, 2), (81, 82), (2,)), 0.6),
        TrainingRow(3, sample((1, 33), (90, 91, 92, 93), missing=(3,)), 0.6),
        TrainingRow(5, sample((1, 30, 31), (94, 2)), 0.0),
    )


class Trained:
    """Steps on rows or pairs: their gradients before each optimizer step, their figures, and their forward passes."""

    def __init__(
        self,
        given: Sequence[Any] | Callable[[int], Sequence[Any]],
        model: Any = None,
        *,
        stage: Stage = "grpo",
        settings: Config | None = None,
        checkpoint: Mapping[str, bytes] | None = None,
        end: int | None = None,
        compute_dtype: Any = None,
        gradient_checkpointing: bool | None = None,
        **training: Any,
    ) -> None:
        """All steps, behind those of a `checkpoint`, or those before the `end`. `given` are the items of each, or
        returns those of a step, which counts from 0."""
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        self.settings = settings or made_settings(**training)
        self.passes = 0
        self.steps: list[int] = []
        self.logs: list[tuple[int, dict[str, Any]]] = []
        self.gradients: list[dict[str, Any]] = []
        self.model = model or policy()
        self.before = self.weights()
        self.model.base_model.model.model.register_forward_pre_hook(self._count)
        self.step = policy_step(
            self.model,
            self.settings,
            stage,
            compute_dtype=compute_dtype,
            gradient_checkpointing=gradient_checkpointing,
        )
        for name, data in (checkpoint or {}).items():
            self.step.restore(name, data)
        hook = register_optimizer_step_pre_hook(lambda *_: self.gradients.append(gradients(self.model)))
        try:
            for number in range(self.step.steps, self.settings.training.steps if end is None else end):
                self.steps.append(number)
                figures = self.step.step(given(number) if callable(given) else given)
                self.logs.append((number + 1, figures))
                refuse_not_finite(number + 1, figures)
        finally:
            hook.remove()

    def _count(self, *_: Any) -> None:
        self.passes += 1

    def weights(self) -> dict[str, Any]:
        """Those that are trained."""
        named = self.model.named_parameters()
        return {name: p.detach().clone() for name, p in named if p.requires_grad and ".ref." not in name}

    def adapter(self) -> AdapterFiles:
        """The trained one."""
        return AdapterFiles.joined(self.step.adapter())

    def checkpoint(self) -> dict[str, bytes]:
        """Its pieces by name."""
        return dict(self.step.checkpoint())


def policy_step(
    model: Any,
    settings: Config,
    stage: Stage = "grpo",
    *,
    compute_dtype: Any = None,
    gradient_checkpointing: bool | None = None,
) -> PolicyStep:
    """The steps of a stage, as the trainer's actor makes them."""
    from transformers import AutoTokenizer

    from flywheel.training.optim.losses import made_loss
    from flywheel.training.optim.policy_step import PolicyStep

    loss = made_loss(
        stage,
        model,
        settings,
        AutoTokenizer.from_pretrained(POLICY),
        seed=1,
        compute_dtype=compute_dtype or model.dtype,
        longest=LONGEST,
        gradient_checkpointing=gradient_checkpointing,
    )
    return PolicyStep(loss, settings, settings.training.steps)


def gradients(model: Any) -> dict[str, Any]:
    return {name: p.grad.clone().cpu() for name, p in model.named_parameters() if p.grad is not None}


def assert_equal(found: dict[str, Any], wanted: dict[str, Any], tolerance: float = 1e-4) -> None:
    assert found.keys() == wanted.keys()
    assert all("lora_" in name for name in found)
    scale = max(grad.abs().max().item() for grad in wanted.values())
    assert scale > 1e-3
    for name, grad in wanted.items():
        assert (found[name] - grad).abs().max().item() <= tolerance * scale, name


class OutOfMemory:
    """Makes one pass of a policy fail: the forward or the backward pass of the `at`-th micro-batch, from 0. Or all
    passes of more than `most` tokens with padding, in their half."""

    def __init__(self, model: Any, half: str, *, at: int = -1, most: int | None = None) -> None:
        import torch

        self.at, self.most, self.seen = at, most, 0
        self.sizes: list[int] = []

        class Failing(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, hidden: Any, fails: bool) -> Any:
                ctx.fails = fails
                return hidden.clone()

            @staticmethod
            def backward(ctx: Any, *grads: Any) -> Any:
                if ctx.fails:
                    exhaust()
                return grads[0], None

        def exhaust() -> None:
            torch.empty(2**58, dtype=torch.uint8)

        def forward(_: Any, arguments: Any, result: Any) -> Any:
            size = result.shape[0] * result.shape[1]
            self.sizes.append(size)
            fails = self.seen == self.at or (self.most is not None and size > self.most)
            self.seen += 1
            if fails and half == "forward":
                exhaust()
            return Failing.apply(result, fails and torch.is_grad_enabled())

        # Of the last layer, so that all passes before it have allocated their part.
        model.base_model.model.model.layers[-1].register_forward_hook(forward)
