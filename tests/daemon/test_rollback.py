"""A rollback beside a swap that goes on, hangs or is stopped: the version that it goes back to serves, and stays."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest

from flywheel.daemon.deployer import RolledBackError
from flywheel.errors import LockedError, ServeError, StoreError
from flywheel.records.round import AdapterRef
from flywheel.records.states import DeploymentState
from flywheel.serving import routes
from flywheel.serving.client.adapter_swap import SwapReport, swap
from flywheel.serving.client.replica_client import AliasChangedError, Replica
from flywheel.store import deployments
from flywheel.store.kernel.database import Store
from flywheel.system.files import tree_sha256
from flywheel.system.lock import instance_lock, swap_lock
from tests import warm
from tests.cli.conftest import Run, flywheel
from tests.daemon.conftest import server
from tests.factories.config import write_config
from tests.factories.fleet import R1, R2, Fleet, config_of
from tests.factories.round import put_trained
from tests.factories.state import write_state
from tests.serving.fake_vllm import BASE, PROBE, FakeVllm, running, with_middleware
from tests.waiting import until, wait_for

__all__ = ["flywheel", "server"]
R3 = "agent@r0003"


@pytest.fixture
def config(tmp_path: Path, server: tuple[FakeVllm, str]) -> Path:
    serving = {"urls": [server[1]], "drain_seconds": 0}
    return write_config(tmp_path, sources=[], model={"base": BASE, "alias": "agent"}, serving=serving)


@pytest.fixture
def three_adapters(tmp_path: Path, server: tuple[FakeVllm, str]) -> None:
    for number in (1, 2, 3):
        write_state(tmp_path / "state", put_trained, number, tmp_path / f"r{number:04d}", server[0])


class Held:
    """A request that waits in front of a server until it is let through, even if its client has left: as one that a
    process sends late that was stopped."""

    def __init__(self, applies: Callable[[str, str, Any], bool]) -> None:
        self.applies = applies
        self.arrived, self.opened, self.ended = threading.Event(), threading.Event(), threading.Event()
        self.status = 0


class Gate:
    """In front of a server: holds the first request of each kind that a test names."""

    def __init__(self, app: FakeVllm) -> None:
        self.serving = with_middleware(app)
        self.held: list[Held] = []

    def hold(self, applies: Callable[[str, str, Any], bool]) -> Held:
        self.held.append(Held(applies))
        return self.held[-1]

    def hold_setting(self, target: str) -> Held:
        return self.hold(
            lambda method, path, body: (method, path, body.get("target")) == ("PUT", routes.ALIAS, target)
        )

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["method"] == "GET":
            await self.serving(scope, receive, send)
            return
        body = b""
        while (message := await receive())["type"] == "http.request":
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        asked = scope["method"], scope["path"], json.loads(body)
        held = next((each for each in self.held if not each.arrived.is_set() and each.applies(*asked)), None)
        if held is not None:
            held.arrived.set()
            while not held.opened.is_set():
                await asyncio.sleep(0.01)

        async def received() -> Any:
            return {"type": "http.request", "body": body, "more_body": False}

        async def sent(message: Any) -> None:
            if held is not None and message["type"] == "http.response.start":
                held.status = message["status"]
            with contextlib.suppress(OSError):
                await send(message)

        await self.serving(scope, received, sent)
        if held is not None:
            held.ended.set()


@pytest.fixture
async def gated(tmp_path: Path, store: Store) -> AsyncIterator[tuple[Fleet, Gate]]:
    """One server, with r0001 deployed before r0002, and r0003 not yet."""
    app = FakeVllm({BASE: PROBE.second.base})
    gate = Gate(app)
    with running(gate) as url:
        for number in (1, 2, 3):
            await store.write(put_trained, number, tmp_path / f"r{number:04d}", app)
        own = Fleet(store, config_of(tmp_path, url), [app], tmp_path)
        await own.deploy("r0001", "r0002")
        try:
            yield own, gate
        finally:
            for held in gate.held:
                held.opened.set()


@pytest.mark.slow
async def test_a_swap_in_progress_is_ended_and_taken_back(fleet: Fleet) -> None:
    await fleet.deploy("r0001", "r0002")
    fleet.apps[1].slow_paths.add(routes.LOAD_ADAPTER)
    before = len(fleet.apps[1].calls)
    swapping = asyncio.create_task(fleet.deployer.deploy("r0003", "test"))
    await until(lambda: f"POST {routes.LOAD_ADAPTER}" in fleet.apps[1].calls[before:], "the load")
    adapter, _ = await fleet.deployer.rollback()
    assert (adapter, await fleet.targets()) == ("r0001", [R1, R1])
    with pytest.raises(RolledBackError, match="a rollback of agent was asked for meanwhile") as caught:
        await swapping
    assert not caught.value.retryable
    assert R3 not in fleet.apps[0].loaded, "what it had loaded is unloaded"
    assert await fleet.states() == ["active", "failed", "retired", "retired"]
    assert await fleet.active() == ("r0001", "r0002")


@pytest.mark.slow
@pytest.mark.parametrize("to", [None, "r0002", "base"])
async def test_what_a_stopped_process_sends_late_is_refused(gated: tuple[Fleet, Gate], to: str | None) -> None:
    """Also if the alias has the same target as before, so that only its revision differs."""
    own, gate = gated
    late = gate.hold_setting(R3)
    swapping = asyncio.create_task(own.deployer.deploy("r0003", "test"))
    await until(late.arrived.is_set, "the change of the alias")
    target = {None: R1, "r0002": R2, "base": BASE}[to]
    await own.deployer.rollback(to)
    assert await own.targets() == [target]
    with pytest.raises(RolledBackError):
        await swapping
    late.opened.set()
    await until(late.ended.is_set, "the late change")
    assert late.status == 409
    await own.deployer.reconcile()
    assert await own.targets() == [target]


@pytest.mark.slow
async def test_what_a_stopped_process_sets_before_the_rollback_does_is_set_again(gated: tuple[Fleet, Gate]) -> None:
    own, gate = gated
    late, going_back = gate.hold_setting(R3), gate.hold_setting(R1)
    swapping = asyncio.create_task(own.deployer.deploy("r0003", "test"))
    await until(late.arrived.is_set, "the change of the alias")
    rolling = asyncio.create_task(own.deployer.rollback())
    await until(going_back.arrived.is_set, "the rollback's")
    with pytest.raises(RolledBackError):
        await swapping
    late.opened.set()
    await until(late.ended.is_set, "the late change")
    assert (late.status, await own.targets()) == (200, [R3])
    going_back.opened.set()
    await rolling
    assert (going_back.status, await own.targets()) == (409, [R1])


@pytest.mark.slow
async def test_a_swap_does_not_take_back_what_another_one_has_done_since(gated: tuple[Fleet, Gate]) -> None:
    """The same adapter was deployed again, while the process that had deployed it first was stopped."""
    own, _ = gated
    path = own.path("r0003")
    adapter = AdapterRef(name="r0003", path=str(path), sha256=tree_sha256(path))

    async def on_state(state: DeploymentState, _report: SwapReport | None = None) -> None:
        if state is DeploymentState.ACTIVE:
            await own.deployer.rollback()
            await own.deployer.deploy("r0003", "test")
            raise InterruptedError

    async with Replica(own.config.serving.urls[0]) as replica:
        with pytest.raises(InterruptedError):
            await swap([replica], "agent", adapter, PROBE, on_state)
    assert await own.targets() == [R3]


async def test_the_adapter_that_is_gone_back_to_is_loaded_whatever_others_unload(gated: tuple[Fleet, Gate]) -> None:
    own, gate = gated
    setting = gate.hold_setting(R1)
    rolling = asyncio.create_task(own.deployer.rollback())
    await until(setting.arrived.is_set, "the rollback's change")
    async with Replica(own.config.serving.urls[0]) as replica:
        assert await replica.unload(R1)
        setting.opened.set()
        await rolling
        assert R1 in own.apps[0].loaded
        with pytest.raises(ServeError, match=f"an alias stands for {R1}"):
            await replica.unload(R1)
        assert await replica.unload(R2)


@pytest.mark.slow
async def test_a_reconciliation_in_progress_does_not_undo_a_rollback(gated: tuple[Fleet, Gate]) -> None:
    own, gate = gated
    await own.point(0, R3, R2)  # so that it has something to do
    proof = gate.hold(lambda _method, path, _body: path == "/v1/completions")
    comparing = asyncio.create_task(own.deployer.reconcile())
    await until(proof.arrived.is_set, "the proof")
    await own.deployer.rollback()
    with pytest.raises(LockedError, match="a rollback of agent was asked for meanwhile"):
        await comparing
    proof.opened.set()
    assert await own.targets() == [R1]


async def test_a_change_of_an_older_revision_is_refused(gated: tuple[Fleet, Gate]) -> None:
    own, _ = gated
    async with Replica(own.config.serving.urls[0]) as replica:
        first = (await replica.alias("agent")).revision
        assert first is not None
        await replica.point("agent", R2, R2, revision=first)
        assert (await replica.alias("agent")).revision == first + 1
        for other in (first, first + 2):
            with pytest.raises(AliasChangedError, match="was set since"):
                await replica.point("agent", R1, R2, revision=other)
        await replica.point("agent", R1, R2, revision=first + 1)


@pytest.mark.slow
async def test_a_later_rollback_ends_an_earlier_one(gated: tuple[Fleet, Gate]) -> None:
    own, gate = gated
    late = gate.hold_setting(R1)
    earlier = asyncio.create_task(own.deployer.rollback())
    await until(late.arrived.is_set, "the earlier one")
    await own.deployer.rollback("base")
    late.opened.set()
    with pytest.raises(StoreError, match="another process has ended it"):
        await earlier
    assert (late.status, await own.targets()) == (409, [BASE])
    assert await own.active() == (None, "r0002")


@pytest.mark.slow
async def test_a_swap_that_a_rollback_of_another_alias_ends_can_be_tried_again(gated: tuple[Fleet, Gate]) -> None:
    own, gate = gated
    late = gate.hold_setting(R3)
    swapping = asyncio.create_task(own.deployer.deploy("r0003", "test"))
    await until(late.arrived.is_set, "the change of the alias")
    await own.store.write(deployments.request_rollback, "other", [], None)
    with pytest.raises(RolledBackError, match="a rollback of other was asked for") as caught:
        await swapping
    assert caught.value.retryable


@pytest.mark.slow
async def test_a_swap_that_a_server_refuses_because_of_a_rollback_says_so(
    gated: tuple[Fleet, Gate], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it has not looked for rollbacks since."""
    monkeypatch.setattr("flywheel.daemon.deployer.LOOK_SECONDS", 600.0)
    own, gate = gated
    late = gate.hold_setting(R3)
    swapping = asyncio.create_task(own.deployer.deploy("r0003", "test"))
    await until(late.arrived.is_set, "the change of the alias")
    assert (await own.deployer.rollback())[0] == "r0001"
    late.opened.set()
    with pytest.raises(RolledBackError, match="a rollback of agent was asked for meanwhile"):
        await swapping
    assert (late.status, await own.targets()) == (409, [R1])


async def test_no_swap_begins_beside_a_rollback(gated: tuple[Fleet, Gate]) -> None:
    """It would take the rollback for one of a dead process."""
    own, gate = gated
    setting = gate.hold_setting(R1)
    rolling = asyncio.create_task(own.deployer.rollback())
    await until(setting.arrived.is_set, "the rollback's change")
    (own.config.state_dir / "swap.lock").unlink()  # as if it had not been taken yet
    with pytest.raises(LockedError):
        await own.deployer.reconcile()
    setting.opened.set()
    assert (await rolling)[0] == "r0001"


async def test_a_lock_is_taken_over_from_a_holder_that_keeps_it(tmp_path: Path) -> None:
    async def is_free() -> bool:
        try:
            async with swap_lock(tmp_path, 0):
                return True
        except LockedError:
            return False

    with contextlib.ExitStack() as old:
        old.enter_context(instance_lock(tmp_path, "swap.lock"))
        assert not await is_free()
        async with swap_lock(tmp_path, 0, take_over=True):
            assert not await is_free()
            old.close()
            assert not await is_free(), "what the old holder releases is another lock"
    assert await is_free()


@pytest.mark.slow
def test_a_swap_that_is_stopped_is_rolled_back_and_stays_so(
    flywheel: Run, config: Path, three_adapters: None, server: tuple[FakeVllm, str]
) -> None:
    app, url = server
    for name in ("r0001", "r0002"):
        assert flywheel("deploy", name, "-c", config).code == 0
    app.slow_paths.add("/v1/completions")
    asked = "POST /v1/completions"
    before = app.calls.count(asked)
    command = [sys.executable, "-m", "flywheel", "deploy", "r0003", "-c", str(config)]
    process = warm.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        # Not before: a process that is stopped while it writes to the state would keep it locked.
        wait_for(lambda: app.calls.count(asked) > before or process.poll() is not None, "the proof")
        process.send_signal(signal.SIGSTOP)
        app.slow_paths.clear()
        assert flywheel("rollback", "-c", config).out == "agent is now r0001\n"
        assert target_of(url) == R1
        process.send_signal(signal.SIGCONT)
        _, err = process.communicate(timeout=120)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 1
    assert "a rollback of agent was asked for meanwhile" in err
    assert target_of(url) == R1
    assert flywheel("status", "-c", config, "--json").json["deployment"]["adapter"] == "r0001"


def target_of(url: str) -> str:
    return str(httpx2.get(f"{url}{routes.ALIAS}").json()["aliases"]["agent"])


@pytest.mark.slow
def test_it_does_not_wait_for_other_commands() -> None:
    """Imports are most of the time that a rollback takes."""
    code = """if 1:
        import sys
        sys.argv = ["flywheel", "rollback", "--help"]
        from flywheel.cli import main
        try:
            main()
        finally:
            print([name for name in sys.modules if name.startswith("flywheel.cli.")], file=sys.stderr)
    """
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "Usage: flywheel rollback" in ran.stdout
    assert "flywheel.cli.rounds" in ran.stderr
    assert "flywheel.cli.status" not in ran.stderr


@pytest.mark.slow
def test_servers_are_rolled_back_before_the_state_can_be_written(
    flywheel: Run, config: Path, three_adapters: None, server: tuple[FakeVllm, str]
) -> None:
    """As beside a daemon that is stopped in a transaction."""
    for name in ("r0001", "r0002"):
        assert flywheel("deploy", name, "-c", config).code == 0
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with contextlib.closing(sqlite3.connect(config.parent / "state" / "state.db")) as connection:
            connection.execute("BEGIN IMMEDIATE")
            held.set()
            release.wait(60)
            connection.rollback()

    def watch() -> None:
        while target_of(server[1]) != R1 and not release.is_set():
            release.wait(0.05)
        release.set()

    threads = [threading.Thread(target=each) for each in (hold, watch)]
    for thread in threads:
        thread.start()
    held.wait(60)
    ran = flywheel("rollback", "-c", config)
    release.set()
    for thread in threads:
        thread.join()
    assert (ran.code, ran.out) == (0, "agent is now r0001\n")
    assert "rolling back the servers first" in ran.err
    assert flywheel("status", "-c", config, "--json").json["deployment"]["adapter"] == "r0001"
