"""SFT through the trainer: its gradient is that of the cross-entropy, whatever the settings of GRPO are."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flywheel.config.file import Config
from flywheel.records.round import METRICS_FILE, AdapterRef
from flywheel.serving.adapter_files import WEIGHTS_FILE
from flywheel.training.data.round_progress import read_steps
from flywheel.training.data.samples import RecordedReply, Sample, TrainingRow
from flywheel.training.engine.policy import is_unchanged
from flywheel.training.optim.epochs import longest_of, minibatches, rows_of, stage_settings
from flywheel.training.worker.loop import Epochs
from flywheel.training.worker.stage_work import StageWork
from tests.factories.policy_training import gradients, policy
from tests.factories.round import POLICY, round_spec
from tests.factories.stage_loop import TrainersHere, work

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


def stage_on(directory: Path, settings: Config, base: Path = POLICY) -> StageWork:
    """A stage of SFT with a trainer in this process."""
    spec = round_spec(seed=3, base_model=str(base), settings=settings.model_dump(mode="json"))
    return work(spec, settings, directory, TrainersHere(spec), "sft")


def with_effect(monkeypatch: pytest.MonkeyPatch, base: Path) -> list[Any]:
    """Let new adapters have an effect. Returns the policies that are made."""
    from flywheel.training.optim import trainer_actor

    made: list[Any] = []

    def with_adapter(*_: Any) -> Any:
        made.append(policy(base))
        return made[-1]

    monkeypatch.setattr(trainer_actor, "with_adapter", with_adapter)
    return made


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
def test_the_gradient_is_that_of_the_cross_entropy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, base: Path
) -> None:
    import torch

    from flywheel.training.optim.policy_step import PolicyStep

    made, seen = with_effect(monkeypatch, base), list[dict[str, Any]]()
    update = PolicyStep._update

    def observed(self: Any, sums: Any) -> Any:
        seen.append(gradients(made[-1]))
        return update(self, sums)

    monkeypatch.setattr(PolicyStep, "_update", observed)
    of_stage = stage_on(tmp_path, Config.model_validate(GRPO), base)
    Epochs("sft", of_stage, REPLIES, REPLIES[:1]).run()

    expected, loss = cross_entropy(base, torch.float64)
    rounded, _ = cross_entropy(base, torch.float32)
    scale = max(float(gradient.abs().max()) for gradient in expected.values())

    def difference(found: dict[str, Any]) -> float:
        return max(float((found[name] - expected[name]).abs().max()) / scale for name in expected)

    assert len(seen) == 2
    assert seen[0].keys() == expected.keys()
    # A genuine model multiplies rounding errors: how much, the same formula in float32 shows.
    assert difference(seen[0]) < 1e-5 + 10 * difference(rounded) < 0.01

    lines = [json.loads(line) for line in (tmp_path / METRICS_FILE).read_text().splitlines()]
    assert lines[0]["loss"] == pytest.approx(loss, rel=1e-5)
    assert all(line["stage"] == "sft" and line["learning_rate"] == 1e-3 for line in lines)
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert lines[-1]["held_out_loss"] > 0
    assert not lines[0].keys() & {"logprob_gap", "ratio_mean", "ratio_capped_share", "clipped_share", "kl"}
    assert (of_stage.adapter / "adapter_config.json").is_file()


@pytest.mark.training
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_loss_of_each_reply_is_its_cross_entropy_and_changes_no_weight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, base: Path
) -> None:
    import torch

    made, settings = with_effect(monkeypatch, base), stage_settings(Config.model_validate(GRPO), "sft", 3)
    trainers = stage_on(tmp_path, settings, base).trainers
    trainers.begin("sft", settings, settings.training.steps, longest_of(REPLIES), None)
    before = {name: weight.detach().clone() for name, weight in made[-1].named_parameters()}
    losses = trainers.nll([rows_of([reply]) for reply in REPLIES])
    assert all(torch.equal(before[name], weight) for name, weight in made[-1].named_parameters())
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


@pytest.mark.training
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_output_layer_is_computed_for_no_prompt_and_no_padding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trl.trainer import utils

    original, computed = utils._ChunkedLogProbFunction, []

    class Observed:
        @staticmethod
        def apply(hidden: Any, *arguments: Any) -> Any:
            computed.append(len(hidden))
            return original.apply(hidden, *arguments)

    settings = stage_settings(Config.model_validate(GRPO), "sft", 2)
    trainers = stage_on(tmp_path, settings).trainers
    trainers.begin("sft", settings, settings.training.steps, longest_of(REPLIES), None)
    monkeypatch.setattr(utils, "_ChunkedLogProbFunction", Observed)
    # A sample of nine tokens behind a prompt of five; then one of seven beside one of five, whose prompt is two.
    trainers.nll([rows_of([reply]) for reply in (REPLIES[0], REPLIES[2])])
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

    def trained(name: str, parent: Path | None = None, count: int = 1, **own: Any) -> Path:
        sft = {"epochs": 1, "batch_size": 1, "learning_rate": 1e-3, **own}
        settings = Config.model_validate(GRPO | {"training": GRPO["training"] | {"sft": sft}})
        of_stage = stage_on(tmp_path / name, settings)
        if parent is not None:
            of_stage.training.adapter = AdapterRef(name="parent", path=str(parent), sha256="")
        Epochs("sft", of_stage, REPLIES[:count]).run()
        return of_stage.adapter

    def rates(adapter: Path) -> list[float]:
        return [line["learning_rate"] for line in read_steps(adapter.parents[2])]

    for scheduler in ("linear", "cosine", "constant"):
        warm = trained(scheduler, scheduler=scheduler, warmup_steps=0.03)
        assert rates(warm) == [1e-3]
        assert not is_unchanged(warm, None)
    warm = trained("several", count=3, warmup_steps=50)
    assert rates(warm) == [0.0, pytest.approx(5e-4), 1e-3]
    assert is_unchanged(trained("new", learning_rate=1e-60), None)
    parent = trained("parent")
    assert is_unchanged(trained("same", parent, learning_rate=1e-30), parent)
    assert not is_unchanged(trained("other", parent), parent)
    # In half precision, a parent's weights are the same numbers.
    weights = {name: tensor.bfloat16() for name, tensor in load_file(parent / WEIGHTS_FILE).items()}
    save_file(weights, parent / WEIGHTS_FILE)
    assert is_unchanged(trained("half", parent, learning_rate=1e-30), parent)
