"""What a running daemon serves: metrics that Prometheus reads, and whether it is alive and ready."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from flywheel.config.file import Config
from flywheel.daemon import metrics_server
from flywheel.daemon.metrics_server import MetricsServer
from flywheel.daemon.service import Service
from flywheel.daemon.status import snapshot
from flywheel.errors import ConfigError, ReceiverError, StoreError
from flywheel.store.kernel.database import Store
from tests.factories.config import make_config
from tests.factories.daemon import running
from tests.factories.judge_server import JudgeServer
from tests.factories.metrics import by, parsed
from tests.factories.state import open_state, running_daemon
from tests.factories.trace import write_lines
from tests.waiting import until

SECONDS = 60.0


def configured(folder: Path, judge: str = "http://127.0.0.1:9/v1", **daemon: Any) -> Config:
    lines = ({"question": f"{n}+1?", "answer": f"\\boxed{{{n + 1}}}"} for n in range(3))
    return make_config(
        folder,
        sources=[{"type": "jsonl", "path": str(write_lines(folder / "lines.jsonl", *lines))}],
        judge={"base_url": judge, "model": "j", "max_attempts": 1},
        serving={"urls": ["http://127.0.0.1:9"]},
        ingest={"settle_seconds": 0},
        daemon={"metrics": "127.0.0.1:0", "drain_seconds": 1, **daemon},
    )


async def test_a_daemon_serves_its_metrics_while_it_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "FRESH_SECONDS", 0.0)
    with JudgeServer() as judge:
        async with running(configured(tmp_path, judge.base_url)) as (_, client):

            async def all_accepted() -> httpx2.Response | None:
                answer = await client.get("/metrics")
                return answer if by(parsed(answer.text)["flywheel_tasks"], "state")["accepted"] == 3 else None

            answer = await until(all_accepted, "three accepted tasks")
            found = parsed(answer.text)
            assert answer.headers["content-type"].startswith("text/plain; version=")
            assert found["flywheel_daemon_up"][0].value == 1
            assert by(found["flywheel_swaps"], "outcome") == {"done": 0, "rolled_back": 0, "failed": 0}
            assert by(found["flywheel_gate_decisions"], "decision") == {"promoted": 0, "rejected": 0}
            times = [
                each for each in found["flywheel_judge_call_seconds"]
                if (each.labels["endpoint"], each.labels["outcome"]) == ("judge", "answered")
            ]  # fmt: skip
            buckets = {each.labels["le"]: each.value for each in times if each.name.endswith("_bucket")}
            [count] = [each.value for each in times if each.name.endswith("_count")]
            assert judge.calls <= count == buckets["+Inf"]
            assert list(buckets.values()) == sorted(buckets.values())
            assert (await client.get("/healthz")).text == (await client.get("/readyz")).text == "ok\n"
            assert (await client.get("/other")).status_code == 404
    with pytest.raises(httpx2.ConnectError):
        httpx2.get(str(answer.url))


async def test_failed_calls_of_the_judge_are_counted_apart(tmp_path: Path) -> None:
    from flywheel.judge.call_seconds import CALL_SECONDS

    def failed() -> float:
        [metric] = CALL_SECONDS.collect()
        counts = {tuple(each.labels.values()): each.value for each in metric.samples if each.name.endswith("_count")}
        return counts.get(("judge", "failed"), 0)

    before = failed()
    with JudgeServer(behaviour="500") as judge:
        async with running(configured(tmp_path, judge.base_url)):
            await until(lambda: failed() > before, "a failed call")


Serve = Callable[..., AbstractAsyncContextManager[tuple[MetricsServer, str]]]


@pytest.fixture
def serve(tmp_path: Path) -> Serve:
    """A server of metrics alone, with its texts."""

    @asynccontextmanager
    async def serve(
        take: Any = None, unhealthy: str = "", unready: str = "", **daemon: Any
    ) -> AsyncIterator[tuple[MetricsServer, str]]:
        config = configured(tmp_path, **daemon)
        async with open_state(config.state_dir) as store:
            taking = take or (lambda: store.read(snapshot, config))
            server = MetricsServer(config.daemon, taking, lambda: unhealthy, lambda: unready)
            await server.listen()
            try:
                yield server, f"http://127.0.0.1:{server.address[1]}"
            finally:
                await server.stop()

    return serve


async def get(url: str, **headers: str) -> httpx2.Response:
    async with httpx2.AsyncClient(timeout=SECONDS) as client:
        return await client.get(url, headers=headers)


@pytest.mark.parametrize("why", ["starting", "stopping"])
async def test_a_daemon_that_is_not_ready_says_so_and_is_alive(serve: Serve, why: str) -> None:
    async with serve(unready=why) as (_, url):
        answer = await get(f"{url}/readyz")
        assert (answer.status_code, answer.text) == (503, f"{why}\n")
        assert (await get(f"{url}/healthz")).status_code == 200


async def test_readiness_follows_the_service(tmp_path: Path, store: Store) -> None:
    service = Service(configured(tmp_path, metrics=None), store)
    assert service._unready() == "starting"
    task = asyncio.create_task(service.run())
    await until(lambda: service._unready() == "", "the start")
    assert service.metrics.address is None, "null serves nothing"
    service.stop()
    assert service._unready() == "stopping"
    await task


async def test_a_token_is_needed_for_metrics_alone(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_METRICS", "a-long-random-text")
    async with serve(metrics="0.0.0.0:0", metrics_token_env="OF_METRICS") as (_, url):
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "a-long-random-text"}):
            refused = await get(f"{url}/metrics", **headers)
            assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
            assert "flywheel_" not in refused.text
        answer = await get(f"{url}/metrics", authorization="Bearer a-long-random-text", host="flywheel.example")
        assert "flywheel_info" in answer.text
        assert (await get(f"{url}/healthz")).status_code == (await get(f"{url}/readyz")).status_code == 200


async def test_an_address_that_others_reach_needs_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"other machines reach metrics 0\.0\.0\.0:9464.*metrics_token_env"):
        configured(tmp_path, metrics="0.0.0.0:9464")
    monkeypatch.delenv("OF_METRICS", raising=False)
    config = configured(tmp_path, metrics="0.0.0.0:0", metrics_token_env="OF_METRICS")
    server = MetricsServer(config.daemon, None, str, str)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"OF_METRICS, which daemon\.metrics_token_env names, is not set"):
        await server.listen()
    assert server.address is None


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:80", "[", ""])
async def test_a_web_page_of_another_host_reads_nothing(serve: Serve, host: str) -> None:
    async with serve() as (_, url):
        refused = await get(f"{url}/metrics", host=host)
        assert refused.status_code in (400, 421)
        assert "flywheel_" not in refused.text
        for right in ("localhost:1", "127.0.0.1", "[::1]:9464"):
            assert (await get(f"{url}/metrics", host=right)).status_code == 200


async def test_requests_at_once_read_the_state_once(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_server, "FRESH_SECONDS", 60.0)
    config = configured(tmp_path)
    async with serve() as (server, _):
        state = await server._snapshot()
    reads = 0

    async def slow() -> dict[str, Any]:
        nonlocal reads
        reads += 1
        await asyncio.sleep(0.05)
        return state

    async with serve(take=slow) as (_, url):
        answers = await asyncio.gather(*(get(f"{url}/metrics") for _ in range(8)))
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.text for answer in answers}) == reads == 1
    assert config.daemon.metrics == "127.0.0.1:0"


async def test_a_state_that_cannot_be_read_is_an_answer(serve: Serve) -> None:
    async def broken() -> dict[str, Any]:
        raise StoreError("read the state", "the disk is gone", "Look.")

    async with serve(take=broken) as (_, url):
        answer = await get(f"{url}/metrics")
        assert (answer.status_code, "the disk is gone" in answer.text) == (503, True)
        assert (await get(f"{url}/healthz")).status_code == 200


async def test_a_taken_port_does_not_stop_the_daemon(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "flywheel")
    taken = socket.create_server(("127.0.0.1", 0))
    port = taken.getsockname()[1]
    config = configured(tmp_path, metrics=f"127.0.0.1:{port}")
    async with running_daemon(config) as service:
        await until(lambda: service._unready() == "", "the start")
        attempted = f"serve metrics at 127.0.0.1:{port}"
        await until(lambda: [line for line in caplog.messages if attempted in line], "the error")
        with pytest.raises(ReceiverError):
            await service.metrics.listen()
        service._stages["metrics"].wake()
        await until(lambda: service._stages["metrics"].task is None, "the next attempt")
        assert len([line for line in caplog.messages if attempted in line]) == 1, "it is logged once"
        taken.close()
        assert "metrics" in {job.id for job in service._schedule().get_jobs()}, "the clock wakes it"
        service._stages["metrics"].wake()
        await until(lambda: service.metrics.address, "the metrics server")
        assert (await get(f"http://127.0.0.1:{port}/readyz")).status_code == 200
