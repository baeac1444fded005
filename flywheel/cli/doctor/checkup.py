"""All checks of the doctor, in the order in which people fix things.

A wrong configuration skips the checks that depend on it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

from flywheel.cli.doctor import model, packages
from flywheel.cli.doctor.agent import check_agent
from flywheel.cli.doctor.finding import Finding, Result
from flywheel.cli.doctor.judge import JudgeChecks
from flywheel.cli.doctor.notify import check_notify
from flywheel.cli.doctor.recordings import check_recordings
from flywheel.cli.doctor.resources import Machine, check_resources
from flywheel.cli.doctor.servers import check_serve, check_servers
from flywheel.cli.doctor.sources import check_sources
from flywheel.cli.doctor.state import check_clock, check_left_out, check_samples, check_state
from flywheel.cli.doctor.systemd_unit import check_unit
from flywheel.config import defaults, load
from flywheel.errors import ConfigError

NEED_SETTINGS: Final = (
    "state", "disk", "schema", "daemon", "source", "prompts", "recordings", "agent", "filters", "rubric", "judge",
    "samples", "serve", "server", "tools", "calls", "model", "rank", "gpu", "memory", "shared memory", "limits",
    "clock", "notify",
)  # fmt: skip
"""The checks that are skipped when the configuration is wrong."""


async def checkup(path: Path | None, *, ask_judge: bool = False) -> AsyncIterator[Finding]:
    """Every finding. `path` is the configuration, None for the defaults; `ask_judge` sends each judge a question."""
    for finding in packages.check_packages():
        yield finding
    try:
        config = defaults() if path is None else load(path)
    except ConfigError as error:
        yield Finding.of("configuration", error)
        for name in NEED_SETTINGS:
            yield Finding(name, Result.SKIPPED, "the configuration is wrong")
        yield check_unit(None, path)
        return
    yield _configuration(path)
    for finding in (*check_state(config), *check_sources(config)):
        yield finding
    yield await check_left_out(config)
    yield await check_recordings(config)
    yield await check_agent(config)
    judge = JudgeChecks(config, ask=ask_judge)
    for finding in judge.findings():
        yield finding
    for own in config.by_target().values():
        yield await check_samples(own)
    yield check_serve(config)
    async for finding in check_servers(config):
        yield finding
    base = model.find(config.model.base)
    for finding in model.check_model(config, base):
        yield finding
    build = packages.installed_extra()
    for finding in check_resources(config, Machine.here(has_gpu_build=build == "gpu"), base, build=build):
        yield finding
    yield check_clock(config, judge.server_time)
    for finding in check_notify(config):
        yield finding
    yield check_unit(config, path)


def _configuration(path: Path | None) -> Finding:
    if path is None:
        remedy = "Name one with -c, $FLYWHEEL_CONFIG or ./flywheel.yaml; `flywheel init` writes one."
        return Finding("configuration", Result.WARNING, "none: the defaults apply", remedy)
    return Finding("configuration", Result.OK, str(path.absolute()))
