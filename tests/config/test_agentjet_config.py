"""What is read of a configuration made for AgentJet or ASTuner, and what is refused."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import yaml

from flywheel.config import AgentProgramSettings, Config, JsonlSource, StudioSource, load
from flywheel.daemon.judging.judge_setup import rubric_of
from flywheel.errors import ConfigError
from flywheel.judge.filters.chain import load_chain
from tests.cases import for_each

SECTION = yaml.safe_load(
    r"""
base_url: ~/AgentScope-Studio/database.sqlite
train_output_path: ./tasks.jsonl
alien_llm_model: qwen3-235b
alien_llm_response_length: 2048
filters:
  - type: llm_evaluate
    enabled: true
    params:
      custom_rubrics: |
        1. Drop the task if the answer is not wrapped in \boxed{}.
      temperature: 0.5
      print_reason: false
      max_thread: 16
  - type: deduplication
    enabled: false
    params: {similarity_threshold: 0.8, db_path: ./.similarity_db, model: null, api_key: null, base_url: null}
"""
)
MODEL = {"base": "Qwen/Qwen3-0.6B"}


def read(folder: Path, raw: Any) -> Config:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(raw))
    return load(path)


@pytest.mark.parametrize("root", ["ajet", "astuner", ""])
def test_both_roots_and_a_bare_section_are_the_same(root: str, tmp_path: Path) -> None:
    inner = {"task_reader": {"type": "tracing", "feedback_tracing": SECTION}}
    raw = {root: inner, "model": MODEL} if root else {"feedback_tracing": SECTION, "model": MODEL}
    config = read(tmp_path, raw)
    (source,) = config.sources
    assert isinstance(source, StudioSource)
    assert source.path == Path("~/AgentScope-Studio/database.sqlite").expanduser()
    assert config.task_file == tmp_path / "tasks.jsonl"
    assert (config.judge.model, config.judge.max_tokens) == ("qwen3-235b", 2048)
    assert config.filter.chain == tmp_path / "config.yaml"
    chain = load_chain(config.filter.chain)
    assert chain.judge is not None
    assert "\\boxed{}" in str(chain.judge.custom_rubrics), "braces survive"
    assert chain.deduplication is None, "switched off"


def test_what_is_for_another_program_is_told_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    raw = {
        "ajet": {"task_reader": {"feedback_tracing": SECTION, "jsonl": {}}, "trainer_common": {"total_epochs": 3}},
        "hydra": {"searchpath": []},
        "model": MODEL,
        "state": {"dir": "own"},
    }
    with caplog.at_level(logging.WARNING):
        config = read(tmp_path, raw)
    assert config.state_dir == tmp_path / "own"
    (record,) = caplog.records
    assert all(key in record.message for key in ("hydra", "ajet.trainer_common", "ajet.task_reader.jsonl"))
    assert "state" not in record.message.split(":")[-1]


@pytest.mark.parametrize(
    ("reader", "complaint"),
    [
        (
            {"feedback_tracing": {"alien_llm_modell": "x"}},
            r"unknown key `ajet\.task_reader\.feedback_tracing\.alien_llm_modell`",
        ),
        ({"type": "tracing"}, r"`ajet\.feedback_tracing` is missing"),
        *(
            (
                {"type": kind, "feedback_tracing": SECTION},
                rf"`ajet\.task_reader\.type` is {kind}, which Flywheel does not",
            )
            for kind in ("env_service", "huggingface_dat_repo", "data_generation")
        ),
    ],
)
def test_a_reader_that_cannot_be_used_is_named(tmp_path: Path, reader: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        read(tmp_path, {"ajet": {"model": {"path": "m"}, "task_reader": reader}})


def test_defaults_are_theirs(tmp_path: Path) -> None:
    config = read(tmp_path, {"feedback_tracing": {}, "model": MODEL})
    assert config.sources == [StudioSource()]
    assert (config.ingest.train_ratio, config.ingest.split_seed, config.filter.chain) == (0.7, 42, None)


@pytest.mark.parametrize(
    ("beside", "complaint"),
    [
        ({"judge": "abc"}, "`judge`: it must be a mapping"),
        ({"ingest": [1]}, "`ingest`: it must be a mapping"),
        ({"filter": 3}, "`filter`: it must be a mapping"),
        ({"ajet": {"task_reader": 5, "feedback_tracing": {}}, "model": MODEL}, None),
    ],
)
def test_a_section_beside_it_that_is_none_is_told_of(tmp_path: Path, beside: Any, complaint: str | None) -> None:
    if complaint is None:
        assert read(tmp_path, beside).sources
        return
    with pytest.raises(ConfigError, match=complaint):
        read(tmp_path, {"feedback_tracing": {"base_url": "x"}, "model": MODEL, **beside})


ROLLOUT = {"num_repeat": 4, "temperature": 0.9, "max_env_worker": 64}


@pytest.mark.parametrize("root", ["ajet", "astuner"])
def test_what_is_trained_and_how_is_theirs(root: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    inner = {
        "model": {"path": "/models/qwen", "dtype": "bf16"},
        "rollout": ROLLOUT,
        "task_reader": {"type": "tracing", "feedback_tracing": SECTION},
    }
    with caplog.at_level(logging.WARNING):
        config = read(tmp_path, {root: inner})
    assert config.model.base == "/models/qwen"
    assert (config.training.group_size, config.rollout.temperature) == (4, 0.9)
    (record,) = caplog.records
    assert f"{root}.model.dtype, {root}.rollout.max_env_worker" in record.message
    assert "path" not in record.message
    assert "num_repeat" not in record.message
    own = {"model": {"base": "mine"}, "training": {"group_size": 6}, "rollout": {"temperature": 0.5}}
    config = read(tmp_path, {root: inner, **own})
    assert (config.model.base, config.training.group_size, config.rollout.temperature) == ("mine", 6, 0.5)


@pytest.mark.parametrize(
    ("raw", "key"),
    [
        ({"feedback_tracing": SECTION}, r"`model\.base`"),
        ({"feedback_tracing": SECTION, "model": {"alias": "a"}}, r"`model\.base`"),
        ({"ajet": {"feedback_tracing": SECTION, "rollout": ROLLOUT}}, r"`ajet\.model\.path`"),
        ({"astuner": {"feedback_tracing": SECTION, "model": {"path": None}}}, r"`astuner\.model\.path`"),
    ],
)
def test_a_missing_model_is_an_error(raw: Any, key: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{key} is missing: nothing says which model is trained"):
        read(tmp_path, raw)


@pytest.mark.parametrize("kind", ["jsonl", "jsonl_dataset_file"])
@pytest.mark.parametrize("section", [None, SECTION])
def test_a_reader_of_lines_is_honoured(kind: str, section: Any, tmp_path: Path) -> None:
    reader = {"type": kind, kind: {"training": {"file_path": "train.jsonl"}}}
    if section is not None:
        reader["feedback_tracing"] = section
    config = read(tmp_path, {"ajet": {"model": {"path": "m"}, "task_reader": reader}})
    (source,) = config.sources
    assert isinstance(source, JsonlSource)
    assert source.path == tmp_path / "train.jsonl"
    assert config.judge.model == ("qwen3-235b" if section else Config().judge.model)
    with pytest.raises(ConfigError, match=rf"`ajet\.task_reader\.{kind}\.training\.file_path` is missing"):
        read(tmp_path, {"ajet": {"model": {"path": "m"}, "task_reader": {"type": kind}}})


def test_the_builtin_reasons_are_judged_beside_the_text(tmp_path: Path) -> None:
    config = read(tmp_path, {"feedback_tracing": SECTION, "model": MODEL})
    rubric = rubric_of(config)
    *reasons, flat = rubric.every
    assert (flat.id, flat.required, len(reasons)) == ("custom_rubrics", True, 7)
    assert all(reason.required and reason.asks_the_judge for reason in reasons)
    for failed in rubric.every:
        assert rubric.score({each.id: float(each.id != failed.id) for each in rubric.every}) == 0
    off = copy.deepcopy(SECTION)
    off["filters"][0]["params"]["builtin"] = False
    config = read(tmp_path, {"feedback_tracing": off, "model": MODEL})
    assert [each.id for each in rubric_of(config).every] == ["custom_rubrics"]


def test_a_workflow_and_its_judge(tmp_path: Path) -> None:
    raw = {
        "ajet": {
            "task_reader": {"type": "tracing", "feedback_tracing": SECTION},
            "model": {"path": "Qwen/Qwen3-0.6B"},
            "rollout": {"user_workflow": "tutorial.sums.agent->Sums", "num_repeat": 6},
            "task_judge": {"judge_protocol": "tutorial/sums/judge.py->Right"},
        }
    }
    folder = tmp_path / "tutorial" / "sums"
    folder.mkdir(parents=True)
    rollout = read(folder, raw).rollout
    assert isinstance(rollout.agent, AgentProgramSettings)
    assert (rollout.agent.workflow, rollout.agent.folder) == ("tutorial.sums.agent->Sums", tmp_path)
    assert rollout.reward_function == f"{folder / 'judge.py'}->Right"
    assert (rollout.weights.rubric, rollout.weights.workflow) == (0, 1)


@for_each("key", ["user_workflow", "agentscope_workflow", "agentscope_learn_protocol"])
def test_the_names_of_a_workflow_and_the_settings_that_it_gets(tmp_path: Path, key: str) -> None:
    raw = {
        "astuner": {
            "task_reader": {"type": "tracing", "feedback_tracing": SECTION},
            "model": {"path": "Qwen/Qwen3-0.6B"},
            "rollout": {key: "agents.sums->Sums", "multi_turn": {"max_steps": 5}},
        },
        "board": {"size": 4, "api_key": "abc", "keys": ["sk-0123456789abcdefghij"], "token": 7},
        "judge": {"model": "ours"},
    }
    agent = read(tmp_path, raw).rollout.agent
    assert isinstance(agent, AgentProgramSettings)
    assert agent.workflow == "agents.sums->Sums"
    assert agent.config == {
        "ajet": raw["astuner"],
        "board": {"size": 4, "api_key": None, "keys": [None], "token": 7},
    }


def test_a_judge_needs_a_workflow(tmp_path: Path) -> None:
    raw: dict[str, Any] = {
        "ajet": {
            "task_reader": {"type": "tracing", "feedback_tracing": SECTION},
            "model": {"path": "Qwen/Qwen3-0.6B"},
            "task_judge": {"judge_protocol": "agents.sums->Right"},
        },
    }
    with pytest.raises(ConfigError, match=r"`ajet\.task_judge\.judge_protocol` names a judge, and no workflow runs"):
        read(tmp_path, raw)
    rollout = read(tmp_path, {**raw, "rollout": {"agent": {"command": ["node", "agent.mjs"]}}}).rollout
    assert (rollout.reward_function, rollout.weights.workflow) == ("agents.sums->Right", 1)
