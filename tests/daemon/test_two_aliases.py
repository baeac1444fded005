"""Two targets behind one server: rounds in turn, an alias for each, and what commands and pages say of them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import pytest
from starlette.testclient import TestClient

from flywheel.cli.status import facts_of
from flywheel.config.file import Config, load
from flywheel.daemon.deployer import Deployer
from flywheel.daemon.judging.judge_setup import rubric_of
from flywheel.daemon.prometheus import exposition
from flywheel.daemon.rounds import planner
from flywheel.daemon.rounds.rounds import Rounds
from flywheel.daemon.status import Facts, as_json, snapshot
from flywheel.records.round import AdapterRef, RoundResult
from flywheel.records.states import RoundState
from flywheel.store import deployments, rounds
from flywheel.store.kernel.database import Store
from flywheel.store.kernel.transitions import move
from flywheel.system.files import tree_sha256, write_json
from flywheel.web.server import application
from tests.cli.conftest import Run
from tests.factories.config import BOXED_RUBRIC, make_config, write_config
from tests.factories.metrics import by, parsed
from tests.factories.round import put_trained
from tests.factories.state import open_state
from tests.factories.targets import TARGETS, both
from tests.factories.wheel import comparison
from tests.serving.fake_vllm import BASE, PROBE, FakeVllm, replica, running, with_middleware


@pytest.fixture
def server() -> Iterator[tuple[FakeVllm, str]]:
    app = FakeVllm({BASE: PROBE.second.base})
    with replica(app, partial(with_middleware, FLYWHEEL_ALIAS="planner\nwork")) as url:
        yield app, url


@pytest.fixture
def file(tmp_path: Path, server: tuple[FakeVllm, str]) -> Path:
    return write_config(
        tmp_path,
        sources=[],
        model={"base": BASE},
        filter={"rubric": str(BOXED_RUBRIC)},
        serving={"urls": [server[1]], "drain_seconds": 0},
        trigger={"min_samples": 4},
        gate={"min_tasks": 2, "min_power": 0},
        targets=TARGETS,
    )


async def _round(store: Store, config: Config, wheel: Rounds, app: FakeVllm) -> tuple[str, dict[str, Any]]:
    """A round from its plan to its promotion; its target, and what its worker was told."""
    name = await wheel.plan("test")
    row = await store.read(rounds.live)
    own = config.by_target()[row.target]
    row = await store.write(planner.begin, row, own, rubric_of(own))
    spec = await store.read(planner.spec_of, row, own, rubric_of(own))
    await store.write(move, row.id, RoundState.PLANNED, RoundState.TRAINING, pid=None)
    adapter = config.state_dir / "rounds" / name / "adapter"
    adapter.mkdir(parents=True)
    (adapter / "weights").write_text(name)
    app.weights[str(adapter)] = PROBE.second.adapter
    result = RoundResult(
        round_id=name, outcome="trained", comparison=comparison(0.5), probe=PROBE,
        adapter=AdapterRef(name=name, path=str(adapter), sha256=tree_sha256(adapter)),
    )  # fmt: skip
    write_json(adapter.parent / "result.json", result.model_dump(mode="json"))
    assert await wheel.finish_live() is RoundState.PROMOTED
    return row.target, spec.model_dump()


async def _train_both(config: Config, app: FakeVllm) -> tuple[list[tuple[str, dict[str, Any]]], Facts]:
    async with open_state(config.state_dir) as store:
        await store.write(both, config)
        deployer = Deployer(store, config)
        wheel = Rounds(store, config, rubric_of(config), deployer)
        found = [await _round(store, config, wheel, app) for _ in range(2)]
        for own in config.by_target().values():
            # It unloads nothing of the other alias.
            assert not (await deployer.of(own).reconcile()).errors
        active = {row.alias: row.adapter for row in await store.read(deployments.all_active)}
        assert active == {"planner": "r0001", "work": "r0002"}
        return found, await store.read(snapshot, config)


@pytest.mark.slow
def test_both_aliases_flip_and_reports_name_the_targets(
    flywheel: Run, file: Path, server: tuple[FakeVllm, str]
) -> None:
    app, url = server
    config = load(file)
    ((first, planned), (second, worked)), state = asyncio.run(_train_both(config, app))
    assert (first, second) == ("planner", "worker")
    assert set(app.loaded) == {"planner@r0001", "work@r0002"}
    # Each round has samples of its target alone, and the other one answers as it is deployed.
    assert [(spec["target"], len(spec["train"])) for spec in (planned, worked)] == [("planner", 4), ("worker", 2)]
    assert planned["frozen"] == [{"target": "worker", "alias": "work", "adapter": None}]
    assert [(each["alias"], each["adapter"]["name"]) for each in worked["frozen"]] == [("planner", "r0001")]
    assert worked["parent"] is None and worked["settings"]["model"]["alias"] == "work"

    deployed = {name: own["deployment"]["adapter"] for name, own in state["targets"].items()}
    assert deployed == {"planner": "r0001", "worker": "r0002"}
    assert [each["target"] for each in state["rounds"]] == ["planner", "worker"]
    assert "free_samples" not in as_json(state)
    samples = parsed(exposition(state).decode())
    assert set(by(samples["flywheel_active_adapter"], "alias", "adapter")) == {"planner r0001", "work r0002"}
    assert by(samples["flywheel_samples_needed"], "target") == {"planner": 4, "worker": 2}
    assert by(samples["flywheel_swaps"], "target", "outcome")["worker done"] == 1

    assert "checked" not in dict(facts_of(state, with_noise=False))["server"]
    shown = flywheel("status", "-c", file).out
    assert "work → r0002" in shown and "planner: 0 free of 4 needed, 3 held out for the gate" in shown
    assert f"{url}\n" in shown and "serves planner@r0001, work@r0002" in shown and "r0002 (worker)" in shown
    assert "trained for: worker" in flywheel("why", "r0002", "-c", file).out
    task = worked["train"][0]["task_id"]
    assert f"task {task} of worker: consumed" in flywheel("why", task, "-c", file).out

    page = TestClient(application(config, names=frozenset({"testserver"})))
    assert "as work" in page.get("/").text
    for path in ("/rounds", "/rounds/r0002", "/gate", f"/tasks/{task}"):
        answer = page.get(path)
        assert answer.status_code == 200 and "worker" in answer.text, path
    told = page.get("/gate").text
    assert "planner: " in told and "worker: " in told

    assert 'value="worker" selected' in page.get("/tasks?target=worker").text
    listed = flywheel("tasks", "--target", "worker", "--json", "-c", file).json
    assert listed["total"] == 4 and {each["target"] for each in listed["tasks"]} == {"worker"}
    exported = flywheel("export", "--format", "trl-sft", "--target", "worker", "--out", "-", "-c", file)
    assert len(exported.out.splitlines()) == 2
    assert "there is no target cook" in flywheel("export", "--format", "trl-sft", "--target", "cook", "-c", file).err

    refused = flywheel("rollback", "-c", file)
    assert refused.code == 1 and "there are several targets: planner, worker. Name one with --target." in refused.err
    refused = flywheel("deploy", "r0001", "--target", "worker", "-c", file)
    assert refused.code == 1 and "r0001 was trained for planner, not for worker" in refused.err
    rolled = flywheel("rollback", "--target", "worker", "--json", "-c", file)
    assert (rolled.json["alias"], rolled.json["adapter"]) == ("work", None)
    # The adapter's round says the target.
    assert flywheel("deploy", "r0002", "--json", "-c", file).json["alias"] == "work"
    assert flywheel("rollback", "--to", "planner@r0001", "--json", "-c", file).json["alias"] == "planner"
    checks = flywheel("doctor", "--json", "-c", file).json["checks"]
    found = {(each["name"], each["subject"]): each for each in checks}
    assert "planner → planner@r0001, work → work@r0002; adapters: " in found["server", url]["found"]


@pytest.mark.slow
async def test_both_aliases_flip_and_each_goes_back_by_itself(tmp_path: Path, store: Store) -> None:
    app = FakeVllm({BASE: PROBE.second.base})

    async def answered_by(alias: str) -> str:
        request = {"model": alias, "messages": []}
        answer = await asyncio.to_thread(httpx2.post, f"{url}/v1/chat/completions", json=request)
        return str(answer.json()["model"])

    async def both() -> list[str]:
        return [await answered_by("plan"), await answered_by("doer")]

    with running(with_middleware(app, FLYWHEEL_ALIAS="plan\ndoer")) as url:
        config = make_config(
            tmp_path,
            sources=[],
            model={"base": BASE},
            targets={"planner": {"alias": "plan"}, "doer": {}},
            serving={"urls": [url], "drain_seconds": 0},
        )
        for number in (1, 2, 3):
            await store.write(put_trained, number, tmp_path / f"r{number:04d}", app)
        planner, doer = (Deployer(store, own) for own in config.by_target().values())
        await planner.deploy("r0001", "test")
        assert await both() == ["plan@r0001", BASE]
        await doer.deploy("r0002", "test")
        assert await both() == ["plan@r0001", "doer@r0002"]
        await planner.deploy("r0003", "test")
        for deployer in (planner, doer):
            assert (await deployer.reconcile()).errors == ()
        assert {"plan@r0003", "doer@r0002"} <= app.loaded.keys(), "each looks after its own versions"
        assert await both() == ["plan@r0003", "doer@r0002"]
        await planner.rollback()
        assert await both() == ["plan@r0001", "doer@r0002"]
        await doer.rollback("base")
        assert await both() == ["plan@r0001", BASE]
