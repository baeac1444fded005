"""Configurations, and the files and states that they name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from flywheel.config import Config, parse
from flywheel.system import files

BOXED_RUBRIC = files.shipped_folder() / "rubrics" / "math-boxed.yaml"
RUBRIC: dict[str, Any] = {
    "id": "r",
    "criteria": [{"id": "correct", "value": "The answer is right.", "required": True}],
}


UNWATCHED: dict[str, Any] = {"deploy": {"watch": {"new_share": 1}}}
"""Most tests are about what happens where a new version answers alone."""


def make_config(folder: Path, **sections: Any) -> Config:
    """A configuration in `folder`, whose state is `folder/state`."""
    return parse({"state": {"dir": "state"}, **UNWATCHED, **sections}, "test", folder)


def with_settings(config: Config, **sections: dict[str, Any]) -> Config:
    """The configuration with other values in some of its sections."""
    changed = {name: getattr(config, name).model_copy(update=values) for name, values in sections.items()}
    return config.model_copy(update=changed)


def write_config(folder: Path, *, name: str = "flywheel.yaml", **sections: Any) -> Path:
    """The file of a configuration whose state is `folder/state`."""
    return write_yaml(folder / name, {"state": {"dir": "state"}, **UNWATCHED, **sections})


def write_rubric(folder: Path, *, name: str = "rubric.yaml", **values: Any) -> Path:
    return write_yaml(folder / name, {**RUBRIC, **values})


def write_chain(folder: Path, *filters: dict[str, Any], name: str = "chain.yaml", **values: Any) -> Path:
    return write_yaml(folder / name, {"id": "c", "filters": list(filters), **values})


def write_yaml(path: Path, content: Any) -> Path:
    path.write_text(yaml.safe_dump(content))
    return path


def base_model(folder: Path, name: str = "base") -> str:
    """The directory of a base model, as far as planning looks at it."""
    directory = folder / "models" / name
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text("{}")
    return str(directory)
