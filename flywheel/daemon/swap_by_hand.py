"""Swaps that a person asks for: which version of which target is meant, and a rollback that waits for no process that
writes the state."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from flywheel.config.file import Config
from flywheel.daemon.deployer import GRACE_SECONDS, Deployer
from flywheel.errors import ServeError, StateBusyError
from flywheel.serving.client.adapter_swap import SwapReport
from flywheel.store.deployments import BY_HAND
from flywheel.store.kernel.database import Store, read_once
from flywheel.store.rounds import by_name

OpenState = Callable[..., AbstractAsyncContextManager[Store]]
"""Opens the state of settings, as commands do."""
Swapped = tuple[str | None, SwapReport]
"""The adapter to which the alias points now, None for the base model, and what the servers did."""


async def named_version(
    config: Config, target: str | None, version: str | None, attempted: str
) -> tuple[Config, str | None]:
    """The settings of the target that is named, or whose round made the version, and the adapter's name of a version
    such as `r0007` or `ALIAS@r0007`. Raises ServeError."""
    settings, (alias, at, name) = config.by_target(), (version or "").rpartition("@")
    if not config.targets:
        if target is not None:
            raise ServeError(attempted, "the configuration has no `targets`", "Leave out --target.")
        own = settings[""]
    else:
        row = await read_once(config.state_dir, by_name, name)
        made_for = row.target if row is not None else ""
        if target is None:
            named = (own.target for own in settings.values() if own.model.alias == alias)
            target = next(named, None) or made_for or (next(iter(settings)) if len(settings) == 1 else None)
        names = ", ".join(settings)
        if target is None:
            raise ServeError(attempted, f"there are several targets: {names}", "Name one with --target.")
        if target not in settings:
            raise ServeError(attempted, f"there is no target {target}", f"The targets are {names}.")
        if made_for and made_for != target:
            why = f"{name} was trained for {made_for}, not for {target}"
            raise ServeError(attempted, why, f"Use --target {made_for}, or name another adapter.")
        own = settings[target]
    if version is None:
        return own, None
    if not name:
        raise ServeError(attempted, "no adapter is named", "`flywheel status` lists them.")
    if at and alias != own.model.alias:
        why = f"{version} is no version of {own.model.alias}"
        raise ServeError(attempted, why, "Name the configuration with that model.alias with -c.")
    return own, name


async def deploy(config: Config, adapter: str, open_state: OpenState) -> Swapped:
    """Point the alias at an adapter, or at `base`. Raises ServeError."""
    chosen = None if adapter == "base" else adapter
    async with open_state(config) as store:
        return chosen, await Deployer(store, config).deploy(chosen, BY_HAND)


async def roll_back(config: Config, to: str | None, open_state: OpenState, say: Callable[[str], None]) -> Swapped:
    """Roll back; if another process is in the middle of writing the state, the servers first, which it says. Raises
    ServeError."""
    with contextlib.suppress(StateBusyError):
        async with open_state(config, busy_ms=round(GRACE_SECONDS * 1000)) as store:
            return await Deployer(store, config).rollback(to)
    say("another process is writing the state: rolling back the servers first, recording it afterwards")
    async with open_state(config, "view") as store:
        await Deployer(store, config).roll_servers_back(to)
    async with open_state(config) as store:
        return await Deployer(store, config).rollback(to)
