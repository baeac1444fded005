"""When a round ends because its policy collapses, and that it does not while the reward does not fall."""

from __future__ import annotations

import logging
import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flywheel.cli.demo.questions import SYSTEM_PROMPT, questions
from flywheel.config.file import Config
from flywheel.training.data.rollout import Rollout, RolloutBatch, RolloutRequest
from flywheel.training.data.round_progress import read_steps
from flywheel.training.engine.policy import AdapterFiles
from flywheel.training.optim.stage_checks import CollapseWatch, RoundRefusedError, StepFigures
from flywheel.training.worker.loop import Reinforcement
from tests.factories.policy_training import TEMPERATURE
from tests.factories.round import POLICY, round_spec
from tests.factories.stage_loop import TrainersHere, work
from tests.training.data.rollouts import StandIn, batch, prompt, reply, verdict

GOOD, BAD = (0.6, 0.8, 0.7, 0.7), (0.2, 0.4, 0.3, 0.3)


def fed(*steps: tuple[float | None, float | None, Sequence[float]]) -> str:
    """Entropy, length and rewards of each step. Returns the number of the step that ended it and the reason."""
    watch = CollapseWatch()
    for number, (entropy, tokens, rewards) in enumerate(steps, 1):
        try:
            watch.add(StepFigures(entropy, tokens, rewards))
        except RoundRefusedError as reason:
            return f"{number}: {reason}"
    return ""


START = ((1.0, 100.0, GOOD), (1.2, 100.0, GOOD))


def test_lost_entropy_with_a_falling_reward_ends_a_round_in_the_third_step() -> None:
    assert fed(*START, (0.5, 100.0, BAD), *[(0.2, 100.0, BAD)] * 5) == (
        "6: the policy collapsed in 3 steps in a row: mean entropy fell from 1.1 nats in the first 2 steps to 0.2;"
        " mean reward fell from 0.7 to 0.3, with a standard error of 0.034. Lower training.learning_rate, or set"
        " training.beta"
    )


@pytest.mark.parametrize(("tokens", "kind"), [(301.0, "longer"), (33.0, "shorter")])
def test_another_length_with_a_falling_reward_ends_a_round(tokens: float, kind: str) -> None:
    ended = fed(*START, *[(1.1, tokens, BAD)] * 3)
    assert ended.startswith(
        f"5: the policy collapsed in 3 steps in a row: completions became {kind}, {tokens:g} tokens"
    )


@pytest.mark.parametrize(
    "later",
    [
        [(0.01, 100.0, (0.9, 1.0, 0.9, 1.0))] * 9,
        [(0.01, 100.0, GOOD)] * 9,
        # Less than the standard error.
        [(0.01, 100.0, (0.6, 0.78, 0.69, 0.7))] * 9,
        [(1.1, 10.0, (0.9, 1.0, 0.9, 1.0)), (1.1, 900.0, (0.9, 1.0, 0.9, 1.0))] * 5,
        # The reward alone.
        [(0.9, 120.0, BAD)] * 9,
        [(0.23, 290.0, BAD), (0.3, 34.0, BAD)] * 5,
        # Never three in a row.
        [(0.01, 100.0, BAD), (0.01, 100.0, BAD), (0.9, 100.0, BAD)] * 4,
        # Nothing is known.
        [(None, None, BAD)] * 9,
        [(0.01, 100.0, ())] * 9,
        [(math.nan, math.nan, BAD)] * 9,
    ],
)
def test_without_both_a_round_goes_on(later: list[tuple[float | None, float | None, Sequence[float]]]) -> None:
    assert fed(*START, *later) == ""


def test_noise_does_not_end_a_round() -> None:
    """Figures that vary by half around what they were."""
    for seed in range(50):
        drawn = random.Random(seed)
        steps = [
            (
                drawn.uniform(0.5, 1.5),
                drawn.uniform(50, 150),
                [drawn.choice((0.0, 0.3, 1.0)) for _ in range(8)],
            )
            for _ in range(60)
        ]
        assert fed(*steps) == ""


def test_each_kind_of_sign_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert fed(*START, *[(0.1, 100.0, GOOD)] * 2, *[(0.1, 400.0, GOOD)] * 2, (1.1, 20.0, GOOD)) == ""
    assert [record.getMessage() for record in caplog.records] == [
        "the policy may be collapsing (step 3 of GRPO): mean entropy fell from 1.1 nats in the first 2 steps to 0.1",
        "the policy may be collapsing (step 5 of GRPO): completions became longer, 400 tokens after 100 in the first"
        " 2 steps",
        "the policy may be collapsing (step 7 of GRPO): completions became shorter, 20 tokens after 100 in the first"
        " 2 steps",
    ]


figures = st.one_of(st.none(), st.floats(0, 10))
steps_of_a_round = st.lists(
    st.tuples(figures, figures, st.lists(st.floats(0, 1), max_size=4)), min_size=3, max_size=12
)


@given(steps_of_a_round)
def test_no_round_ends_while_its_reward_does_not_fall(
    steps: list[tuple[float | None, float | None, list[float]]],
) -> None:
    """And none whose last steps have no sign."""
    ended = fed(*steps)
    if not ended:
        return
    number = int(ended.partition(":")[0])
    assert number >= 5
    first, last = steps[:2], steps[number - 3 : number]
    rewards = [[reward for *_, of_step in some for reward in of_step] for some in (first, last)]
    assert statistics.fmean(rewards[1]) < statistics.fmean(rewards[0])
    known = [[each[kind] for each in first if each[kind] is not None] for kind in (0, 1)]
    for entropy, tokens, _ in last:
        lost = entropy is not None and known[0] and entropy < 0.2 * statistics.fmean(known[0])  # type: ignore[type-var]
        length = statistics.fmean(known[1]) if known[1] else 0.0  # type: ignore[type-var]
        assert lost or (tokens is not None and (tokens > 2.99 * length or tokens < 0.34 * length))


@pytest.mark.slow
@given(st.lists(st.tuples(st.floats(0, 0.01), st.floats(1e4, 1e5)), min_size=3, max_size=9), st.randoms())
def test_no_series_of_signs_ends_a_round_whose_reward_rises(
    signs: list[tuple[float, float]], drawn: random.Random
) -> None:
    rising = [(*sign, [drawn.uniform(0.7, 1.0) for _ in range(4)]) for sign in signs]
    assert fed((1.0, 100.0, GOOD), (1.0, 100.0, (0.7,)), *rising) == ""


def test_the_figures_of_rollouts() -> None:
    """Rewards are those of groups. Without an entropy, the sampled tokens say it, of which each has 0.5 nats."""
    watch = CollapseWatch()
    for rewards, entropy in [([1, 0, 1, 0], 3.0)] * 2 + [([0.2, None, 0.0, 0.1], None)] * 2:
        watch.rolled_out(entropy, batch(rewards, rewards))
    assert watch._steps[0] == StepFigures(3.0, 2.0, [0.5, 0.5])
    assert watch._steps[2] == StepFigures(0.5, 2.0, [pytest.approx(0.1)] * 2)
    with pytest.raises(
        RoundRefusedError, match=r"from 3 nats in the first 2 steps to 0.5; mean reward fell from 0.5"
    ):
        watch.rolled_out(None, batch([0.0] * 4, [0.0, 0.1, 0.0, 0.0]))


class Sampled(StandIn):
    """Samples answers from the trainer's own model, and gives half a point for the right number and half a point for
    its box."""

    def __init__(self, model: Callable[[], Any], tokenizer: Any, answers: dict[str, int]) -> None:
        self.model, self.tokenizer, self.answers = model, tokenizer, answers

    def rollouts(self, requests: Sequence[RolloutRequest], step: int) -> RolloutBatch:
        import torch

        model = self.model()
        # As an engine, which does not learn, and draws no number of the trainer.
        model.eval()
        ids = torch.tensor([request.prompt.token_ids for request in requests])
        start, logprobs = ids.shape[1], []
        with torch.no_grad():
            for _ in range(LONGEST):
                logps = (model(ids).logits[:, -1].float() / TEMPERATURE).log_softmax(-1)
                chosen = logps.exp().multinomial(1)
                ids = torch.cat([ids, chosen], dim=1)
                logprobs.append(logps.gather(1, chosen)[:, 0])
        answers, given = ids[:, start:].tolist(), torch.stack(logprobs, dim=1).tolist()
        found = map(self._rollout, requests, answers, given)
        return RolloutBatch(tuple(found), {"generate": 0.0, "grade": 0.0})

    def _rollout(self, request: RolloutRequest, tokens: list[int], logprobs: list[float]) -> Rollout:
        end = self.tokenizer.eos_token_id
        length = tokens.index(end) + 1 if end in tokens else len(tokens)
        text = self.tokenizer.decode(tokens[:length])
        right = str(self.answers[request.prompt.task.task_id])
        score = 0.5 * (right in text) + 0.5 * (f"boxed{{{right}}}" in text)
        return Rollout(request, reply(request.prompt, tokens[:length], logprobs[:length], text), verdict(score))


LONGEST, STEPS = 24, 10


@pytest.mark.training
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("rate", "on_collapse"),
    [
        (0.05, "gate"),
        pytest.param(0.05, "refuse", marks=pytest.mark.extended),
        pytest.param(1e-3, "refuse", marks=pytest.mark.extended),
    ],
)
def test_a_learning_rate_that_is_far_too_high_ends_a_real_optimisation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rate: float, on_collapse: str
) -> None:
    from transformers import AutoTokenizer

    training = {
        "steps": STEPS,
        "prompts_per_step": 4,
        "group_size": 8,
        "learning_rate": rate,
        "lora": {"r": 8},
        "save_steps": 1,
        "on_collapse": on_collapse,
        "precision": "float32",
    }
    rollouts = {"temperature": TEMPERATURE, "max_model_len": 64, "max_completion_tokens": LONGEST}
    settings = Config.model_validate({"training": training, "rollout": rollouts})
    tokenizer = AutoTokenizer.from_pretrained(POLICY)
    answers, prompts = {}, []
    for number, question in enumerate(questions()[:60:3]):
        asked = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question.text}]
        ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=True)["input_ids"]
        if len(ids) == 27:
            answers[f"t-{number}"] = question.answer
            prompts.append(replace(prompt(f"t-{number}", ids), max_tokens=LONGEST))
    spec = round_spec(seed=1, base_model=str(POLICY), settings=settings.model_dump(mode="json"))
    trainers = TrainersHere(spec)
    of_stage = work(spec, settings, tmp_path, trainers)
    collector: Any = Sampled(lambda: trainers.model, tokenizer, answers)
    # All checkpoints stay, so that which one is taken does not depend on when the policy collapses.
    monkeypatch.setattr("flywheel.training.worker.processes.KEPT", STEPS)
    run, counted = Reinforcement(of_stage, prompts, collector), of_stage.training
    run.run()
    lines = read_steps(tmp_path)
    if rate < 0.05:
        assert (run.refusal, run.ended, counted.rollout_steps) == ("", "", STEPS)
        assert of_stage.adapter.is_dir()
        return
    assert counted.rollout_steps == len(lines) < STEPS
    assert "the policy collapsed in 3 steps in a row" in (run.refusal or run.ended)
    if on_collapse == "refuse":
        assert run.refusal and not run.ended
        assert not of_stage.adapter.exists()
        return
    good = of_stage.checkpoint(len(lines) - 4)
    assert good is not None and good.name == f"step-{len(lines) - 4:06}.zip"
    assert not run.refusal and run.ended.endswith(f"; its adapter is that of step {len(lines) - 4}")
    begun = AdapterFiles.read(of_stage.adapter)
    trainers.begin("grpo", settings, STEPS, LONGEST, None)
    assert trainers.adapter() != begun
    trainers.restore(good)
    assert trainers.adapter() == begun
