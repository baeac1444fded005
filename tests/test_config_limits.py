"""Values that would be taken and do harm later are refused where they are written."""

from __future__ import annotations

from pathlib import Path

import pytest

from flywheel.config import parse
from flywheel.errors import ConfigError
from flywheel.filtering.chain import load_chain


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
