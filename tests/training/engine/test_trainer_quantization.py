"""A quantised base model of the trainer: when it is refused, and what transformers is told."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from flywheel.config.file import Config
from flywheel.config.training import LoraSettings, Quantization, Stage
from flywheel.errors import TrainError
from flywheel.training.optim.stage_checks import WIDEST_GAP, refuse_wide_gap
from tests.factories.policy_training import policy_step
from tests.factories.round import POLICY, round_spec

QUANTISED = {"model": {"trainer_quantization": "4bit"}}


def with_packages(monkeypatch: pytest.MonkeyPatch, *, bitsandbytes: bool, gpu: bool) -> None:
    """This machine as one with or without these."""
    import torch

    find_spec = importlib.util.find_spec
    spec = find_spec("json") if bitsandbytes else None
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: spec if name == "bitsandbytes" else find_spec(name, *rest),
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)


@pytest.mark.training
@pytest.mark.slow
@pytest.mark.parametrize(
    ("bitsandbytes", "gpu", "complaint"),
    [
        (True, False, r"model\.trainer_quantization: 4bit\): .*there is no GPU.* Remove model\.trainer_quantization"),
        (False, True, r"bitsandbytes is not installed.*pip install .*\[quantized\]"),
    ],
)
def test_a_round_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, bitsandbytes: bool, gpu: bool, complaint: str
) -> None:
    from flywheel.training.worker import run_round

    def unused(*_: Any) -> Any:
        raise AssertionError("nothing is started")

    with_packages(monkeypatch, bitsandbytes=bitsandbytes, gpu=gpu)
    spec = round_spec(settings=Config.model_validate(QUANTISED).model_dump(mode="json"))
    with pytest.raises(TrainError, match=complaint) as refused:
        run_round(spec, tmp_path, unused)
    assert not refused.value.retryable
    assert list(tmp_path.iterdir()) == []


@pytest.mark.training
@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["4bit", "8bit", None])
def test_only_the_trainers_frozen_base_is_quantised(
    monkeypatch: pytest.MonkeyPatch, quantization: Quantization | None
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from flywheel.training.engine import policy
    from flywheel.training.optim.trainer_actor import Trainer

    original = AutoModelForCausalLM.from_pretrained
    handed: list[Any] = []

    def loaded(base: str, *, quantization_config: Any = None, **options: Any) -> Any:
        handed.append(quantization_config)
        return original(base, **options)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", loaded)
    monkeypatch.setattr(policy, "check_quantization", lambda _: None)
    settings = Config.model_validate(
        {"model": {"trainer_quantization": quantization}, "training": {"precision": "bfloat16", "lora": {"r": 8}}}
    )
    trainer = Trainer(round_spec(settings=settings.model_dump(mode="json")), threads=1)
    trainer.begin("grpo", settings, 1, 16, None)
    [config] = handed
    if quantization == "4bit":
        assert (config.load_in_4bit, config.bnb_4bit_quant_type, config.bnb_4bit_use_double_quant) == (
            True,
            "nf4",
            True,
        )
        assert config.bnb_4bit_compute_dtype == torch.bfloat16
    elif quantization == "8bit":
        assert (config.load_in_8bit, config.load_in_4bit) == (True, False)
    else:
        assert config is None
    weights = [weight for weight in trainer._policy._loss.model.parameters() if weight.requires_grad]
    assert {weight.dtype for weight in weights} == {torch.float32}


@pytest.mark.training
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("stage", ["grpo", "dpo"])
def test_the_adapter_on_a_quantised_base_stays_float32(stage: Stage) -> None:
    """TRL converts it to bfloat16, which rounds the weights of a parent and loses small steps."""
    import torch

    from tests.factories.policy import load_policy

    model = load_policy(str(POLICY), None, LoraSettings(r=8), seed=1)
    model.base_model.model.is_loaded_in_4bit = True  # what TRL looks at
    before = {name: weight.detach().clone() for name, weight in model.named_parameters() if weight.requires_grad}
    policy_step(model, Config.model_validate(QUANTISED), stage, compute_dtype=torch.bfloat16)
    after = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    assert after.keys() == before.keys()
    assert all(after[name].dtype == torch.float32 and (after[name] == before[name]).all() for name in before)


@pytest.mark.parametrize(("quantization", "remedy"), [("4bit", "Set it to 8bit"), ("8bit", "Remove it")])
def test_a_gap_that_is_too_wide_fails_the_round(quantization: Quantization, remedy: str) -> None:
    refuse_wide_gap(WIDEST_GAP, quantization)
    refuse_wide_gap(None, quantization)
    refuse_wide_gap(1.0, None)
    for gap in (WIDEST_GAP + 0.01, float("nan")):
        with pytest.raises(TrainError, match=r"logprob_gap\), which is more than 0\.2") as refused:
            refuse_wide_gap(gap, quantization)
        assert remedy in refused.value.hint
        assert not refused.value.retryable
