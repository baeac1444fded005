"""The trainer's process: what it loads, and what it leaves when steps have nothing to train."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from flywheel.config.file import Config
from flywheel.training.data.graded_rollouts import StoredSteps
from flywheel.training.data.rollout import Rollout, RolloutBatch, RolloutRequest
from tests.factories.round import POLICY, round_spec
from tests.training.data.rollouts import StandIn, prompt, reply, verdict

STARTED = """
import sys, tempfile
from flywheel.training.optim.trainer import Trainer
from tests.factories.round import round_spec
Trainer(round_spec(), tempfile.gettempdir(), threads=1).start(None)
import flywheel.training.optim.dpo
assert "trl.trainer.grpo_trainer" in sys.modules and "trl.trainer.dpo_trainer" in sys.modules
print([name for name in sys.modules if name.partition(".")[0] == "vllm"])
"""


@pytest.mark.training
@pytest.mark.slow
@pytest.mark.extended
def test_the_trainer_does_not_load_vllm() -> None:
    done = subprocess.run([sys.executable, "-c", STARTED], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr[-3000:]


class Cutting(StandIn):
    """Takes the place of engines and judge. All rollouts of some steps, counted from 0, reach a limit. Those of the
    step behind `last` are stored before its own, as overlap does."""

    def __init__(self, steps: Sequence[int], directory: Path, last: int) -> None:
        self.steps, self.directory, self.last = steps, directory, last

    def collect(
        self, requests: Sequence[RolloutRequest], *, order: int, on_generated: Callable[[], None]
    ) -> RolloutBatch:
        on_generated()
        cut = order in self.steps
        made = [reply(each.prompt, (20 + n, 9), (-2.0, -2.0), "7", truncated=cut) for n, each in enumerate(requests)]
        rollouts = zip(requests, made, strict=True)
        graded = (Rollout(each, done, verdict(n % 2)) for n, (each, done) in enumerate(rollouts))
        batch = RolloutBatch(tuple(graded), {"generate": 0.0, "grade": 0.0})
        if order == self.last:
            StoredSteps(self.directory).append(order + 1, batch, "group")
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
    from flywheel.training.engine.policy import load_policy
    from flywheel.training.optim import trainer as trainer_module

    training = {"steps": steps, "prompts_per_step": 2, "group_size": 4, "save_steps": 1, "mask_truncated": True}
    settings = Config.model_validate({"training": training, "rollout": {"max_model_len": 64}})
    spec = round_spec(settings=settings.model_dump(mode="json"))
    trainer = trainer_module.Trainer(spec, str(tmp_path), threads=1)
    trainer._model = load_policy(str(POLICY), None, settings.training.lora, seed=1, dtype="float32")
    collector = Cutting(cut, tmp_path, last=4)
    monkeypatch.setattr(trainer_module.Collector, "of", lambda *_: contextlib.nullcontext(collector))
    monkeypatch.setattr(trainer_module.AdapterSync, "load", lambda _: None)
    monkeypatch.setattr("transformers.trainer.rotate_checkpoints", lambda *_, **__: None)
    prompts = [replace(prompt(f"t-{n}", (5, 6, 10 + n)), max_tokens=8) for n in range(4)]
    adapter = tmp_path / "stages" / "1-grpo" / "adapter"
    done = trainer.train(prompts, [], lambda *_: lambda __: verdict(None), 0, adapter, 0)
    found = done.refusal or done.ended
    assert found.startswith(why) and bool(found) == bool(why)
    assert bool(done.refusal) == (not trained)
    assert done.steps == trained
    # A later stage begins behind all that is stored.
    assert done.rollout_steps == (6 if trained == 2 else len(cut) + bool(trained))
    assert adapter.exists() is bool(trained)
    if trained:
        good = adapter.parent / "checkpoints" / "checkpoint-2" / "adapter_model.safetensors"
        assert (adapter / "adapter_model.safetensors").read_bytes() == good.read_bytes()
