"""TRL's GRPO on rollouts made by hand: what it trains on, and what an undecided reward does."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from flywheel.config import Config, LoraSettings
from flywheel.errors import TrainError
from flywheel.training.advantage import group_advantages
from flywheel.training.rollout import Batch, Completion, Rollout
from tests.training.rollouts import prompt, request, verdict
from tests.training.test_round_directory import POLICY

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

SETTINGS = Config.model_validate(
    {
        "training": {
            "steps": 1,
            "prompts_per_step": 2,
            "group_size": 4,
            "micro_batch_size": 4,
            "learning_rate": 1e-2,
            "lora": {"r": 8},
        },
        "rollout": {"max_completion_tokens": 16, "max_model_len": 64},
    }
)
PROMPTS = [prompt("t-0", (1, 20, 21, 22, 23)), prompt("t-1", (1, 30, 31))]


SHIFT = 0.5
"""How far, in nats, the engine's logprob of the very first token is from the trainer's."""


@cache
def logprobs(prompt_ids: tuple[int, ...], token_ids: tuple[int, ...]) -> tuple[float, ...]:
    """What the policy itself gives these tokens."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(POLICY)
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt_ids, *token_ids]])).logits[0, len(prompt_ids) - 1 : -1]
    at = logits.log_softmax(-1).gather(1, torch.tensor(token_ids)[:, None])
    return tuple(at[:, 0].tolist())


def rollout(group: int, token_ids: tuple[int, ...], score: float | None) -> Rollout:
    given = logprobs(PROMPTS[group].token_ids, token_ids)
    if token_ids[0] == 40:
        given = (given[0] + SHIFT, *given[1:])
    return Rollout(request(group, of=PROMPTS[group]), Completion(token_ids, given, "an answer"), verdict(score))


def failed(group: int) -> Rollout:
    return Rollout(request(group, of=PROMPTS[group]), Completion(error="the engine failed"), None)


def a_batch(*, last: Rollout) -> Batch:
    return Batch(
        (
            rollout(0, (40, 41, 42, 2), 1.0),
            rollout(0, (43, 2), 0.0),
            rollout(0, (44, 45, 46, 47, 48, 49), None),
            rollout(0, (50, 2), 0.0),
            rollout(1, (60, 2), 1.0),
            rollout(1, (61, 62, 2), 1.0),
            rollout(1, (63, 2), 0.0),
            last,
        )
    )


class Observed:
    """One optimizer step of a fresh adapter: what TRL put into its tensors, and what it reported."""

    def __init__(
        self, directory: Path, batch: Batch, *, tamper: bool = False, training: dict[str, Any] | None = None
    ) -> None:
        from transformers import AutoTokenizer

        from flywheel.training.grpo import RoundTrainer, StepLog, grpo_config, rows
        from flywheel.training.policy import load_policy

        settings = SETTINGS.model_dump()
        settings["training"].update(training or {})
        self.settings = Config.model_validate(settings)
        self.synced = 0
        self.steps: list[int] = []
        self.logs: list[tuple[int, dict[str, Any]]] = []
        self.inputs: dict[str, Any] = {}
        observed = self

        class Watching(RoundTrainer):
            def _generate_and_score_completions(self, inputs: Any) -> Any:
                observed.inputs = super()._generate_and_score_completions(inputs)
                return observed.inputs

            def _calculate_rewards(self, *arguments: Any) -> Any:
                if tamper:
                    self._batch = Batch((*batch.rollouts[:-1], rollout(1, (63, 3), 0.5)))
                return super()._calculate_rewards(*arguments)

        def sync() -> None:
            self.synced += 1

        def roll_out(step: int) -> Batch:
            self.steps.append(step)
            return batch

        self.model = load_policy(str(POLICY), None, LoraSettings(r=8, alpha=16), seed=1)
        self.trainer = Watching(
            roll_out=roll_out,
            sync_weights=sync,
            model=self.model,
            args=grpo_config(self.settings, directory, seed=1, model_dtype=self.model.dtype, longest=16),
            train_dataset=rows(self.settings.training.steps, 2),
            processing_class=AutoTokenizer.from_pretrained(POLICY),
            callbacks=[StepLog(lambda step, logs: self.logs.append((step, logs)))],
        )

    def weights(self) -> dict[str, Any]:
        return {name: p.detach().clone() for name, p in self.model.named_parameters() if p.requires_grad}


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Observed:
    made = Observed(tmp_path_factory.mktemp("trl"), a_batch(last=failed(1)))
    made.before = made.weights()  # type: ignore[attr-defined]
    made.trainer.train()
    return made


def test_what_carries_loss_is_token_for_token_what_the_engine_returned(observed: Observed) -> None:
    inputs = observed.inputs
    mask = (inputs["completion_mask"] * inputs["tool_mask"]).bool()
    trained = [inputs["completion_ids"][row][mask[row]].tolist() for row in range(8)]
    assert trained == [
        [40, 41, 42, 2],
        [43, 2],
        [44, 45, 46, 47, 48, 49],
        [50, 2],
        [60, 2],
        [61, 62, 2],
        [63, 2],
        [],
    ]
    prompts = [inputs["prompt_ids"][row][inputs["prompt_mask"][row].bool()].tolist() for row in range(8)]
    assert prompts == [[1, 20, 21, 22, 23]] * 4 + [[1, 30, 31]] * 4


def test_an_undecided_and_a_failed_rollout_have_no_advantage_and_no_part_in_the_baseline(observed: Observed) -> None:
    advantages = observed.inputs["advantages"].tolist()
    rollouts = a_batch(last=failed(1)).rollouts
    written = group_advantages([each.request.group for each in rollouts], [each.reward for each in rollouts])
    assert [each or 0.0 for each in written] == pytest.approx(advantages, abs=1e-4)
    # Group 0 decided: 1, 0, 0: mean 1/3, deviation sqrt(1/3). Group 1 decided: 1, 1, 0: mean 2/3, the same deviation.
    unit = 1 / (math.sqrt(1 / 3) + 1e-4)
    expected = [2 / 3 * unit, -1 / 3 * unit, 0, -1 / 3 * unit, 1 / 3 * unit, 1 / 3 * unit, -2 / 3 * unit, 0]
    assert advantages == pytest.approx(expected, abs=1e-4)


def test_the_engines_logprobs_are_corrected_for_and_the_gap_is_reported(observed: Observed) -> None:
    ratios = observed.inputs["importance_sampling_ratio"][:, 0].tolist()
    assert ratios == pytest.approx([math.exp(-SHIFT), *[1.0] * 7], abs=1e-3)
    [(step, logs)] = observed.logs
    assert step == 1
    tokens = 4 + 2 + 6 + 2 + 2 + 3 + 2
    assert logs["sampling/sampling_logp_difference/mean"] == pytest.approx(SHIFT / tokens, abs=1e-4)
    assert math.isfinite(logs["loss"])
    assert logs["grad_norm"] > 0
    assert math.isfinite(logs["entropy"])


def test_weights_are_synced_before_rollouts_and_only_the_adapter_is_trained(observed: Observed) -> None:
    assert observed.synced == 1
    before, after = observed.before, observed.weights()  # type: ignore[attr-defined]
    assert all("lora_" in name for name in after)
    assert any((before[name] != after[name]).any() for name in after)


TWICE = {"updates_per_batch": 2}


Trained = Callable[[dict[str, Any]], dict[str, Any]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """The weights that these settings lead to. What is asked for again is not trained again."""
    known: dict[str, dict[str, Any]] = {}

    def train(training: dict[str, Any]) -> dict[str, Any]:
        name = repr(training)
        if name not in known:
            made = Observed(tmp_path_factory.mktemp("trl"), a_batch(last=failed(1)), training=training)
            made.trainer.train()
            known[name] = {name: weight for name, weight in made.weights().items() if ".ref." not in name}
        return known[name]

    return train


@pytest.mark.parametrize(
    ("before", "changed"),
    [
        ({}, {"learning_rate": 5e-3}),
        ({}, {"max_grad_norm": 1e-3, "learning_rate": 1e-2}),
        ({}, {"loss_type": "grpo"}),
        ({}, {"loss_type": "bnpo"}),
        ({}, {"loss_type": "dr_grpo"}),
        ({}, {"scale_rewards": "none"}),
        ({}, {"scale_rewards": "batch"}),
        ({}, TWICE),
        (TWICE, {**TWICE, "clip_epsilon": 0.999}),
        (TWICE, {**TWICE, "clip_epsilon_high": 1e3}),
        (TWICE, {**TWICE, "beta": 1.0}),
        ({"steps": 2}, {"steps": 2, "warmup_steps": 1}),
    ],
)
def test_a_setting_of_the_training_section_changes_what_is_trained(
    trained: Trained, before: dict[str, Any], changed: dict[str, Any]
) -> None:
    kept = trained(before)
    assert any((kept[name] != weight).any() for name, weight in trained(changed).items())


def test_updates_on_a_batch_are_counted_as_one_step(tmp_path: Path) -> None:
    made = Observed(tmp_path, a_batch(last=failed(1)), training={"steps": 2, **TWICE})
    made.trainer.train()
    assert made.steps == [0, 1]
    assert made.synced == 2
    assert [step for step, _ in made.logs] == [1, 2]
    assert made.trainer.state.global_step == 4


def test_a_kl_term_leaves_only_the_trained_adapter_in_what_is_saved(tmp_path: Path) -> None:
    from flywheel.training.policy import save_adapter

    made = Observed(tmp_path / "trl", a_batch(last=failed(1)), training={"beta": 0.1})
    made.trainer.train()
    save_adapter(made.model, tmp_path / "adapter")
    assert sorted(p.name for p in (tmp_path / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]


def test_tokens_that_are_not_the_engines_are_never_trained_on(tmp_path: Path) -> None:
    made = Observed(tmp_path, a_batch(last=rollout(1, (63, 2), 0.5)), tamper=True)
    with pytest.raises(TrainError, match="the trainer's tokens of task t-1 are not those of its rollout"):
        made.trainer.train()


def test_an_adapter_appears_whole_and_can_be_continued(observed: Observed, tmp_path: Path) -> None:
    from flywheel.files import tree_sha256
    from flywheel.round import AdapterRef
    from flywheel.training.policy import check_parent, load_policy, other_form, rank, save_adapter

    path = tmp_path / "adapter"
    save_adapter(observed.model, path)
    assert sorted(p.name for p in path.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["adapter"]
    reference = AdapterRef(name="r0001", path=str(path), sha256=tree_sha256(path))
    check_parent(reference)
    assert rank(reference, LoraSettings(r=1)) == 8
    assert other_form(reference, LoraSettings(r=8, alpha=16)) == ""
    assert other_form(reference, LoraSettings(r=16, alpha=16)) == "r 8"
    again = load_policy(str(POLICY), reference, LoraSettings(r=8), seed=2)
    loaded = {name: p for name, p in again.named_parameters() if p.requires_grad}
    for name, weight in observed.weights().items():
        assert (loaded[name] == weight).all()
