"""Settings of what happens around a promotion."""

from __future__ import annotations

from pydantic import Field

from flywheel.config.section import Section


class WatchSettings(Section):
    new_share: float = Field(default=0.5, gt=0, le=1)
    """Share of the conversations that the new version answers while a promotion is watched; the version before
    answers the others. 0.1 is a canary, 0.9 a holdback. 1: no promotion is watched."""
    until_units: int = Field(default=1000, gt=0)
    """Number of conversations with an outcome after which the watch ends and the new version answers all."""
    max_days: float = Field(default=14.0, gt=0)
    """Days after which the watch ends in any case, and the new version answers all."""


class DeploySettings(Section):
    watch: WatchSettings = WatchSettings()
