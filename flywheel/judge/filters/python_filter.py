"""The filter `python`: a function of the user's, in a file beside the chain.

def keep(task: dict) -> bool | tuple[bool, str]:
    return len(task["answer"]) < 4000, "too long for us"
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from flywheel.config.section import Section
from flywheel.errors import ConfigError
from flywheel.system.limited_call import FunctionError
from flywheel.system.user_code import function_of


class PythonFile(Section):
    """Parameters of `python`."""

    path: str = Field(min_length=1)
    """A Python file, relative to the chain."""
    function: str = "keep"
    """The function in it."""
    timeout_seconds: float = Field(default=30.0, gt=0, allow_inf_nan=False)
    """Longest call for one task."""


def load_filter(path: Path, name: str, seconds: float) -> Callable[[Mapping[str, Any]], tuple[bool, str]]:
    """The function as a filter. Raises ConfigError if the file or the function is missing or does not load."""
    attempted = f"load filter {path}:{name}"
    if not path.is_file():
        raise ConfigError(attempted, "there is no such file", "Paths are relative to the chain's file.")
    try:
        source = path.read_bytes()
    except OSError as error:
        raise ConfigError(attempted, error.strerror or str(error), "Check its permissions.") from error
    function = function_of(source, path, name, attempted=attempted, seconds=seconds)

    def keep(line: Mapping[str, Any]) -> tuple[bool, str]:
        returned = function(line)
        if not isinstance(returned.value, bool):
            raise FunctionError(f"{name} must return a bool or (bool, reason), not {returned.shown}")
        return returned.value, f"{name} returned False" if returned.reason is None else returned.reason

    return keep
