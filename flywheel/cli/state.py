"""The state, as commands look at it: beside whoever works on it, without touching anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

import typer

from flywheel.cli.facts import place

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from flywheel.config import Config

P = ParamSpec("P")
T = TypeVar("T")


def absence(config: Config) -> str:
    """That there is no state where it is looked for, and what that can mean; empty where there is one."""
    path = config.state_dir / "state.db"
    try:
        # One without a byte is what an interrupted copy leaves, or a disk that was full at the first step.
        if path.stat().st_size:
            return ""
    except FileNotFoundError:
        pass
    except OSError:
        return ""  # who looks is told why that may not be known
    return (
        f"there is no state at {place(path)}: nothing was read yet, or it is kept elsewhere "
        "(by another configuration, user or $FLYWHEEL_HOME)"
    )


async def look_at(
    config: Config, look: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """What a question to the state answers; on stderr, if there is none. Raises StoreError."""
    if missing := absence(config):
        typer.echo(f"flywheel: {missing}", err=True)
    return await ask(config, look, *args, **kwargs)


async def ask(config: Config, look: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The same, by a command that says itself when there is no state."""
    # Not above: commands that only read their configuration must not wait for a database library.
    from flywheel.store.database import Store

    store = await Store.view(config.state_dir)
    try:
        return await store.read(look, *args, **kwargs)
    finally:
        await store.close()
