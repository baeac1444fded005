"""Settings of deployments: how a candidate that the gate passed comes to serve, and how its promotion is watched."""

from __future__ import annotations

from pydantic import ConfigDict, Field

from flywheel.config.section import Section, UserPath, WebUrl


class WatchSettings(Section):
    model_config = ConfigDict(allow_inf_nan=False)

    new_share: float = Field(default=0.5, gt=0, le=1)
    """Share of the conversations that the new version answers while a promotion is watched; the version before
    answers the others. 0.1 is a canary, 0.9 a holdback. 1: no promotion is watched."""
    until_units: int = Field(default=1000, gt=0)
    """Number of conversations with an outcome, at least half of each version's expected share among them, after which
    the watch ends and the new version answers all."""
    max_days: float = Field(default=14.0, gt=0, le=36_500)
    """Days after which the watch ends in any case, and the new version answers all; if too few conversations had an
    outcome, with a notice that nothing was shown."""


class DeploySettings(Section):
    model_config = ConfigDict(allow_inf_nan=False)

    watch: WatchSettings = WatchSettings()
    approval_days: float = Field(default=7.0, gt=0, le=36_500)
    """Days that a candidate waits for a person (`gate.mode: manual`). Then its round is rejected, and its samples are
    free for other rounds."""
    web_url: WebUrl = "http://127.0.0.1:4400"
    """The address at which people reach `flywheel web`, for the links in notices of `passed`."""
    publish: UserPath | None = None
    """Folder to which each adapter that is deployed is written, with a model card, and in which `current.json` says
    what each alias stands for. `serving.adopt` reads it. Default: none."""
