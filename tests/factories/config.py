"""Configurations, and the files and states that they name."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import yaml

from flywheel.config import Config, parse
from flywheel.store.kernel.database import Store
from flywheel.system import files

T = TypeVar("T")

BOXED_RUBRIC = files.shipped_folder() / "rubrics" / "math-boxed.yaml"
RUBRIC: dict[str, Any] = {
    "id": "r",
    "criteria": [{"id": "correct", "value": "The answer is right.", "required": True}],
}


def make_config(folder: Path, **sections: Any) -> Config:
    """A configuration in `folder`, whose state is `folder/state`."""
    return parse({"state": {"dir": "state"}, **sections}, "test", folder)


def write_config(folder: Path, *, name: str = "flywheel.yaml", **sections: Any) -> Path:
    """The file of a configuration whose state is `folder/state`."""
    return write_yaml(folder / name, {"state": {"dir": "state"}, **sections})


def write_rubric(folder: Path, *, name: str = "rubric.yaml", **values: Any) -> Path:
    return write_yaml(folder / name, {**RUBRIC, **values})


def write_yaml(path: Path, content: Any) -> Path:
    path.write_text(yaml.safe_dump(content))
    return path


def base_model(folder: Path, name: str = "base") -> str:
    """The directory of a base model, as far as planning looks at it."""
    directory = folder / "models" / name
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text("{}")
    return str(directory)


def write_state(state_dir: Path, work: Callable[..., T], *arguments: Any, **values: Any) -> T:
    """What `work` returns, called with a connection to the state as one transaction. For tests without a loop."""

    async def opened() -> T:
        store = await Store.open(state_dir)
        try:
            return await store.write(work, *arguments, **values)
        finally:
            await store.close()

    return asyncio.run(opened())
