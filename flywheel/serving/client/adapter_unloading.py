"""Unloads adapter versions that are no longer needed from the servers. Files are never changed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Sequence

from flywheel.errors import ServeError
from flywheel.serving.client.adapter_swap import version_name
from flywheel.serving.client.replica_client import Replica

log = logging.getLogger(__name__)


async def retire(
    replicas: Sequence[Replica], alias: str, keep: Collection[str], drain_seconds: float
) -> dict[str, list[str]]:
    """Unload versions of `alias` that are no longer needed. Returns the unloaded names per replica.

    `keep` are names of adapters to keep (the deployed one and those to roll back to). The serving version is always
    kept, and a version is unloaded only after it has not served for `drain_seconds`, so that requests in flight
    complete. Must not run during a swap.
    """

    async def drain(replica: Replica) -> list[str]:
        try:
            return await _retire(replica, alias, keep, drain_seconds)
        except ServeError as error:
            # An adapter that stays loaded costs only memory; the next swap tries again.
            log.warning("old versions stay loaded: %s", error)
            return []

    return dict(zip([r.url for r in replicas], await asyncio.gather(*map(drain, replicas)), strict=True))


async def make_room(
    replicas: Sequence[Replica],
    alias: str,
    adapter: str,
    recent: Collection[str],
    keep: Collection[str],
    drain_seconds: float,
) -> None:
    """Unload versions of `alias` until each replica has a free slot for `adapter`, or nothing more can go.

    First all that are not in `recent`; then, where no slot is free, also those that served until recently, after
    `drain_seconds`; and at last the ones in `keep`, which a rollback loads again. Raises nothing.
    """

    async def free(replica: Replica) -> None:
        try:
            for kept, seconds in ((recent, 0.0), (keep, drain_seconds), ((), drain_seconds)):
                await _retire(replica, alias, {*kept, adapter}, seconds)
                there = await replica.alias(alias)
                adapters = (await replica.models()).keys() - {there.base_model}
                if there.max_adapters is None or len(adapters | {version_name(alias, adapter)}) <= there.max_adapters:
                    break
        except ServeError as error:
            log.warning("old versions stay loaded: %s", error)

    await asyncio.gather(*map(free, replicas))


async def _retire(replica: Replica, alias: str, keep: Collection[str], drain_seconds: float) -> list[str]:
    """Raises ServeError."""
    kept = {version_name(alias, name) for name in keep}

    async def idle() -> set[str]:
        serving = (await replica.alias(alias)).target
        loaded = [name for name in await replica.models() if name.startswith(version_name(alias, ""))]
        return {name for name in loaded if name not in kept and name != serving}

    old = await idle()
    if old:
        await asyncio.sleep(drain_seconds)
        old &= await idle()
    return [name for name in sorted(old) if await replica.unload(name)]
