"""Replicas that come and go behind a name (`dns://NAME:PORT`): pods that appear, are not ready, and leave in a swap.

The pods are loopback addresses with one port; the name has those addresses that a test gives it.
"""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import pytest

from demo.ports import held_port
from flywheel.config.file import Config
from flywheel.daemon.checkup import examine_server
from flywheel.daemon.deployer import ABTestRequest, Deployer
from flywheel.daemon.status import Facts, snapshot
from flywheel.errors import Condition, ServeError
from flywheel.serving import replica_addresses
from flywheel.serving.replica_addresses import has_left, replica_urls
from flywheel.serving.server.alias_table import read_aliases
from flywheel.sources.call_puller import OFF, CallPuller
from flywheel.store import deployments
from flywheel.store.kernel.database import Store
from flywheel.system.files import tree_sha256
from tests.factories.adapter import put_files
from tests.factories.config import make_config
from tests.factories.round import put_trained
from tests.serving.elsewhere import elsewhere
from tests.serving.fake_vllm import BASE, PROBE, FakeVllm, running, with_middleware
from tests.waiting import until

R1, R2 = "agent@r0001", "agent@r0002"
KEY = "a-key-of-administrators"
WAITS = {"agent": "the daemon has not set its adapter yet"}


class Pods:
    """The pods of a Service without a cluster IP: `found` are the addresses that its name has."""

    def __init__(self, folder: Path, port: int) -> None:
        self.port = port
        self.found: list[str] = []
        self.apps: dict[str, FakeVllm] = {}
        self.folder = folder
        self._stack = contextlib.ExitStack()

    def start(self, address: str, before: Callable[[str], None] | None = None, **environment: Any) -> FakeVllm:
        """A pod whose alias waits until it is told what is deployed. `before` is called with the method and path of
        each request."""
        app = FakeVllm({BASE: PROBE.second.base})
        app.weights |= {str(self.folder / name): PROBE.second.adapter for name in ("r0001", "r0002")}
        settings = {"waiting": WAITS, "FLYWHEEL_ADMIN_KEY": KEY, **environment}

        async def watched(scope: Any, receive: Any, send: Any) -> None:
            if before is not None:
                before(f"{scope['method']} {scope['path']}")
            await inside(scope, receive, send)

        inside = elsewhere(with_middleware(app, **settings), self.folder / "daemon")
        self._stack.enter_context(running(watched, address, self.port))
        self.apps[address] = app
        self.found.append(address)
        return app

    def url(self, address: str) -> str:
        return f"http://{address}:{self.port}"

    def is_ready(self, address: str) -> bool:
        return httpx2.get(f"{self.url(address)}/flywheel/ready").status_code == 200

    def serves(self, address: str) -> str:
        answer = httpx2.get(f"{self.url(address)}/flywheel/alias", headers={"authorization": f"Bearer {KEY}"}).json()
        return str(answer["aliases"]["agent"]) if not answer["waiting"] else ""

    def stop(self) -> None:
        self._stack.close()


@pytest.fixture
def pods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pods]:
    async def addresses_of(name: str, port: int) -> list[str]:
        assert (name, port) == ("pods.test", made.port)
        if not made.found:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return list(made.found)

    monkeypatch.setattr(replica_addresses, "addresses_of", addresses_of)
    monkeypatch.setenv("ADMIN_KEY", KEY)
    with held_port("0.0.0.0") as port:  # of each of the addresses
        made = Pods(tmp_path, port)
        with contextlib.closing(made._stack):
            yield made


@pytest.fixture
def config(pods: Pods, tmp_path: Path) -> Config:
    serving = {"urls": [f"dns://pods.test:{pods.port}"], "drain_seconds": 0, "admin_key_env": "ADMIN_KEY"}
    return make_config(tmp_path, sources=[], model={"base": BASE, "alias": "agent"}, serving=serving)


@pytest.fixture
async def deployer(store: Store, config: Config, tmp_path: Path) -> Deployer:
    for number in (1, 2):
        await store.write(put_trained, number, tmp_path / f"r{number:04d}")
    return Deployer(store, config)


async def test_a_name_is_resolved_each_time(pods: Pods, config: Config) -> None:
    entry = config.serving.urls[0]
    assert await replica_urls(config.serving) == {entry: entry}
    pods.found = ["127.0.0.2", "::1"]
    assert await replica_urls(config.serving) == {pods.url("127.0.0.2"): entry, pods.url("[::1]"): entry}
    mixed = config.serving.model_copy(update={"urls": ["http://127.0.0.9:1", entry]})
    assert list(await replica_urls(mixed)) == ["http://127.0.0.9:1", pods.url("127.0.0.2"), pods.url("[::1]")]
    assert not await has_left(mixed, "http://127.0.0.9:1")
    assert await has_left(mixed, pods.url("127.0.0.3"))
    pods.found = []
    assert not await has_left(mixed, pods.url("127.0.0.3")), "a name server that is away removes no pod"


async def test_a_genuine_resolver_is_asked(tmp_path: Path) -> None:
    serving = make_config(tmp_path, serving={"urls": ["dns://127.0.0.5:8000", "dns://no.such.invalid:8000"]}).serving
    assert await replica_urls(serving) == {
        "http://127.0.0.5:8000": "dns://127.0.0.5:8000",
        "dns://no.such.invalid:8000": "dns://no.such.invalid:8000",
    }


@pytest.mark.slow
async def test_a_new_pod_is_not_ready_until_it_has_the_deployed_adapter(pods: Pods, deployer: Deployer) -> None:
    pods.start("127.0.0.2")
    await deployer.deploy("r0001", "test")
    pods.start("127.0.0.3")
    assert pods.is_ready("127.0.0.2")
    assert not pods.is_ready("127.0.0.3")
    report = await deployer.reconcile()
    assert [(each.url, each.serves) for each in report.changed] == [(pods.url("127.0.0.3"), R1)]
    assert pods.is_ready("127.0.0.3")
    assert pods.serves("127.0.0.3") == R1


async def test_before_anything_is_deployed_a_new_pod_answers_with_the_base_model(
    pods: Pods, deployer: Deployer
) -> None:
    pods.start("127.0.0.2")
    assert not pods.is_ready("127.0.0.2")
    await deployer.reconcile()
    assert pods.is_ready("127.0.0.2")
    assert pods.serves("127.0.0.2") == BASE


@pytest.mark.slow
@pytest.mark.parametrize(
    "request_",
    ["GET /flywheel/alias", "POST /v1/load_lora_adapter", "POST /v1/completions", "PUT /flywheel/alias"],
    ids=["asked", "load", "proof", "flip"],
)
async def test_a_pod_that_leaves_in_mid_swap_does_not_fail_it(
    request_: str, pods: Pods, deployer: Deployer, store: Store
) -> None:
    """It fails from such a request on, and its name has its address no more."""
    is_on = False

    def leave(asked: str) -> None:
        if is_on and asked == request_:
            pods.found = ["127.0.0.2", "127.0.0.4"]
        if is_on and "127.0.0.3" not in pods.found:
            raise ConnectionResetError

    for address, before in (("127.0.0.2", None), ("127.0.0.3", leave), ("127.0.0.4", None)):
        pods.start(address, before)
    await deployer.deploy("r0001", "test")
    is_on = True
    report = await deployer.deploy("r0002", "test")
    there = [pods.url("127.0.0.2"), pods.url("127.0.0.4")]
    assert [each.url for each in report.replicas] == there
    assert [pods.serves("127.0.0.2"), pods.serves("127.0.0.4")] == [R2, R2]
    row = await store.read(deployments.active, "agent")
    assert row is not None
    assert row.adapter == "r0002"
    assert sorted(await store.read(deployments.replica_states, "agent")) == there


async def test_a_pod_that_fails_and_stays_fails_the_swap(pods: Pods, deployer: Deployer) -> None:
    pods.start("127.0.0.2")
    broken = pods.start("127.0.0.3")
    await deployer.deploy("r0001", "test")
    broken.faults["/v1/load_lora_adapter"] = (500, "broken")
    with pytest.raises(ServeError, match=r"127\.0\.0\.3.*broken"):
        await deployer.deploy("r0002", "test")
    assert [pods.serves("127.0.0.2"), pods.serves("127.0.0.3")] == [R1, R1]


async def test_a_swap_whose_pods_have_all_left_fails(pods: Pods, deployer: Deployer) -> None:
    def replace(asked: str) -> None:
        if asked == "POST /v1/load_lora_adapter":
            pods.found = ["127.0.0.3"]
            raise ConnectionResetError

    pods.start("127.0.0.2", replace)
    with pytest.raises(ServeError, match="have gone meanwhile"):
        await deployer.deploy("r0001", "test")


async def test_a_name_without_an_address_is_an_error_by_that_name(
    pods: Pods, deployer: Deployer, config: Config, store: Store
) -> None:
    entry = config.serving.urls[0]
    with pytest.raises(ServeError, match=f"{entry}.*no address now.*publishNotReadyAddresses"):
        await deployer.deploy("r0001", "test")
    report = await deployer.reconcile()
    assert [(each.url, each.condition) for each in report.replicas] == [(entry, Condition.UNREACHABLE)]
    for url, name in (await replica_urls(config.serving)).items():
        with pytest.raises(ServeError, match=re.escape(entry)):
            await examine_server(config, url, name)


async def test_the_others_are_reconciled_beside_a_name_without_an_address(
    pods: Pods, deployer: Deployer, config: Config, store: Store
) -> None:
    pods.start("127.0.0.2")
    await deployer.deploy("r0001", "test")
    urls = [pods.url("127.0.0.2"), config.serving.urls[0]]
    mixed = config.model_copy(update={"serving": config.serving.model_copy(update={"urls": urls})})
    pods.found = []
    report = await Deployer(store, mixed).reconcile()
    assert [(each.url, each.condition) for each in report.replicas] == [
        (urls[0], Condition.OK),
        (urls[1], Condition.UNREACHABLE),
    ]


async def test_the_status_shows_the_pods_that_were_found_last(
    pods: Pods, deployer: Deployer, config: Config, store: Store
) -> None:
    def urls(status: Facts) -> list[str]:
        return [each["url"] for target in status["targets"].values() for each in target["replicas"]]

    assert urls(await store.read(snapshot, config)) == config.serving.urls
    pods.start("127.0.0.2")
    pods.start("127.0.0.3")
    await deployer.reconcile()
    assert urls(await store.read(snapshot, config)) == [pods.url("127.0.0.2"), pods.url("127.0.0.3")]
    pods.found.remove("127.0.0.2")
    await deployer.reconcile()
    assert urls(await store.read(snapshot, config)) == [pods.url("127.0.0.3")]


async def test_calls_are_pulled_from_the_pods_that_are_there(pods: Pods, config: Config, store: Store) -> None:
    pods.start("127.0.0.2")
    puller = CallPuller(store, config)
    await puller.pull()
    assert [each.condition for each in puller.call_log_copy.servers().values()] == [OFF]
    pods.found = ["127.0.0.3"]
    await puller.pull()
    assert puller.call_log_copy.servers()[pods.url("127.0.0.3")].condition == Condition.UNREACHABLE
    pods.found = []
    await puller.pull()
    assert "no address now" in puller.call_log_copy.servers()[config.serving.urls[0]].error
    await puller.close()


@pytest.mark.slow
async def test_pods_that_share_no_disk_with_the_daemon_get_its_adapters(
    pods: Pods, deployer: Deployer, store: Store, tmp_path: Path
) -> None:
    """Also a pod that comes later, and what is retired does not stay on their disks."""
    (tmp_path / "daemon").mkdir()
    hashes = []
    for number in (3, 4, 5):
        folder = put_files(tmp_path / "daemon" / f"r{number:04d}", str(number).encode())
        hashes.append(tree_sha256(folder))
        await store.write(put_trained, number, folder)

    def has(copies: Path, wanted: list[str]) -> bool:
        return sorted(each.name for each in copies.iterdir()) == sorted(wanted)

    def start(address: str) -> Path:
        copies = tmp_path / address
        sent = {"path": str(copies), "max_bytes": 1_000_000}
        file = str(tmp_path / f"{address}.json")
        app = pods.start(address, sent_adapters=sent, FLYWHEEL_ALIAS_FILE=file)
        app.weights |= {str(copies / each): PROBE.second.adapter for each in hashes}
        return copies

    first = start("127.0.0.2")
    await deployer.deploy("r0003", "test")
    second = start("127.0.0.3")
    await deployer.reconcile()
    for copies in (first, second):
        assert [each.name for each in copies.iterdir()] == hashes[:1]
    for name in ("r0004", "r0005"):
        await deployer.deploy(name, "test")
    await deployer.reconcile()
    assert [pods.serves("127.0.0.2"), pods.serves("127.0.0.3")] == ["agent@r0005"] * 2
    for copies in (first, second):
        await until(partial(has, copies, hashes[1:]), "two copies are left: one is for a rollback")
    await deployer.deploy("r0003", "test", ABTestRequest(0.5, "salt"))
    for address, copies in (("127.0.0.2", first), ("127.0.0.3", second)):
        target = read_aliases(copies.with_name(f"{address}.json"))[0]["agent"]
        assert [each.path for each in target.versions] == [str(copies / hashes[0]), str(copies / hashes[2])]
    report = await deployer.reconcile()
    assert not report.errors
    assert not report.changed
