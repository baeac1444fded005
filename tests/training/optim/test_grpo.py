"""TRL's GRPO on rows made by hand: its gradient is that of an independent computation, and of TRL alone."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from flywheel.config.training import LoraSettings, Stage
from flywheel.errors import TrainError
from flywheel.training.data.samples import Sample, TrainingRow
from flywheel.training.worker.processes import refuse_not_finite
from flywheel.training.worker.stage import stage_settings
from tests.factories.pair import PAIRS
from tests.factories.policy_training import (
    LONGEST,
    TEMPERATURE,
    OutOfMemory,
    Trained,
    assert_equal,
    exact,
    gradients,
    logps_of,
    made_settings,
    policy,
    policy_step,
    rows,
    sample,
)
from tests.factories.round import POLICY
from tests.training.data.rollouts import batch

pytestmark = [pytest.mark.training, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def expected(given: Sequence[TrainingRow], *, loss_type: str, importance: str, cap: float = 3.0) -> dict[str, Any]:
    """The gradient of the first update, from the definition: token by token, sample by sample."""
    model = policy()
    trained = {
        at: [place for place in range(1, len(row.sample.token_ids)) if row.sample.logprobs[place] is not None]
        for at, row in enumerate(given)
    }
    of_rollout: dict[int, int] = {}
    for at, row in enumerate(given):
        of_rollout[row.rollout] = of_rollout.get(row.rollout, 0) + len(trained[at])
    for at, row in enumerate(given):
        logps = logps_of(model, row.sample)
        loss = 0.0
        for place in trained[at]:
            logp, engine = logps[place - 1], row.sample.logprobs[place]
            if importance == "engine":
                ratio = (logp - engine).exp()
                term = -min(ratio * row.advantage, ratio.clamp(0.8, 1.28) * row.advantage)
            else:
                weight = min(math.exp(logp.item() - engine), cap)
                term = -weight * (logp - logp.detach()).exp() * row.advantage
            share = {
                "dapo": 1 / sum(of_rollout.values()),
                "grpo": 1 / of_rollout[row.rollout] / len(of_rollout),
                "dr_grpo": 1 / LONGEST / len(of_rollout),
            }[loss_type]
            loss = loss + term * share
        loss.backward()  # type: ignore[attr-defined]
    return gradients(model)


@pytest.mark.parametrize(
    ("loss_type", "importance"),
    [
        ("dapo", "truncated"),
        ("grpo", "engine"),
        ("dr_grpo", "truncated"),
        pytest.param("dapo", "engine", marks=pytest.mark.extended),
        pytest.param("grpo", "truncated", marks=pytest.mark.extended),
        pytest.param("dr_grpo", "engine", marks=pytest.mark.extended),
    ],
)
def test_a_steps_gradient_is_that_of_an_independent_computation(loss_type: str, importance: str) -> None:
    """Several samples per rollout, masks and missing logprobs, whole and in micro-batches."""
    wanted = expected(rows(), loss_type=loss_type, importance=importance)
    for budget, batches in ((10_000, 1), (30, 3), (1, 8)):
        done = Trained(rows(), loss_type=loss_type, importance=importance, micro_batch_tokens=budget)
        [gradient] = done.gradients
        assert_equal(gradient, wanted)
        [(_, logs)] = done.logs
        assert logs["micro_batches"] == batches
        assert done.passes == batches, "a forward pass besides the loss's own"


def test_the_metrics_are_means_over_the_steps_trained_tokens() -> None:
    pairs = [
        (
            exact(Sample(row.sample.token_ids, row.sample.loss_mask, (None,) * len(row.sample.token_ids)))[at - 1],
            given,
        )
        for row in rows()
        for at, given in enumerate(row.sample.logprobs)
        if given is not None
    ]
    ratios = [math.exp(own - engine) for own, engine in pairs]
    for budget in (10_000, 30):
        [(step, logs)] = Trained(rows(), micro_batch_tokens=budget).logs
        assert step == 1
        assert logs["trained_tokens"] == len(pairs)
        assert logs["ratio_mean"] == pytest.approx(sum(ratios) / len(ratios), rel=1e-4)
        assert logs["ratio_capped_share"] == pytest.approx(sum(r > 3 for r in ratios) / len(ratios))
        gap = sum(abs(own - engine) for own, engine in pairs) / len(pairs)
        assert logs["logprob_gap"] == pytest.approx(gap, rel=1e-4)
        assert 0 < logs["entropy"] < math.log(400)
        assert math.isfinite(logs["loss"])
        assert logs["grad_norm"] > 0


def trained_logps(model: Any) -> list[float]:
    """Log-probabilities of the trained tokens of all rows by a model, in their order."""
    import torch

    with torch.no_grad():
        each = [(row.sample, logps_of(model, row.sample).tolist()) for row in rows()]
    return [logps[at - 1] for sample, logps in each for at in sample.trained]


def test_the_clipped_share_does_not_depend_on_micro_batches() -> None:
    engine = [row.sample.logprobs[at] for row in rows() for at in row.sample.trained]
    advantages = [row.advantage for row in rows() for _ in row.sample.trained]
    ratios = [math.exp(own - given) for own, given in zip(trained_logps(policy()), engine, strict=True)]
    clipped = [
        ratio < 0.8 if advantage < 0 else ratio > 1.28 and advantage > 0
        for ratio, advantage in zip(ratios, advantages, strict=True)
    ]
    assert 0 < sum(clipped) < len(clipped)
    for budget in (10_000, 30, 1):
        [(_, logs)] = Trained(rows(), importance="engine", micro_batch_tokens=budget).logs
        assert logs["clipped_share"] == pytest.approx(sum(clipped) / len(clipped), rel=1e-5)
        assert "kl" not in logs


def test_the_kl_does_not_depend_on_micro_batches() -> None:
    """That of a second update: before the first one, the policy is the reference."""
    training = {"beta": 0.1, "learning_rate": 1e-3, "clip_epsilon": 0.01, "clip_epsilon_high": 0.01}
    once = Trained(rows(), **training)
    pairs = list(zip(trained_logps(once.model), trained_logps(policy()), strict=True))
    # The reference is also the old policy, by which the loss weights its KL term.
    terms = [math.exp(own - first) * (math.exp(first - own) - (first - own) - 1) for own, first in pairs]
    kl = sum(terms) / len(terms)
    assert kl > 1e-3
    advantages = [row.advantage for row in rows() for _ in row.sample.trained]
    clipped = [
        (own - first > math.log(1.01)) if advantage > 0 else (own - first < math.log(0.99)) and advantage < 0
        for (own, first), advantage in zip(pairs, advantages, strict=True)
    ]
    assert 0 < sum(clipped) < len(clipped)
    found = [Trained(rows(), **training, **TWICE, micro_batch_tokens=budget).logs[0][1] for budget in (10_000, 30, 1)]
    for logs in found:
        assert logs["kl"] == pytest.approx(found[0]["kl"], rel=1e-5)
        assert logs["kl"] == pytest.approx(kl, rel=1e-4)
        assert logs["clipped_share"] == pytest.approx(sum(clipped) / len(clipped), rel=1e-5)


def trl_alone(directory: Path, given: Sequence[TrainingRow], group: int, **arguments: Any) -> dict[str, Any]:
    """The gradient of TRL's own GRPOTrainer on one sample per rollout, with its own forward pass for its correction
    and its own padding, advantages and normaliser."""
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    model = policy()
    found: list[dict[str, Any]] = []

    class Gradients(TrainerCallback):  # type: ignore[misc]
        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            found.append(gradients(model))

    class NoSync:
        def sync_weights(self) -> None:
            pass

    def roll_out(prompts: Sequence[str], _: Any) -> dict[str, list[Any]]:
        assert len(prompts) == len(given)
        starts = [row.sample.trained[0] for row in given]
        pairs = list(zip(starts, given, strict=True))
        return {
            "prompt_ids": [list(row.sample.token_ids[:at]) for at, row in pairs],
            "completion_ids": [list(row.sample.token_ids[at:]) for at, row in pairs],
            "logprobs": [[value or 0.0 for value in row.sample.logprobs[at:]] for at, row in pairs],
            "env_mask": [[int(own) for own in row.sample.loss_mask[at:]] for at, row in pairs],
            "reward": [row.advantage for row in given],
        }

    trainer = GRPOTrainer(
        model=model,
        reward_funcs=lambda reward, **_: reward,
        rollout_func=roll_out,
        args=GRPOConfig(
            output_dir=str(directory),
            max_steps=1,
            per_device_train_batch_size=len(given),
            num_generations=group,
            max_completion_length=LONGEST,
            temperature=TEMPERATURE,
            beta=0.0,
            epsilon_high=0.28,
            scale_rewards="none",
            max_grad_norm=1e9,
            vllm_importance_sampling_mode="token_truncate",
            vllm_importance_sampling_clip_max=3.0,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            shuffle_dataset=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            **arguments,
        ),
        train_dataset=Dataset.from_dict({"prompt": ["x"] * (len(given) // group)}),
        processing_class=AutoTokenizer.from_pretrained(POLICY),
        callbacks=[Gradients()],
    )
    # This enables the correction without starting vLLM.
    trainer.vllm_generation, trainer._last_loaded_step, trainer.use_vllm = NoSync(), -1, True
    trainer.train()
    return found[0]


@pytest.mark.parametrize("loss_type", ["dapo", pytest.param("grpo", marks=pytest.mark.extended)])
def test_the_gradient_is_trls_where_trl_can_express_the_step(tmp_path: Path, loss_type: str) -> None:
    """Prompts x group rollouts of one sample each; advantages that have a mean of 0 in their group."""
    given = [
        TrainingRow(0, sample((1, 20, 21, 22, 23), (40, 41, 42, 2), (70, 71, 72), (44, 45, 2)), 0.75),
        TrainingRow(1, sample((1, 20, 21, 22, 23), (50, 51, 2)), -0.25),
        TrainingRow(2, sample((1, 20, 21, 22, 23), (43, 2)), -0.25),
        TrainingRow(3, sample((1, 20, 21, 22, 23), (60, 61, 62, 63, 64, 65, 66, 2)), -0.25),
        TrainingRow(4, sample((1, 30, 31), (67, 2)), 0.5),
        TrainingRow(5, sample((1, 30, 31), (68, 69, 2), (81, 82), (2,)), 0.5),
        TrainingRow(6, sample((1, 30, 31), (90, 91, 92, 93)), -0.5),
        TrainingRow(7, sample((1, 30, 31), (94, 2)), -0.5),
    ]
    wanted = trl_alone(tmp_path / "trl", given, 4, loss_type=loss_type)
    done = Trained(given, loss_type=loss_type, micro_batch_tokens=40)
    assert_equal(done.gradients[0], wanted)


def test_only_the_adapter_is_trained() -> None:
    done = Trained(rows())
    after = done.weights()
    assert all("lora_" in name for name in after)
    assert any((done.before[name] != after[name]).any() for name in after)


TWICE = {"updates_per_batch": 2}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """The weights that these settings lead to. What is asked for again is not trained again."""
    known: dict[str, dict[str, Any]] = {}

    def train(training: dict[str, Any]) -> dict[str, Any]:
        name = repr(training)
        if name not in known:
            made = Trained(rows(), **training)
            known[name] = {name: weight for name, weight in made.weights().items() if ".ref." not in name}
        return known[name]

    return train


@pytest.mark.parametrize(
    ("before", "changed"),
    [
        ({}, {"loss_type": "grpo"}),
        ({}, {"importance": "engine"}),
        ({}, TWICE),
        (TWICE, {**TWICE, "clip_epsilon": 0.999}),
        (TWICE, {**TWICE, "beta": 1.0}),
        *(
            pytest.param(*each, marks=pytest.mark.extended)
            for each in (
                ({}, {"learning_rate": 5e-3}),
                ({}, {"max_grad_norm": 1e-9}),
                ({}, {"importance_cap": 1.1}),
                (TWICE, {**TWICE, "clip_epsilon_high": 1e3}),
                ({"steps": 2}, {"steps": 2, "warmup_steps": 1}),
            )
        ),
    ],
)
def test_a_setting_of_the_training_section_changes_what_is_trained(
    trained: Callable[[dict[str, Any]], dict[str, Any]], before: dict[str, Any], changed: dict[str, Any]
) -> None:
    kept = trained(before)
    assert any((kept[name] != weight).any() for name, weight in trained(changed).items())


def test_updates_on_a_batch_are_one_step_and_need_one_pass_each() -> None:
    done = Trained(rows(), steps=2, **TWICE)
    assert done.steps == [0, 1]
    assert [step for step, _ in done.logs] == [1, 2]
    assert len(done.gradients) == 4
    assert done.passes == 4


def test_the_second_update_has_the_first_ones_policy_as_the_old_one() -> None:
    """Its importance weights stay those of the first, and the ratio to the engine changes."""
    done = Trained(rows(), **TWICE, learning_rate=1e-3, micro_batch_tokens=30)
    first, second = done.gradients
    assert any((first[name] != second[name]).any() for name in first)
    [(_, logs)] = done.logs
    once = Trained(rows(), learning_rate=1e-3).logs[0][1]
    assert logs["logprob_gap"] == pytest.approx(once["logprob_gap"], rel=1e-4)
    assert logs["ratio_mean"] != pytest.approx(once["ratio_mean"], rel=1e-6)


def test_out_of_memory_means_torchs_own_errors() -> None:
    """Of a GPU, and the real one of a CPU."""
    import torch

    def on_gpu() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total of 8 GiB.")

    def trained(fail: Callable[[], object]) -> Trained:
        model, failures = policy(), iter([fail])
        model.base_model.model.model.register_forward_pre_hook(lambda *_: next(failures, lambda: None)() and None)
        return Trained(rows(), model, micro_batch_tokens=40)

    for failure in (on_gpu, lambda: torch.empty(2**58, dtype=torch.uint8)):
        assert trained(failure).step.max_tokens < 40
    with pytest.raises(RuntimeError, match="size"):
        trained(lambda: torch.zeros(2) @ torch.zeros(3))


@pytest.mark.parametrize(
    ("half", "importance"),
    [
        ("backward", "truncated"),
        pytest.param("forward", "truncated", marks=pytest.mark.extended),
        pytest.param("backward", "engine", marks=pytest.mark.extended),
        pytest.param("forward", "engine", marks=pytest.mark.extended),
    ],
)
def test_a_step_that_runs_out_of_memory_has_the_gradient_of_an_undisturbed_one(
    half: str, importance: str, caplog: pytest.LogCaptureFixture
) -> None:
    """At each of its micro-batches. Nothing of the failed attempt is in the figures."""
    calm = Trained(rows(), importance=importance, micro_batch_tokens=40)
    [(_, wanted)] = calm.logs
    batches = int(wanted["micro_batches"])
    assert batches > 2
    for at in range(batches):
        model = policy()
        failing = OutOfMemory(model, half, at=at)
        caplog.clear()
        done = Trained(rows(), model, importance=importance, micro_batch_tokens=40)
        [gradient] = done.gradients
        assert_equal(gradient, calm.gradients[0], tolerance=1e-5)
        [(_, logs)] = done.logs
        assert logs["micro_batches"] > batches
        assert len(failing.sizes) == at + 1 + logs["micro_batches"]
        assert done.steps == [0], "its rollouts are not asked again"
        for name in ("trained_tokens", "entropy", "ratio_mean", "ratio_capped_share", "logprob_gap", "clipped_share"):
            assert logs[name] == pytest.approx(wanted[name], rel=1e-5), name
        assert logs["loss"] == pytest.approx(wanted["loss"], rel=1e-4, abs=1e-6)
        assert done.step.max_tokens == failing.sizes[at] // 2
        [line] = [each.getMessage() for each in caplog.records if "out of memory" in each.getMessage()]
        assert f"a micro-batch of {failing.sizes[at]} tokens: this step is repeated" in line


@pytest.mark.extended
def test_the_smaller_micro_batches_stay() -> None:
    """With memory for 17 tokens in a pass, which is the longest row: only the first step is repeated."""
    model = policy()
    longest = max(row.tokens for row in rows())
    failing = OutOfMemory(model, "backward", most=longest)
    done = Trained(rows(), model, steps=2, micro_batch_tokens=10_000, learning_rate=1e-4)
    calm = Trained(rows(), steps=2, micro_batch_tokens=10_000, learning_rate=1e-4)
    assert [step for step, _ in done.logs] == [1, 2]
    for found, wanted in zip(done.gradients, calm.gradients, strict=True):
        assert_equal(found, wanted, tolerance=1e-4)
    last = int(done.logs[1][1]["micro_batches"])
    assert 1 < sum(size > longest for size in failing.sizes) < 5
    assert max(failing.sizes[-last:]) <= longest


@pytest.mark.parametrize(
    ("half", "beta"),
    [
        ("forward", 0.1),
        pytest.param("backward", 0.1, marks=pytest.mark.extended),
        pytest.param("forward", 0.0, marks=pytest.mark.extended),
        pytest.param("backward", 0.0, marks=pytest.mark.extended),
    ],
)
def test_a_second_update_that_runs_out_of_memory_keeps_the_first_ones_policy(half: str, beta: float) -> None:
    training = {**TWICE, "beta": beta, "learning_rate": 1e-3, "micro_batch_tokens": 40}
    calm = Trained(rows(), **training)
    [(_, wanted)] = calm.logs
    passes = calm.passes
    model = policy()
    failing = OutOfMemory(model, half, at=passes - 2)
    done = Trained(rows(), model, **training)
    for found, expected_gradient in zip(done.gradients, calm.gradients, strict=True):
        assert_equal(found, expected_gradient, tolerance=1e-5)
    [(_, logs)] = done.logs
    assert len(failing.sizes) > passes
    for name in ("ratio_mean", "logprob_gap", "clipped_share", *(["kl"] if beta else [])):
        assert logs[name] == pytest.approx(wanted[name], rel=1e-4), name


@pytest.mark.parametrize("half", ["forward", pytest.param("backward", marks=pytest.mark.extended)])
def test_a_row_that_does_not_fit_alone_is_refused_with_its_length(half: str) -> None:
    longest = max(row.tokens for row in rows())
    model = policy()
    OutOfMemory(model, half, most=longest - 1)
    with pytest.raises(TrainError, match=f"cannot train on a sample of {longest} tokens: memory does not") as caught:
        Trained(rows(), model)
    assert not caught.value.retryable
    assert "rollout.max_model_len or rollout.max_completion_tokens" in caught.value.hint


@pytest.mark.parametrize("half", ["forward", pytest.param("backward", marks=pytest.mark.extended)])
def test_a_measurement_that_runs_out_of_memory_is_repeated_as_a_step_is(
    half: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The mean negative log-likelihood of rows: in the micro-batches of a step, which then also keeps the smaller
    ones. A backward pass it has not."""
    calm = policy_step(policy(), made_settings(micro_batch_tokens=40)).nll(rows())
    failing = OutOfMemory(model := policy(), half, at=1)
    step = policy_step(model, made_settings(micro_batch_tokens=40))
    assert step.nll(rows()) == pytest.approx(calm, rel=1e-5)
    assert calm == pytest.approx(-statistics.fmean(trained_logps(policy())), rel=1e-4)
    assert max(failing.sizes) <= 40
    lines = [each.getMessage() for each in caplog.records if "out of memory" in each.getMessage()]
    if half == "backward":
        assert (lines, step.max_tokens) == ([], 40)
        return
    assert step.max_tokens == failing.sizes[1] // 2
    assert f"a micro-batch of {failing.sizes[1]} tokens: this measurement is repeated" in lines[0]


def test_a_row_that_cannot_be_measured_alone_is_refused_with_its_length() -> None:
    longest = max(row.tokens for row in rows())
    OutOfMemory(model := policy(), "forward", most=longest - 1)
    step = policy_step(model, made_settings())
    with pytest.raises(TrainError, match=f"cannot measure a sample of {longest} tokens: memory does not suffice"):
        step.nll(rows())


@pytest.mark.parametrize("stage", ["grpo", "sft", "dpo"])
@pytest.mark.parametrize(
    ("scheduler", "shares"),
    [("constant", [0, 0.5, 1, 1]), ("linear", [0, 0.5, 1, 0.5]), ("cosine", [0, 0.5, 1, 0.5])],
)
def test_each_schedule_has_its_warm_up(stage: Stage, scheduler: str, shares: list[float]) -> None:
    own = {"scheduler": scheduler, "warmup_steps": 2, "learning_rate": 1e-3}
    settings = made_settings(**({"steps": 4, **own} if stage == "grpo" else {stage: {"epochs": 4, **own}}))
    if stage != "grpo":
        settings = stage_settings(settings, stage, 3)
    done = Trained(PAIRS if stage == "dpo" else rows()[:2], stage=stage, settings=settings)
    assert [logs["learning_rate"] for _, logs in done.logs] == pytest.approx([1e-3 * share for share in shares])


def test_gradients_are_those_of_an_earlier_version() -> None:
    """Of eight configurations: the norm of each weight's gradient, and three sums of it that other gradients do not
    have. Processors differ in the last bits."""
    import torch

    known = json.loads((Path(__file__).parent / "row_gradients.json").read_bytes())
    for name, configuration in known["configurations"].items():
        done = Trained(rows(), **configuration["training"])
        assert sorted(done.gradients[0]) == known["weights"]
        for found, wanted in zip(done.gradients, configuration["gradients"], strict=True):
            largest = max(norm for norm, *_ in wanted)
            for weight, figures in zip(known["weights"], wanted, strict=True):
                flat = found[weight].double().flatten()
                places = torch.arange(len(flat), dtype=torch.float64)
                sums = [float((flat * (times * places).cos()).sum()) for times in (1, 2, 3)]
                assert [float(flat.norm()), *sums] == pytest.approx(figures, rel=1e-3, abs=1e-4 * largest), name


def test_a_step_without_rows_changes_nothing() -> None:
    """All its groups were dropped. The optimizer's momentum must not move the weights either."""
    moved: list[dict[str, Any]] = []

    def given(step: int) -> Sequence[TrainingRow]:
        moved.append(done_model_weights())
        return rows() if step in (0, 2) else batch([1, 1, 1, 1], [1, 0, 0]).rows()

    model = policy()

    def done_model_weights() -> dict[str, Any]:
        return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}

    done = Trained(given, model, steps=3)
    start, after_first, after_second = moved
    assert any((start[name] != after_first[name]).any() for name in start)
    assert all((after_first[name] == after_second[name]).all() for name in start)
    assert [(step, logs["loss"], logs["grad_norm"]) for step, logs in done.logs if step == 2] == [(2, 0, 0)]
    assert "trained_tokens" not in done.logs[1][1]


def test_a_loss_that_is_not_a_number_ends_the_round() -> None:
    """Of any update of a step, which is the last one; the step is reported before the error."""
    broken = TrainingRow(0, Sample((1, 2, 3), (False, True, True), (None, -0.5, float("nan"))), 1.0)
    with pytest.raises(TrainError, match="cannot take step 1 of the round: loss is nan") as caught:
        Trained([*rows(), broken])
    assert not caught.value.retryable
    step, passes = policy_step(model := policy(), made_settings(updates_per_batch=3, importance="engine")), [0]
    model.base_model.model.model.register_forward_pre_hook(lambda *_: passes.append(1) and None)
    assert math.isnan(step.step([*rows(), broken])["loss"])
    assert sum(passes) == 1


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("name", ["loss", "grad_norm"])
def test_a_figure_that_is_not_a_number_names_its_step_and_is_not_retried(name: str, value: float) -> None:
    figures = {"loss": 0.5, "grad_norm": 1.0}
    refuse_not_finite(2, figures)
    with pytest.raises(TrainError, match=f"cannot take step 3 of the round: {name} is {value}") as caught:
        refuse_not_finite(3, {**figures, name: value})
    assert not caught.value.retryable


@pytest.mark.parametrize(
    ("modules", "why"),
    [(["q_proj", "lm_head"], "its output layer is one of them"), (["no_proj"], "no_proj.* not found in the base")],
)
def test_layers_that_this_model_cannot_train_are_not_tried_again(modules: list[str], why: str) -> None:
    """Models have different names of their layers, so that the settings cannot know all of them."""
    from tests.factories.policy import load_policy

    lora = LoraSettings.model_construct(target_modules=modules, r=8, alpha=16.0, dropout=0.0)
    with pytest.raises(TrainError, match=rf"\(training\.lora\.target_modules\): .*{why}") as caught:
        load_policy(str(POLICY), None, lora, seed=1)
    assert not caught.value.retryable


def test_a_kl_term_leaves_only_the_trained_adapter_in_what_is_saved(tmp_path: Path) -> None:
    from flywheel.training.data.step_figures import TOKEN_MEANS, UPDATE_FIGURES
    from tests.factories.policy import save_adapter

    done = Trained(rows(), beta=0.1, micro_batch_tokens=30)
    assert done.logs[0][1]["kl"] == pytest.approx(0, abs=1e-5)
    figures = {*UPDATE_FIGURES, *TOKEN_MEANS}
    assert figures <= set(done.logs[0][1]), "they are in metrics.jsonl"
    save_adapter(done.model, tmp_path / "adapter")
    assert sorted(p.name for p in (tmp_path / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]


def test_an_adapter_appears_whole_and_can_be_continued(tmp_path: Path) -> None:
    from flywheel.records.round import AdapterRef
    from flywheel.system.files import tree_sha256
    from flywheel.training.engine.policy import check_parent, other_form, rank
    from tests.factories.policy import load_policy, save_adapter

    model = policy()
    path = tmp_path / "adapter"
    save_adapter(model, path)
    assert sorted(p.name for p in path.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["adapter"]
    reference = AdapterRef(name="r0001", path=str(path), sha256=tree_sha256(path))
    check_parent(reference)
    assert rank([reference, None], LoraSettings(r=1)) == 8
    assert other_form(reference, LoraSettings(r=8, alpha=16)) == ""
    assert other_form(reference, LoraSettings(r=16, alpha=16)) == "r 8"
    again = load_policy(str(POLICY), reference, LoraSettings(r=8), seed=2)
    loaded = {name: p for name, p in again.named_parameters() if p.requires_grad}
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            assert (loaded[name] == weight).all()
