"""Two agents in one workflow, on one daemon and one server: each gets an adapter of its own, in alternating rounds.

Genuine vLLM, Ray and TRL; the agents are those of `two_agents.py`, and their users call both aliases.
"""

from __future__ import annotations

import asyncio
import io
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI
from rich.console import Console

from demo.panel import Metrics, Status
from demo.users import Users
from demo.wheel import Scene, Screen, Wheel
from flywheel.cli.demo.questions import questions
from flywheel.config.file import Config
from flywheel.system.files import tree_sha256
from flywheel.training.data import rollout_file
from tests.demo.two_agents import OPERATIONS, SYSTEM, ask
from tests.factories.demo_run import belongings
from tests.waiting import until

Json = dict[str, Any]

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(1800)]

ASKED = {
    name: [question.text for question in questions() if f" {operation} " in question.text]
    for name, operation in OPERATIONS.items()
}
DIALOGUES_PER_SECOND = 12.0
WORKFLOW = Path(__file__).with_name("two_agents.py")


class BothAgents(Users):
    """Users of the agents in service."""

    def __init__(self, config: Config) -> None:
        super().__init__(" and ".join(OPERATIONS), rate=DIALOGUES_PER_SECOND, seed=1)
        self._url = config.serving.urls[0]

    async def run(self) -> None:
        await self.keep_asking()

    async def dialogue(self) -> None:
        self.asked += 1
        name = self.random.choice(list(OPERATIONS))
        try:
            await ask(endpoint(self._url, name), self.random.choice(ASKED[name]))
        except Exception as error:
            await self.has_failed(error)
        else:
            self.has_answered()


def endpoint(url: str, name: str) -> dict[str, str]:
    return {"base_url": f"{url}/v1", "api_key": "unused", "model": alias(name)}


def alias(name: str) -> str:
    return f"{name}-agent"


class TwoTargets(Scene):
    """The demo's configuration with a workflow and two targets. The solver has a rubric of its own."""

    def settings(self, folder: Path, judge_url: str, port: int) -> Json:
        raw = Scene.settings(self, folder, judge_url, port)
        rubric = folder / "solver.yaml"
        shutil.copy(raw["filter"]["rubric"], rubric)
        raw["sources"] = [{"type": "calls"}]
        del raw["model"]["alias"]
        raw["targets"] = {
            "planner": {"alias": alias("planner")},
            "solver": {"alias": alias("solver"), "rubric": str(rubric), "min_samples": 40},
        }
        raw["trigger"] |= {"min_samples": 48, "min_held_out": 20}
        raw["training"] |= {"steps": 10}
        raw["gate"] |= {"max_tasks": 24}
        raw["rollout"] |= {"agent": {"workflow": f"{WORKFLOW}:run"}, "workers": 4}
        return raw


class UntilBothAreTrained(Wheel):
    """Ends when each target has a promoted adapter, and its alias answers with it."""

    answered_by: Mapping[str, str] = {}

    async def _watch(self, config: Config, users: Users, asking: asyncio.Task[None]) -> Mapping[str, Any]:
        status = await super()._watch(config, users, asking)
        self.answered_by = {name: await model_behind(config.serving.urls[0], name) for name in OPERATIONS}
        return status

    def _enough(self, status: Mapping[str, Any]) -> bool:
        return {each["target"] for each in promoted(status)} == set(OPERATIONS)


class Silent(Screen):
    def show(self, status: Status, metrics: Metrics) -> None:
        """The panel is that of one target."""


async def model_behind(url: str, name: str) -> str:
    """The adapter that answers an alias; waits for the first one."""
    where = endpoint(url, name)
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": ASKED[name][0]}]
    async with AsyncOpenAI(base_url=where["base_url"], api_key=where["api_key"]) as client:

        async def adapter() -> str:
            model = (await client.chat.completions.create(model=where["model"], messages=messages)).model
            return model if "@" in model else ""

        return str(await until(adapter, f"an adapter behind {name}"))


def promoted(status: Mapping[str, Any]) -> list[Json]:
    return [each for each in status["rounds"] if each["state"] == "promoted"]


def lines(path: Path) -> list[Json]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def check_own_tokens(directory: Path, target: str) -> None:
    """The samples of a round hold the calls of its target alone."""
    found = list(rollout_file.rollouts(directory))
    assert found
    (other,) = (operation for name, operation in OPERATIONS.items() if name != target)
    for line in found:
        (sample,) = line["samples"]
        said = "".join(sample["text"])
        assert f" {OPERATIONS[target]} " in said
        assert f" {other} " not in said
        trained = "".join(text for text, is_own in zip(sample["text"], sample["loss_mask"], strict=True) if is_own)
        assert trained.startswith(line["answer"])


async def test_two_targets_get_two_adapters_and_both_aliases_flip(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    console = Console(file=io.StringIO())
    wheel = UntilBothAreTrained(TwoTargets("demo.yaml", BothAgents), folder, 2, 1500, Silent(console))
    try:
        status = await wheel.turn()
    except Exception as error:
        logs = "\n".join(f"{log}:\n{log.read_text()[-3000:]}" for log in folder.glob("*.log"))
        raise AssertionError(f"{error}\n{logs}") from error
    assert belongings(tmp_path) == []
    assert status["balanced"] is True
    first, second = status["rounds"][:2]
    assert {first["target"], second["target"]} == set(OPERATIONS), "rounds alternate where both have samples"
    adapters = {each["target"]: each for each in promoted(status)}
    assert wheel.answered_by == {name: f"{alias(name)}@{each['adapter']}" for name, each in adapters.items()}
    hashes = set()
    for each in adapters.values():
        directory = Path(each["dir"])
        check_own_tokens(directory, each["target"])
        spec = json.loads((directory / "spec.json").read_text())
        assert spec["target"] == each["target"]
        asked = {
            OPERATIONS[name]
            for task in spec["train"]
            for name in OPERATIONS
            if OPERATIONS[name] in task["exchange"]["query"]
        }
        assert asked == {OPERATIONS[each["target"]]}
        steps = [line for line in lines(directory / "metrics.jsonl") if line["event"] == "step"]
        assert not any(sum(step["program"]["failures"].values()) for step in steps)
        hashes.add(tree_sha256(directory / "adapter"))
        assert steps[-1]["program"]["metrics"][each["target"]] > steps[0]["program"]["metrics"][each["target"]]
    assert len(hashes) == 2
    # The one that was trained first is frozen in the other's round, where it acts with its adapter.
    later = max(adapters.values(), key=lambda each: each["round"])
    (frozen,) = (name for name in OPERATIONS if name != later["target"])
    steps = [line for line in lines(Path(later["dir"]) / "metrics.jsonl") if line["event"] == "step"]
    own = [line for line in lines(Path(adapters[frozen]["dir"]) / "metrics.jsonl") if line["event"] == "step"]
    assert steps[0]["program"]["metrics"][frozen] > own[0]["program"]["metrics"][frozen]
