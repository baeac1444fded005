"""SAGE's and ASTuner's options: which become stages, and what is said of the others."""

from __future__ import annotations

import contextlib
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from flywheel.config.file import Config, load, parse
from flywheel.config.foreign import Row
from flywheel.config.ingest import JsonlSource, StudioSource
from flywheel.config.sage import CLASSES, SAGE, rubrics_in
from flywheel.config.section import put
from flywheel.config.training import CoresetSettings, ReplaySettings
from flywheel.config.translation import translate
from flywheel.daemon.judging.judge_setup import rubric_of
from flywheel.errors import ConfigError
from flywheel.judge.rubric.file import load_rubric
from flywheel.system.files import shipped_folder
from tests.factories.foreign_files import SFT

SHIPPED_FILE = yaml.safe_load((shipped_folder() / "rubrics" / "agent-reward.yaml").read_text())
DPO = {"beta": 0.2, "label_smoothing": 0.1, "loss_type": "sigmoid", "reference_free": False}
TRACES = {"model": {"path": "m"}, "task_reader": {"feedback_tracing": {}}}


def read(raw: dict[str, Any]) -> Config:
    return parse(raw, "pasted.yaml", Path("/nowhere"))


def refusal(raw: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as refused:
        read(raw)
    return str(refused.value)


@pytest.mark.parametrize("outer", ["", "rl_config", "ajet", "astuner"])
def test_options_of_dpo_become_its_stage_and_its_settings(outer: str) -> None:
    options: dict[str, Any] = {"algorithm": "dpo", "dpo_config": DPO}
    if outer in ("ajet", "astuner"):
        options |= TRACES
    training = read({outer: options} if outer else options).training
    assert training.stages == ["dpo"]
    assert (training.dpo.beta, training.dpo.label_smoothing, training.dpo.loss_type) == (0.2, 0.1, "sigmoid")


def test_options_of_grpo_become_its_stage_and_its_settings_beside_flywheels_own() -> None:
    training = read(
        {"grpo_config": {"group_size": 4, "beta": 0.1, "use_advantage": True}, "training": {"steps": 7}}
    ).training
    assert training.stages == ["grpo"], "the options of a stage name it"
    assert (training.group_size, training.beta, training.steps) == (4, 0.1, 7)
    defaults = read({"algorithm": "grpo"}).training
    assert (defaults.group_size, defaults.beta) == (8, 0.0), "what a file does not set is Flywheel's"


def test_the_estimator_of_astuners_trainer_is_read(caplog: pytest.LogCaptureFixture) -> None:
    def common(**algorithm: Any) -> dict[str, Any]:
        return {"astuner": {**TRACES, "trainer_common": {"algorithm": algorithm, "total_epochs": 50}}}

    with caplog.at_level(logging.WARNING):
        assert read(common(adv_estimator="grpo", use_kl_in_reward=False)).training.stages == ["grpo"]
    [record] = caplog.records
    assert "without effect: astuner.trainer_common.total_epochs; " in record.message
    assert "adv_estimator` is gae, which Flywheel does not take: PPO is no part" in refusal(
        common(adv_estimator="gae")
    )
    assert "adv_estimator` is rloo: of SAGE's stages of RL, a round has these" in refusal(
        common(adv_estimator="rloo")
    )
    assert "training.beta" in refusal(common(use_kl_in_reward=True))


@pytest.mark.parametrize("key", [{"algorithm": "ppo"}, {"ppo_config": {"kl_coef": 0.02}}])
def test_ppo_is_refused_with_the_reason_and_what_to_use(key: dict[str, Any]) -> None:
    for raw in (key, {"rl_config": key}):
        message = refusal(raw)
        assert "PPO is no part of TRL's stable API" in message
        assert "Use `training.stages: [grpo]`" in message


@pytest.mark.parametrize(
    ("raw", "settings", "unused"),
    [
        (
            {"algorithm": "dpo", "training": {"stages": ["grpo"]}},
            {"stages": ["grpo"]},
            "algorithm (training.stages counts",
        ),
        (
            {"dpo_config": {"beta": 0.1}, "training": {"dpo": {"beta": 0.2}}},
            {"stages": ["dpo"], "dpo": {"beta": 0.2}},
            "dpo_config.beta (training.dpo.beta counts)",
        ),
        (
            {"algorithm": "dpo", "rl_config": {"algorithm": "grpo"}},
            {"stages": ["dpo"]},
            "rl_config.algorithm (algorithm c",
        ),
        (
            {"sft_config": {"train_data": "agent_sft:train"}, "sources": [], "training": {"stages": ["sft"]}},
            {"stages": ["sft"]},
            "sft_config.train_data (sources counts)",
        ),
    ],
)
def test_flywheels_own_key_counts_and_else_the_last(
    raw: dict[str, Any], settings: dict[str, Any], unused: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        read(raw)
    assert f"without effect: {unused}" in caplog.text
    assert translate(raw, None).settings["training"] == settings


@pytest.mark.parametrize(
    ("raw", "complaint"),
    [
        ({"training": {"task_weights": {"tool_selection": 1}}}, "class of SAGE, by words; classes here are by"),
        ({"training": {"task_weights": {"tool_selection": 1}}}, "the nearest: one_tool"),
        ({"training": {"task_weights": {"multi_step_planning": 1}}}, "the nearest: several_tools"),
        ({"training": {"task_weights": {"timing_decision": 1}}}, "the nearest: no_tools"),
        ({"training": {"task_weights": {"tool_retrieval": 1}}}, "the nearest: one_tool"),
        ({"training": {"task_weights": {"tools": 1}}}, "there is no class tools; the classes are several_turns, sev"),
        ({"training": {"task_weights": {"one_tool": 0}}}, "all weights are 0"),
        ({"training": {"coreset": {"size": 9, "strategy": "loss_topk"}}}, "it is for stages [sft]; use diversity or"),
        ({"training": {"stages": ["sft", "dpo"], "coreset": {"size": 9, "strategy": "hybrid"}}}, "for stages [sft]"),
        (
            {"training": {"stages": ["sft"], "replay": {}, "coreset": {"size": 9, "strategy": "hybrid"}}},
            "strategy hybrid has no replay",
        ),
        ({"training": {"stages": ["sft"], "prompts": "decided"}}, "decided is for rollouts of grpo and dpo"),
    ],
)
def test_what_chooses_the_samples_of_a_round_in_sage_is_refused_with_what_does_here(
    raw: dict[str, Any], complaint: str
) -> None:
    assert complaint in refusal(raw)


@pytest.mark.parametrize(
    ("raw", "complaint"),
    [
        ({"dpo_config": {"reference_free": True}}, "`dpo_config.reference_free` is True: the reference is always"),
        ({"grpo_config": {"use_advantage": False}}, "`grpo_config.use_advantage` is False: the loss of GRPO"),
        ({"dpo_config": {"bta": 1}}, "unknown key `dpo_config.bta` (did you mean `rl_config.dpo_config.beta`?)"),
        (
            {"dpo_config": {"colour": 1}},
            "unknown key `dpo_config.colour` (known here: beta, label_smoothing, loss_type, reference_free). Correct",
        ),
        ({"dpo_config": {"loss_type": "ipo", "label_smoothing": 0.1}}, "only the loss sigmoid has it"),
        ({"dpo_config": [1]}, "`dpo_config` is a list, not a mapping"),
        (
            {"algorithm": "kto"},
            "`algorithm` is kto: of SAGE's stages of RL, a round has these. Set it to dpo or grpo, or",
        ),
        ({"rl_config": {"algorithm": "dpo", "nmu": 1}}, "unknown key `rl_config.nmu`"),
        ({"algorithm": {"algorithm_type": "grpo"}}, "it is a configuration of Trinity-RFT"),
    ],
)
def test_what_cannot_be_honoured_is_an_error_by_name(raw: dict[str, Any], complaint: str) -> None:
    assert complaint in refusal(raw)


def rows(raw: dict[str, Any]) -> dict[str, list[Row]]:
    """What becomes of each option, by its place."""
    found: dict[str, list[Row]] = {}
    for row in translate(raw, None).rows:
        found.setdefault(row.place, []).append(row)
    return found


@pytest.mark.parametrize("section", ["sft_config", "production", ""])
def test_options_of_sft_are_its_stage_and_its_settings(section: str) -> None:
    config = read({section: SFT} if section else SFT)
    training, lora, sft = config.training, config.training.lora, config.training.sft
    assert (training.stages, training.precision, training.save_steps, training.seed) == (["sft"], "bfloat16", 500, 7)
    assert (lora.r, lora.alpha, lora.dropout, lora.target_modules) == (128, 256, 0.05, ["q_proj", "v_proj"])
    assert config.serving.max_lora_rank == 128, "the server takes what is trained"
    assert (sft.batch_size, sft.epochs, sft.learning_rate) == (32, 2, 2e-5), "4 × 8"
    assert (sft.warmup_steps, sft.scheduler) == (0.1, "cosine")
    assert (config.model.base, config.model.trainer_quantization) == ("Qwen/Qwen2.5-7B-Instruct", "8bit")
    assert (config.rollout.max_model_len, config.trigger.max_samples) == (2048, 900)
    assert training.coreset == CoresetSettings(size=60, strategy="diversity")
    assert training.replay == ReplaySettings(ratio=0.3, buffer=99)
    assert config.tracking.report_to == ["wandb"]
    found = [(each.path.name, each.split) for each in config.sources if isinstance(each, JsonlSource)]
    assert found == [("a.jsonl", "train"), ("b.jsonl", "held-out")]


def test_what_a_section_turned_on_leaves_open_is_sages_default() -> None:
    training = read({"sft_config": {"use_online_continual": True, "batch_size": 2}}).training
    assert (training.replay, training.sft.batch_size) == (ReplaySettings(ratio=0.25, buffer=2048), 32)
    coreset = {"use_coreset_selection": True, "coreset_target_size": 5}
    assert read({"sft_config": coreset}).training.coreset == CoresetSettings(size=5, strategy="loss_topk")
    off = rows({"sft_config": {"use_online_continual": False, "continual_buffer_size": 9, "load_in_4bit": False}})
    assert off["sft_config.continual_buffer_size"][0].why == "`use_online_continual` is not set"
    assert off["sft_config.load_in_4bit"][0].made is None


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"use_dora": True}, "`sft_config.use_dora` is True: vLLM cannot serve DoRA. Set it to false"),
        ({"lr_scheduler": "polynomial"}, "`sft_config.lr_scheduler` is polynomial.*Set it to linear or cosine or"),
        ({"load_in_4bit": True, "load_in_8bit": True}, "cannot be in 4 and in 8 bits. Keep one"),
        ({"train_data": "agent_sft:train"}, "agent_sft:train is a data set of SAGE's package.*JSON lines"),
        ({"use_coreset_selection": True}, "nothing says how many samples.*Set `coreset_target_size`"),
        (
            {"use_coreset_selection": True, "coreset_target_size": 9, "use_online_continual": True},
            r"a choice by loss \(loss_topk\) is for the stage sft alone.*Set `coreset_strategy` to diversity or",
        ),
        ({"warmup_ratio": 3}, "3 is no share of the steps"),
        ({"batch_size": "four"}, "`sft_config.batch_size`: it is no whole number"),
        ({"batch_sise": 4}, r"unknown key `sft_config.batch_sise` \(did you mean `sft_config.batch_size`\?\)"),
        (
            {
                "task_weights": {
                    "tool_selection": 0.35,
                    "planning": 0.3,
                    "multi_step_planning": 0.1,
                    "tool_retrieval": 0.2,
                }
            },
            r"found by words, and those here by structure. The nearest are `training.task_weights: \{one_tool: 0.55, "
            r"several_tools: 0.4\}`",
        ),
    ],
)
def test_an_option_of_sft_that_cannot_be_honoured_is_refused_with_the_nearest(
    options: dict[str, Any], complaint: str
) -> None:
    assert re.search(complaint, refusal({"sft_config": options}))


def test_classes_of_tasks_are_flywheels_where_the_file_has_them() -> None:
    weights = {"one_tool": 1, "no_tools": 2}
    assert read({"sft_config": {"task_weights": weights}}).training.task_weights == weights


def test_a_section_that_the_algorithm_does_not_choose_is_without_effect() -> None:
    sections = {"dpo_config": {"beta": 0.2}, "ppo_config": {"kl_coef": 0.02}, "grpo_config": {"beta": 0.3}}
    for algorithm, unused in (("dpo", "grpo_config"), ("grpo", "dpo_config"), (None, "grpo_config")):
        raw = {"rl_config": {**({"algorithm": algorithm} if algorithm else {}), **sections}}
        training, found = read(raw).training, rows(raw)
        assert training.stages == [algorithm or "dpo"], "SAGE's default"
        assert (training.dpo.beta, training.beta) == ((0.1, 0.3) if algorithm == "grpo" else (0.2, 0.0))
        for place in (f"rl_config.{unused}", "rl_config.ppo_config"):
            assert found[place][0].outcome == "without effect"
    message = refusal({"rl_config": {"algorithm": "ppo", **sections}})
    assert "`rl_config.algorithm` is ppo, which Flywheel does not take: PPO is no part" in message
    assert "refused" not in message, "of one key alone"


def test_options_of_rl_are_those_of_the_stage() -> None:
    common = {"num_epochs": 2, "batch_size": 2, "gradient_accumulation": 4, "learning_rate": 5e-6}
    common["num_samples_per_prompt"] = 6
    training = read({"rl_config": {"algorithm": "dpo", **common}}).training
    assert (training.dpo.epochs, training.dpo.batch_size, training.dpo.learning_rate) == (2, 8, 5e-6)
    assert training.group_size == 6
    raw = {"rl_config": {"algorithm": "grpo", **common, "grpo_config": {"group_size": 4}}}
    training, found = read(raw).training, rows(raw)
    assert (training.learning_rate, training.group_size, training.prompts_per_step) == (5e-6, 4, 8)
    for option in ("num_epochs", "batch_size", "num_samples_per_prompt"):
        assert found[f"rl_config.{option}"][0].outcome == "without effect"
    for option in ("sft_model_path", "reference_model_path"):
        assert f"`rl_config.{option}` is an" in refusal({"rl_config": {option: "m"}})


@pytest.mark.parametrize(
    ("raw", "stages"),
    [
        ({"run_sft": True, "rl_config": {"algorithm": "grpo"}}, ["sft", "grpo"]),
        ({"run_rl": True}, ["sft", "dpo"]),
        ({"run_rl": False}, ["sft"]),
        ({"run_sft": False, "rl_config": {"algorithm": "grpo"}}, ["grpo"]),
        ({"sft_config": {"num_epochs": 1}, "rl_config": {"learning_rate": 1e-6}}, ["sft", "dpo"]),
        ({"sft_config": {"num_epochs": 1}, "training": {"stages": ["sft", "grpo"]}}, ["sft", "grpo"]),
        ({"warmup": {"enabled": False, "samples": 9}}, ["grpo"]),
        ({"run_eval": True, "sft_config": {}, "rl_config": {"algorithm": "dpo"}}, ["sft", "dpo"]),
        ({"run_eval": True, "rl_config": {"algorithm": "dpo"}}, ["sft", "dpo"]),
        ({"run_eval": False}, ["sft", "dpo"]),
        ({"sft_config": {}, "rl_config": {"algorithm": "grpo"}}, ["sft", "grpo"]),
        ({"sft_config": {}, "rl_config": {}}, ["sft", "dpo"]),
        ({"sft_config": {"num_epochs": 1}, "rl_config": {}}, ["sft", "dpo"]),
        ({"sft_config": {}}, ["sft"]),
        ({"rl_config": {}}, ["dpo"]),
        ({"run_sft": False, "sft_config": {}, "rl_config": {}}, ["dpo"]),
        ({"run_warmup": True}, [{"sft": {"samples": 1000, "epochs": 1}}, "sft", "dpo"]),
        ({"warmup": {"enabled": True, "samples": 9, "focus": ["x"]}}, [{"sft": {"samples": 9, "epochs": 1}}, "grpo"]),
    ],
    ids=str,
)
def test_a_pipeline_is_the_stages_of_a_round(raw: dict[str, Any], stages: list[Any]) -> None:
    assert translate(raw, None).settings["training"]["stages"] == stages
    assert read(raw).training.kinds == ["sft" if isinstance(each, dict) else each for each in stages]


@pytest.mark.parametrize(
    ("raw", "complaint"),
    [
        ({"run_sft": False, "run_rl": False}, "`run_sft`: no stage is left to train"),
        ({"development": {"lora_r": 16}, "production": {"lora_r": 64}}, "are two presets.*Remove one of them"),
        ({"learning_rate": 1e-5}, "`learning_rate` is an option of two classes of SAGE. Put it below `sft_config`"),
        ({"sft_config": [1]}, "`sft_config` is a list, not a mapping"),
        ({"reward_config": {"weights": {"tool_use": 1}}}, "there is no tool_use. These can have a number: task_comp"),
        ({"reward_config": {"weights": {"task_completion": 0.5}}}, "`weights` add up to 0.5. Let them add up to 1"),
        ({"reward_config": {"weights": {"task_completion": 0}}}, "`weights` add up to 0. Let them add up to 1"),
        (
            {"reward_config": {"penalties": {"timeout": 0.5}}},
            "`penalties.timeout`: it must be 0 or less, not `0.5`. Correct it: a weight is a number from 0 on, a pen",
        ),
        ({"reward_config": {"penalties": [1]}}, "`penalties`: it must be a mapping.* Correct"),
        (
            {"reward_config": {"weights": {"efficiency": True}}},
            "`weights.efficiency`: it must be a number, not `True`",
        ),
        (
            {"reward_config": {"weights": {"efficiency": float("nan")}}},
            "`weights.efficiency`: it must be a finite number",
        ),
        (
            {"reward_config": {"penalties": {"timeout": -float("inf")}}},
            "`penalties.timeout`: it must be a finite number",
        ),
        ({"reward_config": {"weights": {"hallucination": 1}}}, "there is no hallucination. These can have a number"),
    ],
)
def test_what_a_file_leaves_open_or_contradicts_is_refused(raw: dict[str, Any], complaint: str) -> None:
    assert re.search(complaint, refusal(raw))


@pytest.mark.parametrize("value", [-5, 0, float("inf"), float("nan"), True, "60", "", [60]], ids=str)
def test_a_timeout_is_a_number_of_seconds(value: Any) -> None:
    message = refusal({"reward_config": {"timeout_seconds": value}})
    assert re.search("`reward_config.timeout_seconds`: `timeout_seconds`: it must be (above 0|a .*number)", message)


@pytest.mark.parametrize("given", [{}, None, {"max_steps": 5}, {"max_steps": 5, "weights": None}], ids=str)
def test_rewards_without_numbers_are_those_of_sage(given: Any, tmp_path: Path) -> None:
    raw = {"reward_config": given}
    (row,) = rows(raw)["reward_config"]
    assert (row.outcome, row.use, row.made) == ("replaced by", "filter.rubric", "rubrics/agent-reward.yaml")
    assert translate(raw, None).rubrics["rubrics/agent-reward.yaml"] == SHIPPED_FILE
    (tmp_path / "sage.yaml").write_text(yaml.safe_dump(raw))
    assert rubric_of(load(tmp_path / "sage.yaml")).hash == SHIPPED.hash


def test_the_data_of_sft_are_not_those_of_a_file_with_a_reader() -> None:
    raw = {"ajet": TRACES, "sft_config": {"train_data": "a.jsonl", "lora_r": 8}}
    (row,) = rows(raw)["sft_config.train_data"]
    assert (row.outcome, row.why) == ("without effect", "task_reader counts")
    assert [type(each) for each in read(raw).sources] == [StudioSource]


def test_a_key_named_class_is_none_of_sages() -> None:
    assert "unknown key `class`" in refusal({"class": "dpo", "sft_config": {"lora_r": 8}})


def test_a_penalty_that_another_one_has_is_a_row_of_its_own() -> None:
    found = rows({"reward_config": {"penalties": {"wrong_tool": -0.3, "hallucination": -0.4}}})
    (row,) = found["reward_config.penalties.hallucination"]
    assert (row.value, row.outcome) == (-0.4, "without effect")
    assert row.why == "a call of a tool that does not exist is a `format_error`"
    assert found["reward_config.penalties"][0].use == "filter.rubric"


def test_all_refused_options_are_named_in_one_error() -> None:
    options = {"use_dora": True, "train_data": "agent_sft:train", "lora_r": 8, "bogus": 1}
    message = refusal({"sft_config": options, "rl_config": {"algorithm": "ppo"}})
    first, *lines = message.splitlines()
    assert first == "cannot use configuration pasted.yaml: 4 keys are refused (see `flywheel docs migrate`):"
    assert [line.split("`")[1] for line in lines[:1]] == ["rl_config.algorithm"]
    assert {line.split("`")[1] for line in lines} == {
        "rl_config.algorithm", "sft_config.use_dora", "sft_config.train_data", "sft_config.bogus",
    }  # fmt: skip
    chosen = {"use_coreset_selection": True, "coreset_target_size": 9, "batch_size": "x"}
    message = refusal({"sft_config": chosen, "rl_config": {"algorithm": "dpo"}})
    assert [line.split("`")[1] for line in message.splitlines()[1:]] == [
        "sft_config.use_coreset_selection", "sft_config.batch_size",
    ]  # fmt: skip


SHIPPED = load_rubric(shipped_folder() / "rubrics" / "agent-reward.yaml")
WEIGHTS = {each.id: each.weight for each in SHIPPED.criteria if abs(each.weight) > 1e-6}
LATE = {"timeout_seconds": 60}
REWARDS = {
    "weights": {name: weight for name, weight in WEIGHTS.items() if weight > 0},
    "penalties": {name: weight for name, weight in WEIGHTS.items() if weight < 0},
}


def test_rewards_are_the_shipped_rubric_with_their_numbers(tmp_path: Path) -> None:
    file = tmp_path / "sage.yaml"
    for given, expected in (
        (REWARDS, WEIGHTS),
        ({"penalties": {"wrong_tool": -0.9, "hallucination": -0.4}},
         {**REWARDS["weights"], "wrong_tool": -0.9}),
        ({"weights": {"task_completion": 0.5, "efficiency": 0.5}, "penalties": {"timeout": -1}} | LATE,
         {"task_completion": 0.5, "efficiency": 0.5, "timeout": -1}),
    ):  # fmt: skip
        file.write_text(yaml.safe_dump({"reward_config": {"max_steps": 10, **given}}))
        config = load(file)
        rubric = rubric_of(config)
        assert {each.id: each.weight for each in rubric.criteria if abs(each.weight) > 1e-6} == expected
        assert (rubric.hash == SHIPPED.hash) == (expected == WEIGHTS)
        (written,) = translate(yaml.safe_load(file.read_text()), file).rubrics.items()
        assert written[0] == "rubrics/agent-reward.yaml"
        (tmp_path / "written.yaml").write_text(yaml.safe_dump(written[1], sort_keys=False))
        assert load_rubric(tmp_path / "written.yaml").hash == rubric.hash, "nothing is judged again"
    assert rubric.criteria[-1].value == 60


def test_an_option_may_be_set_on_the_command_line() -> None:
    for key, ours in (("dpo_config.beta", "training.dpo.beta"), ("sft_config.lora_r", "training.lora.r")):
        assert parse({}, "pasted.yaml", Path("/nowhere"), given=[f"{key}=64"]).is_given(ours)
    with pytest.raises(ConfigError, match=r"use --set sft_config\.optim: Flywheel does not use this key"):
        parse({}, "pasted.yaml", Path("/nowhere"), given=["sft_config.optim=adamw"])
    with pytest.raises(ConfigError, match="PPO is no part"):
        parse({}, "pasted.yaml", Path("/nowhere"), given=["algorithm=ppo"])


@pytest.mark.parametrize("value", [0, 1.5, "x", [1], [[1]], [{}], {"a": 1}, {1: 2}, True, float("nan")], ids=str)
def test_no_value_of_an_option_is_more_than_an_error(value: Any) -> None:
    for name in (*SAGE.entries, "training.stages", "sources", *CLASSES):
        raw: dict[str, Any] = {"run_sft": True}
        put(raw, name, value)
        with contextlib.suppress(ConfigError):
            read(raw)
        rubrics_in(raw)
