"""DPO through TRL: the loss by hand, the reference that it starts from, and tokens that the policy did not write."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flywheel.config.file import Config
from flywheel.errors import TrainError
from flywheel.records.round import METRICS_FILE
from flywheel.training.data.samples import Pair, Sample
from flywheel.training.engine.adapter_files import AdapterFiles
from tests.factories.pair import PAIRS, pair_sample
from tests.factories.policy_training import OutOfMemory, policy
from tests.factories.round import POLICY, round_spec

pytestmark = [pytest.mark.training, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

BETA = 0.3


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


def train(
    directory: Path, configured: Config, pairs: Any = PAIRS, parent: Any = None, prepare: Any = None
) -> tuple[list[Any], Any]:
    """The lines of the metrics, and the trainer. `parent` is a policy that the stage starts from; `prepare` is called
    with the policy before it is trained."""
    from flywheel.training.engine.policy import save_adapter
    from flywheel.training.optim.trainer import Trainer

    directory.mkdir(exist_ok=True)
    trainer = Trainer(round_spec(seed=3, settings=configured.model_dump(mode="json")), str(directory), threads=1)
    start = None
    if parent is not None:
        save_adapter(parent, directory / "parent")
        start = AdapterFiles.read(directory / "parent")
    trainer.start(start)
    if prepare is not None:
        prepare(trainer._model)
    trainer.prefer(pairs, directory / "adapter", 0)
    lines = [json.loads(line) for line in (directory / METRICS_FILE).read_text().splitlines()]
    return lines, trainer


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


def loaded(path: Path) -> Any:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(str(POLICY)), str(path))


@pytest.mark.parametrize(("name", "smoothing"), [("sigmoid", 0.0), ("sigmoid", 0.2), ("hinge", 0.0)])
def test_the_loss_is_the_one_by_hand(tmp_path: Path, name: str, smoothing: float) -> None:
    configured = settings(loss_type=name, label_smoothing=smoothing, learning_rate=1e-2, epochs=1)
    before, _ = train(tmp_path / "one", configured)
    assert before[0]["loss"] == pytest.approx(loss(0.0, name, smoothing), rel=1e-5)
    # The second epoch's loss is that of the adapter after the first one.
    lines, _ = train(tmp_path / "two", settings(loss_type=name, label_smoothing=smoothing, learning_rate=1e-2))
    found = gains(loaded(tmp_path / "one" / "adapter"), loaded_base())
    assert max(found) > 0.5
    assert lines[1]["loss"] == pytest.approx(sum(loss(gain, name, smoothing) for gain in found) / 3, rel=1e-3)
    assert lines[1]["margin"] == pytest.approx(BETA * sum(found) / 3, rel=1e-3)
    assert lines[1]["accuracy"] == pytest.approx(sum(gain > 0 for gain in found) / 3)
    assert [line["stage"] for line in lines] == ["dpo", "dpo"]


def test_the_loss_of_ipo_is_the_one_by_hand(tmp_path: Path) -> None:
    lines, _ = train(tmp_path, settings(loss_type="ipo", learning_rate=1e-3))
    assert lines[0]["loss"] == pytest.approx((1 / (2 * BETA)) ** 2, rel=1e-5)
    assert lines[1]["loss"] < lines[0]["loss"]


def loaded_base() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(str(POLICY))


def test_the_reference_is_what_the_stage_starts_from(tmp_path: Path) -> None:
    """With a parent that has an effect, the first loss is that of no difference, and the reference stays the parent
    while the adapter moves away from it."""
    from flywheel.system.files import tree_sha256

    lines, trainer = train(tmp_path, settings(learning_rate=1e-3), parent=policy())
    assert lines[0]["loss"] == pytest.approx(math.log(2), rel=1e-6)
    assert lines[0]["margin"] == 0.0
    assert lines[1]["loss"] < lines[0]["loss"]

    import torch
    from safetensors.torch import load_file

    weights = trainer._model.state_dict()
    parent = load_file(tmp_path / "parent" / "adapter_model.safetensors")
    for name, weight in parent.items():
        kept = weights[name.replace(".weight", ".ref.weight")]
        assert torch.equal(kept, weight), name
    assert tree_sha256(tmp_path / "adapter") != tree_sha256(tmp_path / "parent")
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert saved.keys() == parent.keys()
    assert any(bool((saved[name] != parent[name]).any()) for name in parent)


def test_tokens_of_tool_results_add_no_term(tmp_path: Path) -> None:
    """Of a pair with equal messages and different results of tools, nothing is learnt."""
    from flywheel.training.optim.dpo import pair_tensors

    tensors = pair_tensors(PAIRS, pad=0, device="cpu")
    marked = [row[mask.bool()].tolist() for row, mask in zip(tensors["input_ids"], tensors["completion_mask"])]  # noqa: B905
    assert marked[1] == [60, 61, 44, 2]
    assert marked[4] == [62, 61, 45, 2]
    # The last message is before the results: what follows it has no effect on its probability.
    one = pair_sample((1, 30), (60, 2), (70, 71))
    equal = Pair("d", one, replace(one, token_ids=(1, 30, 60, 2, 72, 73)))
    lines, _ = train(tmp_path, settings(learning_rate=1e-2), [equal])
    assert [line["loss"] for line in lines] == [pytest.approx(math.log(2), rel=1e-6)] * 2
    assert [line["grad_norm"] for line in lines] == [pytest.approx(0.0, abs=1e-6)] * 2


@pytest.mark.parametrize("half", ["backward", pytest.param("forward", marks=pytest.mark.extended)])
def test_a_step_that_runs_out_of_memory_is_repeated_in_smaller_micro_batches(tmp_path: Path, half: str) -> None:
    """With the same figures and weights as without, whichever of its passes failed."""
    from safetensors.torch import load_file

    def weights(folder: str) -> dict[str, Any]:
        return load_file(tmp_path / folder / "adapter" / "adapter_model.safetensors")

    configured = settings(learning_rate=1e-3, epochs=1, batch_size=4)
    training = configured.training.model_copy(update={"micro_batch_tokens": 2 * PAIRS[1].tokens})
    configured = configured.model_copy(update={"training": training})
    pairs = [*PAIRS, replace(PAIRS[0], task_id="d", chosen=PAIRS[0].rejected, rejected=PAIRS[0].chosen)]
    [wanted], _ = train(tmp_path / "calm", configured, pairs)
    # Two micro-batches of two pairs, each with a pass of the policy and then one of the reference without gradients.
    for at in (0, 1, 2, 3) if half == "forward" else (0, 2):
        failing: list[OutOfMemory] = []

        def prepare(model: Any, at: int = at, failing: list[OutOfMemory] = failing) -> None:
            failing.append(OutOfMemory(model, half, at=at))

        name = f"{half}-{at}"
        [line], _ = train(tmp_path / name, configured, pairs, prepare=prepare)
        assert len(failing[0].sizes) > at + 1 + 4
        for figure in ("loss", "margin", "accuracy", "chosen", "rejected", "grad_norm"):
            assert line[figure] == pytest.approx(wanted[figure], rel=1e-5, abs=1e-7), figure
        found = weights(name)
        for key, weight in weights("calm").items():
            assert (found[key] - weight).abs().max() < 1e-5, key


def test_a_pair_that_does_not_fit_alone_is_refused_with_its_length(tmp_path: Path) -> None:
    longest = max(pair.tokens for pair in PAIRS)

    def prepare(model: Any) -> None:
        OutOfMemory(model, "forward", most=longest - 1)

    with pytest.raises(TrainError, match=f"cannot train on a sample of {longest // 2} tokens"):
        train(tmp_path, settings(), prepare=prepare)
