"""The replicas that `serving.urls` stands for now: entries `dns://NAME:PORT` are resolved anew each time."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Final
from urllib.parse import urlsplit

from flywheel.config.serving import DNS, ServingSettings

RESOLVE_SECONDS: Final = 5.0
"""Longest time for a name: one that does not resolve must not delay a rollback on the other replicas."""


def is_name(url: str) -> bool:
    """Whether a URL is an entry `dns://NAME:PORT`."""
    return url.startswith(f"{DNS}://")


async def replica_urls(serving: ServingSettings) -> dict[str, str]:
    """The URL of each replica, with the entry of `serving.urls` that it is from.

    An entry whose name has no address now is its own URL: requests to such a replica fail by that name, and not those
    to others.
    """
    found = await asyncio.gather(*map(_urls_of, serving.urls))
    return {url: entry for entry, urls in zip(serving.urls, found, strict=True) for url in urls or [entry]}


async def has_left(serving: ServingSettings, url: str) -> bool:
    """Whether a replica is none any more. As long as a name cannot be resolved, none has left."""
    now = await replica_urls(serving)
    return url not in now and not any(map(is_name, now))


async def _urls_of(entry: str) -> list[str]:
    parts = urlsplit(entry)
    if not is_name(entry) or parts.hostname is None:
        return [entry]
    addresses: list[str] = []
    with contextlib.suppress(OSError, UnicodeError):  # what a name can have that no name server accepts
        async with asyncio.timeout(RESOLVE_SECONDS):
            addresses = await addresses_of(parts.hostname, parts.port or 0)
    return [f"http://[{each}]:{parts.port}" if ":" in each else f"http://{each}:{parts.port}" for each in addresses]


async def addresses_of(name: str, port: int) -> list[str]:
    """The addresses of a name, in an order of their own. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(name, port, type=socket.SOCK_STREAM)
    return sorted({str(address[0]) for *_, address in found})
