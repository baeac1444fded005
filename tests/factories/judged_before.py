"""Rubrics, chains and a state that was judged by them, with the hashes that an earlier version gave them.

`tests/data/judged_before.json` was written once, by that version, and is not written again: what is stored by a hash
has to be found by it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import yaml

from flywheel.judge.rubric.file import load_rubric, parse_rubric
from flywheel.judge.rubric.rubric import Rubric

BEFORE: Final[dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "data" / "judged_before.json").read_text(encoding="utf-8")
)
RUBRICS: Final[dict[str, dict[str, Any]]] = {each["name"]: each for each in BEFORE["rubrics"]}
CHAINS: Final[dict[str, dict[str, Any]]] = {each["name"]: each for each in BEFORE["chains"]}


def read_rubric(folder: Path, name: str) -> Rubric:
    """A rubric; where its hash has the files that its criteria use, these lie in the folder."""
    given = RUBRICS[name]
    if "with_files" not in given:
        return parse_rubric(yaml.safe_load(given["yaml"]) if "yaml" in given else given["rubric"], name)
    write_used(folder)
    (folder / "rubric.yaml").write_text(yaml.safe_dump(given["rubric"]))
    return load_rubric(folder / "rubric.yaml")


def write_used(folder: Path) -> None:
    for name, text in BEFORE["files"].items():
        (folder / name).write_text(text)
