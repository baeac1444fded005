"""The files that users edit, as they were shipped: `rubrics/`, `filters/`, `configs/` and `systemd/`."""

from __future__ import annotations

from pathlib import Path
from typing import Final

FOLDERS: Final = ("configs", "filters", "rubrics", "systemd")


def folder() -> Path:
    """Where they lie: inside an installed package, or beside it in a checkout."""
    package = Path(__file__).parent
    installed = package / "shipped"
    return installed if installed.is_dir() else package.parent
