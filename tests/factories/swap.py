"""Two replicas between whose versions a swap goes, and faults of one."""

from __future__ import annotations

from pathlib import Path

import httpx2

from flywheel.records.round import AdapterRef, Probe
from flywheel.records.states import TRANSITIONS, DeploymentState
from flywheel.serving.client.adapter_swap import SwapReport, swap
from flywheel.serving.client.replica_client import Replica
from flywheel.system.files import tree_sha256
from tests.serving.fake_vllm import PROBE, FakeVllm


class Fleet:
    """Two replicas on which `agent@r0001` serves, and the files of r0002 and of a wrong r0003."""

    def __init__(self, folder: Path, apps: list[FakeVllm], replicas: list[Replica]) -> None:
        self.apps = apps
        self.replicas = replicas
        self.states: list[DeploymentState] = [DeploymentState.REQUESTED]
        self.paths = {name: str(folder / name) for name in ("r0001", "r0002", "r0003")}
        for name, path in self.paths.items():
            Path(path).mkdir()
            (Path(path) / "weights").write_text(name)
        for app in apps:
            app.weights = {
                self.paths["r0001"]: [-1.0] * len(PROBE.places),
                self.paths["r0002"]: [value - 0.004 for value in PROBE.second.adapter],
                self.paths["r0003"]: PROBE.second.base,
            }

    async def on_state(self, state: DeploymentState, _: SwapReport | None = None) -> None:
        assert state in TRANSITIONS[DeploymentState][self.states[-1]]
        self.states.append(state)

    async def targets(self) -> list[str]:
        return [(await each.alias("agent")).target for each in self.replicas]

    async def answers(self) -> list[str]:
        """Which model answers a request for the alias on each replica."""
        async with httpx2.AsyncClient() as client:
            asked = [
                await client.post(f"{r.url}/v1/chat/completions", json={"model": "agent"}) for r in self.replicas
            ]
        return [answer.json()["model"] for answer in asked]

    async def swap(self, name: str | None = "r0002", probe: Probe | None = PROBE) -> object:
        return await swap(self.replicas, "agent", self.ref(name) if name else None, probe, self.on_state)

    def ref(self, name: str) -> AdapterRef:
        return AdapterRef(name=name, path=self.paths[name], sha256=tree_sha256(Path(self.paths[name])))


OLD, NEW = "agent@r0001", "agent@r0002"


class FlipFault:
    """Fails the flips of one replica: refused outright, or done with the answer lost."""

    def __init__(self, app: object, lost: bool, times: int) -> None:
        self.app = app
        self.lost = lost
        self.times = times

    async def __call__(self, scope: dict[str, object], receive: object, send: object) -> None:
        if scope["method"] != "PUT" or self.times == 0:
            await self.app(scope, receive, send)  # type: ignore[operator]
            return
        self.times -= 1
        if self.lost:

            async def nowhere(_: object) -> None: ...

            await self.app(scope, receive, nowhere)  # type: ignore[operator]
        await send({"type": "http.response.start", "status": 500, "headers": []})  # type: ignore[operator]
        await send({"type": "http.response.body", "body": b"no flip"})  # type: ignore[operator]
