"""Python that users write: one function in one file, executed from its text."""

from __future__ import annotations

import hashlib
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flywheel.errors import ConfigError


def load_function(source: bytes | str, path: Path, name: str, attempted: str) -> Callable[..., Any]:
    """The function `name` of a file's text. Raises ConfigError when it is not there or the text does not run."""
    # Not by the import system, which would write its bytecode beside the user's file. It is registered all the same:
    # dataclasses look their module up.
    text = source if isinstance(source, bytes) else source.encode()
    digest = hashlib.sha256(str(path.absolute()).encode() + text).hexdigest()[:16]
    module = types.ModuleType(f"flywheel_file_{digest}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module
    try:
        exec(compile(text, str(path), "exec", dont_inherit=True), module.__dict__)
    except (Exception, SystemExit) as error:
        raise ConfigError(attempted, f"{type(error).__name__}: {error}", "Correct the file.") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(attempted, f"it has no function {name}", "Name one that is in the file.")
    return function  # type: ignore[no-any-return]
