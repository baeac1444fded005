"""Whether there is a base model: its files on this machine, or a name that the hub may have. It loads nothing."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

from flywheel.model_parsers import folder_of

_OFF: Final = ("", "0", "false", "off", "no")
_NAME: Final = re.compile(r"[\w.-]+(/[\w.-]+)?")


def missing(base: str) -> str:
    """Why no process here can load a base model; empty when its files are here, or the hub may have them."""
    path = Path(base)
    if path.is_absolute() or path.is_dir():
        if not path.is_dir():
            return f"there is no directory {base}"
        return "" if (path / "config.json").is_file() else f"{base} has no config.json"
    if not _NAME.fullmatch(base):
        return f"there is no directory {base}, and it is no name on the hub"
    if _is_offline() and folder_of(base) is None:
        return f"{base} is not on this machine, and HF_HUB_OFFLINE says not to load it"
    return ""


def _is_offline() -> bool:
    variables = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    return any(os.environ.get(variable, "").lower() not in _OFF for variable in variables)
