"""A round of two stages, SFT and GRPO, with real Ray, vLLM and TRL; its worker is killed after the first stage."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from flywheel.cli.demo import judge
from flywheel.config import Config
from flywheel.records.round import RoundSpec, RoundTask
from flywheel.training.data.stages import stage_adapter, tasks_by_stage
from tests.training.worker.test_round import Done, family, run, spec, start
from tests.waiting import wait_for

pytestmark = [pytest.mark.training, pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore")]


def with_reply(task: RoundTask) -> RoundTask:
    answer = task.exchange.reference
    return task.model_copy(update={"reply": ({"role": "assistant", "content": answer},) if answer else ()})


def staged(judge_url: str) -> RoundSpec:
    made = spec(judge_url)
    settings = json.loads(json.dumps(made.settings))
    settings["training"] |= {"stages": ["sft", "grpo"], "steps": 1}
    settings["training"]["sft"] |= {"epochs": 4, "learning_rate": 1e-2}
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
            wait_for(lambda: stage_adapter(directory, 1, "sft").is_dir(), "the end of SFT", seconds=400)
        finally:
            for member in family(directory):
                member.kill()
            first.communicate()
        yield run(directory, made.model_copy(update={"attempt": 2}))


def test_a_worker_that_is_started_again_goes_on_with_the_second_stage(done: Done) -> None:
    log = (done.directory / "worker.log").read_text()
    assert done.code == 0, log[-3000:]
    assert [(stage.stage, stage.outcome) for stage in done.result.stages] == [("sft", "trained"), ("grpo", "trained")]
    assert done.result.stages[0].reason == "it ended before the worker was started again"
    assert [stage.steps for stage in done.result.stages] == [8, 1]
    assert [line["step"] for line in done.steps] == list(range(1, 10))
    assert {line["step"] for line in done.rollouts} == {9}
    assert log.count("stage 1 of 2, sft") == 1
    assert log.count("stage 2 of 2, grpo") >= 1


def test_sft_lowers_the_loss_on_replies_that_it_did_not_see(done: Done) -> None:
    steps = [line for line in done.steps if line["stage"] == "sft"]
    losses = [line["held_out_loss"] for line in steps if "held_out_loss" in line]
    assert [line["step"] for line in steps] == list(range(1, len(steps) + 1))
    assert len(losses) == 4
    assert losses[-1] < losses[0]


def test_grpo_asks_prompts_that_sft_was_not_taught(done: Done) -> None:
    asked_for = [task for task in done.spec.train if task.task_id not in done.result.left_out]
    parts = tasks_by_stage(asked_for, ["sft", "grpo"], done.spec.seed)
    taught = {task.task_id for task in parts["sft"]}
    asked = {line["task_id"] for line in done.rollouts}
    assert asked
    assert not asked & taught


def test_grpo_starts_from_what_sft_made(done: Done) -> None:
    from safetensors.numpy import load_file

    sft, last = (load_file(path / "adapter_model.safetensors") for path in (
        stage_adapter(done.directory, 1, "sft"), done.directory / "adapter"))  # fmt: skip
    # One step of GRPO at 5e-3 moves each weight by at most that; SFT moved them further.
    moved = max(float(abs(last[name] - sft[name]).max()) for name in sft)
    taught = max(float(abs(sft[name]).max()) for name in sft if "lora_B" in name)
    assert 0 < moved <= 6e-3
    assert taught > 2e-2


def test_the_gate_compares_the_last_stage_with_what_is_deployed(done: Done) -> None:
    comparison, adapter = done.result.comparison, done.result.adapter
    assert comparison is not None
    assert adapter is not None
    assert (adapter.name, Path(adapter.path)) == ("r0001", done.directory / "adapter")
    # The base model is right in about a quarter of its answers; SFT on right ones has taught it the form.
    assert comparison.candidate_mean > comparison.deployed_mean
