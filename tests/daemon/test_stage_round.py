"""`flywheel.sft`, `dpo` and `grpo`: arguments are settings, rows those of a file, and errors name arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any, Final, get_args

import pytest

import flywheel
from flywheel.config.section import value_at
from flywheel.config.training import Stage
from flywheel.daemon import file_round
from flywheel.daemon.stage_round import SHORT, StageRound, prepare
from flywheel.errors import ConfigError, TrainError
from flywheel.training.program.program_child import MARK
from tests.factories.config import BOXED_RUBRIC

PAGE: Final = Path(__file__).parents[2] / "docs" / "train" / "files-and-python.md"
CHATS: Final = [
    {
        "messages": [
            {"role": "user", "content": f"What is {n} plus {n}?"},
            {"role": "assistant", "content": str(2 * n)},
        ]
    }
    for n in range(12)
]
PREFERENCES: Final = [{"prompt": f"{n}?", "chosen": f"yes {n}", "rejected": f"no {n}"} for n in range(12)]
JUDGED: Final = {
    "rubric": BOXED_RUBRIC, "judge": {"base_url": "http://127.0.0.1:9/v1", "model": "m"}, "gate": {"min_tasks": 2},
}  # fmt: skip
GIVEN: Final = {
    "base_model": "org/model", "epochs": 2, "steps": 7, "batch_size": 3, "learning_rate": 0.5, "warmup": 0.25,
    "num_samples": 6, "beta": 0.75, "max_length": 99, "task_weights": {"no_tools": 1.0}, "seed": 11,
    "rubric": str(BOXED_RUBRIC),
}  # fmt: skip
STAGES: Final[tuple[Stage, ...]] = get_args(Stage)


@pytest.fixture(autouse=True)
def _without_packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(file_round, "require_packages", lambda *_: None)
    monkeypatch.chdir(tmp_path)


def ready(stage: Stage, data: Any = CHATS, **given: Any) -> StageRound:
    return prepare(stage, data, {"base_model": "org/model", **given})


def refusal(stage: Stage, data: Any = CHATS, **given: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        ready(stage, data, **given)
    return str(refused.value)


@pytest.mark.parametrize("stage", STAGES)
def test_arguments_are_the_settings_of_their_stage(stage: Stage) -> None:
    short = {name: keys[STAGES.index(stage)] for name, keys in SHORT.items() if keys[STAGES.index(stage)]}
    given = {name: GIVEN[name] for name in short}
    made = ready(stage, **JUDGED | given)
    found = made.settings.model_dump(mode="json")
    assert {name: value_at(found, key) for name, key in short.items()} == given
    assert (made.spec.round_id, made.settings.training.stages) == (stage, [stage])
    for name in GIVEN.keys() - short.keys() - {"epochs"}:
        assert f"there is no argument `{name}`" in refusal(stage, **{name: GIVEN[name]})


def test_the_page_has_each_argument_with_its_settings() -> None:
    text = PAGE.read_text().partition("## Options and settings")[2].partition("\n## ")[0]
    parents = [f"{where}." for where in re.findall(r", below `([\w.]+)`", text)]
    shown: dict[str, tuple[str, ...]] = {}
    for names, *cells in re.findall(r"^\| (`--.*?) \|(.*)\|(.*)\|(.*)\|$", text, re.MULTILINE):
        keys = [re.match(r"`(\w+)`", cell.strip()) for cell in cells]
        for name in re.findall(r"`--([\w-]+)`", names):
            shown[name] = tuple(f"{where}{key[1]}" if key else "" for where, key in zip(parents, keys, strict=True))
    differing = {name: keys for name, keys in SHORT.items() if len({*keys} - {""}) > 1}
    assert shown == {name.replace("_", "-"): keys for name, keys in differing.items()}
    for name in SHORT.keys() - differing.keys():
        assert f"`--{name.replace('_', '-')}`" in text
        key = SHORT[name][-1]
        # Those of the options' own names are in one sentence.
        assert f"`{key}`" in text or key == f"training.{name}"


def test_arguments_win_over_sections_and_these_over_the_file(tmp_path: Path) -> None:
    training: dict[str, Any] = {"sft": {"epochs": 9, "batch_size": 9, "learning_rate": 0.9}, "lora": {"r": 8}}
    (tmp_path / "given").mkdir()
    file = tmp_path / "given" / "flywheel.yaml"
    file.write_text(json.dumps({"training": training, "sources": [{"type": "jsonl", "path": "none.jsonl"}]}))
    made = ready("sft", config="given/flywheel.yaml", training={"sft": {"epochs": 5, "batch_size": 5}}, epochs=2)
    sft = made.settings.training.sft
    assert (sft.epochs, sft.batch_size, sft.learning_rate) == (2, 5, 0.9)
    assert (made.settings.training.lora.r, made.settings.sources) == (8, [])
    file.write_text(json.dumps({"filter": {"chain": "none.yaml"}}))
    judged = ready("sft", config="given/flywheel.yaml", **JUDGED).settings.filter
    assert (judged.rubric, judged.chain) == (BOXED_RUBRIC, None)
    assert prepare("sft", CHATS, {"model": Path("org/other")}).spec.base_model == "org/other"
    assert prepare("sft", CHATS, {"model": {"base": "org/other"}}).spec.base_model == "org/other"


@pytest.mark.parametrize("of", [list, iter])
def test_rows_are_the_tasks_of_a_file_with_them(tmp_path: Path, of: Callable[[Any], Any]) -> None:
    file, held_out = tmp_path / "rows.jsonl", CHATS[:2]
    file.write_text("".join(json.dumps(row) + "\n" for row in CHATS))
    (tmp_path / "held.jsonl").write_text("".join(json.dumps(row) + "\n" for row in held_out))
    for of_file, of_rows in ((None, None), ("held.jsonl", of(held_out))):
        one = ready("sft", file, eval_data=of_file).spec
        other = ready("sft", of(CHATS), eval_data=of_rows).spec
        left_out = {key: why.replace("held.jsonl", "rows") for key, why in one.left_out.items()}
        assert [task.task_id for task in other.train] == [task.task_id for task in one.train]
        assert [task.reply for task in other.train] == [task.reply for task in one.train]
        assert [task.task_id for task in other.held_out] == [task.task_id for task in one.held_out]
        assert other.left_out == left_out
    spec = ready("dpo", of(PREFERENCES)).spec
    assert [task.rejected[-1]["content"] for task in spec.train] == [f"no {n}" for n in range(12)]


@pytest.mark.parametrize(("batch", "epochs", "steps"), [(4, 1, 2), (4, 3, 6), (5, 3, 5), (32, 2, 2)])
def test_epochs_of_grpo_are_steps(batch: int, epochs: int, steps: int) -> None:
    held_out = [{"question": f"Why {n}?"} for n in range(4)]
    data = [{"question": f"What is {n} plus {n}?"} for n in range(8)]
    training = ready("grpo", data, eval_data=held_out, epochs=epochs, batch_size=batch, **JUDGED).spec.settings
    assert training["training"]["steps"] == steps


def test_a_warm_up_that_is_no_shorter_than_the_steps_of_the_epochs_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "flywheel.yaml"
    file.write_text(json.dumps({"training": {"warmup_steps": 10}}))
    about = {**JUDGED, "eval_data": [{"question": f"Why {n}?"} for n in range(4)], "epochs": 1}
    data = [{"question": f"What is {n} plus {n}?"} for n in range(20)]
    why = "cannot train with grpo: `training`: warmup_steps 10 is not below steps 3"
    assert why in refusal("grpo", data, **about, config=file)
    with pytest.raises(ConfigError, match=re.escape(why)):
        prepare("grpo", data, {"base_model": "org/model", **about}, single=["training.warmup_steps=10"])
    assert ready("grpo", data, **about | {"epochs": 5}, config=file).spec.settings["training"]["steps"] == 13


@pytest.mark.parametrize(
    ("stage", "given", "why"),
    [
        ("sft", {"num_train_epochs": 3}, "cannot train with sft: there is no argument `num_train_epochs`. Arguments"),
        ("sft", {"learning_rate": -1}, "`learning_rate`: it must be above 0, not `-1`"),
        ("dpo", {"epochs": 1.5}, "`epochs`: it must be a whole number, not `1.5`"),
        ("grpo", {"epochs": 0}, "epochs is 0. Give a whole number from 1, without steps"),
        (
            "grpo",
            {"epochs": 1, "steps": 2},
            "epochs is 1. Give a whole number from 1, without steps (training.steps)",
        ),
        ("sft", {"warmup": 1}, "warmup is 1: it is the share of all steps"),
        (
            "grpo",
            {"warmup": "a tenth"},
            "or a number of steps as the setting training.warmup_steps",
        ),
        ("sft", {"training": 3}, "there is no argument `training`"),
        ("sft", {"training": [1]}, "there is no argument `training`"),
        ("sft", {"training": [{"lora": {"r": 64}}]}, "there is no argument `training`"),
        ("sft", {"training": {"sft": [{"batch_size": 2}]}, "epochs": 2}, "`training.sft`: "),
        ("sft", {"sources": [{"type": "jsonl", "path": "x"}]}, "there is no argument `sources`"),
        ("sft", {"model": "org/other"}, "model is another name of base_model, and both are given. Give one of them."),
        ("sft", {"training": {"sft": {"epoch": 1}}}, "unknown key `training.sft.epoch` (did you mean `epochs`?)"),
        ("sft", {"base_model": None}, "there is no base model: neither base_model nor model.base names one"),
        ("sft", {"output": 3}, "cannot train with sft: output: "),
        ("sft", {"output": "."}, "is not empty. Name a new folder"),
        ("dpo", {"sft_model": "nowhere"}, "is not there"),
        ("grpo", {}, "its rollouts get no rewards: there is no rubric"),
        ("sft", {"config": "none.yaml"}, "none.yaml: "),
    ],
)
def test_a_wrong_argument_is_named(tmp_path: Path, stage: Stage, given: dict[str, Any], why: str) -> None:
    (tmp_path / "a file").touch()
    assert why in refusal(stage, **given)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (None, "there is no data"),
        ([], "cannot read data rows: it is empty"),
        ([{"question": "1?", "answer": "1"}, {"question": "2?"}], "cannot read data rows: line 2: it has no reply"),
        (["text"], "line 1: "),
        ([{"question": datetime.min}], "cannot read rows: line 1: Object of type datetime is not JSON serializable"),
        (CHATS[0], "a value of the type dict is none. Name a file, or give a list of rows"),
        (7, "a value of the type int is none"),
        ("none.jsonl", "cannot read data none.jsonl: No such file"),
    ],
)
def test_data_that_cannot_be_trained_on(data: Any, why: str) -> None:
    assert why in refusal("sft", data)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("tool_selection", "one_tool"), ("selection", "one_tool"), ("tool_retrieval", "one_tool"),
        ("retrieval", "one_tool"), ("multi_step_planning", "several_tools"), ("multi_step", "several_tools"),
        ("planning", "several_tools"), ("timing_decision", "no_tools"), ("timing", "no_tools"),
    ],
)  # fmt: skip
def test_classes_of_sage_are_refused_with_the_nearest(name: str, near: str) -> None:
    said = refusal("sft", task_weights={name: 1})
    assert f"`task_weights`: {name} is a class of SAGE, by words; classes here are by structure" in said
    assert f"the nearest: {near}" in said
    for other in ("ning", "one", ""):
        assert f"there is no class {other}; the classes are" in refusal("sft", task_weights={other: 1})


def test_a_single_setting_of_steps_is_refused_with_epochs_of_grpo() -> None:
    given = {"base_model": "m", "epochs": 2, **JUDGED}
    why = "epochs is 2. Give a whole number from 1, without steps"
    for single in ("training.steps=4", "training={stages: [grpo], steps: 4}"):
        with pytest.raises(ConfigError, match=why):
            prepare("grpo", CHATS, given, single=[single])
    assert prepare("grpo", CHATS, given, single=["training.seed=4"]).spec.seed == 4


@pytest.mark.parametrize("single", ["training.stages=[grpo]", "training={seed: 4}"])
def test_a_single_setting_of_another_stage_is_refused(single: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot train with sft: by --set, training.stages is \[grpo\]"):
        prepare("sft", CHATS, {"base_model": "m"}, single=[single])


def test_weights_take_the_place_of_those_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "flywheel.yaml").write_text("training: {task_weights: {one_tool: 2}}")
    made = ready("sft", config="flywheel.yaml", task_weights={"no_tools": 1})
    assert made.settings.training.task_weights == {"no_tools": 1}


def test_a_file_that_trains_when_a_rollout_loads_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MARK, "1")
    with pytest.raises(ConfigError, match="would call it again"):
        flywheel.grpo(CHATS, base_model="m")


def test_missing_packages_are_named_before_anything_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def missing(attempted: str) -> None:
        raise TrainError(attempted, "ray is not installed", "")

    monkeypatch.setattr(file_round, "require_packages", missing)
    with pytest.raises(TrainError, match="cannot train with dpo: ray is not installed"):
        flywheel.dpo(PREFERENCES, base_model="m", output="made")
    assert list(tmp_path.iterdir()) == []
