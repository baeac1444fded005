"""Retirement: versions that nothing needs any more leave the servers' memory. Adapters' files are never touched."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Sequence

from flywheel.config import ServingSettings
from flywheel.errors import ServeError
from flywheel.serving.client import Replica
from flywheel.serving.swap import version_name

log = logging.getLogger(__name__)


async def retire(
    replicas: Sequence[Replica], alias: str, keep: Collection[str], settings: ServingSettings
) -> dict[str, list[str]]:
    """Unload the versions of `alias` that nothing needs any more; which were, per replica.

    `keep` are adapters by name (the deployed one and those to roll back to). What serves is kept in any case, and a
    version goes only after it has not served for `drain_seconds`: requests that were given it have long begun by
    then. Not to be run during a swap.
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
            # What stays loaded costs memory and nothing else; the next swap tries again.
            log.warning("old versions stay loaded: %s", error)
            return []

    return dict(zip([r.url for r in replicas], await asyncio.gather(*map(drain, replicas)), strict=True))
