"""A configuration made for AgentJet or ASTuner works as it is."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import yaml

from flywheel.config import Config, StudioSource, load
from flywheel.errors import ConfigError
from flywheel.filtering.chain import load_chain

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


def read(folder: Path, raw: Any) -> Config:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(raw))
    return load(path)


@pytest.mark.parametrize("root", ["ajet", "astuner", ""])
def test_both_roots_and_a_bare_section_are_the_same(root: str, tmp_path: Path) -> None:
    inner = {"task_reader": {"type": "tracing", "feedback_tracing": SECTION}}
    config = read(tmp_path, {root: inner} if root else {"feedback_tracing": SECTION})
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
        "state": {"dir": "own"},
    }
    with caplog.at_level(logging.WARNING):
        config = read(tmp_path, raw)
    assert config.state_dir == tmp_path / "own"
    (record,) = caplog.records
    assert all(key in record.message for key in ("hydra", "ajet.trainer_common", "ajet.task_reader.jsonl"))
    assert "state" not in record.message.split(":")[-1]


def test_an_unknown_key_inside_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown key `ajet\.task_reader\.feedback_tracing\.alien_llm_modell`"):
        read(tmp_path, {"ajet": {"task_reader": {"feedback_tracing": {"alien_llm_modell": "x"}}}})


def test_a_root_without_the_section_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"`ajet\.feedback_tracing` is missing"):
        read(tmp_path, {"ajet": {"task_reader": {"type": "jsonl"}}})


def test_defaults_are_theirs(tmp_path: Path) -> None:
    config = read(tmp_path, {"feedback_tracing": {}})
    assert config.sources == [StudioSource()]
    assert (config.ingest.train_ratio, config.ingest.split_seed, config.filter.chain) == (0.7, 42, None)


@pytest.mark.parametrize(
    ("beside", "complaint"),
    [
        ({"judge": "abc"}, "`judge`: input should be"),
        ({"ingest": [1]}, "`ingest`: input should be"),
        ({"filter": 3}, "`filter`: input should be"),
        ({"ajet": {"task_reader": 5, "feedback_tracing": {}}}, None),
    ],
)
def test_a_section_beside_it_that_is_none_is_told_of(tmp_path: Path, beside: Any, complaint: str | None) -> None:
    if complaint is None:
        assert read(tmp_path, beside).sources
        return
    with pytest.raises(ConfigError, match=complaint):
        read(tmp_path, {"feedback_tracing": {"base_url": "x"}, **beside})
