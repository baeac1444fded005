"""How long the files of rounds stay."""

from __future__ import annotations

from pydantic import ConfigDict, Field

from flywheel.config.section import Section


class RetentionSettings(Section):
    model_config = ConfigDict(allow_inf_nan=False)

    keep_days: float | None = Field(default=90.0, ge=0, le=36_500)
    """How long the adapter, rollouts and log of a round stay after it has ended. What it was told and what it
    measured stays for ever; so do, whatever their age, what serves, what a rollback goes back to and what the round
    under way goes on from. `null` keeps everything."""
    keep_served: int = Field(default=5, ge=0)
    """So many of the adapters that have served last stay besides, whatever their age."""
