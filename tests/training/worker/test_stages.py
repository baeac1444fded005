"""A round of SFT, DPO and GRPO with real Ray, vLLM and TRL; its worker is killed after the first stage."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from flywheel.cli.demo import judge
from flywheel.config import Config
from flywheel.config.training import Stage
from flywheel.records.round import RoundSpec
from flywheel.training.data.stages import TRAINED_FILE, stage_adapter, tasks_by_stage
from tests.factories.worker import Done, family, run, spec, start, with_reply
from tests.waiting import wait_for

pytestmark = [pytest.mark.training, pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore")]


STAGES: list[Stage] = ["sft", "dpo", "grpo"]


def staged(judge_url: str) -> RoundSpec:
    made = spec(judge_url)
    settings = json.loads(json.dumps(made.settings))
    settings["training"] |= {"stages": STAGES, "steps": 1}
    settings["training"]["sft"] |= {"epochs": 4, "learning_rate": 1e-2}
    settings["training"]["dpo"] |= {"batch_size": 2, "learning_rate": 1e-3}
    return made.model_copy(
        update={
            "settings": Config.model_validate(settings).model_dump(mode="json"),
            "train": [with_reply(task) for task in made.train],
            "held_out": [with_reply(task) for task in made.held_out],
        }
    )


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Done]:
    directory = tmp_path_factory.mktemp("staged") / "r0001"
    with judge.running() as url:
        made = staged(url)
        first = start(directory, made)
        try:
            ended = stage_adapter(directory, 1, "sft").with_name(TRAINED_FILE)
            wait_for(ended.is_file, "the end of SFT", seconds=400)
        finally:
            for member in family(directory):
                member.kill()
            first.communicate()
        yield run(directory, made.model_copy(update={"attempt": 2}))


def test_a_worker_that_is_started_again_goes_on_with_the_second_stage(done: Done) -> None:
    log = (done.directory / "worker.log").read_text()
    assert done.code == 0, log[-3000:]
    assert [(stage.stage, stage.outcome) for stage in done.result.stages] == [(each, "trained") for each in STAGES]
    steps = [stage.steps for stage in done.result.stages]
    assert steps[2] == 1
    assert [line["step"] for line in done.steps] == list(range(1, sum(steps) + 1))
    assert [line["stage"] for line in done.steps] == [
        name for name, count in zip(STAGES, steps, strict=True) for _ in range(count)
    ]
    assert {line["step"] for line in done.rollouts} == {
        line["step"] for line in done.steps if line.get("reward_mean") is not None
    }
    assert log.count("stage 1 of 3, sft") == 1
    assert log.count("stage 3 of 3, grpo") >= 1


def test_dpo_trains_on_the_best_and_the_worst_rollout_of_a_prompt(done: Done) -> None:
    folder = stage_adapter(done.directory, 2, "dpo").parent
    pairs = [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()]
    assert pairs
    rewards: dict[str, list[float]] = {}
    for line in done.rollouts:
        rewards.setdefault(line["task_id"], []).append(line["reward"])
    for pair in pairs:
        own = rewards[pair["task_id"]]
        assert (pair["chosen_score"], pair["rejected_score"]) == (max(own), min(own))
        assert pair["chosen"] != pair["rejected"]
    updates = [line for line in done.steps if line["stage"] == "dpo" and "margin" in line]
    assert sum(line["pairs"] for line in updates) == len(pairs)
    assert updates[0]["loss"] == pytest.approx(0.6931, abs=1e-3)


def test_sft_lowers_the_loss_on_replies_that_it_did_not_see(done: Done) -> None:
    steps = [line for line in done.steps if line["stage"] == "sft"]
    losses = [line["held_out_loss"] for line in steps if "held_out_loss" in line]
    assert [line["step"] for line in steps] == list(range(1, len(steps) + 1))
    assert len(losses) == 4
    assert losses[-1] < losses[0]


def test_grpo_asks_prompts_that_sft_was_not_taught(done: Done) -> None:
    asked_for = [task for task in done.spec.train if task.task_id not in done.result.left_out]
    parts = tasks_by_stage(asked_for, STAGES, done.spec.seed)
    taught = {task.task_id for stage in ("sft", "dpo") for task in parts[stage]}
    asked = {line["task_id"] for line in done.rollouts if line["step"] == done.steps[-1]["step"]}
    assert asked
    assert not asked & taught


def test_each_stage_starts_from_what_the_one_before_made(done: Done) -> None:
    from safetensors.numpy import load_file

    folders = (
        stage_adapter(done.directory, 1, "sft"),
        stage_adapter(done.directory, 2, "dpo"),
        done.directory / "adapter",
    )
    sft, dpo, last = (load_file(path / "adapter_model.safetensors") for path in folders)
    # One step of GRPO at 5e-3 moves each weight by at most that; SFT moved them further.
    moved = max(float(abs(last[name] - dpo[name]).max()) for name in dpo)
    taught = max(float(abs(sft[name]).max()) for name in sft if "lora_B" in name)
    preferred = max(float(abs(dpo[name] - sft[name]).max()) for name in sft)
    assert dpo.keys() == sft.keys()
    assert 0 < preferred <= 1e-3 * done.result.stages[1].steps
    assert 0 < moved <= 6e-3
    assert taught > 2e-2


def test_the_gate_compares_the_last_stage_with_what_is_deployed(done: Done) -> None:
    comparison, adapter = done.result.comparison, done.result.adapter
    assert comparison is not None
    assert adapter is not None
    assert (adapter.name, Path(adapter.path)) == ("r0001", done.directory / "adapter")
    # The base model is right in about a quarter of its answers; SFT on right ones has taught it the form.
    assert comparison.candidate_mean > comparison.deployed_mean
