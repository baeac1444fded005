"""Refuses to build for a Python that is too old. pip would name a package that is missing instead."""

from __future__ import annotations

from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class PythonVersion(MetadataHookInterface):
    """Runs before the dependencies are looked for."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Raises SystemExit."""
