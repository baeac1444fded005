"""SFT through the trainer: its gradient is that of the cross-entropy, whatever the settings of GRPO are."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flywheel.config.file import Config
from flywheel.records.round import AdapterRef
from flywheel.serving.adapter_files import WEIGHTS_FILE
from flywheel.training.data.samples import RecordedReply, Sample, TrainingRow, minibatches, rows_of
from flywheel.training.engine.policy import is_unchanged
from flywheel.training.worker.stage import stage_settings
from tests.factories.policy_training import Trained, gradients, policy, policy_step
from tests.factories.round import POLICY

GRPO: dict[str, Any] = {
    "training": {
        "stages": ["sft", "grpo"],
        "beta": 0.1,
        "updates_per_batch": 2,
        "loss_type": "grpo",
        "importance": "engine",
        "max_grad_norm": 1e9,
        "lora": {"r": 8},
        "precision": "float32",
        "micro_batch_tokens": 40,
        "sft": {"batch_size": 3, "epochs": 2, "learning_rate": 1e-3, "scheduler": "constant"},
    },
    "rollout": {"temperature": 0.6, "max_completion_tokens": 16, "max_model_len": 64},
}
"""Settings of GRPO that would change the loss of SFT if they reached it."""
STAGES: tuple[Literal["sft", "dpo"], ...] = ("sft", "dpo")


def recorded(task: str, *parts: tuple[int, ...]) -> RecordedReply:
    """A reply of one sample: context and supervised tokens in turn."""
    ids = tuple(token for part in parts for token in part)
    mask = tuple(bool(place % 2) for place, part in enumerate(parts) for _ in part)
    return RecordedReply(task, (Sample(ids, mask),))


REPLIES = (
    recorded("a", (1, 20, 21, 22), (40, 41, 42, 2)),
    recorded("b", (1, 30), (60, 61, 2), (70, 71), (44, 2)),
    RecordedReply(
        "c", (*recorded("c", (1, 31, 32, 33, 34), (50, 2)).samples, *recorded("c", (1, 5), (6, 7, 2)).samples)
    ),
)


@pytest.fixture(params=["demo", pytest.param("small", marks=pytest.mark.extended)])
def base(request: pytest.FixtureRequest) -> Path:
    """The demo's policy, whose numbers are float32, and the small model, whose are bfloat16."""
    return POLICY if request.param == "demo" else request.getfixturevalue("small_model_path")


def settings_of(count: int = len(REPLIES), **own: Any) -> Config:
    """Of a stage on so many replies."""
    training = GRPO["training"] | {"sft": GRPO["training"]["sft"] | own}
    return stage_settings(Config.model_validate(GRPO | {"training": training}), "sft", count)


def cross_entropy(base: Path, dtype: Any) -> tuple[dict[str, Any], float]:
    """The gradient of torch's cross-entropy of all supervised tokens in a dtype, as float64, and the loss."""
    import torch

    model = policy(base).to(dtype)
    loss = torch.zeros((), dtype=dtype)
    tokens = 0
    for sample in (sample for reply in REPLIES for sample in reply.samples):
        ids = torch.tensor([sample.token_ids])
        shown = zip(sample.token_ids, sample.loss_mask, strict=True)
        labels = torch.tensor([token if own else -100 for token, own in shown])
        logits = model(ids).logits[0, :-1].to(dtype)
        loss = loss + torch.nn.functional.cross_entropy(logits, labels[1:], ignore_index=-100, reduction="sum")
        tokens += sum(sample.loss_mask)
    (loss / tokens).backward()
    return {name: gradient.double() for name, gradient in gradients(model).items()}, float(loss / tokens)


@pytest.mark.training
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_gradient_is_that_of_the_cross_entropy(base: Path) -> None:
    import torch

    done = Trained(rows_of(REPLIES), policy(base), stage="sft", settings=settings_of())
    expected, loss = cross_entropy(base, torch.float64)
    rounded, _ = cross_entropy(base, torch.float32)
    scale = max(float(gradient.abs().max()) for gradient in expected.values())

    def difference(found: dict[str, Any]) -> float:
        return max(float((found[name] - expected[name]).abs().max()) / scale for name in expected)

    assert len(done.gradients) == 2
    assert done.gradients[0].keys() == expected.keys()
    # A genuine model multiplies rounding errors: how much, the same formula in float32 shows.
    assert difference(done.gradients[0]) < 1e-5 + 10 * difference(rounded) < 0.01

    (_, first), (_, last) = done.logs
    assert first["nll"] == pytest.approx(loss, rel=1e-5)
    assert (first["learning_rate"], last["learning_rate"]) == (1e-3, 1e-3)
    assert last["nll"] < first["nll"]
    assert (done.step.nll(rows_of(REPLIES[:1])) or 0) > 0


@pytest.mark.training
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_loss_of_each_reply_is_its_cross_entropy_and_changes_no_weight(base: Path) -> None:
    import torch

    model = policy(base)
    step = policy_step(model, settings_of(), "sft")
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    losses = [step.nll(rows_of([reply])) for reply in REPLIES]
    assert all(torch.equal(before[name], weight) for name, weight in model.named_parameters())
    model = policy(base)
    for reply, loss in zip(REPLIES, losses, strict=True):
        total = tokens = 0.0
        for sample in reply.samples:
            ids = torch.tensor([sample.token_ids])
            labels = torch.tensor([token if own else -100 for token, own in zip(*astuple(sample), strict=True)])
            logits = model(ids).logits[0, :-1].detach().float()
            total += float(torch.nn.functional.cross_entropy(logits, labels[1:], ignore_index=-100, reduction="sum"))
            tokens += sum(sample.loss_mask)
        assert loss == pytest.approx(total / tokens, rel=1e-4)
    assert step.step(rows_of(REPLIES))["nll"] == pytest.approx(cross_entropy(base, torch.float32)[1], rel=1e-4)


@pytest.mark.training
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_output_layer_is_computed_for_no_prompt_and_no_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    step, computed = policy_step(policy(), settings_of(), "sft"), []
    from trl.trainer import utils

    original = utils._ChunkedLogProbFunction

    class Observed:
        @staticmethod
        def apply(hidden: Any, *arguments: Any) -> Any:
            computed.append(len(hidden))
            return original.apply(hidden, *arguments)

    monkeypatch.setattr(utils, "_ChunkedLogProbFunction", Observed)
    # A sample of nine tokens behind a prompt of five; then one of seven beside one of five, whose prompt is two.
    for reply in (REPLIES[0], REPLIES[2]):
        step.nll(rows_of([reply]))
    assert computed == [4, 5 + 3]


def astuple(sample: Sample) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    return sample.token_ids, sample.loss_mask


@given(count=st.integers(1, 40), size=st.integers(1, 12), epochs=st.integers(1, 4), seed=st.integers(0, 9))
def test_each_epoch_has_every_reply_once(count: int, size: int, epochs: int, seed: int) -> None:
    batches = minibatches(count, size, epochs, seed)
    per_epoch = len(batches) // epochs
    for epoch in range(epochs):
        own = batches[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert Counter(number for batch in own for number in batch) == Counter(range(count))
        assert all(len(batch) == size for batch in own[:-1])
    assert batches == minibatches(count, size, epochs, seed)
    for stage in STAGES:
        configured = Config.model_validate({"training": {stage: {"batch_size": size, "epochs": epochs}}})
        assert stage_settings(configured, stage, count).training.steps == len(batches)


def test_a_reply_of_several_samples_is_one_rollout() -> None:
    rows = rows_of(REPLIES)
    assert [row.rollout for row in rows] == [0, 1, 2, 2]
    assert {row.advantage for row in rows} == {1.0}
    assert all(isinstance(row, TrainingRow) and row.sample.logprobs == () for row in rows)


def test_tokens_without_an_engine_are_trained_and_the_first_never_is() -> None:
    assert Sample((5, 6, 7), (True, False, True)).trained == [2]
    assert Sample((5, 6, 7), (False, True, True), (None, None, -0.5)).trained == [2]


@pytest.mark.training
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_short_run_has_a_learning_rate_and_one_that_changes_nothing_is_seen(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    from tests.factories.policy import load_policy

    def trained(name: str, parent: Path | None = None, count: int = 1, **own: Any) -> Path:
        settings = settings_of(count, **{"epochs": 1, "batch_size": 1, **own})
        ref = None if parent is None else AdapterRef(name="parent", path=str(parent), sha256="")
        model = load_policy(str(POLICY), ref, settings.training.lora, seed=3)
        done = Trained(lambda step: rows_of(REPLIES[step : step + 1]), model, stage="sft", settings=settings)
        done.adapter().write(tmp_path / name)
        rates[name] = [logs["learning_rate"] for _, logs in done.logs]
        return tmp_path / name

    rates: dict[str, list[float]] = {}
    for scheduler in ("linear", "cosine", "constant"):
        warm = trained(scheduler, scheduler=scheduler, warmup_steps=0.03)
        assert rates[scheduler] == [1e-3]
        assert not is_unchanged(warm, None)
    trained("several", count=3, warmup_steps=50)
    assert rates["several"] == [0.0, pytest.approx(5e-4), 1e-3]
    assert is_unchanged(trained("new", learning_rate=1e-60), None)
    parent = trained("parent")
    assert is_unchanged(trained("same", parent, learning_rate=1e-30), parent)
    assert not is_unchanged(trained("other", parent), parent)
    # In half precision, a parent's weights are the same numbers.
    weights = {name: tensor.bfloat16() for name, tensor in load_file(parent / WEIGHTS_FILE).items()}
    save_file(weights, parent / WEIGHTS_FILE)
    assert is_unchanged(trained("half", parent, learning_rate=1e-30), parent)
