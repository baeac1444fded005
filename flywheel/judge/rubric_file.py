"""Rubric files: YAML in, a checked rubric out, or an error that names the key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from flywheel.config import explain
from flywheel.errors import ConfigError
from flywheel.rubric import Rubric

REMEDY = "Correct the file; see docs/rubrics.md."


def load_rubric(path: Path) -> Rubric:
    """Read a rubric. Raises ConfigError for whatever is wrong with it."""
    attempted = f"read rubric {path}"
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(attempted, "there is no such file", "Set filter.rubric to a rubric in YAML.") from None
    except OSError as error:
        raise ConfigError(attempted, error.strerror or str(error), "Check the path and its permissions.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(attempted, "it is not UTF-8 text", "Set filter.rubric to a rubric in YAML.") from error
    except yaml.YAMLError as error:
        raise ConfigError(attempted, f"it is not YAML: {' '.join(str(error).split())}", REMEDY) from error
    return parse_rubric(raw, str(path))


def parse_rubric(raw: Any, name: str) -> Rubric:
    """Check a parsed rubric. Raises ConfigError."""
    if not isinstance(raw, dict):
        raise ConfigError(f"use rubric {name}", f"its root is a {type(raw).__name__}, not a mapping", REMEDY)
    try:
        return Rubric.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(f"use rubric {name}", explain(error, Rubric), REMEDY) from None
