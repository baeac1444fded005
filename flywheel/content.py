"""The files that come with Flywheel: what users edit (`configs/`, `filters/`, `rubrics/`, `systemd/`) and `docs/`."""

from __future__ import annotations

from pathlib import Path
from typing import Final

FOLDERS: Final = ("configs", "filters", "rubrics", "systemd")
"""What `flywheel init` lays out copies of."""


def folder() -> Path:
    """Where they lie: inside an installed package, or beside it in a checkout."""
    package = Path(__file__).parent
    installed = package / "shipped"
    return installed if installed.is_dir() else package.parent


def pages() -> dict[str, Path]:
    """The pages of the documentation by name, as `flywheel docs` takes them."""
    return {path.stem: path for path in sorted((folder() / "docs").glob("*.md"))}
