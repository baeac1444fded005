"""Half precision's scaler, quantised bases and NCCL, which have their real form on GPUs alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flywheel.config.file import Config
from flywheel.config.training import LoraSettings, Quantization
from flywheel.training.data.samples import Sample, TrainingRow
from flywheel.training.engine import ray_cluster
from flywheel.training.engine.policy import AdapterFiles
from tests.factories.policy_training import LONGEST, Trained, made_settings, policy, rows
from tests.factories.round import POLICY
from tests.factories.trainer_processes import Processes, furthest

pytestmark = [pytest.mark.training, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def scaled_step(scale: float = 1024.0, **training: Any) -> Any:
    """Steps in float32 with the scaler of half precision, of which torch has one for CPUs."""
    import torch
    from transformers import AutoTokenizer

    from flywheel.training.optim.losses import made_loss
    from flywheel.training.optim.policy_step import PolicyStep

    settings = made_settings(**{"steps": 4, "learning_rate": 1e-3, **training})
    loss = made_loss(
        "grpo",
        policy(),
        settings,
        AutoTokenizer.from_pretrained(POLICY),
        seed=1,
        compute_dtype=torch.float32,
        longest=LONGEST,
    )
    accelerator = loss.everyone
    accelerator.scaler, accelerator.native_amp = torch.amp.GradScaler("cpu", init_scale=scale), True
    accelerator.state._mixed_precision = "fp16"
    return PolicyStep(loss, settings, 4)


@pytest.fixture
def precision_restored() -> Any:
    """accelerate has one state for the whole process."""
    from accelerate.state import AcceleratorState

    yield
    AcceleratorState._reset_state(reset_partial_state=False)


@pytest.mark.usefixtures("precision_restored")
def test_the_scaler_scales_gradients_back_and_goes_on_from_a_checkpoint() -> None:
    [(_, wanted)] = Trained(rows(), learning_rate=1e-3).logs
    step = scaled_step()
    # accelerate computes in half precision, too.
    assert step.step(rows()) == pytest.approx(wanted, rel=0.02, abs=0.02)
    # The scaler refuses an optimizer step without gradients.
    assert step.step([])["grad_norm"] == 0
    step._accelerator.scaler.update(64.0)
    again = scaled_step()
    for name, data in step.checkpoint():
        again.restore(name, data)
    assert again._accelerator.scaler.get_scale() == 64
    assert again.step(rows()) == step.step(rows())


@pytest.mark.usefixtures("precision_restored")
def test_an_update_whose_scale_is_too_large_is_repeated_with_a_smaller_one() -> None:
    """A first scale is only a guess, and the rollouts of the step have been judged."""
    [(_, wanted)] = Trained(rows(), learning_rate=1e-3).logs
    step = scaled_step(2.0**40)
    before = [weight.detach().clone() for weight in step._weights]
    assert step.step(rows()) == pytest.approx(wanted, rel=0.02, abs=0.02)
    assert 1 <= step._accelerator.scaler.get_scale() < 2.0**40
    assert any(bool((weight != kept).any()) for weight, kept in zip(step._weights, before, strict=True))
    assert (step.steps, step._schedule.last_epoch) == (1, 1)


@pytest.mark.usefixtures("precision_restored")
def test_an_update_whose_gradients_overflow_at_any_scale_leaves_the_weights() -> None:
    step = scaled_step()
    before = [weight.detach().clone() for weight in step._weights]
    huge = TrainingRow(0, Sample((1, 2, 3), (False, True, True), (None, -0.5, float("-inf"))), 1e38)
    figures = step.step([*rows(), huge])
    assert not figures["grad_norm"] < float("inf")
    assert all(bool((weight == kept).all()) for weight, kept in zip(step._weights, before, strict=True))
    step.step(rows())
    assert all(bool(weight.isfinite().all()) for weight in step._weights)
    assert any(bool((weight != kept).any()) for weight, kept in zip(step._weights, before, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("stage", ["grpo", "sft", "dpo"])
def test_float16_trains_on_a_gpu(stage: Any) -> None:
    import torch

    from tests.factories.pair import PAIRS

    items: Any = PAIRS if stage == "dpo" else rows()
    done = Trained(items, stage=stage, steps=3, learning_rate=1e-3, compute_dtype=torch.float16)
    assert done.step._accelerator.scaler is not None
    assert any((done.before[name] != weight.cpu()).any() for name, weight in done.weights().items())
    wanted = Trained(items, stage=stage, steps=3, learning_rate=1e-3)
    assert done.logs[0][1]["loss"] == pytest.approx(wanted.logs[0][1]["loss"], rel=0.02, abs=0.02)


@pytest.mark.gpu
@pytest.mark.parametrize("quantization", ["4bit", "8bit"])
def test_an_adapter_on_a_quantised_base_trains_and_goes_on(quantization: Quantization) -> None:
    import torch

    from tests.factories.policy import load_policy

    def made() -> Any:
        return load_policy(str(POLICY), None, LoraSettings(r=8), seed=1, dtype="bfloat16", quantization=quantization)

    options: dict[str, Any] = {"steps": 3, "learning_rate": 1e-3, "compute_dtype": torch.bfloat16}
    whole = Trained(rows(), made(), **options)
    first = Trained(rows(), made(), end=2, **options)
    again = Trained(rows(), made(), checkpoint=first.checkpoint(), **options)
    weights = whole.weights()
    assert {weight.dtype for weight in weights.values()} == {torch.float32}
    assert all((again.weights()[name] - weight).abs().max() < 1e-5 for name, weight in weights.items())


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_two_gpus_have_the_gradient_of_one(tmp_path: Path) -> None:
    """By NCCL, which has one process for each GPU."""
    import torch

    from tests.factories.policy import save_adapter

    if torch.cuda.device_count() < 2:
        pytest.skip("NCCL needs two GPUs")
    save_adapter(policy(), tmp_path / "parent")
    parent = AdapterFiles.read(tmp_path / "parent")
    wanted, _ = Processes(1, parent).step("grpo", rows())
    with ray_cluster.session(Config.model_validate({"training": {"workers": 2}})):
        found, _ = Processes(2, parent, gpus=2).step("grpo", rows())
    assert (
        furthest({name: each.cpu() for name, each in found.items()}, {n: e.cpu() for n, e in wanted.items()}) < 1e-6
    )
