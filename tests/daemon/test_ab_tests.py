"""A deployment for a share of the units: what is recorded, what servers answer, and how it ends."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest
from sqlalchemy import Connection, select

from flywheel.daemon.deployer import ABTestRequest
from flywheel.errors import ServeError
from flywheel.serving.alias_target import ABTest, AliasTarget
from flywheel.serving.client.replica_client import Replica
from flywheel.store import deployments, rounds
from flywheel.store.kernel import schema
from tests.factories.config import with_settings
from tests.factories.fleet import R1, R2, Fleet, Restarts, config_of
from tests.serving.fake_vllm import BASE, PROBE, FakeVllm, running

HALF = ABTestRequest(0.5, "salt")
RECORDED = {"other": "r0001", "share": 0.5, "salt": "salt"}


async def ab_test_of(fleet: Fleet) -> Any:
    row = await fleet.store.read(deployments.active, "agent")
    return row.ab_test


def answers(fleet: Fleet) -> list[set[str]]:
    """The models that answer on each server."""
    found = []
    with httpx2.Client(timeout=60) as client:
        for url in fleet.config.serving.urls:
            asked = [
                client.post(
                    f"{url}/v1/chat/completions",
                    json={"model": "agent"},
                    headers={"x-flywheel-conversation": f"c{number}"},
                )
                for number in range(30)
            ]
            found.append({reply.json()["model"] if reply.status_code == 200 else reply.text for reply in asked})
    return found


async def begin(fleet: Fleet) -> None:
    await fleet.deploy("r0001")
    await fleet.deployer.deploy("r0002", "test", HALF)


@pytest.mark.slow
async def test_both_versions_are_in_use(fleet: Fleet) -> None:
    await fleet.deploy("r0003", "r0001")
    await fleet.deployer.deploy("r0002", "test", HALF)
    # Without the way back, too.
    await fleet.store.write(
        lambda conn: conn.execute(schema.deployments.update().values(previous=None, retired_at="2020-01-01"))
    )
    assert await fleet.store.read(deployments.in_use, "agent", 0) == {"r0001", "r0002"}
    needed = await fleet.store.read(lambda conn: rounds._needed(conn, 0))
    assert {name for name in needed if name != "None"} >= {"r0001", "r0002"}
    await fleet.deployer.reconcile()
    assert [set(app.loaded) for app in fleet.apps] == [{R1, R2}] * 2


@pytest.mark.slow
async def test_the_end_of_an_ab_test_leaves_the_new_version_alone(fleet: Fleet) -> None:
    await begin(fleet)
    before = await fleet.store.read(deployments.active, "agent")
    for app in fleet.apps:
        app.calls.clear()
    report = await fleet.deployer.end_ab_test("600 units have outcomes")
    assert report is not None
    assert not report.errors
    assert answers(fleet) == [{R2}] * 2
    after = await fleet.store.read(deployments.active, "agent")
    assert (after.id, after.adapter, after.ab_test) == (before.id, "r0002", None)
    assert not any("POST /v1/completions" in app.calls for app in fleet.apps), "it is not proven again"
    assert await fleet.store.read(reasons, before.id) == ["600 units have outcomes"]
    assert await fleet.deployer.end_ab_test("again") is None
    assert not (await fleet.deployer.reconcile()).changed
    await fleet.deployer.rollback()
    assert answers(fleet) == [{R1}] * 2


def reasons(conn: Connection, number: int) -> list[str]:
    events = schema.events.c
    query = select(events.detail).where(events.kind == "deployments", events.subject == str(number))
    return list(conn.execute(query.where(events.old == "ab_test")).scalars())


@pytest.mark.slow
async def test_an_ab_test_with_the_base_model(fleet: Fleet) -> None:
    await fleet.deployer.deploy("r0001", "test", HALF)
    assert await ab_test_of(fleet) == {**RECORDED, "other": None}
    assert answers(fleet) == [{BASE, R1}] * 2
    assert not (await fleet.deployer.reconcile()).changed
    assert await fleet.store.read(deployments.in_use, "agent", 0) == {"r0001"}
    await fleet.deployer.end_ab_test("test")
    assert answers(fleet) == [{R1}] * 2


async def test_the_version_that_serves_has_no_ab_test_with_itself(fleet: Fleet) -> None:
    await fleet.deploy("r0001")
    with pytest.raises(ServeError, match="it serves already"):
        await fleet.deployer.deploy("r0001", "test", HALF)
    with pytest.raises(ValueError, match="share"):
        await fleet.deployer.deploy("r0002", "test", ABTestRequest(1.5, "salt"))
    assert await fleet.active() == ("r0001", None)
    assert answers(fleet) == [{R1}] * 2


@pytest.mark.slow
async def test_an_ab_test_ends_where_servers_answer_and_reconcile_ends_it_elsewhere(fleet: Fleet) -> None:
    await begin(fleet)
    fleet.apps[1].faults["/v1/models"] = (500, "broken")
    with pytest.raises(ServeError, match=r"cannot end the A/B test of agent on every replica.*broken"):
        await fleet.deployer.end_ab_test("test")
    assert answers(fleet) == [{R2}, {R1, R2}]
    assert await ab_test_of(fleet) is None
    fleet.apps[1].faults.clear()
    assert not (await fleet.deployer.reconcile()).errors
    assert answers(fleet) == [{R2}, {R2}]


@pytest.mark.slow
async def test_an_ab_test_that_no_server_ends_goes_on(fleet: Fleet) -> None:
    await begin(fleet)
    for app in fleet.apps:
        app.faults["/v1/models"] = (500, "broken")
    with pytest.raises(ServeError, match="end the A/B test"):
        await fleet.deployer.end_ab_test("test")
    assert await ab_test_of(fleet) == RECORDED
    for app in fleet.apps:
        app.faults.clear()
    assert not (await fleet.deployer.reconcile()).changed
    assert answers(fleet) == [{R1, R2}] * 2


@pytest.mark.slow
async def test_a_next_deployment_replaces_an_ab_test(fleet: Fleet) -> None:
    await begin(fleet)
    await fleet.deploy("r0003")
    assert answers(fleet) == [{"agent@r0003"}] * 2
    assert await ab_test_of(fleet) is None
    assert await fleet.active() == ("r0003", "r0002")


@pytest.mark.slow
async def test_a_process_that_died_while_it_began_leaves_what_was_deployed(fleet: Fleet) -> None:
    """At any replica, and also where it died while it ended the A/B test."""
    await fleet.deploy("r0001")
    urls = fleet.config.serving.urls
    for pointed in (1, 2):
        await fleet.store.write(deployments.request, "agent", urls, "r0002", "test", RECORDED)
        ab_test = ABTest(AliasTarget(R1, str(fleet.path("r0001")), "a hash"), 0.5, "salt")
        for url in urls[:pointed]:
            async with Replica(url) as each:
                await each.load(R2, str(fleet.path("r0002")))
                await each.point("agent", R2, R1, str(fleet.path("r0002")), ab_test=ab_test)
        report = await fleet.deployer.reconcile()
        assert not report.errors
        assert answers(fleet) == [{R1}] * 2
        assert await fleet.active() == ("r0001", None)
    await fleet.deployer.deploy("r0002", "test", HALF)
    async with Replica(urls[0]) as each:
        await each.point("agent", R2, R2, str(fleet.path("r0002")))
    assert answers(fleet) == [{R2}, {R1, R2}]
    assert not (await fleet.deployer.reconcile()).errors
    assert answers(fleet) == [{R1, R2}] * 2


@pytest.mark.slow
async def test_two_slots_are_enough_for_an_ab_test_and_what_follows(two_slots: None, fleet: Fleet) -> None:
    fleet.config = with_settings(fleet.config, serving={"max_loras": 2})
    await fleet.deploy("r0003", "r0001")
    await fleet.deployer.deploy("r0002", "test", HALF)
    assert answers(fleet) == [{R1, R2}] * 2
    await fleet.deployer.rollback("r0003")
    assert answers(fleet) == [{"agent@r0003"}] * 2
    await fleet.deployer.deploy("r0002", "test", HALF)
    await fleet.deploy("r0001")
    assert answers(fleet) == [{R1}] * 2
    assert [len(app.loaded) for app in fleet.apps] == [2, 2]


@pytest.mark.slow
async def test_a_version_whose_files_changed_is_not_loaded_again_and_the_other_answers(fleet: Fleet) -> None:
    await begin(fleet)
    (fleet.path("r0001") / "weights").write_text("others")
    fleet.apps[0].loaded.pop(R1)
    report = await fleet.deployer.reconcile()
    assert ["not those" in each.error for each in report.replicas] == [True, False]
    assert answers(fleet) == [{R2}, {R1, R2}]


@pytest.mark.slow
async def test_a_server_started_anew_answers_both(fleet: Fleet, tmp_path: Any) -> None:
    app = FakeVllm({BASE: PROBE.second.base})
    app.weights = {str(fleet.path(name)): PROBE.second.adapter for name in ("r0001", "r0002")}
    server = Restarts(app, tmp_path / "aliases.json")
    with running(server) as url:
        one = Fleet(fleet.store, config_of(tmp_path, url), [app], fleet.folder)
        await begin(one)
        server.anew()
        assert answers(one) == [{R1, R2}]
        app.loaded.pop(R2)
        server.anew()
        assert answers(one) == [{R1}]
        assert not (await one.deployer.reconcile()).errors
        assert answers(one) == [{R1, R2}]
