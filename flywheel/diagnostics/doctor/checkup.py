"""A whole checkup: every check in the order in which people put things right, each by itself.

A wrong configuration ends only what depends on it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

from flywheel.config import Config, defaults, load
from flywheel.diagnostics.doctor import model, packages
from flywheel.diagnostics.doctor.finding import Finding, Result
from flywheel.diagnostics.doctor.judge import Judging
from flywheel.diagnostics.doctor.resources import Machine, check_resources
from flywheel.diagnostics.doctor.samples import check_left_out, check_samples
from flywheel.diagnostics.doctor.servers import serve, servers
from flywheel.diagnostics.doctor.sources import sources
from flywheel.diagnostics.doctor.state import clock, state
from flywheel.diagnostics.doctor.systemd_unit import unit
from flywheel.errors import ConfigError

NEED_SETTINGS: Final = (
    "state", "disk", "schema", "daemon", "source", "prompts", "filters", "rubric", "judge", "samples", "serve",
    "server", "tools", "model", "rank", "gpu", "memory", "shared memory", "limits", "clock",
)  # fmt: skip
"""The checks of what a configuration says."""


async def checkup(path: Path | None, *, ask_judge: bool = False) -> AsyncIterator[Finding]:
    """Every finding. `path` is the configuration, None the defaults; `ask_judge` asks the judge one question."""
    for finding in packages.packages():
        yield finding
    try:
        config = defaults() if path is None else load(path)
    except ConfigError as error:
        yield Finding.of("configuration", error)
        for name in NEED_SETTINGS:
            yield Finding(name, Result.SKIPPED, "the configuration is wrong")
        yield unit(None, path)
        return
    yield _configuration(path)
    async for finding in _of_settings(config, ask_judge=ask_judge):
        yield finding
    yield unit(config, path)


def _configuration(path: Path | None) -> Finding:
    if path is None:
        told = "none: the defaults hold"
        remedy = "Name one with -c, $FLYWHEEL_CONFIG or ./flywheel.yaml; `flywheel init` lays one out."
        return Finding("configuration", Result.WARNING, told, remedy)
    return Finding("configuration", Result.OK, str(path.absolute()))


async def _of_settings(config: Config, *, ask_judge: bool) -> AsyncIterator[Finding]:
    for finding in (*state(config), *sources(config)):
        yield finding
    yield await check_left_out(config)
    judging = Judging(config, ask=ask_judge)
    for finding in judging.findings():
        yield finding
    yield await check_samples(config)
    yield serve(config)
    async for finding in servers(config):
        yield finding
    base = model.find(config.model.base)
    for finding in model.model(config, base):
        yield finding
    build = next((extra for extra, name in packages.EXTRAS.items() if packages.version_of(name) is not None), "")
    machine = Machine.here(has_gpu_build=build == "gpu")
    for finding in check_resources(config, machine, base, build=build):
        yield finding
    yield clock(config, judging.server_time)
