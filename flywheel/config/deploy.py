"""Settings of deployments: how a candidate that the gate passed comes to serve."""

from __future__ import annotations

from pydantic import ConfigDict, Field

from flywheel.config.section import Section, WebUrl


class DeploySettings(Section):
    model_config = ConfigDict(allow_inf_nan=False)

    approval_days: float = Field(default=7.0, gt=0, le=36_500)
    """Days that a candidate waits for a person (`gate.mode: manual`). Then its round is rejected, and its samples are
    free for other rounds."""
    web_url: WebUrl = "http://127.0.0.1:4400"
    """The address at which people reach `flywheel web`, for the links in notices of `passed`."""
