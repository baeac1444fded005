"""The loop of a stage: what it leaves when steps have nothing to train. And what the trainer loads."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flywheel.config.file import Config
from flywheel.errors import TrainError
from flywheel.training.data.graded_rollouts import StoredSteps
from flywheel.training.data.rollout import Rollout, RolloutBatch, RolloutRequest
from flywheel.training.data.round_directory import END_FILE
from flywheel.training.data.round_progress import read_steps
from flywheel.training.data.samples import RecordedReply, Sample
from flywheel.training.engine.policy import AdapterFiles
from flywheel.training.worker.loop import Epochs, Reinforcement
from tests.factories.round import round_spec
from tests.factories.stage_loop import FIGURES, StandInTrainers, TrainersHere, work
from tests.training.data.rollouts import StandIn, prompt, reply, verdict

STARTED = """
import sys
from flywheel.training.optim.trainer_actor import Trainer
from tests.factories.round import round_spec
Trainer(round_spec(), threads=1).start()
assert "trl.trainer.grpo_trainer" in sys.modules and "trl.trainer.dpo_trainer" in sys.modules
print([name for name in sys.modules if name.partition(".")[0] == "vllm"])
"""


@pytest.mark.training
@pytest.mark.slow
@pytest.mark.extended
def test_the_trainer_does_not_load_vllm() -> None:
    done = subprocess.run([sys.executable, "-c", STARTED], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr[-3000:]


def test_a_checkpoint_counts_once_it_was_written_whole(tmp_path: Path) -> None:
    """And those behind the one that is gone on from are written again."""
    settings = Config.model_validate({"training": {"steps": 20, "save_steps": 5}})
    trainers = StandInTrainers()
    of_stage = work(round_spec(), settings, tmp_path, trainers)
    assert of_stage.checkpoint() is None
    for steps in (2, 10, 999_999, 1_000_000):
        of_stage.trainers.save(of_stage.folder / "checkpoints", steps)
    half_written = of_stage.folder / "checkpoints" / ".step-000012.zip.0123abcd"
    half_written.touch()
    found, early = of_stage.checkpoint(1_000_001), of_stage.checkpoint(9)
    assert found is not None and early is not None
    assert (found.name, early.name) == ("step-1000000.zip", "step-000002.zip")
    assert of_stage.begin("grpo", steps=20, longest=8, most=9) == 2
    assert {path.name for path in early.parent.iterdir()} == {early.name, half_written.name}
    assert trainers.restored == [early]


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(Path.unlink, id="removed"),
        pytest.param(lambda path: path.write_bytes(path.read_bytes()[:-30]), id="cut"),
        pytest.param(lambda path: path.write_bytes(path.read_bytes().replace(b"of a", b"of 1")), id="changed"),
        pytest.param(lambda path: path.write_bytes(b""), id="empty"),
    ],
)
def test_of_a_damaged_checkpoint_the_one_before_it_is_gone_on_from(
    tmp_path: Path, damage: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    trainers = StandInTrainers()
    of_stage = work(round_spec(), Config.model_validate({"training": {"steps": 20}}), tmp_path, trainers)
    for steps in (5, 10):
        trainers.save(of_stage.folder / "checkpoints", steps)
    last = of_stage.checkpoint()
    assert last is not None and last.name == "step-000010.zip"
    damage(last)
    named = last.exists()
    assert of_stage.begin("grpo", steps=20, longest=8) == 5
    assert [path.name for path in trainers.restored] == ["step-000005.zip"]
    assert [path.name for path in last.parent.iterdir()] == ["step-000005.zip"]
    assert (f"{last} is damaged" in caplog.text) == named


def test_training_ends_at_a_checkpoint_when_it_is_asked_to(tmp_path: Path) -> None:
    settings = Config.model_validate({"training": {"sft": {"batch_size": 1, "epochs": 5}, "save_steps": 2}})
    replies = [RecordedReply("a", (Sample((1, 20, 2), (False, True, True)),))]
    (tmp_path / END_FILE).touch()
    first, again = (work(round_spec(), settings, tmp_path, StandInTrainers(), "sft") for _ in range(2))
    with pytest.raises(TrainError, match="asked its worker to end at this checkpoint") as why:
        Epochs("sft", first, replies).run()
    assert why.value.retryable
    checkpoint = first.checkpoint()
    assert checkpoint is not None and checkpoint.name == "step-000002.zip"
    (tmp_path / END_FILE).unlink()
    trainers: Any = again.trainers
    Epochs("sft", again, replies).take_steps()
    assert (trainers.restored, len(trainers.items)) == ([checkpoint], 3)
    assert [line["step"] for line in read_steps(tmp_path)] == [1, 2, 3, 4, 5]


def test_the_figures_of_sft_are_those_of_its_tokens_and_of_held_out_replies_after_each_epoch(tmp_path: Path) -> None:
    settings = Config.model_validate({"training": {"sft": {"batch_size": 2, "epochs": 2}}})
    figures = {**FIGURES, "nll": 2.5, "trained_tokens": 4.0, "entropy": 1.5, "logprob_gap": 0.0, "kl": 0.0}
    of_stage = work(round_spec(), settings, tmp_path, StandInTrainers(figures), "sft")
    of_stage.training.steps = 3
    replies = [RecordedReply(f"t-{n}", (Sample((1, 20, 2), (False, True, True)),)) for n in range(3)]
    run = Epochs("sft", of_stage, replies, replies[:2])
    run.run()
    lines = read_steps(tmp_path)
    assert [(line["step"], line["steps"], line["epoch"], line["replies"]) for line in lines] == [
        (4, 7, 0.5, 2), (5, 7, 1.0, 1), (6, 7, 1.5, 2), (7, 7, 2.0, 1),
    ]  # fmt: skip
    assert [line.get("held_out_loss") for line in lines] == [None, 2.0, None, 2.0]
    for line in lines:
        assert (line["stage"], line["loss"], line["trained_tokens"], line["entropy"]) == ("sft", 2.5, 4, 1.5)
        assert not line.keys() & {"logprob_gap", "ratio_mean", "ratio_capped_share", "clipped_share", "kl"}
    assert (run.trained, of_stage.training.steps, run.with_gradient) == (4, 7, {"t-0", "t-1", "t-2"})
    assert of_stage.adapter.is_dir()


@pytest.mark.training
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_stage_of_fewer_steps_than_its_warm_up_trains(tmp_path: Path) -> None:
    """Its number of steps follows from its replies, which no configuration knows."""
    own = {"batch_size": 2, "epochs": 1, "warmup_steps": 50, "learning_rate": 1e-2}
    settings = Config.model_validate({"training": {"sft": own, "stages": ["sft"], "precision": "float32"}})
    spec = round_spec(settings=settings.model_dump(mode="json"))
    of_stage = work(spec, settings, tmp_path, TrainersHere(spec), "sft")
    replies = [RecordedReply(f"t-{n}", (Sample((1, 20, 2), (False, True, True)),)) for n in range(6)]
    Epochs("sft", of_stage, replies).run()
    assert [line["learning_rate"] for line in read_steps(tmp_path)] == [0.0, 5e-3, 1e-2]


class Cutting(StandIn):
    """All rollouts of some steps, counted from 0, reach a limit. Those of the step behind `last` are stored before
    its own, as overlap may do."""

    def __init__(self, steps: Sequence[int], directory: Path, last: int) -> None:
        self.steps, self.directory, self.last = steps, directory, last

    def rollouts(self, requests: Sequence[RolloutRequest], step: int) -> RolloutBatch:
        cut = step in self.steps
        made = [reply(each.prompt, (20 + n, 9), (-2.0, -2.0), "7", truncated=cut) for n, each in enumerate(requests)]
        rollouts = zip(requests, made, strict=True)
        graded = (Rollout(each, done, verdict(n % 2)) for n, (each, done) in enumerate(rollouts))
        batch = RolloutBatch(tuple(graded), {"generate": 0.0, "grade": 0.0})
        if step == self.last:
            StoredSteps(self.directory).append(step + 1, batch, "group")
        return batch


@pytest.mark.training
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("steps", "cut", "trained", "why"),
    [
        pytest.param(6, (2, 3, 4), 2, "step 5 has no token to train", id="what was trained is kept"),
        pytest.param(2, (0, 1), 0, "step 2 has no token to train", id="nothing was trained"),
        pytest.param(6, (0, 1, 2), 0, "step 3 has no token to train", id="nor in three steps"),
        pytest.param(2, (0,), 1, "", id="a step was trained"),
    ],
)
def test_what_becomes_of_steps_without_a_token_to_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int, cut: Sequence[int], trained: int, why: str
) -> None:
    training = {"steps": steps, "prompts_per_step": 2, "group_size": 4, "save_steps": 1, "mask_truncated": True}
    training = {"precision": "float32", **training}
    settings = Config.model_validate({"training": training, "rollout": {"max_model_len": 64}})
    spec = round_spec(settings=settings.model_dump(mode="json"))
    trainers = TrainersHere(spec)
    of_stage = work(spec, settings, tmp_path, trainers)
    monkeypatch.setattr("flywheel.training.worker.processes.KEPT", steps)
    prompts = [replace(prompt(f"t-{n}", (5, 6, 10 + n)), max_tokens=8) for n in range(4)]
    collector: Any = Cutting(cut, tmp_path, last=4)
    run = Reinforcement(of_stage, prompts, collector)
    run.run()
    found = run.refusal or run.ended
    assert found.startswith(why) and bool(found) == bool(why)
    assert bool(run.refusal) == (not trained)
    assert run.trained == trained
    # A later stage begins behind all that is stored.
    assert of_stage.training.rollout_steps == (6 if trained == 2 else len(cut) + bool(trained))
    assert of_stage.adapter.exists() is bool(trained)
    if trained:
        good = of_stage.checkpoint(2)
        assert good is not None
        trainers.restore(good)
        assert trainers.adapter() == AdapterFiles.read(of_stage.adapter)
