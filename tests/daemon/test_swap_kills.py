"""Kill -9 of daemon, command and server at every step of a swap: the old or the new version serves meanwhile, and
state and servers agree again within `reconcile_seconds`."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx2
import pytest

from demo.ports import held_port
from flywheel.config.file import Config, load
from flywheel.daemon.deployer import Deployer
from flywheel.daemon.service import Service
from flywheel.errors import ServeError
from flywheel.serving import routes
from flywheel.store import deployments
from flywheel.store.kernel.database import Store
from tests import warm
from tests.daemon.killed_swap import CLIENT_STEPS, RECORD, REQUESTS
from tests.factories.config import write_config
from tests.factories.round import put_trained
from tests.serving.fake_vllm import BASE
from tests.waiting import until, wait_for

ROOT = Path(__file__).parents[2]
RECONCILE_SECONDS = 0.5
WHEN = ("before", "after")


@dataclass
class Server:
    """A server in a process of its own, on the same port whenever it starts."""

    folder: Path
    port: int
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self.folder.mkdir(exist_ok=True)
        command = [sys.executable, "-m", "tests.daemon.killed_swap", "server", str(self.folder), str(self.port)]
        self.process = warm.Popen(command, cwd=ROOT)
        wait_for(self.answers, "the server")

    def answers(self) -> bool:
        with contextlib.suppress(httpx2.HTTPError):
            return httpx2.get(f"{self.url}/health").status_code == 200
        return False

    def die_at(self, step: str, when: str) -> None:
        beside = self.folder / "order"
        beside.write_text(f"{REQUESTS[step]} {when}")
        beside.rename(self.folder / "die")

    def target(self) -> str:
        return str(httpx2.get(f"{self.url}{routes.ALIAS}").json()["aliases"]["agent"])


@dataclass
class Traffic:
    """A client of each server, until it is stopped: the models that answered, and what failed, by server."""

    servers: list[Server]
    answered: list[set[str]] = field(default_factory=lambda: [set(), set()])
    failed: list[list[str]] = field(default_factory=lambda: [[], []])
    stopping: threading.Event = field(default_factory=threading.Event)

    def ask(self, number: int) -> None:
        url = f"{self.servers[number].url}/v1/chat/completions"
        with httpx2.Client(timeout=60) as client:
            while not self.stopping.is_set():
                try:
                    answer = client.post(url, json={"model": "agent", "messages": []})
                except httpx2.HTTPError as error:
                    self.failed[number].append(repr(error))
                else:
                    if answer.status_code == 200:
                        self.answered[number].add(answer.json()["model"])
                    else:
                        self.failed[number].append(f"{answer.status_code} {answer.text}")
                self.stopping.wait(0.01)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        threads = [threading.Thread(target=self.ask, args=(number,)) for number in (0, 1)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self.stopping.set()
            for thread in threads:
                thread.join()


@dataclass
class Bench:
    """Two servers that answer with the third of three adapters, so that the first is unloaded by the next swap."""

    store: Store
    config: Config
    servers: list[Server]
    newest: int = 0

    @property
    def deployer(self) -> Deployer:
        return Deployer(self.store, self.config)

    async def trained(self) -> str:
        """The name of another adapter."""
        self.newest += 1
        name = f"r{self.newest:04d}"
        await self.store.write(put_trained, self.newest, self.config.state_dir.parent / name)
        return name

    async def active(self) -> str:
        row = await self.store.read(deployments.active, "agent")
        assert row is not None
        return f"agent@{row.adapter}"

    async def agrees(self) -> bool:
        rows = await self.store.read(deployments.history, "agent", 99)
        active = await self.active()
        ended = all(row.state in ("active", "retired", "failed") for row in rows)
        return ended and [each.target() for each in self.servers] == [active] * 2

    async def answers(self) -> bool:
        """Whether each server answers with the active version."""
        traffic = Traffic(self.servers)
        with traffic.running():
            await until(
                lambda: all(map(any, zip(traffic.answered, traffic.failed, strict=True))), "an answer of each"
            )
        return traffic.answered == [{await self.active()}] * 2 and traffic.failed == [[], []]


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[Server]]:
    with held_port() as one, held_port() as other:
        started = [Server(tmp_path / f"server{number}", port) for number, port in enumerate((one, other))]
        try:
            for each in started:
                each.start()
            yield started
        finally:
            for each in started:
                if each.process is not None:
                    each.process.kill()
                    each.process.wait()


@pytest.fixture
async def bench(tmp_path: Path, servers: list[Server]) -> AsyncIterator[Bench]:
    serving = {"urls": [each.url for each in servers], "drain_seconds": 0}
    daemon = {"reconcile_seconds": RECONCILE_SECONDS, "metrics": None}
    model = {"base": BASE, "alias": "agent"}
    config = load(write_config(tmp_path, sources=[], model=model, serving=serving, daemon=daemon))
    store = await Store.open(config.state_dir)
    made = Bench(store, config, servers)
    try:
        for _ in range(3):
            await made.deployer.deploy(await made.trained(), "test")
        yield made
    finally:
        await store.close()


@contextlib.asynccontextmanager
async def daemon(bench: Bench) -> AsyncIterator[None]:
    service = Service(bench.config, bench.store)
    running = asyncio.create_task(service.run())
    try:
        yield
    finally:
        service.stop()
        await running


CLIENT_KILLS = [
    *((step, arrival, when) for step in CLIENT_STEPS for arrival in (1, 2) for when in WHEN),
    *((RECORD, 1, when) for when in WHEN),
]


@pytest.mark.slow
@pytest.mark.parametrize("victim", [pytest.param("command", marks=pytest.mark.extended), "daemon"])
async def test_a_swap_that_dies_anywhere_leaves_one_version(bench: Bench, victim: str) -> None:
    for step, arrival, when in CLIENT_KILLS:
        old, adapter = await bench.active(), await bench.trained()
        where = f"{victim} {when} {step} {arrival}"
        traffic = Traffic(bench.servers)
        config = str(bench.config.file)
        command = [
            sys.executable,
            "-m",
            "tests.daemon.killed_swap",
            victim,
            config,
            adapter,
            step,
            str(arrival),
            when,
        ]
        async with contextlib.AsyncExitStack() as stack:
            stack.enter_context(traffic.running())
            # A daemon that is running has unloaded what is out of use before.
            is_beside = victim == "command" and step != "unload"
            if is_beside:
                await stack.enter_async_context(daemon(bench))
            ran = await asyncio.to_thread(warm.run, command, cwd=ROOT, capture_output=True, timeout=300, check=False)
            assert ran.returncode == -signal.SIGKILL, f"{where}: {ran.returncode} {ran.stderr.decode()[-3000:]}"
            if not is_beside:
                await stack.enter_async_context(daemon(bench))
            await until(bench.agrees, f"state and servers to agree ({where})")
        is_recorded = (step, when) == (RECORD, "after")
        assert await bench.active() == (f"agent@{adapter}" if is_recorded else old), where
        for number in (0, 1):
            assert traffic.answered[number] <= {old, f"agent@{adapter}"}, where
            assert traffic.failed[number] == [], where
        assert await bench.answers(), where
        await bench.deployer.deploy(await bench.trained(), "test")  # so that the next swap has one to unload


@pytest.mark.slow
@pytest.mark.extended
@pytest.mark.parametrize("stays_away", [False, True])
async def test_a_server_that_dies_anywhere_in_a_swap_gets_the_version_that_serves(
    bench: Bench, stays_away: bool
) -> None:
    for step, when in itertools.product(REQUESTS, WHEN):
        old, adapter = await bench.active(), await bench.trained()
        where = f"server {when} {step}"
        traffic, mortal = Traffic(bench.servers), bench.servers[0]
        mortal.die_at(step, when)
        async with daemon(bench):
            with traffic.running():
                swapping = asyncio.create_task(bench.deployer.deploy(adapter, "test"))
                assert mortal.process is not None
                await asyncio.to_thread(mortal.process.wait, 300)
                if stays_away:
                    with contextlib.suppress(ServeError):
                        await swapping
                await asyncio.to_thread(mortal.start)
                with contextlib.suppress(ServeError):
                    await swapping
                await until(bench.agrees, f"state and servers to agree ({where})")
                await until(bench.answers, f"both to answer ({where})")
        for number in (0, 1):
            assert traffic.answered[number] <= {old, f"agent@{adapter}"}, where
        assert traffic.failed[1] == [], where
        assert await bench.active() in (old, f"agent@{adapter}"), where
        await bench.deployer.deploy(await bench.trained(), "test")
