"""A filter of the user's own: one function in one file, loaded by its path.

def keep(task: dict) -> bool | tuple[bool, str]:
    return len(task["answer"]) < 4000, "too long for us"
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flywheel.errors import ConfigError


def load_function(path: Path, name: str) -> Callable[[Mapping[str, Any]], tuple[bool, str]]:
    """The function as a filter. Raises ConfigError when the file or the function is not there, or does not load."""
    attempted = f"load filter {path}:{name}"
    if not path.is_file():
        raise ConfigError(attempted, "there is no such file", "Paths are relative to the chain's file.")
    spec = importlib.util.spec_from_file_location(f"flywheel_filter_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ConfigError(attempted, "it is no Python file", "Name a file that ends in .py.")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(attempted, f"{type(error).__name__}: {error}", "Correct the file.") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(attempted, f"it has no function {name}", "Name one in params.function.")

    def keep(line: Mapping[str, Any]) -> tuple[bool, str]:
        said = function(line)
        if isinstance(said, bool):
            return said, f"{name} said no"
        if isinstance(said, tuple) and len(said) == 2 and isinstance(said[0], bool):
            return said[0], str(said[1])
        raise TypeError(f"{name} must return a bool or (bool, reason), not {said!r}")

    return keep
