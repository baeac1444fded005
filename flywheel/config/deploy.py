"""Settings of deployments: how a candidate that the gate passed comes to serve, and how its promotion is watched."""

from __future__ import annotations

from pydantic import ConfigDict, Field

from flywheel.config.section import Section, UserPath, WebUrl


class WatchSettings(Section):
    model_config = ConfigDict(allow_inf_nan=False)

    new_share: float = Field(default=0.5, gt=0, le=1)
    """Share of conversations that the new version answers during a canary. The version before answers the others. 1:
    no canary."""
    until_units: int = Field(default=1000, gt=0)
    """The canary ends after this many conversations with an outcome, at least half of each version's expected share.
    The new version then answers all."""
    max_days: float = Field(default=14.0, gt=0, le=36_500)
    """The canary ends after this many days in any case. With too few outcomes, a notice says so."""


class DeploySettings(Section):
    model_config = ConfigDict(allow_inf_nan=False)

    watch: WatchSettings = WatchSettings()
    approval_days: float = Field(default=7.0, gt=0, le=36_500)
    """Days that a candidate waits for a person (`gate.mode: manual`). Then its round is rejected, and its samples
    are free again."""
    web_url: WebUrl = "http://127.0.0.1:4400"
    """Address at which people reach `flywheel web`, for links in notices."""
    publish: UserPath | None = None
    """Folder to which each deployed adapter is written, with a model card and `current.json`, which names the
    adapter of each alias. Default: none."""
