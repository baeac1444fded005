"""Rubric files: YAML in, a checked rubric out, or an error that names the key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from flywheel.errors import ConfigError
from flywheel.rubric import Rubric
from flywheel.yaml_file import explain, read_yaml

REMEDY = "Correct the file; see docs/rubrics.md."


def load_rubric(path: Path) -> Rubric:
    """Read a rubric. Raises ConfigError for whatever is wrong with it."""
    raw = read_yaml(path, f"read rubric {path}", "Set filter.rubric to a rubric in YAML.")
    return parse_rubric(raw, str(path))


def parse_rubric(raw: Any, name: str) -> Rubric:
    """Check a parsed rubric. Raises ConfigError."""
    if not isinstance(raw, dict):
        raise ConfigError(f"use rubric {name}", f"its root is a {type(raw).__name__}, not a mapping", REMEDY)
    try:
        return Rubric.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(f"use rubric {name}", explain(error, Rubric), REMEDY) from None
