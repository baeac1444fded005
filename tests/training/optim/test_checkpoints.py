"""Checkpoints: training that goes on from one ends with exactly the weights of undisturbed training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from flywheel.records.round import AdapterRef
from flywheel.training.data.samples import TrainingRow
from tests.factories.policy_training import Trained, policy, rows
from tests.factories.round import POLICY

pytestmark = [pytest.mark.training, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

STEPS = 5


def rows_of_step(step: int) -> Sequence[TrainingRow]:
    """Each has others."""
    return [TrainingRow(row.rollout, row.sample, row.advantage * (1 + step / 7)) for row in rows()]


def trained(parent: Path, **options: Any) -> Trained:
    from flywheel.config.training import LoraSettings
    from tests.factories.policy import load_policy

    ref = AdapterRef(name="r0001", path=str(parent), sha256="")
    model = load_policy(str(POLICY), ref, LoraSettings(), seed=1, dtype="float32")
    return Trained(rows_of_step, model, **{"steps": STEPS, "learning_rate": 1e-3, **options})


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.factories.policy import save_adapter

    directory = tmp_path_factory.mktemp("parent") / "adapter"
    save_adapter(policy(), directory)
    return directory


def furthest(some: Mapping[str, Any], others: Mapping[str, Any]) -> float:
    return max(float((some[name] - others[name]).abs().max()) for name in some)


@pytest.mark.parametrize(
    "training",
    [
        pytest.param({}, id="plain"),
        pytest.param({"updates_per_batch": 2}, id="two updates", marks=pytest.mark.extended),
        pytest.param({"beta": 0.5}, id="with a reference", marks=pytest.mark.extended),
        pytest.param({"warmup_steps": 3, "scheduler": "cosine"}, id="schedule", marks=pytest.mark.extended),
    ],
)
def test_training_goes_on_from_a_checkpoint_as_if_it_had_never_ended(parent: Path, training: dict[str, Any]) -> None:
    whole = trained(parent, **training)
    at_death = trained(parent, end=2, **training)
    resumed = trained(parent, checkpoint=at_death.checkpoint(), **training)
    assert resumed.steps == [2, 3, 4]
    assert furthest(resumed.weights(), whole.weights()) == 0
    assert furthest(at_death.weights(), whole.weights()) > 0
    assert resumed.logs == whole.logs[2:]


def test_checkpoints_come_in_pieces_and_have_what_is_trained_alone(
    parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the smaller micro-batches after a shortage of memory."""
    from flywheel.training.optim import policy_step

    monkeypatch.setattr(policy_step, "PIECE_BYTES", 20_000)
    done = trained(parent, beta=0.5, end=3)
    done.step.max_tokens = 29
    pieces = done.checkpoint()
    assert len(pieces) > 20
    # A weight is whole, with a header.
    assert max(map(len, pieces.values())) < 60_000
    trainable = sum(weight.nbytes for weight in done.weights().values())
    assert 3 * trainable < sum(map(len, pieces.values())) < 3 * trainable + 4_000 * len(pieces)
    resumed = trained(parent, beta=0.5, checkpoint=pieces, end=3)
    assert resumed.adapter() == done.adapter()
    resumed = trained(parent, beta=0.5, checkpoint=pieces)
    assert resumed.step.max_tokens == 29
    assert furthest(resumed.weights(), trained(parent, beta=0.5, micro_batch_tokens=29).weights()) < 1e-5
