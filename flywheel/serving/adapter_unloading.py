"""Unloads adapter versions that are no longer needed from the servers' memory. Files are never changed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Sequence

from flywheel.config import ServingSettings
from flywheel.errors import ServeError
from flywheel.serving.adapter_swap import version_name
from flywheel.serving.replica_client import Replica

log = logging.getLogger(__name__)


async def retire(
    replicas: Sequence[Replica], alias: str, keep: Collection[str], settings: ServingSettings
) -> dict[str, list[str]]:
    """Unload versions of `alias` that are no longer needed. Returns the unloaded names per replica.

    `keep` are names of adapters to keep (the deployed one and those to roll back to). The serving version is always
    kept, and a version is unloaded only after it has not served for `drain_seconds`, so that requests in flight
    complete. Must not run during a swap.
    """
    kept = {version_name(alias, name) for name in keep}

    async def idle(replica: Replica) -> set[str]:
        serving = (await replica.alias(alias)).target
        loaded = [name for name in await replica.models() if name.startswith(version_name(alias, ""))]
        return {name for name in loaded if name not in kept and name != serving}

    async def drain(replica: Replica) -> list[str]:
        try:
            old = await idle(replica)
            if old:
                await asyncio.sleep(settings.drain_seconds)
                old &= await idle(replica)
            return [name for name in sorted(old) if await replica.unload(name)]
        except ServeError as error:
            # An adapter that stays loaded costs only memory; the next swap tries again.
            log.warning("old versions stay loaded: %s", error)
            return []

    return dict(zip([r.url for r in replicas], await asyncio.gather(*map(drain, replicas)), strict=True))
