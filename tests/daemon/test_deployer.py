"""Deployments and what the servers answer agree, whoever else is at work and wherever a process dies."""

from __future__ import annotations

import asyncio
import logging
import shutil
from pathlib import Path

import httpx2
import pytest
from sqlalchemy import Connection, select, update

from flywheel.daemon.deployer import Deployer
from flywheel.daemon.service import Service
from flywheel.errors import LockedError, ServeError, StoreError
from flywheel.records.states import DeploymentState
from flywheel.serving.client.replica_client import Replica
from flywheel.serving.environment_variables import SETTINGS_VARIABLE, ServerSettings
from flywheel.serving.server_keys import make_admin_key
from flywheel.store import deployments, rounds
from flywheel.store.kernel import schema
from flywheel.store.kernel.database import Store
from flywheel.system.files import tree_sha256
from flywheel.system.lock import instance_lock, swap_lock
from tests.factories.config import with_settings
from tests.factories.fleet import R1, R2, Fleet, Restarts, config_of
from tests.factories.round import put_trained
from tests.serving.fake_vllm import BASE, PROBE, FakeVllm, running, with_middleware
from tests.waiting import until


async def test_an_adapter_whose_probe_has_another_form_is_not_deployed(fleet: Fleet) -> None:
    old = {"prompt_token_ids": [1], "token_ids": [2], "adapter_logprobs": [-1.0], "base_logprobs": [-2.0]}
    await fleet.deploy("r0001")
    for probe in (old, None):
        await fleet.store.write(lambda conn, kept: conn.execute(update(schema.adapters).values(probe=kept)), probe)
        with pytest.raises(ServeError, match=r"deploy adapter r0002: its round stored no probe"):
            await fleet.deploy("r0002")
    assert await fleet.targets() == [R1, R1]


@pytest.mark.slow
async def test_a_server_that_answers_with_wrong_weights_is_never_pointed_at_them(fleet: Fleet) -> None:
    """Not at the second look either, when the adapter is loaded already."""
    await fleet.deploy("r0001")
    forgetful = fleet.apps[0]
    forgetful.loaded.clear()
    forgetful.weights[str(fleet.path("r0001"))] = PROBE.second.base
    async with Replica(fleet.config.serving.urls[0]) as restarted:
        await restarted.point("agent", BASE, R1)
    for _ in range(3):
        report = await fleet.deployer.reconcile()
        assert "prove agent@r0001" in report.errors[0]
        assert await fleet.targets() == [BASE, R1]
    forgetful.weights[str(fleet.path("r0001"))] = PROBE.second.adapter
    await fleet.deployer.reconcile()
    assert await fleet.targets() == [R1, R1]


@pytest.mark.slow
async def test_a_rollback_that_one_replica_does_not_follow_is_not_taken_back(fleet: Fleet) -> None:
    await fleet.deploy("r0001", "r0002")
    fleet.apps[1].faults["/v1/models"] = (500, "broken")
    with pytest.raises(ServeError, match=r"roll agent back to agent@r0001 on every replica.*broken"):
        await fleet.deployer.rollback()
    assert await fleet.targets() == [R1, R2]
    assert (await fleet.active())[0] == "r0001"
    await fleet.deployer.reconcile()
    assert await fleet.targets() == [R1, R2], "the way back is not taken forth again"
    fleet.apps[1].faults.clear()
    await fleet.deployer.reconcile()
    assert await fleet.targets() == [R1, R1], "what could not follow follows when it can"


@pytest.mark.slow
async def test_a_rollback_that_no_replica_follows_changes_nothing_and_says_what_each_serves(fleet: Fleet) -> None:
    await fleet.deploy("r0001", "r0002")
    for app in fleet.apps:
        app.faults["/v1/models"] = (500, "broken")
    with pytest.raises(ServeError, match="on every replica"):
        await fleet.deployer.rollback()
    assert await fleet.active() == ("r0002", "r0001")
    assert (await fleet.states())[0] == "failed"
    assert await sightings(fleet) == [("wrong adapter", R2)] * 2


@pytest.mark.slow
async def test_deploying_again_what_serves_keeps_the_way_back(fleet: Fleet) -> None:
    await fleet.deploy("r0001", "r0002")
    await fleet.deployer.deploy("r0002", "again")
    await fleet.deployer.reconcile()
    assert set(fleet.apps[0].loaded) == {R1, R2}
    target, _ = await fleet.deployer.rollback()
    assert target == "r0001"


async def test_the_state_that_cannot_be_written_leaves_the_old_version_serving(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fleet.deploy("r0001")

    def full(*_: object) -> None:
        raise StoreError("use the state database", "the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(deployments, "activate", full)
        with pytest.raises(StoreError, match="disk is full"):
            await fleet.deploy("r0002")
    assert await fleet.targets() == [R1, R1]
    assert (await fleet.active())[0] == "r0001"


@pytest.mark.slow
async def test_a_stop_while_the_swap_is_written_down_leaves_no_two_truths(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fleet.deploy("r0001")
    real, writing, go_on = deployments.activate, asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def slow(*arguments: object) -> None:
        loop.call_soon_threadsafe(writing.set)
        asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result(60)
        real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(deployments, "activate", slow)
    deploying = asyncio.create_task(fleet.deployer.deploy("r0002", "test"))
    await asyncio.wait_for(writing.wait(), 60)
    deploying.cancel()
    for _ in range(10):  # until it has heard of it
        await asyncio.sleep(0)
    go_on.set()
    await asyncio.wait([deploying])
    adapter, _ = await fleet.active()
    assert await fleet.targets() == [f"agent@{adapter}"] * 2


@pytest.mark.slow
@pytest.mark.parametrize("pointed", [0, 1, 2])
async def test_a_process_that_died_in_the_first_swap_of_all_leaves_the_base_model(fleet: Fleet, pointed: int) -> None:
    await fleet.store.write(deployments.request, "agent", [], "r0002", "killed -9 in it")
    for number, url in enumerate(fleet.config.serving.urls):
        async with Replica(url) as each:
            await each.load(R2, str(fleet.path("r0002")))
            if number < pointed:
                await each.point("agent", R2, BASE)
    await fleet.deployer.reconcile()
    assert await fleet.targets() == [BASE, BASE]
    assert (await fleet.states())[0] == "failed"
    assert all(R2 not in app.loaded for app in fleet.apps)


@pytest.mark.slow
async def test_servers_are_managed_with_the_admin_key(
    tmp_path: Path, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that `flywheel serve` made on this state, else the one that is configured; never the agents'."""
    key = fleet.config.state_dir / "serving" / "admin.key"
    key.parent.mkdir(mode=0o700)
    make_admin_key(fleet.config)
    monkeypatch.setenv("AGENTS", "agents")
    monkeypatch.setenv("ADMIN", "of my own")
    app = fleet.apps[0]

    async def turn(admin: str, **settings: str) -> None:
        with running(with_middleware(app, FLYWHEEL_API_KEY="agents", FLYWHEEL_ADMIN_KEY=admin)) as url:
            deployer = fleet.other(serving={"urls": [url], "api_key_env": "AGENTS", **settings})
            await deployer.deploy("r0001", "test")
            assert not (await deployer.reconcile()).errors
            await deployer.rollback()

    await turn(key.read_text().strip())
    await turn("of my own", admin_key_env="ADMIN")
    with pytest.raises(ServeError, match="refuses the key"):
        await turn("of my own")


async def test_an_adapter_with_pickled_weights_is_not_deployed(fleet: Fleet) -> None:
    """Not even if its files are those that its round wrote down."""
    path = fleet.path("r0001")
    (path / "adapter_model.bin").touch()
    await fleet.store.write(_hashed_anew, path)
    with pytest.raises(ServeError, match=r"adapter_model\.bin.*only safetensors"):
        await fleet.deploy("r0001")
    assert all("POST /v1/load_lora_adapter" not in app.calls for app in fleet.apps)


def _hashed_anew(conn: Connection, path: Path) -> None:
    conn.execute(update(schema.adapters).where(schema.adapters.c.path == str(path)).values(sha256=tree_sha256(path)))


async def test_a_daemon_that_starts_leaves_a_swap_by_hand_alone(fleet: Fleet) -> None:
    await fleet.deploy("r0001")
    with instance_lock(fleet.config.state_dir, "swap.lock"):
        number = await fleet.store.write(deployments.request, "agent", [], "r0002", "by hand")
        await fleet.store.write(deployments.advance, number, DeploymentState.LOADING)
        await Service(fleet.config, fleet.store).recover()
        assert (await fleet.states())[0] == "loading"
        await fleet.store.write(deployments.activate, number, "agent", {})
    assert await fleet.active() == ("r0002", "r0001")


async def test_a_deployment_that_was_given_up_cannot_become_active(fleet: Fleet) -> None:
    await fleet.deploy("r0001")
    number = await fleet.store.write(deployments.request, "agent", [], "r0002", "test")
    await fleet.store.write(deployments.fail_unfinished, "its process died")
    with pytest.raises(StoreError, match="failed"):
        await fleet.store.write(deployments.activate, number, "agent", {})
    assert await fleet.active() == ("r0001", None)


@pytest.mark.slow
async def test_files_that_were_put_back_can_be_deployed_again(fleet: Fleet) -> None:
    path, backup = fleet.path("r0001"), fleet.folder / "backup"
    shutil.copytree(path, backup)
    shutil.rmtree(path)
    with pytest.raises(ServeError, match="is not there"):
        await fleet.deploy("r0001")
    path.mkdir()
    (path / "weights").write_text("tampered")
    with pytest.raises(ServeError, match="not those that were evaluated") as refused:
        await fleet.deploy("r0001")
    assert "Restore them" in refused.value.hint
    shutil.rmtree(path)
    shutil.copytree(backup, path)
    await fleet.deploy("r0001")
    assert await fleet.targets() == [R1, R1]


async def test_files_that_may_not_be_read(fleet: Fleet) -> None:
    def denied(_: Path) -> str:
        raise PermissionError(13, "Permission denied", "weights")

    from flywheel.serving import adapter_files

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adapter_files, "tree_sha256", denied)
        with pytest.raises(ServeError, match="Permission denied"):
            await fleet.deploy("r0001")


@pytest.mark.slow
async def test_a_rollback_goes_to_nothing_that_was_never_proven(fleet: Fleet) -> None:
    await fleet.deploy("r0001")
    with pytest.raises(ServeError, match="r0003 has never served") as refused:
        await fleet.deployer.rollback("r0003")
    assert "flywheel deploy r0003" in refused.value.hint
    await fleet.deploy("r0002")
    assert (await fleet.deployer.rollback("r0001"))[0] == "r0001"
    assert (await fleet.deployer.rollback("base"))[0] is None
    assert await fleet.targets() == [BASE, BASE]


@pytest.mark.slow
async def test_a_rollback_whose_adapter_is_neither_loaded_nor_there_says_where_to_go(fleet: Fleet) -> None:
    await fleet.deploy("r0001", "r0002", "r0001")
    shutil.rmtree(fleet.path("r0002"))
    assert (await fleet.deployer.rollback())[0] == "r0002", "no files are needed of what is still loaded"
    shutil.rmtree(fleet.path("r0001"))
    for app in fleet.apps:
        del app.loaded[R1]
    with pytest.raises(ServeError, match=r"r0001 .*is not there.*flywheel rollback --to base"):
        await fleet.deployer.rollback()
    await fleet.deployer.rollback("base")
    assert await fleet.targets() == [BASE, BASE]


@pytest.mark.slow
async def test_an_adapter_of_another_base_model_is_neither_loaded_again_nor_gone_back_to(fleet: Fleet) -> None:
    await fleet.deploy("r0001", "r0002")
    await forget(fleet, 0, R2)
    changed = fleet.other(model={"base": "another/model"})
    with pytest.raises(ServeError, match=r"was trained on tiny, and model\.base is another/model"):
        await changed.rollback()
    report = await changed.reconcile()
    assert "it was trained on tiny, and model.base is another/model" in report.errors[0]
    assert "flywheel deploy base" in report.errors[0]
    assert R2 not in fleet.apps[0].loaded
    await changed.deploy(None, "as the message says")
    assert not (await changed.reconcile()).errors


@pytest.mark.parametrize("key", ["s3cret\n", "s3crét", "s3\tcret", None])
async def test_a_key_that_is_not_set_or_that_no_request_can_carry(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, key: str | None
) -> None:
    if key is None:
        monkeypatch.delenv("MY_KEY", raising=False)
    else:
        monkeypatch.setenv("MY_KEY", key)
    deployer = fleet.other(serving={"admin_key_env": "MY_KEY"})
    with pytest.raises(ServeError, match="MY_KEY" if key else "names MY_KEY, which is not set") as refused:
        await deployer.deploy("r0001", "test")
    assert "s3" not in str(refused.value)


@pytest.mark.slow
async def test_a_rollback_that_is_stopped_while_a_replica_hangs_stays_where_it_came(fleet: Fleet) -> None:
    await fleet.deploy("r0001", "r0002")
    fleet.apps[1].slow_paths.add("/v1/models")
    going_back = asyncio.create_task(fleet.deployer.rollback())

    async def has_gone_back() -> bool:
        """The first replica's answer has arrived, too: its alias changes earlier."""
        restoring = [getattr(task.get_coro(), "__name__", "") == "_restore" for task in asyncio.all_tasks()]
        return (await fleet.targets())[0] == R1 and sum(restoring) <= 1

    await until(has_gone_back, "the first replica to go back")
    going_back.cancel()
    with pytest.raises(ServeError, match="stopped before it had answered"):
        await going_back
    fleet.apps[1].slow_paths.clear()
    await fleet.deployer.reconcile()
    assert await fleet.targets() == [R1, R1]


@pytest.mark.slow
async def test_a_rollback_that_is_stopped_before_it_changed_anything(fleet: Fleet) -> None:
    await fleet.deploy("r0001", "r0002")
    for app in fleet.apps:
        app.slow_paths.add("/v1/models")
        app.calls.clear()
    going_back = asyncio.create_task(fleet.deployer.rollback())
    await until(lambda: all(app.calls for app in fleet.apps), "both replicas to be asked")
    going_back.cancel()
    with pytest.raises(asyncio.CancelledError):
        await going_back
    assert await fleet.active() == ("r0002", "r0001")
    assert await fleet.targets() == [R2, R2]


async def forget(fleet: Fleet, number: int, serves: str) -> None:
    """As a server that has restarted without its aliases."""
    fleet.apps[number].loaded.clear()
    async with Replica(fleet.config.serving.urls[number]) as restarted:
        await restarted.point("agent", BASE, serves)


async def sightings(fleet: Fleet) -> list[tuple[str, str]]:
    found = await fleet.store.read(deployments.replica_states, "agent")
    return [(found[url].condition, found[url].serves) for url in fleet.config.serving.urls]


@pytest.mark.slow
async def test_files_that_were_changed_are_not_loaded_into_a_server_that_forgot_them(fleet: Fleet) -> None:
    await fleet.deploy("r0001")
    (fleet.path("r0001") / "weights").write_text("others, that give the same figures")
    await forget(fleet, 0, R1)
    report = await fleet.deployer.reconcile()
    assert f"the files in {fleet.path('r0001')} are not those that were evaluated" in report.errors[0]
    assert "flywheel rollback --to base" in report.errors[0]
    assert await fleet.targets() == [BASE, R1]
    assert fleet.apps[0].loaded == {}
    assert await sightings(fleet) == [("wrong adapter", BASE), ("ok", R1)]
    assert (await fleet.store.read(rounds.adapter, "r0001")).state == "corrupt"  # type: ignore[union-attr]
    assert ("ready", "corrupt", "files changed") in await fleet.store.read(events_of, "adapters")
    (fleet.path("r0001") / "weights").write_text("1")
    assert not (await fleet.deployer.reconcile()).errors
    assert await fleet.targets() == [R1, R1]
    assert ("corrupt", "ready", "its files are complete again") in await fleet.store.read(events_of, "adapters")


def events_of(conn: Connection, kind: str) -> list[tuple[str, str, str]]:
    events = schema.events
    return [
        (row.old, row.new, row.detail)
        for row in conn.execute(select(events).where(events.c.kind == kind).order_by(events.c.id))
    ]


@pytest.mark.slow
async def test_a_server_knows_the_hash_of_what_it_serves_wherever_a_swap_leads(fleet: Fleet) -> None:
    hashes = {name: tree_sha256(fleet.path(name)) for name in ("r0001", "r0002")}

    async def known() -> list[str | None]:
        found = []
        for url in fleet.config.serving.urls:
            async with Replica(url) as each:
                found.append((await each.alias("agent")).sha256)
        return found

    await fleet.deploy("r0001")
    assert await known() == [hashes["r0001"]] * 2
    fleet.apps[1].weights[str(fleet.path("r0002"))] = PROBE.second.base
    with pytest.raises(ServeError, match="prove"):
        await fleet.deploy("r0002")
    assert await known() == [hashes["r0001"]] * 2
    fleet.apps[1].weights[str(fleet.path("r0002"))] = PROBE.second.adapter
    await fleet.deploy("r0002")
    assert await known() == [hashes["r0002"]] * 2
    await fleet.deployer.rollback()
    assert await known() == [hashes["r0001"]] * 2


@pytest.mark.slow
async def test_what_was_found_on_each_replica_is_kept(fleet: Fleet) -> None:
    url = fleet.config.serving.urls[0]
    assert await fleet.store.read(deployments.replica_states, "agent") == {}
    await fleet.deploy("r0001")
    assert await sightings(fleet) == [("ok", R1), ("ok", R1)]
    first = (await fleet.store.read(deployments.replica_states, "agent"))[url]
    assert first.since == first.looked_at
    await fleet.deploy("r0002")
    second = (await fleet.store.read(deployments.replica_states, "agent"))[url]
    assert second.since == second.looked_at > first.looked_at, "since then it answers with that"
    await fleet.deployer.rollback()

    fleet.apps[0].faults["/v1/models"] = (503, "down")
    await fleet.deployer.reconcile()
    assert await sightings(fleet) == [("unreachable", R1), ("ok", R1)]
    down = (await fleet.store.read(deployments.replica_states, "agent"))[url]
    assert "HTTP 503" in down.error
    await fleet.deployer.reconcile()
    still = (await fleet.store.read(deployments.replica_states, "agent"))[url]
    assert still.since == down.since < still.looked_at

    fleet.apps[0].faults = {"/v1/models": (500, "broken")}
    await fleet.deployer.reconcile()
    assert await sightings(fleet) == [("failing", R1), ("ok", R1)]
    fleet.apps[0].faults = {"/health": (503, "the engine is dead")}
    await fleet.deployer.reconcile()
    assert await sightings(fleet) == [("unreachable", R1), ("ok", R1)]
    fleet.apps[0].faults = {}
    fleet.apps[0].weights[str(fleet.path("r0001"))] = PROBE.second.base
    await forget(fleet, 0, R1)
    await fleet.deployer.reconcile()
    assert await sightings(fleet) == [("wrong weights", BASE), ("ok", R1)]
    fleet.apps[0].weights[str(fleet.path("r0001"))] = PROBE.second.adapter
    await fleet.deployer.reconcile()
    assert await sightings(fleet) == [("ok", R1), ("ok", R1)]
    history = [(old, new) for old, new, _ in await fleet.store.read(events_of, "replicas")]
    assert [new for _, new in history] == [
        "ok", "ok", "unreachable", "failing", "unreachable", "wrong weights", "ok",
    ]  # fmt: skip


@pytest.mark.slow
async def test_a_key_that_is_not_set_is_seen_in_the_status(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    await fleet.deploy("r0001")
    monkeypatch.delenv("MY_KEY", raising=False)
    with pytest.raises(ServeError, match="MY_KEY"):
        await fleet.other(serving={"admin_key_env": "MY_KEY"}).reconcile()
    assert await sightings(fleet) == [("misconfigured", ""), ("misconfigured", "")]
    await fleet.deployer.reconcile()
    assert await sightings(fleet) == [("ok", R1), ("ok", R1)]


@pytest.mark.slow
@pytest.mark.parametrize(("status", "condition"), [(404, "ok"), (403, "ok"), (500, "unreachable")])
async def test_a_proxy_that_lets_nobody_ask_for_health_is_no_dead_engine(
    fleet: Fleet, status: int, condition: str
) -> None:
    await fleet.deploy("r0001")
    fleet.apps[0].faults["/health"] = (status, "says the proxy")
    await fleet.deployer.reconcile()
    assert await sightings(fleet) == [(condition, R1), ("ok", R1)]


async def test_a_reconciliation_that_a_swap_keeps_from_its_work_says_nothing(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    """It is tried again every 15 seconds, and the swap may be one of this process."""
    caplog.set_level(logging.INFO, "flywheel")
    async with swap_lock(fleet.config.state_dir, 0):
        with pytest.raises(LockedError):
            await fleet.deployer.reconcile()
    assert caplog.text == ""


async def test_where_nothing_was_deployed_servers_are_looked_at_and_left_alone(fleet: Fleet) -> None:
    report = await fleet.deployer.reconcile()
    assert not report.changed
    assert await sightings(fleet) == [("ok", BASE), ("ok", BASE)]
    await fleet.point(1, R1, BASE)
    report = await fleet.deployer.reconcile()
    assert "by this state nothing was ever deployed" in report.errors[0]
    assert await fleet.targets() == [BASE, R1]
    assert await sightings(fleet) == [("ok", BASE), ("wrong adapter", R1)]
    await fleet.deployer.deploy(None, "as the message says")
    assert await fleet.targets() == [BASE, BASE]


@pytest.mark.slow
async def test_a_server_started_anew_with_its_adapter_is_proven_again_once(tmp_path: Path, store: Store) -> None:
    """By somebody who started it in another precision, say: the alias stands for the adapter from the start."""
    app = FakeVllm({BASE: PROBE.second.base})
    started = Restarts(app, tmp_path / "aliases.json")
    with running(started) as url:
        path = tmp_path / "r0001"
        await store.write(put_trained, 1, path, app)
        daemon = Deployer(store, config_of(tmp_path, url))
        await daemon.deploy("r0001", "test")

        async def condition() -> str:
            await daemon.reconcile()
            return str((await store.read(deployments.replica_states, "agent"))[url].condition)

        def proofs() -> int:
            return app.calls.count("POST /v1/completions")

        assert await condition() == "ok"
        before = proofs()
        assert await condition() == "ok"
        assert proofs() == before, "what is proven is not measured again"
        started.anew()
        app.weights[str(path)] = PROBE.second.base
        for _ in range(2):
            assert await condition() == "wrong weights"
        app.weights[str(path)] = PROBE.second.adapter
        assert await condition() == "ok"
        before = proofs()
        assert await condition() == "ok"
        assert proofs() == before


@pytest.fixture
def four_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SETTINGS_VARIABLE, ServerSettings(max_adapters=4).as_json())


@pytest.mark.slow
async def test_deploying_by_hand_again_and_again_leaves_three_adapters(four_slots: None, fleet: Fleet) -> None:
    for number in range(1, 21):
        if number > 3:
            await fleet.store.write(put_trained, number, fleet.path(f"r{number:04}"), *fleet.apps)
        await fleet.deployer.deploy(f"r{number:04}", "by hand")
    # The one to roll back to before the last swap, the one to roll back to now, and the one that serves.
    assert [set(app.loaded) for app in fleet.apps] == [{"agent@r0018", "agent@r0019", "agent@r0020"}] * 2


@pytest.mark.slow
async def test_what_served_until_recently_stays_while_there_are_slots(four_slots: None, fleet: Fleet) -> None:
    # Waiting for it would take longer than the test may.
    deployer = fleet.other(serving={"drain_seconds": 3600.0})
    for name in ("r0001", "r0002", "r0003"):
        await deployer.deploy(name, "by hand")
    assert [len(app.loaded) for app in fleet.apps] == [3, 3]


@pytest.mark.slow
async def test_two_slots_are_enough_to_deploy_and_to_roll_back(two_slots: None, fleet: Fleet) -> None:
    await fleet.deploy("r0001", "r0002", "r0003")
    assert [set(app.loaded) for app in fleet.apps] == [{R2, "agent@r0003"}] * 2
    await fleet.deployer.rollback("r0001")
    assert await fleet.targets() == [R1, R1]
    assert [len(app.loaded) for app in fleet.apps] == [2, 2]


async def test_adapters_of_others_are_not_unloaded_for_a_deployment(two_slots: None, fleet: Fleet) -> None:
    async with Replica(fleet.config.serving.urls[1]) as each:
        for name in ("theirs", "other@r0001"):
            await each.load(name, str(fleet.path("r0002")))
    with pytest.raises(ServeError, match="all 2 slots for adapters are taken: theirs, other@r0001"):
        await fleet.deployer.deploy("r0001", "by hand")
    assert await fleet.targets() == [BASE, BASE]
    assert set(fleet.apps[1].loaded) == {"theirs", "other@r0001"}


@pytest.mark.slow
async def test_a_daemon_that_starts_puts_a_killed_swap_right_at_once(fleet: Fleet) -> None:
    await fleet.deploy("r0001")
    await fleet.store.write(deployments.request, "agent", [], "r0002", "killed -9 in it")
    await fleet.point(0, R2, R1)
    service = Service(with_settings(fleet.config, daemon={"reconcile_seconds": 3600.0}), fleet.store)
    running_service = asyncio.create_task(service.run())
    await until(lambda: is_right(fleet), "both replicas to answer with r0001")
    service.stop()
    await running_service


async def is_right(fleet: Fleet) -> bool:
    return await fleet.targets() == [R1, R1]


@pytest.mark.slow
async def test_a_trouble_whose_figures_vary_is_logged_once(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "flywheel")
    await fleet.deploy("r0001")
    service = Service(fleet.config, fleet.store)
    path = str(fleet.path("r0001"))
    await forget(fleet, 0, R1)
    for further in (0.0, 0.01, -0.01, 0.1):
        fleet.apps[0].weights[path] = [value + further for value in PROBE.second.base]
        await service._do_reconcile()
    assert len([line for line in caplog.messages if "prove agent@r0001" in line]) == 1
    fleet.apps[0].faults["/v1/models"] = (500, "broken")
    await service._do_reconcile()
    assert "broken" in caplog.messages[-1]
    fleet.apps[0].faults.clear()
    fleet.apps[0].weights[path] = PROBE.second.adapter
    await service._do_reconcile()
    assert "all inference servers have recovered" in caplog.messages


async def test_each_server_in_trouble_is_logged(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    urls = ["http://127.1.0.1:9", "http://127.1.0.2:9"]
    await Service(with_settings(fleet.config, serving={"urls": urls}), fleet.store)._do_reconcile()
    assert all(any(url in line for line in caplog.messages) for url in urls)


@pytest.mark.slow
async def test_only_a_server_that_had_the_adapter_has_lost_it(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "flywheel")
    url, other = fleet.config.serving.urls
    await fleet.other(serving={"urls": [other]}).deploy("r0001", "test")
    await fleet.deployer.reconcile()
    assert f"{url} answered with {BASE}: agent is {R1} there now" in caplog.messages, "it is new"
    await fleet.deploy("r0002")
    fleet.apps[1].faults["/v1/models"] = (500, "broken")
    with pytest.raises(ServeError, match="broken"):
        await fleet.deployer.rollback()
    fleet.apps[1].faults.clear()
    await fleet.deployer.reconcile()
    assert f"{other} answered with {R2}: agent is {R1} there now" in caplog.messages, "it could not go back"
    assert "had lost" not in caplog.text
    await forget(fleet, 0, R1)
    await fleet.deployer.reconcile()
    assert f"{url} had lost the deployed adapter: agent is {R1} there now" in caplog.messages
    assert caplog.text.count("had lost") == 1
    await fleet.deployer.deploy(None, "test")
    await fleet.point(0, R1, BASE)
    await fleet.deployer.reconcile()
    assert f"{url} answered with {R1}: agent is {BASE} there now" in caplog.messages
    assert caplog.text.count("had lost") == 1


class Waits(Restarts):
    """A server that starts with an empty state directory and `serving.start: wait`."""

    def anew(self) -> None:
        self.app.loaded.clear()
        self.aliases.unlink(missing_ok=True)
        waits = {"agent": "nobody has said so"}
        self.serving = with_middleware(self.app, FLYWHEEL_ALIAS_FILE=str(self.aliases), waiting=waits)


@pytest.mark.slow
async def test_a_server_that_waits_is_told_what_is_deployed(fleet: Fleet, tmp_path: Path) -> None:
    """Where nothing was ever deployed, where the base model was, and where an adapter is."""
    app = FakeVllm({BASE: PROBE.second.base})
    app.weights = fleet.apps[0].weights
    waits = Waits(app, tmp_path / "aliases.json")
    with running(waits) as url:
        daemon = fleet.other(serving={"urls": [url]})

        def answered() -> tuple[int, str]:
            answer = httpx2.post(f"{url}/v1/chat/completions", json={"model": "agent", "messages": []})
            ready = httpx2.get(f"{url}/flywheel/ready").status_code
            assert ready == answer.status_code
            return answer.status_code, str(answer.json().get("model", ""))

        for adapter, target in (("never", BASE), (None, BASE), ("r0001", R1)):
            waits.anew()
            if adapter != "never":
                await daemon.deploy(adapter, "test")
                assert answered() == (200, target), "a deployment by hand says so as well"
                waits.anew()
            assert answered() == (503, "")
            await daemon.reconcile()
            assert answered() == (200, target)
            assert not (await daemon.reconcile()).changed
        waits.anew()
        app.weights = {str(fleet.path("r0001")): PROBE.second.base}
        await daemon.reconcile()
        assert answered() == (503, ""), "no server answers with weights that were not proven"
        await daemon.rollback("base")
        assert answered() == (200, BASE)
