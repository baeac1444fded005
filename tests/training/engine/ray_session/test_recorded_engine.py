"""Rollouts with recorded tools on a real engine: vLLM renders and parses each turn."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from flywheel.cli.demo.questions import questions
from flywheel.records.verdict import Exchange, Verdict
from flywheel.training.data import rollout_file
from flywheel.training.data.prompts import Prompt
from flywheel.training.data.rollout import CallOutcome, Completion, LoadedAdapter, RolloutRequest
from flywheel.training.engine import ray_cluster
from flywheel.training.engine.engine import EngineSettings
from flywheel.training.optim.collector import Collector
from flywheel.training.recorded.recorded_rollout import ToolSetup
from tests.factories.engine import strange_adapter
from tests.factories.round import POLICY
from tests.factories.worker import lines
from tests.training.data.rollouts import verdict
from tests.training.engine.ray_session.round_on_engine import run_round
from tests.training.optim import calling_policy

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

TOKENS = 40


@pytest.fixture(scope="module")
def engine(shared_engine: Any, calling_settings: EngineSettings) -> Any:
    return shared_engine.of(calling_settings)


@pytest.fixture(scope="module")
def prompts(engine: Any) -> list[Prompt]:
    some = [calling_policy.task(f"t-{at}", question) for at, question in enumerate(questions()[::150])]
    [(made, refused)] = ray_cluster.wait([engine.encode.remote(some)])
    assert (len(made), refused) == (len(some), {})
    prompts: list[Prompt] = made
    return prompts


def use(engine: Any, training: ToolSetup | None = None, **gate: Any) -> None:
    setup = training or ToolSetup()
    ray_cluster.wait([engine.use_tools.remote(setup, ToolSetup(**gate))])


def generate(engine: Any, prompts: list[Prompt], side: LoadedAdapter | None = None, **changes: Any) -> list[Any]:
    wanted = [RolloutRequest(prompt, 0, place, 1.0, TOKENS, side) for place, prompt in enumerate(prompts)]
    wanted = [replace(request, **changes) for request in wanted]
    found: list[Completion] = ray_cluster.wait([engine.generate.remote(request) for request in wanted])
    return found


def test_two_turns_and_the_tools_answer_between_them_are_one_sample(engine: Any, prompts: list[Prompt]) -> None:
    use(engine)
    made = [each for each in generate(engine, prompts) if not each.truncated]
    assert len(made) > len(prompts) / 2
    assert {each.error for each in made} == {""}
    for each in made:
        assert [call.outcome for call in each.calls] == [CallOutcome.TRACE]
        assert [step["role"] for step in each.steps] == ["assistant", "tool"]
        assert (each.turns, len(each.samples)) == (2, 1 + each.forks)
        assert all(logprob is not None and logprob <= 0 for logprob in each.logprobs)
    linear = [each for each in made if not each.forks]
    # The text of a turn may be encoded in other tokens than were generated: that forks.
    assert len(linear) > len(made) / 2
    for each in linear:
        [sample], [texts] = each.samples, each.texts
        prompt = next(one.token_ids for one in prompts if sample.token_ids[: len(one.token_ids)] == one.token_ids)
        assert not any(sample.loss_mask[: len(prompt)])
        assert 0 < sum(sample.loss_mask) == len(each.token_ids) <= TOKENS
        assert calling_policy.RESULT in "".join(str(text) for text in texts)
        own = "".join(str(text) for text, mine in zip(texts, sample.loss_mask, strict=True) if mine)
        assert own == f"{each.steps[0]['content']}<|im_end|>{each.text}<|im_end|>"


def test_a_traced_trajectory_needs_the_tokens_of_all_its_messages(engine: Any, prompts: list[Prompt]) -> None:
    """Where the trace has no counts of tokens."""
    told = prompts[0].task
    tasks = [told, told.model_copy(update={"steps": []}), told.model_copy(update={"output_tokens": 500})]
    [(made, _)] = ray_cluster.wait([engine.encode.remote(tasks)])
    whole, answer_alone, counted = (each.needs for each in made)
    assert answer_alone + 10 < whole < counted == 500


def test_the_engines_logprobs_are_those_of_the_merged_sample(
    engine: Any, prompts: list[Prompt], tmp_path: Path
) -> None:
    """As a trainer computes them, in one pass over both turns; with an adapter, those of the adapter alone."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    side = strange_adapter(engine, 31, tmp_path / "a31")
    use(engine)
    base = AutoModelForCausalLM.from_pretrained(POLICY)
    made = generate(engine, prompts, side)
    ray_cluster.wait([engine.unload.remote(side)])

    def gap(model: Any) -> float:
        differences = []
        for sample in (sample for each in made for sample in each.samples):
            with torch.no_grad():
                rows = model(torch.tensor([sample.token_ids])).logits[0].log_softmax(-1)
            differences += [
                abs(rows[place - 1, sample.token_ids[place]].item() - float(sample.logprobs[place] or 0))
                for place in sample.trained
            ]
        return sum(differences) / len(differences)

    assert gap(base) > 0.05
    assert gap(PeftModel.from_pretrained(base, tmp_path / "a31")) < 1e-3


def test_rollouts_that_take_too_long_are_given_up_and_the_engine_goes_on(engine: Any, prompts: list[Prompt]) -> None:
    use(engine)
    first = generate(engine, prompts)
    wanted = [RolloutRequest(prompt, 0, 1000 + place, 1.0, TOKENS, None) for place, prompt in enumerate(prompts * 8)]
    with Collector([engine], graded, max_thread=4, timeout_seconds=0.05) as collector:
        batch = collector.collect(wanted)
    assert any(rollout.failure == "no completion within 0.05 s" for rollout in batch.rollouts)
    again = generate(engine, prompts)
    assert sum(a.token_ids == b.token_ids for a, b in zip(first, again, strict=True)) >= 0.9 * len(first)


def graded(shown: Exchange) -> Verdict:
    """Some answers are right and some are wrong."""
    return verdict(float(len(shown.answer) % 2))


def test_a_round_trains_on_trajectories(engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of the tasks has no result for messages without a box."""
    some = questions()[::40]
    every, boxed = (True, False), (True,)
    train = [calling_policy.task(f"t-{at}", some[at], every if at % 4 else boxed) for at in range(12)]
    held_out = [calling_policy.task(f"h-{at}", some[12 + at], every if at % 5 else boxed) for at in range(10)]
    result = run_round(engine, tmp_path, monkeypatch, train, held_out, max_completion_tokens=TOKENS)
    assert (result.outcome, result.steps) == ("trained", 2), result.reason
    weights = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert all((weight != 0).any() for name, weight in weights.items() if "lora_B" in name)

    steps = [line for line in lines(tmp_path / "metrics.jsonl") if line["event"] == "step"]
    rollouts = list(rollout_file.rollouts(tmp_path))
    assert [step["step"] for step in steps] == [1, 2]
    for step in steps:
        assert 1 < step["turns_mean"] <= 2
        assert 0 < step["tools"]["hit_rate"] <= 1
        assert step["tools"]["call_share"] > 0.5
        of_step = [line for line in rollouts if line["step"] == step["step"]]
        assert step["missed"] == sum("no recorded result" in line["error"] for line in of_step)
        # Both turns are trained on, in the groups that are.
        trained = [line for line in of_step if line["advantage"] is not None]
        masks = [mask for line in trained for sample in line["samples"] for mask in sample["loss_mask"]]
        assert step["trained_tokens"] == sum(masks) > 0
        assert step["logprob_gap"] < 1e-2
    answered = [line for line in rollouts if not line["error"] and not line["truncated"]]
    assert all([each["role"] for each in line["steps"]] == ["assistant", "tool"] for line in answered)
    assert max(line["reward"] for line in answered) > 0
    missed = [line for line in rollouts if "no recorded result" in line["error"]]
    assert {(line["reward"], line["advantage"], line["answer"]) for line in missed} <= {(None, None, "")}
    # Results are those of the own task's trace alone.
    without = {task.task_id for task in train if len(task.steps) == 2}
    assert {line["task_id"] for line in missed} <= without

    answers = lines(tmp_path / "evaluation.jsonl")
    assert len(answers) == 2 * 10
    assert any(answer["steps"] for answer in answers)
    comparison = result.comparison
    assert comparison is not None
    assert (comparison.tasks, comparison.undecided) == (10, 0)
    ended = [answer["side"] for answer in answers if "no recorded result" in answer["error"]]
    assert ended.count("candidate") == comparison.candidate_missed
    assert ended.count("deployed") == comparison.deployed_missed
