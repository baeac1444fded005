"""Swaps over replicas that fail: the old version keeps serving, on all of them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from flywheel.config.serving import ServingSettings
from flywheel.errors import ServeError, StoreError
from flywheel.records.round import Probe
from flywheel.records.states import DeploymentState
from flywheel.serving.client.adapter_swap import SwapReport, reconcile, retire, rollback, swap
from flywheel.serving.client.replica_client import Replica
from tests.factories.swap import NEW, OLD, Fleet, FlipFault
from tests.serving.fake_vllm import BASE, PROBE, FakeVllm, running, with_middleware
from tests.waiting import until

SETTINGS = ServingSettings(drain_seconds=0)


async def test_a_swap(fleet: Fleet) -> None:
    report = await swap(fleet.replicas, "agent", fleet.ref("r0002"), PROBE, fleet.on_state)
    assert await fleet.answers() == [NEW, NEW]
    assert fleet.states[1:] == [DeploymentState.LOADING, DeploymentState.PROBING, DeploymentState.ACTIVE]
    assert report.changed
    shown = json.loads(json.dumps(report.as_json()))
    assert shown["target"] == NEW
    for each, app in zip(shown["replicas"], fleet.apps, strict=True):
        assert each["previous"] == OLD
        assert each["loaded"] and each["pointed"] and not each["error"]
        assert each["probe"]["adapter_slope"] == pytest.approx(1, abs=0.01)
        assert (each["probe"]["parent_slope"], each["probe"]["passed"]) == (None, True)
        assert set(app.loaded) == {OLD, NEW}


async def test_a_swap_to_the_base_model(fleet: Fleet) -> None:
    await fleet.swap(None)
    assert await fleet.answers() == [BASE, BASE]
    assert fleet.states[-1] == DeploymentState.ACTIVE


@pytest.mark.slow
async def test_swapping_again_to_what_serves_changes_nothing(fleet: Fleet) -> None:
    await fleet.swap()
    fleet.states = [DeploymentState.REQUESTED]
    report = await swap(fleet.replicas, "agent", fleet.ref("r0002"), PROBE, fleet.on_state)
    assert not report.changed
    assert await fleet.answers() == [NEW, NEW]


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize(
    ("path", "state"),
    [
        ("/v1/load_lora_adapter", DeploymentState.LOADING),
        ("/v1/models", DeploymentState.LOADING),
        ("/v1/completions", DeploymentState.PROBING),
    ],
)
async def test_one_replica_fails_before_the_flip(fleet: Fleet, which: int, path: str, state: DeploymentState) -> None:
    fleet.apps[which].faults[path] = (500, "broken")
    with pytest.raises(ServeError, match="broken"):
        await fleet.swap()
    assert fleet.states[-2:] == [state, DeploymentState.FAILED]
    assert await fleet.answers() == [OLD, OLD]
    fleet.apps[which].faults.clear()
    assert [set(app.loaded) for app in fleet.apps] == [{OLD}, {OLD}]


async def test_wrong_weights_on_one_replica(fleet: Fleet) -> None:
    fleet.apps[1].weights[fleet.paths["r0002"]] = PROBE.second.base
    with pytest.raises(ServeError, match=r"prove agent@r0002 .* shows 0\.00 of the adapter's"):
        await fleet.swap()
    assert await fleet.answers() == [OLD, OLD]


@pytest.mark.slow
@pytest.mark.parametrize("lost", [False, True])
async def test_the_second_flip_fails(fleet: Fleet, tmp_path: Path, lost: bool) -> None:
    app = FakeVllm({BASE: PROBE.second.base})
    app.weights = fleet.apps[0].weights
    faulty = FlipFault(with_middleware(app), lost, times=0)
    with running(faulty) as url:
        async with Replica(url, timeout_seconds=30) as third:
            await third.load(OLD, fleet.paths["r0001"])
            await third.point("agent", OLD, BASE, fleet.paths["r0001"])
            faulty.times = 1
            fleet.replicas.append(third)
            with pytest.raises(ServeError, match="no flip"):
                await fleet.swap()
            assert await fleet.answers() == [OLD, OLD, OLD]
            assert fleet.states[-1] == DeploymentState.FAILED
            assert [(await r.alias("agent")).path for r in fleet.replicas] == [fleet.paths["r0001"]] * 3


async def test_what_cannot_be_put_back_is_said(fleet: Fleet) -> None:
    app = FakeVllm()
    faulty = FlipFault(with_middleware(app), lost=True, times=9)
    with running(faulty) as url:
        async with Replica(url, timeout_seconds=30) as third:
            fleet.replicas.append(third)
            with pytest.raises(ServeError, match=f"moreover, {url} may still answer with {NEW}"):
                await fleet.swap(probe=None)
            assert (await fleet.answers())[:2] == [OLD, OLD]


async def test_the_store_fails_after_the_flips(fleet: Fleet) -> None:
    """What is written down and what serves must agree, so the flips are taken back."""

    async def on_state(state: DeploymentState, _: SwapReport | None = None) -> None:
        if state == DeploymentState.ACTIVE:
            raise StoreError("write the deployment", "the disk is full")

    with pytest.raises(StoreError, match="disk is full"):
        await swap(fleet.replicas, "agent", fleet.ref("r0002"), PROBE, on_state)
    assert await fleet.answers() == [OLD, OLD]


async def test_a_stop_in_the_middle(fleet: Fleet) -> None:
    pointed = asyncio.Event()

    async def on_state(state: DeploymentState, _: SwapReport | None = None) -> None:
        if state == DeploymentState.ACTIVE:  # not written down yet when the stop comes
            pointed.set()
            await asyncio.sleep(600)

    swapping = asyncio.create_task(swap(fleet.replicas, "agent", fleet.ref("r0002"), PROBE, on_state))
    await asyncio.wait_for(pointed.wait(), 60)
    assert await fleet.answers() == [NEW, NEW]
    swapping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await swapping
    assert await fleet.answers() == [OLD, OLD]


async def test_a_rollback_reloads_what_was_unloaded(fleet: Fleet) -> None:
    await fleet.swap()
    assert await retire(fleet.replicas, "agent", [], 0) == {r.url: [OLD] for r in fleet.replicas}
    report = await rollback(fleet.replicas, "agent", fleet.ref("r0001"))
    assert await fleet.answers() == [OLD, OLD]
    assert all(each.loaded and each.pointed for each in report.replicas)
    await rollback(fleet.replicas, "agent", None)
    assert await fleet.answers() == [BASE, BASE]


async def test_retire_keeps_what_serves_and_what_is_to_be_kept(fleet: Fleet) -> None:
    await fleet.swap()
    for each in fleet.replicas:
        await each.load("agent@r0003", fleet.paths["r0003"])
        await each.load("agentic@r0001", fleet.paths["r0003"])
    gone = await retire(fleet.replicas, "agent", ["r0001"], 0)
    assert gone == {each.url: ["agent@r0003"] for each in fleet.replicas}
    assert [set(app.loaded) for app in fleet.apps] == [{OLD, NEW, "agentic@r0001"}] * 2
    assert all((Path(path) / "weights").exists() for path in fleet.paths.values())


@pytest.mark.slow
async def test_retire_spares_what_serves_again_after_the_drain(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await fleet.swap()
    caplog.clear()
    draining: list[float] = []
    drained = asyncio.Event()
    sleep = asyncio.sleep

    async def until_drained(seconds: float, *result: Any) -> Any:
        if seconds != 3600.0:
            return await sleep(seconds, *result)
        draining.append(seconds)
        return await drained.wait()

    monkeypatch.setattr(asyncio, "sleep", until_drained)
    retiring = asyncio.create_task(retire(fleet.replicas, "agent", [], 3600.0))
    await until(lambda: len(draining) == len(fleet.apps), "the drain of each, when the versions that serve are known")
    await rollback(fleet.replicas, "agent", fleet.ref("r0001"))
    drained.set()
    assert await retiring == {each.url: [] for each in fleet.replicas}
    assert caplog.messages == []
    assert await fleet.answers() == [OLD, OLD]


async def test_retire_survives_a_server_that_fails(fleet: Fleet) -> None:
    await fleet.swap()
    fleet.apps[0].faults["/v1/unload_lora_adapter"] = (500, "broken")
    gone = await retire(fleet.replicas, "agent", [], 0)
    assert list(gone.values()) == [[], [OLD]]


async def test_a_server_that_forgot_is_brought_back(fleet: Fleet) -> None:
    await fleet.swap()
    forgetful = fleet.replicas[0]
    fleet.apps[0].loaded.clear()
    await forgetful.point("agent", BASE, NEW)
    report = await reconcile(fleet.replicas, "agent", fleet.ref("r0002"), PROBE)
    assert await fleet.answers() == [NEW, NEW]
    assert [(each.loaded, each.pointed) for each in report.replicas] == [(True, True), (False, False)]
    assert report.replicas[0].probe is not None
    again = await reconcile(fleet.replicas, "agent", fleet.ref("r0002"), PROBE)
    assert not again.changed
    assert not again.errors


def with_parent(step: float) -> Probe:
    """A probe whose parent lies between the base model and the adapter, a `step` from it in every other token."""
    parent = [value + step * (place % 2) for place, value in enumerate(PROBE.second.adapter)]
    recorded = PROBE.second.model_copy(update={"parent": parent})
    return PROBE.model_copy(update={"first": recorded, "second": recorded})


async def test_a_server_that_answers_with_the_parents_weights_is_not_swapped_to(fleet: Fleet) -> None:
    """r0002 has been loaded, and its parent r0001, 0.05 nats off, answers under its name."""
    probe = with_parent(0.05)
    assert probe.second.parent is not None
    fleet.apps[1].weights[fleet.paths["r0002"]] = probe.second.parent
    with pytest.raises(
        ServeError, match=r"prove agent@r0002 .* shows 1\.00 of its parent's .* and 0\.00 of the adapter"
    ):
        await fleet.swap(probe=probe)
    assert await fleet.answers() == [OLD, OLD]


async def test_what_cannot_be_told_from_its_parent_is_not_swapped_to(fleet: Fleet) -> None:
    with pytest.raises(
        ServeError, match=r"cannot distinguish it from its parent and the base model.*no number of tokens"
    ):
        await fleet.swap(probe=with_parent(0.0))
    assert await fleet.answers() == [OLD, OLD]
