"""Refuses to build for a Python that is too old. pip would name a package that is missing instead."""

from __future__ import annotations

import sys
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class PythonVersion(MetadataHookInterface):
    """Runs before the dependencies are looked for."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Raises SystemExit."""
        version = sys.version_info[:2]
        if version < (3, 11):
            sys.exit(f"Flywheel needs Python 3.11 or newer, and this is {version[0]}.{version[1]}.")
