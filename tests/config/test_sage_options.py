"""SAGE's and ASTuner's options: which become stages, and what is said of the others."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from flywheel.config.file import Config, parse
from flywheel.config.sage import SAGE
from flywheel.errors import ConfigError

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
    assert "adv_estimator` is gae: PPO is no part" in refusal(common(adv_estimator="gae"))
    for other in ("rloo", "dpo"):
        complaint = f"adv_estimator` is {other}, which Flywheel does not take. Set it to grpo. See"
        assert complaint in refusal(common(adv_estimator=other))
    assert "training.beta" in refusal(common(use_kl_in_reward=True))


@pytest.mark.parametrize("key", [{"algorithm": "ppo"}, {"ppo_config": {"kl_coef": 0.02}}])
def test_ppo_is_refused_with_the_reason_and_what_to_use(key: dict[str, Any]) -> None:
    for raw in (key, {"rl_config": key}):
        message = refusal(raw)
        assert "PPO is no part of TRL's stable API" in message
        assert "Use `training.stages: [grpo]`" in message


@pytest.mark.parametrize(
    ("raw", "complaint"),
    [
        ({"algorithm": "dpo", "training": {"stages": ["dpo"]}}, "`algorithm` and `training.stages` both say"),
        ({"algorithm": "grpo", "dpo_config": {}}, "`algorithm` is of grpo and `dpo_config` of dpo"),
        ({"dpo_config": {}, "grpo_config": {}}, "`dpo_config` is of dpo and `grpo_config` of grpo"),
        ({"algorithm": "dpo", "rl_config": {"algorithm": "grpo"}}, "`algorithm` is of dpo and `rl_config.algorithm`"),
        (
            {"dpo_config": {"beta": 0.1}, "training": {"dpo": {"beta": 0.2}}},
            "`dpo_config.beta` and another key both set `training.dpo.beta`",
        ),
        (
            {"dpo_config": {"beta": 0.1}, "rl_config": {"dpo_config": {"beta": 0.2}}},
            "`rl_config.dpo_config.beta` and another key both set `training.dpo.beta`",
        ),
    ],
)
def test_two_keys_that_say_what_is_trained_are_an_error(raw: dict[str, Any], complaint: str) -> None:
    assert complaint in refusal(raw)


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
        ({"dpo_config": {"bta": 1}}, "unknown key `dpo_config.bta` (did you mean `dpo_config.beta`?)"),
        (
            {"dpo_config": {"colour": 1}},
            "unknown key `dpo_config.colour` (known here: beta, label_smoothing, loss_type, reference_free). Correct",
        ),
        ({"dpo_config": {"loss_type": "ipo", "label_smoothing": 0.1}}, "only the loss sigmoid has it"),
        ({"dpo_config": [1]}, "`dpo_config` is a list, not a mapping"),
        ({"algorithm": "kto"}, "`algorithm` is kto, which Flywheel does not take. Set it to dpo or grpo. See"),
        ({"rl_config": {"algorithm": "dpo", "nmu": 1}}, "unknown key `rl_config.nmu`"),
        ({"algorithm": {"algorithm_type": "grpo"}}, "it is a configuration of Trinity-RFT"),
    ],
)
def test_what_cannot_be_honoured_is_an_error_by_name(raw: dict[str, Any], complaint: str) -> None:
    assert complaint in refusal(raw)


@pytest.mark.parametrize("option", SAGE.refused)
def test_every_other_option_is_an_error_that_says_what_to_use_or_why_there_is_nothing(option: str) -> None:
    section, _, name = option.rpartition(".")
    hint, why = SAGE.refused[option]
    message = refusal({section: {name: None}} if section else {name: 1})
    assert f"`{option}` is {why}. {hint} See `flywheel docs sage`." in message
    assert hint.startswith("Use `") or (hint == "Remove it." and ": " in why)


def test_an_option_of_several_classes_has_the_keys_of_all() -> None:
    message = refusal({"num_epochs": 3, "batch_size": 1})
    assert "`training.dpo.epochs` or `training.steps` or `training.sft.epochs`" in message
    assert "The file has 1 more refused key." in message
