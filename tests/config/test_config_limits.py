"""Values that would be taken and do harm later are refused where they are written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flywheel.config.file import parse
from flywheel.errors import ConfigError
from flywheel.judge.filters.chain import load_chain


@pytest.mark.parametrize("alias", ["", " ", " a", "a\n", "a\x07b", "a@r0001", "@"])
def test_an_alias_that_is_no_name_is_refused(tmp_path: Path, alias: str) -> None:
    with pytest.raises(ConfigError, match=r"`model\.alias`: it must"):
        parse({"model": {"alias": alias}}, "test", tmp_path)


@pytest.mark.parametrize("alias", ["my-agent", "org/name", "qwen3:4b", "agent 2", "助手"])
def test_an_alias_that_is_a_name_is_taken(tmp_path: Path, alias: str) -> None:
    assert parse({"model": {"alias": alias}}, "test", tmp_path).model.alias == alias


def test_threads_without_end_are_refused(tmp_path: Path) -> None:
    assert parse({"judge": {"max_thread": 1024}}, "test", tmp_path).judge.max_thread == 1024
    with pytest.raises(ConfigError, match=r"`judge\.max_thread`: .*1024"):
        parse({"judge": {"max_thread": 1_000_000}}, "test", tmp_path)
    chain = tmp_path / "chain.yaml"
    chain.write_text("id: c\nfilters: [{type: llm_evaluate, params: {max_thread: 1000000}}]\n")
    with pytest.raises(ConfigError, match=r"max_thread.*1024"):
        load_chain(chain)


@pytest.mark.parametrize(
    ("sections", "error"),
    [
        ({"training": {"lora": {"r": 128}}}, r"training\.lora\.r 128 is above serving\.max_lora_rank 64"),
        ({"rollout": {"max_completion_tokens": 4096}}, r"leaves no room for a prompt in max_model_len 4096"),
        (
            {"trigger": {"min_held_out": 4}},
            r"trigger\.min_held_out 4 is below gate\.min_tasks 8: a round could start that can only be rejected",
        ),
        ({"retention": {"keep_days": 1e12}}, r"`retention\.keep_days`: .*36500"),
        ({"gate": {"non_inferiority_margins": {"safe": 0}}}, r"`gate\.non_inferiority_margins\.safe`"),
        ({"gate": {"suites": {"a": {"file": "a.jsonl", "margin": 0}}}}, r"`gate\.suites\.a\.margin`"),
        ({"gate": {"suites": {"a": {"margin": 0.1}}}}, r"`gate\.suites\.a\.file`"),
        ({"gate": {"max_tasks": 4}}, r"max_tasks 4 is below min_tasks 8: nothing could ever be promoted"),
        ({"training": {"steps": 5, "warmup_steps": 5}}, r"warmup_steps 5 is not below steps 5"),
        ({"training": {"lora": {"alpha": 0}}}, r"`training\.lora\.alpha`"),
        ({"training": {"lora": {"dropout": 1}}}, r"`training\.lora\.dropout`"),
        ({"training": {"lora": {"target_modules": []}}}, r"`training\.lora\.target_modules"),
        (
            {"training": {"lora": {"target_modules": ["q_proj", "lm_head"]}}},
            r"target_modules`: lm_head cannot have",
        ),
        ({"training": {"lora": {"target_modules": ["model.embed_tokens"]}}}, r"embed_tokens cannot have an adapter"),
        ({"training": {"lora": {"target_modules": r"(.*_proj|lm_\w+)"}}}, r"lm_head cannot have an adapter"),
        ({"training": {"lora": {"target_modules": r".*\.(q_proj|embed_tokens)"}}}, r"embed_tokens cannot have an"),
        ({"training": {"lora": {"target_modules": "*_proj"}}}, r"target_modules`: it is not a regular expression"),
        ({"training": {"learning_rate": float("inf")}}, r"`training\.learning_rate`"),
        ({"rollout": {"temperature": float("inf")}}, r"`rollout\.temperature`: it must be a finite number"),
        ({"rollout": {"loop_reward": -2e6}}, r"`rollout\.loop_reward`"),
        ({"rollout": {"reward": {"range": 0}}}, r"`rollout\.reward\.range`"),
        ({"rollout": {"reward": {"range": 5}}}, r"range is that of the workflow's reward, which has no weight"),
        ({"rollout": {"reward": {"rubric": 1e308}}}, r"`rollout\.reward\.rubric`"),
        ({"training": {"seed": -100}}, r"`training\.seed`"),
        ({"training": {"seed": 2**40}}, r"`training\.seed`"),
    ],
)
def test_a_round_that_could_come_to_nothing_is_refused(tmp_path: Path, sections: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        parse(sections, "test", tmp_path)


@pytest.mark.parametrize("modules", ["all-linear", ["q_proj", "self_attn.k_proj"], r".*\.(q|v)_proj"])
def test_linear_layers_can_have_an_adapter(tmp_path: Path, modules: str | list[str]) -> None:
    sections = {"training": {"lora": {"target_modules": modules}}}
    assert parse(sections, "test", tmp_path).training.lora.target_modules == modules


def test_a_rank_that_the_server_takes_is_taken(tmp_path: Path) -> None:
    sections = {"training": {"lora": {"r": 128}}, "serving": {"max_lora_rank": 128}}
    assert parse(sections, "test", tmp_path).training.lora.r == 128
