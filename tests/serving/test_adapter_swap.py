"""Swaps over replicas that fail: the old version keeps serving, on all of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest

from flywheel.config import ServingSettings
from flywheel.errors import ServeError, StoreError
from flywheel.round import AdapterRef, Probe
from flywheel.serving.adapter_swap import reconcile, rollback, swap
from flywheel.serving.adapter_unloading import retire
from flywheel.serving.replica_client import Replica
from flywheel.serving.swap_report import SwapReport
from flywheel.serving.weight_verification import compare
from flywheel.states import TRANSITIONS, DeploymentState
from tests.serving.fake_vllm import BASE, FakeVllm, replica, running, with_middleware

SETTINGS = ServingSettings(probe_tolerance=0.1, drain_seconds=0)
PROBE = Probe(
    prompt_token_ids=[1, 2, 3],
    token_ids=[4, 5],
    adapter_logprobs=[-0.5, -0.25],
    base_logprobs=[-2.0, -3.0],
)


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
                self.paths["r0001"]: [-1.0, -1.0],
                self.paths["r0002"]: [-0.504, -0.25],
                self.paths["r0003"]: [-2.0, -3.0],
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
        return await swap(self.replicas, "agent", self.ref(name) if name else None, probe, SETTINGS, self.on_state)

    def ref(self, name: str) -> AdapterRef:
        return AdapterRef(name=name, path=self.paths[name], sha256=f"the hash of {name}")


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    async with contextlib.AsyncExitStack() as stack:
        apps = [FakeVllm({BASE: PROBE.base_logprobs}) for _ in range(2)]
        urls = [stack.enter_context(replica(app)) for app in apps]
        replicas = [await stack.enter_async_context(Replica(url, timeout_seconds=30)) for url in urls]
        fleet = Fleet(tmp_path, apps, replicas)
        for each in replicas:
            await each.load("agent@r0001", fleet.paths["r0001"])
            await each.flip("agent", "agent@r0001", BASE, fleet.paths["r0001"])
        yield fleet


OLD, NEW = "agent@r0001", "agent@r0002"


async def test_a_swap(fleet: Fleet) -> None:
    report = await swap(fleet.replicas, "agent", fleet.ref("r0002"), PROBE, SETTINGS, fleet.on_state)
    assert await fleet.answers() == [NEW, NEW]
    assert fleet.states[1:] == [DeploymentState.LOADING, DeploymentState.PROBING, DeploymentState.ACTIVE]
    assert report.changed
    shown = json.loads(json.dumps(report.as_json()))
    assert shown["target"] == NEW
    for each, app in zip(shown["replicas"], fleet.apps, strict=True):
        assert each["previous"] == OLD
        assert each["loaded"] and each["flipped"] and not each["error"]
        assert each["probe"]["to_adapter"] == pytest.approx(0.002)
        assert each["probe"]["to_base"] > 1
        assert each["probe"]["indistinct"] == []
        assert set(app.loaded) == {OLD, NEW}


async def test_a_swap_to_the_base_model(fleet: Fleet) -> None:
    await fleet.swap(None)
    assert await fleet.answers() == [BASE, BASE]
    assert fleet.states[-1] == DeploymentState.ACTIVE


async def test_swapping_again_to_what_serves_changes_nothing(fleet: Fleet) -> None:
    await fleet.swap()
    fleet.states = [DeploymentState.REQUESTED]
    report = await swap(fleet.replicas, "agent", fleet.ref("r0002"), PROBE, SETTINGS, fleet.on_state)
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
    fleet.apps[1].weights[fleet.paths["r0002"]] = PROBE.base_logprobs
    with pytest.raises(ServeError, match=r"prove agent@r0002 .* nats from the adapter's, 0\.000 from the base"):
        await fleet.swap()
    assert await fleet.answers() == [OLD, OLD]


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


@pytest.mark.parametrize("lost", [False, True])
async def test_the_second_flip_fails(fleet: Fleet, tmp_path: Path, lost: bool) -> None:
    app = FakeVllm({BASE: PROBE.base_logprobs})
    app.weights = fleet.apps[0].weights
    faulty = FlipFault(with_middleware(app), lost, times=0)
    with running(faulty) as url:
        async with Replica(url, timeout_seconds=30) as third:
            await third.load(OLD, fleet.paths["r0001"])
            await third.flip("agent", OLD, BASE, fleet.paths["r0001"])
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
        await swap(fleet.replicas, "agent", fleet.ref("r0002"), PROBE, SETTINGS, on_state)
    assert await fleet.answers() == [OLD, OLD]


async def test_a_stop_in_the_middle(fleet: Fleet) -> None:
    flipped = asyncio.Event()

    async def on_state(state: DeploymentState, _: SwapReport | None = None) -> None:
        if state == DeploymentState.ACTIVE:  # not written down yet when the stop comes
            flipped.set()
            await asyncio.sleep(600)

    swapping = asyncio.create_task(swap(fleet.replicas, "agent", fleet.ref("r0002"), PROBE, SETTINGS, on_state))
    await asyncio.wait_for(flipped.wait(), 60)
    assert await fleet.answers() == [NEW, NEW]
    swapping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await swapping
    assert await fleet.answers() == [OLD, OLD]


async def test_a_rollback_reloads_what_was_unloaded(fleet: Fleet) -> None:
    await fleet.swap()
    assert await retire(fleet.replicas, "agent", [], 0) == {r.url: [OLD] for r in fleet.replicas}
    report = await rollback(fleet.replicas, "agent", fleet.ref("r0001"), SETTINGS)
    assert await fleet.answers() == [OLD, OLD]
    assert all(each.loaded and each.flipped for each in report.replicas)
    await rollback(fleet.replicas, "agent", None, SETTINGS)
    assert await fleet.answers() == [BASE, BASE]


async def test_a_dead_replica_does_not_keep_the_others_from_going_back(fleet: Fleet) -> None:
    await fleet.swap()
    async with Replica("http://127.0.0.1:9", timeout_seconds=5) as dead:
        with pytest.raises(ServeError, match=r"roll agent back to agent@r0001.*127\.0\.0\.1:9"):
            await rollback([dead, *fleet.replicas], "agent", fleet.ref("r0001"), SETTINGS)
    assert await fleet.answers() == [OLD, OLD]


async def test_retire_keeps_what_serves_and_what_is_to_be_kept(fleet: Fleet) -> None:
    await fleet.swap()
    for each in fleet.replicas:
        await each.load("agent@r0003", fleet.paths["r0003"])
        await each.load("agentic@r0001", fleet.paths["r0003"])
    gone = await retire(fleet.replicas, "agent", ["r0001"], 0)
    assert gone == {each.url: ["agent@r0003"] for each in fleet.replicas}
    assert [set(app.loaded) for app in fleet.apps] == [{OLD, NEW, "agentic@r0001"}] * 2
    assert all((Path(path) / "weights").exists() for path in fleet.paths.values())


async def test_retire_spares_what_serves_again_after_the_drain(fleet: Fleet) -> None:
    await fleet.swap()
    retiring = asyncio.create_task(retire(fleet.replicas, "agent", [], 0.5))
    await asyncio.sleep(0.1)
    await rollback(fleet.replicas, "agent", fleet.ref("r0001"), SETTINGS)
    await retiring
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
    await forgetful.flip("agent", BASE, NEW)
    report = await reconcile(fleet.replicas, "agent", fleet.ref("r0002"), PROBE, SETTINGS)
    assert await fleet.answers() == [NEW, NEW]
    assert [(each.loaded, each.flipped) for each in report.replicas] == [(True, True), (False, False)]
    assert report.replicas[0].probe is not None
    again = await reconcile(fleet.replicas, "agent", fleet.ref("r0002"), PROBE, SETTINGS)
    assert not again.changed
    assert not again.errors


async def test_a_server_that_came_back_with_wrong_weights_is_not_pointed_at_them(fleet: Fleet) -> None:
    fleet.apps[0].weights[fleet.paths["r0002"]] = PROBE.base_logprobs
    report = await reconcile(fleet.replicas, "agent", fleet.ref("r0002"), PROBE, SETTINGS)
    assert await fleet.answers() == [OLD, NEW]
    assert "prove agent@r0002" in report.errors[0]


async def test_reconcile_reports_a_dead_server_and_goes_on(fleet: Fleet) -> None:
    async with Replica("http://127.0.0.1:9", timeout_seconds=5) as dead:
        report = await reconcile([dead, *fleet.replicas], "agent", fleet.ref("r0002"), None, SETTINGS)
    assert await fleet.answers() == [NEW, NEW]
    assert "cannot be reached" in report.replicas[0].error


BASE_LOGPROBS = PROBE.base_logprobs


@pytest.mark.parametrize(
    ("measured", "passed"),
    [
        ([-0.5, -0.25], True),
        ([-0.53, -0.28], True),
        ([-0.55, -0.30], False),
        ([-0.8, -0.25], False),
        ([math.nan, -0.25], False),
        ([-math.inf, -0.25], False),
    ],
)
def test_what_is_allowed_is_four_times_the_noise(measured: list[float], passed: bool) -> None:
    noisy = PROBE.model_copy(update={"noise": 0.01})
    figures = compare(measured, BASE_LOGPROBS, noisy, 0.1)
    assert figures.allowed == pytest.approx(0.04)
    assert figures.passed is passed


def test_noise_is_also_what_the_base_model_shows_on_the_server() -> None:
    """Another precision or other kernels: the same weights give other figures, the adapter's too."""
    shifted = [value + 0.02 for value in BASE_LOGPROBS]
    assert compare([-0.53, -0.28], BASE_LOGPROBS, PROBE, 0.1).passed is False
    figures = compare([-0.53, -0.28], shifted, PROBE, 0.1)
    assert (figures.passed, figures.noise) == (True, pytest.approx(0.02))
    assert compare([-0.53, -0.28], shifted, PROBE, 0.02).passed is False, "probe_tolerance is an upper bound"


def test_no_noise_allows_for_more_than_the_tolerance() -> None:
    """Of another base model, everything is far off."""
    another = [value + 3 for value in BASE_LOGPROBS]
    assert compare([-0.7, -0.45], another, PROBE, 0.1).passed is False


@pytest.mark.parametrize("other", ["parent_logprobs", "base_logprobs"])
def test_weights_0_05_nats_off_are_those_of_another(other: str) -> None:
    """As near as a parent's are after a round of small steps; the old tolerance of 0.1 let them pass."""
    near = PROBE.model_copy(update={other: [-0.55, -0.30], "noise": 0.001})
    base = near.base_logprobs
    assert compare([-0.5, -0.25], base, near, 0.1).passed
    wrong = compare([-0.55, -0.30], base, near, 0.1)
    assert not wrong.passed
    assert wrong.indistinct == ()


def test_nearer_to_another_fails_within_what_noise_allows() -> None:
    near = PROBE.model_copy(update={"parent_logprobs": [-0.56, -0.31], "noise": 0.0125})
    assert compare([-0.54, -0.29], BASE_LOGPROBS, near, 0.1).passed is False
    assert compare([-0.51, -0.26], BASE_LOGPROBS, near, 0.1).passed is True


def test_what_is_too_near_to_tell_is_said() -> None:
    near = PROBE.model_copy(update={"parent_logprobs": [-0.52, -0.25], "noise": 0.005})
    figures = compare([-0.52, -0.25], BASE_LOGPROBS, near, 0.1)
    assert figures.passed
    assert figures.indistinct == ("its parent",)
    assert figures.doubt == ("too near to tell it from its parent (0.0100 nats apart) where 0.0200 nats may be noise")
    assert compare([-0.5, -0.25], BASE_LOGPROBS, PROBE, 0.1).doubt == ""


def test_only_the_chosen_tokens_are_compared() -> None:
    chosen = PROBE.model_copy(update={"places": [1], "parent_logprobs": [-0.5, -0.35]})
    assert compare([-0.25], [-3.0], chosen, 0.1).passed
    assert not compare([-0.35], [-3.0], chosen, 0.1).passed


def test_a_probe_that_an_older_round_wrote_down_proves_its_adapter() -> None:
    old = Probe.model_validate(
        {
            "prompt_token_ids": [1],
            "token_ids": [2, 3],
            "adapter_logprobs": [-1.0, -2.0],
            "base_logprobs": [-2.0, -2.5],
        }
    )
    assert compare([-1.001, -2.0], [-2.0, -2.5], old, 0.1).passed
    assert not compare([-2.0, -2.5], [-2.0, -2.5], old, 0.1).passed


async def test_a_server_that_answers_with_the_parents_weights_is_not_swapped_to(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    """r0002 has been loaded, and its parent r0001, 0.05 nats off, answers under its name."""
    near = PROBE.model_copy(update={"parent_logprobs": [-0.55, -0.30], "noise": 0.002})
    fleet.apps[1].weights[fleet.paths["r0002"]] = [-0.55, -0.30]
    with pytest.raises(ServeError, match=r"prove agent@r0002 .* 0\.000 from its parent's and .* from the base"):
        await fleet.swap(probe=near)
    assert await fleet.answers() == [OLD, OLD]


async def test_a_swap_to_what_cannot_be_told_from_its_parent_says_so(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    near = PROBE.model_copy(update={"parent_logprobs": [-0.51, -0.25], "noise": 0.005})
    report = await swap(fleet.replicas, "agent", fleet.ref("r0002"), near, SETTINGS, fleet.on_state)
    assert [each.probe.indistinct for each in report.replicas if each.probe] == [("its parent",)] * 2
    assert "agent@r0002 on" in caplog.text
    assert "too near to tell it from its parent" in caplog.text
