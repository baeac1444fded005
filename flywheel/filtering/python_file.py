"""A filter of the user's own: one function in one file, loaded by its path.

def keep(task: dict) -> bool | tuple[bool, str]:
    return len(task["answer"]) < 4000, "too long for us"
"""

from __future__ import annotations

import hashlib
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flywheel.errors import ConfigError


def load_function(path: Path, name: str) -> Callable[[Mapping[str, Any]], tuple[bool, str]]:
    """The function as a filter. Raises ConfigError when the file or the function is not there, or does not load."""
    attempted = f"load filter {path}:{name}"
    if not path.is_file():
        raise ConfigError(attempted, "there is no such file", "Paths are relative to the chain's file.")
    # Not by the import system, which would write its bytecode beside the user's file. It is registered all the same:
    # dataclasses look their module up.
    module = types.ModuleType(f"flywheel_filter_{hashlib.sha256(str(path.absolute()).encode()).hexdigest()[:16]}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module
    try:
        exec(compile(path.read_bytes(), str(path), "exec", dont_inherit=True), module.__dict__)
    except (Exception, SystemExit) as error:
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
