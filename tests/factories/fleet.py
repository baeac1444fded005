"""Two replicas of a state with three adapters, and a server that is restarted behind the middleware."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flywheel.config.file import Config
from flywheel.daemon.deployer import Deployer
from flywheel.serving.client.replica_client import Replica
from flywheel.store import deployments
from flywheel.store.kernel.database import Store
from tests.factories.config import make_config, with_settings
from tests.serving.fake_vllm import BASE, FakeVllm, with_middleware


@dataclass
class Fleet:
    """Two replicas, and three adapters of which none was deployed yet."""

    store: Store
    config: Config
    apps: list[FakeVllm]
    folder: Path

    @property
    def deployer(self) -> Deployer:
        """As another process has it."""
        return Deployer(self.store, self.config)

    async def targets(self) -> list[str]:
        found = []
        for url in self.config.serving.urls:
            async with Replica(url, timeout_seconds=30) as each:
                found.append((await each.alias("agent")).target)
        return found

    async def active(self) -> tuple[str | None, str | None]:
        row = await self.store.read(deployments.active, "agent")
        return (row.adapter, row.previous) if row is not None else (None, None)

    async def states(self) -> list[str]:
        return [row.state for row in await self.store.read(deployments.history, "agent", 99)]

    def other(self, **sections: dict[str, Any]) -> Deployer:
        """With other settings."""
        return Deployer(self.store, with_settings(self.config, **sections))

    async def deploy(self, *names: str) -> None:
        for name in names:
            await self.deployer.deploy(name, "test")

    async def point(self, number: int, target: str, before: str) -> None:
        """Load an adapter on a replica behind the daemon's back, and point the alias at it."""
        async with Replica(self.config.serving.urls[number]) as each:
            await each.load(target, str(self.path(target.partition("@")[2])))
            await each.point("agent", target, before)

    def path(self, name: str) -> Path:
        return self.folder / name


def config_of(folder: Path, *urls: str) -> Config:
    serving = {"urls": list(urls), "drain_seconds": 0}
    return make_config(folder, sources=[], model={"base": BASE, "alias": "agent"}, serving=serving)


R1, R2 = "agent@r0001", "agent@r0002"


class Restarts:
    """A server behind the middleware, which can be made anew as a restart of both makes it."""

    def __init__(self, app: FakeVllm, aliases: Path) -> None:
        self.app, self.aliases = app, aliases
        self.anew()

    def anew(self) -> None:
        names = list(self.app.loaded)
        self.serving = with_middleware(self.app, FLYWHEEL_ALIAS_FILE=str(self.aliases), loaded=names)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self.serving(scope, receive, send)
