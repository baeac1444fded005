"""A round of SFT twice, the first time on few replies, and GRPO. Its worker is killed in the second stage."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from flywheel.cli.demo import judge
from flywheel.config.file import Config
from flywheel.records.round import RoundSpec
from tests.factories.worker import Done, Judge, killed, read, run, spec, with_reply

pytestmark = [pytest.mark.training, pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore")]

STAGES = [{"sft": {"samples": 6, "epochs": 1, "learning_rate": 1e-2}}, "sft", "grpo"]
STEPS, EPOCHS = 2, 20


def planned(judge_url: str) -> RoundSpec:
    made = spec(judge_url, test=None)
    settings = json.loads(json.dumps(made.settings))
    settings["training"] |= {"stages": STAGES, "steps": STEPS, "save_steps": 2, "learning_rate": 1e-3}
    settings["training"]["sft"] |= {"epochs": EPOCHS, "batch_size": 2, "learning_rate": 1e-3}
    settings = Config.model_validate(settings).model_dump(mode="json")
    assert settings["training"]["stages"] == STAGES
    train = [with_reply(task) for task in made.train[:30]]
    return made.model_copy(update={"settings": settings, "train": train, "held_out": []})


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    directory = tmp_path_factory.mktemp("repeated") / "r0001"

    def in_second_stage() -> bool:
        return any((directory / "stages" / "2-sft" / "checkpoints").glob("step-*.zip"))

    with judge.running(complete=Judge()) as url:
        made = planned(url)
        killed(directory, made, in_second_stage, "worker")
        assert not (directory / "stages" / "2-sft" / "trained.json").exists()
        return run(directory, made.model_copy(update={"attempt": 2}))


def test_the_round_goes_on_in_the_second_of_two_equal_stages(done: Done) -> None:
    log = read(done.directory / "worker.log")
    assert done.code == 0, log[-3000:]
    found = [(stage.stage, stage.outcome, stage.steps) for stage in done.result.stages]
    taught, asked = (stage.tasks for stage in done.result.stages[1:])
    steps = [3, EPOCHS * -(-taught // 2), STEPS]
    assert found == [(name, "trained", taken) for name, taken in zip(("sft 1", "sft 2", "grpo"), steps, strict=True)]
    assert (done.result.stages[0].tasks, taught + asked) == (6, 24)
    begun = [log.count(f"stage {number} of 3, {kind}: ") for number, kind in enumerate(("sft", "sft", "grpo"), 1)]
    assert begun == [1, 2, 1]


def test_each_step_names_its_stage_once(done: Done) -> None:
    assert [line["step"] for line in done.steps] == list(range(1, done.result.steps + 1))
    assert Counter(line["stage"] for line in done.steps) == {each.stage: each.steps for each in done.result.stages}
    first = {line["stage"]: line["learning_rate"] for line in reversed(done.steps)}
    assert first == {"sft 1": 1e-2, "sft 2": 1e-3, "grpo": 1e-3}, "each stage has its own"
    assert {line["step"] for line in done.rollouts} == {line["step"] for line in done.steps[-STEPS:]}


def test_the_adapter_is_that_of_the_last_stage(done: Done) -> None:
    name = "adapter_model.safetensors"
    folders = [done.directory / "stages" / each / "adapter" for each in ("1-sft", "2-sft", "3-grpo")]
    weights = [(folder / name).read_bytes() for folder in (*folders, done.directory / "adapter")]
    assert len(set(weights)) == 3
    assert weights[2] == weights[3]
