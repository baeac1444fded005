"""What an earlier version stored is found: rubrics, criteria, judges and chains have the hashes that they had."""

from __future__ import annotations

from pathlib import Path

import pytest

from flywheel.config.judge import JudgeSettings
from flywheel.judge.filters.chain import load_chain
from flywheel.judge.grader import Grader
from flywheel.judge.rubric.file import parse_rubric
from tests.factories.judged_before import BEFORE, CHAINS, RUBRICS, read_rubric, write_used


@pytest.mark.parametrize("name", RUBRICS)
def test_a_rubric_its_criteria_and_its_judge_have_the_hashes_that_they_had(tmp_path: Path, name: str) -> None:
    rubric = read_rubric(tmp_path, name)
    grader = Grader(rubric, JudgeSettings(**BEFORE["judge"]))
    told = {"hash": rubric.hash, "criteria": grader.hashes, "judge": grader.judge_hash}
    assert told == {key: RUBRICS[name][key] for key in told}


@pytest.mark.parametrize("name", RUBRICS)
def test_a_rubric_that_a_round_stored_is_the_same(tmp_path: Path, name: str) -> None:
    rubric = read_rubric(tmp_path, name)
    again = parse_rubric(rubric.model_dump(mode="json"), "the rubric of a round")
    assert (again, again.hash) == (rubric, RUBRICS[name]["hash"])


def test_a_rubric_is_stored_as_it_was() -> None:
    stored = BEFORE["stored"]
    assert parse_rubric(stored, "the rubric of a round").model_dump(mode="json") == stored


@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_has_the_hash_that_it_had(tmp_path: Path, name: str) -> None:
    write_used(tmp_path)
    (tmp_path / "chain.yaml").write_text(CHAINS[name]["yaml"])
    assert load_chain(tmp_path / "chain.yaml").hash == CHAINS[name]["hash"]
