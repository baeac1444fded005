"""A state with judged tasks and a server, and what a round of it ends with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flywheel.config.file import Config
from flywheel.daemon.deployer import Deployer
from flywheel.daemon.rounds.rounds import Rounds
from flywheel.records.round import AdapterRef, Comparison, RoundResult, Score
from flywheel.records.states import RoundState
from flywheel.store import deployments, rounds
from flywheel.store.kernel.database import Store
from flywheel.store.kernel.transitions import move
from flywheel.store.views import balance
from flywheel.system.files import tree_sha256, write_json
from tests.factories.config import with_settings
from tests.serving.fake_vllm import PROBE, FakeVllm


@dataclass
class Wheel:
    """A state with judged tasks, a server, and what works on them."""

    store: Store
    config: Config
    server: FakeVllm
    rounds: Rounds
    deployer: Deployer

    def others(self, config: Config, deployer: Deployer | None = None) -> Rounds:
        return Rounds(self.store, config, self.rounds._rubric, deployer or self.deployer)

    async def row(self, name: str = "r0001") -> Any:
        return await self.store.read(rounds.by_name, name)

    async def active(self) -> Any:
        return await self.store.read(deployments.active, "agent")

    async def started(self) -> Path:
        """A round whose worker has been started and is gone."""
        name = await self.rounds.plan("test")
        row = await self.store.read(rounds.live)
        await self.store.write(move, row.id, RoundState.PLANNED, RoundState.TRAINING, pid=None)
        directory = self.config.state_dir / "rounds" / name
        directory.mkdir(parents=True)
        return directory

    async def state(self, name: str = "r0001") -> str:
        return str((await self.row(name)).state)

    async def trains(self, name: str = "r0001") -> bool:
        return await self.state(name) == "training"

    async def books(self) -> dict[str, int]:
        books = await self.store.read(balance.balance)
        assert books.balanced, books.problems
        return books.task_states


def comparison(lower: float) -> Comparison:
    scores = [Score(task_id=f"t{n}", candidate=0.9, deployed=0.2) for n in range(20)]
    return Comparison(
        tasks=20, samples=1, undecided=0, candidate_mean=0.9, deployed_mean=0.2, gain=0.7, lower=lower, upper=0.9,
        confidence=0.95, method="test", scores=scores,
    )  # fmt: skip


def leave_result(wheel: Wheel, directory: Path, *, lower: float = 0.5, weights: str = "good", **values: Any) -> None:
    adapter = directory / "adapter"
    adapter.mkdir()
    (adapter / "weights").write_text(weights)
    wheel.server.weights[str(adapter)] = PROBE.second.adapter if weights == "good" else PROBE.second.base
    defaults: dict[str, Any] = {
        "outcome": "trained",
        "adapter": AdapterRef(name=directory.name, path=str(adapter), sha256=tree_sha256(adapter)),
        "comparison": comparison(lower),
        "probe": PROBE,
    }
    result = RoundResult(round_id=directory.name, **{**defaults, **values})
    write_json(directory / "result.json", result.model_dump(mode="json"))


def manual(wheel: Wheel, **settings: Any) -> Config:
    """Its configuration, by which candidates that pass wait for a person."""
    return with_settings(wheel.config, gate={"mode": "manual"}, **settings)


async def passes(wheel: Wheel, by_hand: Rounds, **result: Any) -> str:
    """A round whose candidate waits; its name."""
    directory = await wheel.started()
    leave_result(wheel, directory, **result)
    assert await by_hand.finish_live() is RoundState.PASSED
    return directory.name
