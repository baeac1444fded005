"""DPO through TRL: the loss by hand, the reference that it starts from, and tokens that the policy did not write."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flywheel.config.file import Config
from flywheel.errors import TrainError
from flywheel.records.round import AdapterRef
from flywheel.training.data.samples import Pair, Sample, StepSize, minibatches
from flywheel.training.worker.stage import stage_settings
from tests.factories.pair import PAIRS, pair_sample
from tests.factories.policy_training import OutOfMemory, Trained, policy, policy_step
from tests.factories.round import POLICY

pytestmark = [pytest.mark.training, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

BETA = 0.3


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """With several, matrix products of other shapes are summed in another order, which the first step amplifies."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def settings(**dpo: Any) -> Config:
    return Config.model_validate(
        {
            "training": {
                "stages": ["dpo"],
                "max_grad_norm": 1e9,
                "lora": {"r": 8, "alpha": 16},
                "micro_batch_tokens": 30,
                "dpo": {"beta": BETA, "batch_size": 3, "epochs": 2, "scheduler": "constant", **dpo},
            },
            "rollout": {"max_completion_tokens": 16, "max_model_len": 64},
        }
    )


def train(configured: Config, pairs: Any = PAIRS, model: Any = None) -> Trained:
    """All pairs in each step, from a new adapter or from that of a model."""
    own = stage_settings(configured, "dpo", len(pairs))
    return Trained(pairs, model or new(configured), stage="dpo", settings=own)


def new(configured: Config) -> Any:
    """A policy with a new adapter."""
    from tests.factories.policy import load_policy

    return load_policy(str(POLICY), None, configured.training.lora, seed=3)


def gains(tuned: Any, reference: Any, pairs: Any = PAIRS) -> list[float]:
    """How much more the tuned policy than the reference prefers the better reply, in nats, token by token."""
    import torch

    def logp(model: Any, one: Sample) -> float:
        logits = model(torch.tensor([one.token_ids])).logits[0].float().log_softmax(-1)
        return sum(float(logits[at - 1, one.token_ids[at]]) for at in one.trained)

    with torch.no_grad():
        return [
            logp(tuned, pair.chosen)
            - logp(reference, pair.chosen)
            - logp(tuned, pair.rejected)
            + logp(reference, pair.rejected)
            for pair in pairs
        ]


def softplus(value: float) -> float:
    return math.log1p(math.exp(-abs(value))) + max(value, 0.0)


def loss(gain: float, name: str, smoothing: float) -> float:
    if name == "hinge":
        return max(0.0, 1 - BETA * gain)
    return (1 - smoothing) * softplus(-BETA * gain) + smoothing * softplus(BETA * gain)


@pytest.mark.parametrize(("name", "smoothing"), [("sigmoid", 0.0), ("sigmoid", 0.2), ("hinge", 0.0)])
def test_the_loss_is_the_one_by_hand(name: str, smoothing: float) -> None:
    configured = settings(loss_type=name, label_smoothing=smoothing, learning_rate=1e-2, epochs=1)
    once = train(configured)
    [(_, first)] = once.logs
    assert first["loss"] == pytest.approx(loss(0.0, name, smoothing), rel=1e-5)
    # The second epoch's loss is that of the adapter after the first one.
    _, (_, second) = train(settings(loss_type=name, label_smoothing=smoothing, learning_rate=1e-2)).logs
    found = gains(once.model, loaded_base())
    assert max(found) > 0.5
    assert second["loss"] == pytest.approx(sum(loss(gain, name, smoothing) for gain in found) / 3, rel=1e-3)
    assert second["rewards/margins"] == pytest.approx(BETA * sum(found) / 3, rel=1e-3)
    assert second["rewards/accuracies"] == pytest.approx(sum(gain > 0 for gain in found) / 3)
    assert (first["pairs"], second["pairs"]) == (3, 3)


def test_the_loss_of_ipo_is_the_one_by_hand() -> None:
    (_, first), (_, second) = train(settings(loss_type="ipo", learning_rate=1e-3)).logs
    assert first["loss"] == pytest.approx((1 / (2 * BETA)) ** 2, rel=1e-5)
    assert second["loss"] < first["loss"]


def loaded_base() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(str(POLICY))


def test_the_reference_is_what_the_stage_starts_from(tmp_path: Path) -> None:
    """With a parent that has an effect, the first loss is that of no difference, and the reference stays the parent
    while the adapter moves away from it."""
    import torch
    from safetensors.torch import load, load_file

    from tests.factories.policy import load_policy, save_adapter

    configured = settings(learning_rate=1e-3)
    save_adapter(policy(), tmp_path / "parent")
    parent_ref = AdapterRef(name="r0001", path=str(tmp_path / "parent"), sha256="")
    done = train(configured, model=load_policy(str(POLICY), parent_ref, configured.training.lora, seed=3))
    (_, first), (_, second) = done.logs
    assert first["loss"] == pytest.approx(math.log(2), rel=1e-6)
    assert first["rewards/margins"] == 0.0
    assert second["loss"] < first["loss"]
    weights = done.model.state_dict()
    parent = load_file(tmp_path / "parent" / "adapter_model.safetensors")
    for name, weight in parent.items():
        kept = weights[name.replace(".weight", ".ref.weight")]
        assert torch.equal(kept, weight), name
    saved = load(bytes(done.adapter().contents["adapter_model.safetensors"]))
    assert saved.keys() == parent.keys()
    assert any(bool((saved[name] != parent[name]).any()) for name in parent)


def test_tokens_of_tool_results_add_no_term() -> None:
    """Of a pair with equal messages and different results of tools, nothing is learnt."""
    step = policy_step(policy(), settings(), "dpo")
    [batch] = step._loss.batches(PAIRS, StepSize.of(PAIRS), 10_000)
    # Longest first.
    own = [
        [ids[mask.bool()].tolist() for ids, mask in zip(*pair, strict=True)]
        for pair in zip(batch.tensors["input_ids"], batch.tensors["completion_mask"], strict=True)
    ]
    assert own[0] == [[60, 61, 44, 2], [62, 61, 45, 2]]
    # The last message is before the results: what follows it has no effect on its probability.
    one = pair_sample((1, 30), (60, 2), (70, 71))
    equal = Pair("d", one, replace(one, token_ids=(1, 30, 60, 2, 72, 73)))
    logs = [each for _, each in train(settings(learning_rate=1e-2), [equal]).logs]
    assert [each["loss"] for each in logs] == [pytest.approx(math.log(2), rel=1e-6)] * 2
    assert [each["grad_norm"] for each in logs] == [pytest.approx(0.0, abs=1e-6)] * 2


@pytest.mark.parametrize("half", ["backward", pytest.param("forward", marks=pytest.mark.extended)])
def test_a_step_that_runs_out_of_memory_is_repeated_in_smaller_micro_batches(half: str) -> None:
    """With the same figures and weights as without, whichever of its passes failed."""
    configured = settings(learning_rate=1e-3, epochs=1, batch_size=4)
    training = configured.training.model_copy(update={"micro_batch_tokens": 2 * PAIRS[1].tokens})
    configured = configured.model_copy(update={"training": training})
    pairs = [*PAIRS, replace(PAIRS[0], task_id="d", chosen=PAIRS[0].rejected, rejected=PAIRS[0].chosen)]
    pairs = [pairs[place] for place in minibatches(len(pairs), 4, 1, seed=3)[0]]
    calm = train(configured, pairs)
    [(_, wanted)] = calm.logs
    # Two micro-batches of two pairs, each with a pass of the policy and then one of the reference without gradients.
    for at in (0, 1, 2, 3) if half == "forward" else (0, 2):
        failing = OutOfMemory(model := new(configured), half, at=at)
        done = train(configured, pairs, model)
        assert len(failing.sizes) > at + 1 + 4
        [(_, logs)] = done.logs
        for figure in set(wanted) - {"micro_batches", "entropy"}:
            assert logs[figure] == pytest.approx(wanted[figure], rel=1e-5, abs=1e-7), figure
        found = done.weights()
        for name, weight in calm.weights().items():
            assert (found[name] - weight).abs().max() < 1e-5, name


def test_a_pair_that_does_not_fit_alone_is_refused_with_its_length() -> None:
    longest = max(pair.tokens for pair in PAIRS)
    OutOfMemory(model := policy(), "forward", most=longest - 1)
    with pytest.raises(TrainError, match=f"cannot train on a sample of {longest // 2} tokens"):
        train(settings(), model=model)
