"""Checkpoints: training that goes on from one ends with exactly the weights of undisturbed training."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from flywheel.errors import TrainError
from flywheel.records.round import AdapterRef
from flywheel.training.data.round_directory import go_on_from, last_checkpoint
from flywheel.training.data.samples import TrainingRow
from tests.factories.policy_training import LONGEST, made_settings, policy, rows
from tests.factories.round import POLICY

pytestmark = [pytest.mark.training, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

STEPS = 5


class KilledError(Exception):
    pass


def trained(
    folder: Path, parent: Path, *, dies_at: int | None = None, **training: Any
) -> tuple[dict[str, Any], list[int]]:
    """The weights, and the steps that were asked for their rows, of which each has others."""
    from transformers import AutoTokenizer

    from flywheel.config.training import LoraSettings
    from flywheel.training.engine.policy import load_policy
    from flywheel.training.optim.grpo import EndAtCheckpoint, RoundTrainer, StepLog, grpo_config, step_dataset

    settings = made_settings(**{"steps": STEPS, "save_steps": 2, "learning_rate": 1e-3, **training})
    asked = []

    def roll_out(step: int) -> list[TrainingRow]:
        if step == dies_at:
            raise KilledError
        asked.append(step)
        return [TrainingRow(row.rollout, row.sample, row.advantage * (1 + step / 7)) for row in rows()]

    ref = AdapterRef(name="r0001", path=str(parent), sha256="")
    model = load_policy(str(POLICY), ref, LoraSettings(), seed=1, dtype="float32")
    checkpoint = go_on_from(folder)
    trainer = RoundTrainer(
        roll_out=roll_out,
        settings=settings,
        model=model,
        args=grpo_config(settings, folder / "checkpoints", seed=1, compute_dtype=model.dtype, longest=LONGEST),
        train_dataset=step_dataset(STEPS),
        processing_class=AutoTokenizer.from_pretrained(POLICY),
        callbacks=[StepLog(lambda *_: None), EndAtCheckpoint(folder / "end-at-checkpoint")],
    )
    with contextlib.suppress(KilledError):
        trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint.path))
    kept = {name: weight.detach().clone() for name, weight in model.named_parameters() if weight.requires_grad}
    return kept, asked


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from flywheel.training.engine.policy import save_adapter

    directory = tmp_path_factory.mktemp("parent") / "adapter"
    save_adapter(policy(), directory)
    return directory


def furthest(some: Mapping[str, Any], others: Mapping[str, Any]) -> float:
    return max(float((some[name] - others[name]).abs().max()) for name in some)


@pytest.mark.parametrize(
    "training",
    [
        pytest.param({}, id="plain"),
        pytest.param({"updates_per_batch": 2, "save_steps": 1}, id="two updates", marks=pytest.mark.extended),
        pytest.param({"beta": 0.5}, id="with a reference", marks=pytest.mark.extended),
        pytest.param({"warmup_steps": 3, "scheduler": "cosine"}, id="schedule", marks=pytest.mark.extended),
    ],
)
def test_training_goes_on_from_a_checkpoint_as_if_it_had_never_ended(
    tmp_path: Path, parent: Path, training: dict[str, Any]
) -> None:
    whole, _ = trained(tmp_path / "whole", parent, **training)
    at_death, _ = trained(tmp_path / "again", parent, dies_at=3, **training)
    every = training.get("save_steps", 2)
    updates = training.get("updates_per_batch", 1)
    checkpoint = last_checkpoint(tmp_path / "again")
    assert checkpoint is not None
    assert checkpoint.updates == 3 // every * every * updates
    resumed, asked = trained(tmp_path / "again", parent, **training)
    assert asked == list(range(checkpoint.updates // updates, STEPS))
    assert furthest(resumed, whole) == 0
    assert furthest(at_death, whole) > 0


def test_training_that_had_ended_has_nothing_left_to_do(tmp_path: Path, parent: Path) -> None:
    whole, _ = trained(tmp_path, parent)
    again, asked = trained(tmp_path, parent)
    assert asked == []
    assert furthest(again, whole) == 0


def test_training_ends_at_a_checkpoint_when_it_is_asked_to(tmp_path: Path, parent: Path) -> None:
    (tmp_path / "end-at-checkpoint").touch()
    with pytest.raises(TrainError, match="asked its worker to end at this checkpoint") as why:
        trained(tmp_path, parent)
    assert why.value.retryable
    checkpoint = last_checkpoint(tmp_path)
    assert checkpoint is not None
    assert checkpoint.updates == 2
    (tmp_path / "end-at-checkpoint").unlink()
    _, asked = trained(tmp_path, parent)
    assert asked == [2, 3, 4]


def test_checkpoints_have_the_trained_adapter_alone_and_the_last_two_stay(tmp_path: Path, parent: Path) -> None:
    trained(tmp_path, parent, beta=0.5, save_steps=1)
    kept = sorted((tmp_path / "checkpoints").iterdir())
    assert [path.name for path in kept] == ["checkpoint-4", "checkpoint-5"]
    for path in kept:
        assert [each.name for each in path.iterdir() if each.is_dir()] == []
        assert (path / "adapter_model.safetensors").is_file()
