"""The state, as commands look at it: beside whoever works on it, without touching anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from flywheel.config import Config

if TYPE_CHECKING:
    from sqlalchemy import Connection

P = ParamSpec("P")
T = TypeVar("T")


async def look_at(
    config: Config, look: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """What a question to the state answers. Raises StoreError."""
    # Not above: commands that only read their configuration must not wait for a database library.
    from flywheel.store.database import Store

    store = await Store.view(config.state_dir)
    try:
        return await store.read(look, *args, **kwargs)
    finally:
        await store.close()
