"""A filter of the user's own: one function in one file, loaded by its path.

def keep(task: dict) -> bool | tuple[bool, str]:
    return len(task["answer"]) < 4000, "too long for us"
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flywheel import python_source
from flywheel.errors import ConfigError


def load_function(path: Path, name: str) -> Callable[[Mapping[str, Any]], tuple[bool, str]]:
    """The function as a filter. Raises ConfigError when the file or the function is not there, or does not load."""
    attempted = f"load filter {path}:{name}"
    if not path.is_file():
        raise ConfigError(attempted, "there is no such file", "Paths are relative to the chain's file.")
    try:
        source = path.read_bytes()
    except OSError as error:
        raise ConfigError(attempted, error.strerror or str(error), "Check its permissions.") from error
    function = python_source.load_function(source, path, name, attempted)

    def keep(line: Mapping[str, Any]) -> tuple[bool, str]:
        said = function(line)
        if isinstance(said, bool):
            return said, f"{name} said no"
        if isinstance(said, tuple) and len(said) == 2 and isinstance(said[0], bool):
            return said[0], str(said[1])
        raise TypeError(f"{name} must return a bool or (bool, reason), not {said!r}")

    return keep
