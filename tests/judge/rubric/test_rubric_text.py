"""The text of a rubric: read again, it is the same rubric; texts of several lines stay such."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from flywheel.judge.rubric.rubric_text import text_of

from flywheel.judge.rubric import Rubric
from flywheel.judge.rubric.file import load_rubric
from flywheel.system import files

RUBRICS = sorted((files.shipped_folder() / "rubrics").glob("*.yaml"))


@pytest.mark.parametrize("path", RUBRICS, ids=lambda path: path.stem)
def test_a_text_is_the_rubric(path: Path) -> None:
    rubric = load_rubric(path)
    assert Rubric.model_validate(yaml.safe_load(text_of(rubric))).hash == rubric.hash


def test_lines_stay_lines() -> None:
    criteria = [{"id": "correct", "value": "It is right.\nIt is whole."}]
    text = text_of(Rubric.model_validate({"id": "r", "criteria": criteria}))
    assert text.splitlines() == [
        "version: 1", "id: r", "criteria:", "- id: correct", "  value: |-", "    It is right.", "    It is whole.",
    ]  # fmt: skip
