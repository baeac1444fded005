"""An alias in an A/B test on replicas that fail and restart: both versions are loaded, proven, restored and kept."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from flywheel.errors import Condition, ServeError
from flywheel.serving.alias_target import ABTest, AliasTarget
from flywheel.serving.client.adapter_swap import OtherVersion, reconcile, retire, rollback, swap
from flywheel.serving.client.replica_client import Replica
from tests.factories.swap import NEW, OLD, Fleet, FlipFault
from tests.serving.fake_vllm import BASE, PROBE, FakeVllm, running, with_middleware


@pytest.fixture
async def ab_test(fleet: Fleet) -> Fleet:
    """The alias has an A/B test between r0002 and r0001."""
    await begin(fleet)
    return fleet


async def begin(fleet: Fleet, share: float = 0.5) -> None:
    await swap(fleet.replicas, "agent", fleet.ref("r0002"), PROBE, nothing, other(fleet, share))


def other(fleet: Fleet, share: float = 0.5) -> OtherVersion:
    # The weights of r0001 are not those of the probe, which is only measured where it was lost.
    return OtherVersion(fleet.ref("r0001"), None, share, "salt")


async def restored(fleet: Fleet, **more: Any) -> list[str]:
    report = await reconcile(fleet.replicas, "agent", fleet.ref("r0002"), PROBE, other=other(fleet), **more)
    return list(report.errors)


async def answers(url: str, conversations: int = 40) -> list[str]:
    """Which model answers each of some conversations; the status of a failure."""
    async with httpx2.AsyncClient(timeout=60) as client:
        found = []
        for number in range(conversations):
            headers = {"x-flywheel-conversation": f"c{number}"}
            reply = await client.post(f"{url}/v1/chat/completions", json={"model": "agent"}, headers=headers)
            found.append(reply.json()["model"] if reply.status_code == 200 else str(reply.status_code))
        return found


async def test_an_ab_test_gives_a_conversation_the_same_version_on_every_replica(ab_test: Fleet) -> None:
    first, second = [await answers(each.url) for each in ab_test.replicas]
    assert first == second
    assert set(first) == {OLD, NEW}
    for each in ab_test.replicas:
        shown = await each.alias("agent")
        assert shown.ab_test == ABTest(
            AliasTarget(OLD, ab_test.paths["r0001"], ab_test.ref("r0001").sha256), 0.5, "salt"
        )
        assert (shown.target, shown.answering, shown.missing) == (NEW, [NEW, OLD], "")
    assert await restored(ab_test) == []
    assert [set(app.loaded) for app in ab_test.apps] == [{OLD, NEW}] * 2


@pytest.mark.slow
async def test_a_share_of_the_new_version_only_grows_with_it(ab_test: Fleet) -> None:
    """A unit that had the new version at a half has it at nine tenths too."""
    half = await answers(ab_test.replicas[0].url)
    await begin(ab_test, 0.9)
    most = await answers(ab_test.replicas[0].url)
    assert all(later == NEW for before, later in zip(half, most, strict=True) if before == NEW)
    assert Counter(most)[NEW] > Counter(half)[NEW]


async def test_neither_version_of_an_ab_test_is_unloaded(ab_test: Fleet) -> None:
    for each in ab_test.replicas:
        await each.load("agent@r0003", ab_test.paths["r0003"])
    assert await retire(ab_test.replicas, "agent", [], 0) == {each.url: ["agent@r0003"] for each in ab_test.replicas}
    assert [set(app.loaded) for app in ab_test.apps] == [{OLD, NEW}] * 2
    # Nor for whoever asks.
    for name in (OLD, NEW):
        with pytest.raises(ServeError, match=f"an alias stands for {name}"):
            await ab_test.replicas[0].unload(name)


@pytest.mark.parametrize("name", ["r0001", "r0002", None])
async def test_a_rollback_ends_an_ab_test(ab_test: Fleet, name: str | None) -> None:
    await rollback(ab_test.replicas, "agent", ab_test.ref(name) if name else None)
    for each in ab_test.replicas:
        assert set(await answers(each.url)) == {f"agent@{name}" if name else BASE}
        assert (await each.alias("agent")).ab_test is None


@pytest.mark.slow
async def test_an_ab_test_that_fails_is_taken_back_whole(fleet: Fleet, tmp_path: Path) -> None:
    app = FakeVllm({BASE: PROBE.second.base})
    app.weights = fleet.apps[0].weights
    faulty = FlipFault(with_middleware(app), lost=True, times=0)
    with running(faulty) as url:
        async with Replica(url, timeout_seconds=30) as third:
            await third.load(OLD, fleet.paths["r0001"])
            await third.point("agent", OLD, BASE, fleet.paths["r0001"])
            faulty.times = 1
            fleet.replicas.append(third)
            with pytest.raises(ServeError, match="no flip"):
                await begin(fleet)
            for each in fleet.replicas:
                assert set(await answers(each.url, 10)) == {OLD}
                assert (await each.alias("agent")).ab_test is None
            # And a deployment during an A/B test brings the test back.
            await begin(fleet)
            fleet.paths["r0003"] = fleet.paths["r0002"]
            faulty.times = 1
            with pytest.raises(ServeError, match="no flip"):
                await swap(fleet.replicas, "agent", fleet.ref("r0003"), PROBE, nothing)
            for each in fleet.replicas:
                assert set(await answers(each.url)) == {OLD, NEW}


async def nothing(*_: object) -> None: ...


@pytest.mark.slow
@pytest.mark.parametrize("lost", [OLD, NEW])
async def test_a_version_that_was_lost_is_loaded_and_proven_again(ab_test: Fleet, lost: str) -> None:
    del ab_test.apps[0].loaded[lost]
    ab_test.apps[0].weights[ab_test.paths["r0001"]] = PROBE.second.adapter
    measured = OtherVersion(ab_test.ref("r0001"), PROBE, 0.5, "salt")
    ab_test.apps[0].calls.clear()
    report = await reconcile(ab_test.replicas, "agent", ab_test.ref("r0002"), PROBE, other=measured)
    assert not report.errors
    assert set(ab_test.apps[0].loaded) == {OLD, NEW}
    assert "POST /v1/completions" in ab_test.apps[0].calls
    # With wrong weights its share goes to the other one, and the server is said to be in trouble.
    del ab_test.apps[0].loaded[lost]
    right = dict(ab_test.apps[0].weights)
    ab_test.apps[0].weights[ab_test.paths[lost.removeprefix("agent@")]] = PROBE.second.base
    for _ in range(2):
        report = await reconcile(ab_test.replicas, "agent", ab_test.ref("r0002"), PROBE, other=measured)
        assert [each.condition for each in report.replicas] == [Condition.WRONG_WEIGHTS, Condition.OK]
        assert set(await answers(ab_test.replicas[0].url)) == {OLD if lost == NEW else NEW}
        assert (await ab_test.replicas[0].alias("agent")).missing == lost
    ab_test.apps[0].weights = right
    report = await reconcile(ab_test.replicas, "agent", ab_test.ref("r0002"), PROBE, other=measured)
    assert not report.errors
    assert set(await answers(ab_test.replicas[0].url)) == {OLD, NEW}
    assert (await ab_test.replicas[0].alias("agent")).missing == ""


@pytest.mark.slow
async def test_what_serves_is_measured_once_for_each_start_of_a_server(ab_test: Fleet) -> None:
    for app in ab_test.apps:
        app.weights[ab_test.paths["r0001"]] = PROBE.second.adapter
    measured, proven = OtherVersion(ab_test.ref("r0001"), PROBE, 0.5, "salt"), dict[tuple[str, str], str]()

    async def proofs() -> int:
        ab_test.apps[0].calls.clear()
        report = await reconcile(
            ab_test.replicas, "agent", ab_test.ref("r0002"), PROBE, proven=proven, other=measured
        )
        assert not report.errors
        return ab_test.apps[0].calls.count("POST /v1/completions")

    both = await proofs()
    assert await proofs() == 0
    del proven[ab_test.replicas[0].url, OLD]
    assert await proofs() == both / 2


@pytest.mark.slow
async def test_a_version_that_cannot_be_loaded_leaves_the_other_serving(ab_test: Fleet) -> None:
    """On a server without any memory of the alias, too."""
    ab_test.apps[0].loaded.clear()
    await ab_test.replicas[0].point("agent", BASE, NEW)
    gone = Path(ab_test.paths["r0001"])
    gone.rename(gone.with_name("elsewhere"))
    errors = await restored(ab_test)
    assert "finds no adapter in" in errors[0]
    assert len(errors) == 1
    assert set(await answers(ab_test.replicas[0].url)) == {NEW}
    assert set(await answers(ab_test.replicas[1].url)) == {OLD, NEW}
    gone.with_name("elsewhere").rename(gone)
    assert await restored(ab_test) == []
    assert set(await answers(ab_test.replicas[0].url)) == {OLD, NEW}


@pytest.mark.parametrize(
    "wrong",
    [
        {"share": 0}, {"share": 1}, {"share": -0.5}, {"share": "0.5"}, {"share": True}, {"share": None},
        {"salt": ""}, {"salt": "x" * 65}, {"salt": None}, {"salt": 3}, {"target": ""}, {"target": None},
        {"target": "agent@r0002"}, {"target": "agent"}, {"path": 3}, {"sha256": []},
    ],
)  # fmt: skip
async def test_a_wrong_ab_test_is_refused_and_changes_nothing(fleet: Fleet, wrong: dict[str, Any]) -> None:
    good = {"target": OLD, "path": "/a", "sha256": "x", "share": 0.5, "salt": "s"}
    async with httpx2.AsyncClient(base_url=fleet.replicas[0].url) as client:
        before = (await client.get("/flywheel/alias")).json()
        for ab_test in (3, "x", [], [good], {**good, **wrong}):
            change = {"alias": "agent", "target": NEW, "ab_test": ab_test}
            assert (await client.put("/flywheel/alias", json=change)).status_code == 400
        for missing in ("agent@r0003", 3):
            change = {"alias": "agent", "target": NEW, "ab_test": good, "missing": missing}
            assert (await client.put("/flywheel/alias", json=change)).status_code == 400
        assert (await client.get("/flywheel/alias")).json() == before
        change = {"alias": "agent", "target": NEW, "ab_test": good}
        answered = (await client.put("/flywheel/alias", json=change)).json()
        assert answered == {"alias": "agent", "target": NEW, "previous": OLD}
        assert (await client.get("/flywheel/alias")).json()["ab_tests"] == {"agent": good}
        await client.put("/flywheel/alias", json={"alias": "agent", "target": NEW, "ab_test": None})
        assert (await client.get("/flywheel/alias")).json()["ab_tests"] == {}


SERVE = """
import json, os, sys
import uvicorn
from tests.serving.fake_vllm import BASE, PROBE, FakeVllm, with_middleware

class Told(uvicorn.Server):
    async def startup(self, sockets=None):
        await super().startup(sockets)
        print(self.servers[0].sockets[0].getsockname()[1], flush=True)

app = FakeVllm({BASE: PROBE.second.base})
app.loaded = json.loads(sys.argv[2])
for path in json.loads(sys.argv[3]):
    app.weights[path] = PROBE.second.adapter
serving = with_middleware(
    app, FLYWHEEL_ALIAS_FILE=sys.argv[1], loaded=list(app.loaded)
)
Told(uvicorn.Config(serving, port=int(sys.argv[4]), log_level="warning", lifespan="off", ws="none")).run()
"""


@contextlib.contextmanager
def process(aliases: Path, loaded: dict[str, str], paths: list[str], port: int = 0) -> Iterator[tuple[str, Any]]:
    """A replica in a process of its own, which starts with these adapters."""
    arguments = [str(aliases), json.dumps(loaded), json.dumps(paths), str(port)]
    server = subprocess.Popen(
        [sys.executable, "-c", SERVE, *arguments], stdout=subprocess.PIPE, text=True, env={**os.environ}
    )
    try:
        assert server.stdout is not None
        yield f"http://127.0.0.1:{int(server.stdout.readline())}", server
    finally:
        server.kill()
        server.wait(60)
        server.stdout.close()


@pytest.mark.slow
async def test_kill_9_of_a_replica_during_an_ab_test(fleet: Fleet, tmp_path: Path) -> None:
    """No request to the others fails; what was killed answers with what it has, and is restored."""
    paths = list(fleet.paths.values())
    for app in fleet.apps:
        app.weights[fleet.paths["r0001"]] = PROBE.second.adapter
    aliases = tmp_path / "aliases.json"
    measured = OtherVersion(fleet.ref("r0001"), PROBE, 0.5, "salt")
    with process(aliases, {OLD: fleet.paths["r0001"]}, paths) as (url, server):
        async with Replica(url, timeout_seconds=60) as killed:
            await killed.point("agent", OLD, BASE, fleet.paths["r0001"])
            replicas = [*fleet.replicas, killed]
            await swap(replicas, "agent", fleet.ref("r0002"), PROBE, fleet.on_state, measured)
            expected = await answers(url)
            server.kill()
            server.wait(60)
            for each in fleet.replicas:
                assert await answers(each.url) == expected
            report = await reconcile(replicas, "agent", fleet.ref("r0002"), PROBE, other=measured)
            assert [bool(each.error) for each in report.replicas] == [False, False, True]
    port = int(url.rpartition(":")[2])
    for loaded, alone in (({OLD: fleet.paths["r0001"]}, OLD), ({NEW: fleet.paths["r0002"]}, NEW)):
        with process(aliases, loaded, paths, port) as (again, _):
            async with Replica(again, timeout_seconds=60) as restarted:
                assert set(await answers(again)) == {alone}
                assert (await restarted.alias("agent")).missing == (NEW if alone == OLD else OLD)
                assert httpx2.get(f"{again}/flywheel/ready").status_code == 200
                report = await reconcile([restarted], "agent", fleet.ref("r0002"), PROBE, other=measured)
                assert not report.errors
                assert await answers(again) == expected
    with process(aliases, {}, paths, port) as (again, _):
        assert set(await answers(again)) == {"503"}, "it waits only without both"
        async with Replica(again, timeout_seconds=60) as restarted:
            assert f"{NEW} is not loaded and {OLD} is not loaded" in (await restarted.alias("agent")).waiting
            report = await reconcile([restarted], "agent", fleet.ref("r0002"), PROBE, other=measured)
            assert not report.errors
            assert await answers(again) == expected
