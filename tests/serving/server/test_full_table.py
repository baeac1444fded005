"""A real server with two slots for adapters, on which many have been deployed one after the other.

It runs without Flywheel's plugin, as one whose vLLM is another release: only the empty slot protects its base model.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from unittest import mock

import httpx2
import pytest

from demo.ports import held_port
from flywheel.config.file import Config
from flywheel.errors import ServeError
from flywheel.serving.client.adapter_swap import make_room
from flywheel.serving.client.replica_client import Replica
from flywheel.serving.environment_variables import CPU_LORA_VARIABLE
from flywheel.serving.server import vllm_command
from flywheel.serving.server_keys import admin_key
from tests.conftest import MadeAdapter, serve_config, start_server, stop_server

pytestmark = [pytest.mark.slow, pytest.mark.extended]

DEPLOYED = 8


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Config]:
    home = tmp_path_factory.mktemp("full-table")
    with held_port() as port:
        config = serve_config(home / "state", port, max_loras=2)
        arguments, environment = vllm_command.command(config)
        environment.pop(CPU_LORA_VARIABLE)
        with mock.patch.object(vllm_command, "command", lambda _: (arguments, environment)):
            process = start_server(config, home / "vllm.log")
        yield config
        stop_server(process)


@pytest.fixture
async def replica(server: Config) -> AsyncIterator[Replica]:
    url = server.serving.urls[0]
    async with Replica(url, admin_key(server, url, "ask the tests' server")) as client:
        yield client


def managing(config: Config) -> dict[str, str]:
    """Only the admin key may ask for a version by name."""
    key = admin_key(config, config.serving.urls[0], "ask the tests' server")
    return {"authorization": f"Bearer {key}"}


async def answers(config: Config, models: list[str]) -> list[str]:
    """Greedy answers to different questions, asked at the same time."""
    async with httpx2.AsyncClient(base_url=config.serving.urls[0], timeout=120, headers=managing(config)) as client:

        async def ask(number: int, model: str) -> str:
            request = {"model": model, "prompt": f"How much is {number} plus 7?", "max_tokens": 48, "temperature": 0}
            answer = await client.post("/v1/completions", json={**request, "ignore_eos": True})
            assert answer.status_code == 200, answer.text
            return str(answer.json()["choices"][0]["text"])

        return await asyncio.gather(*(ask(number, model) for number, model in enumerate(models)))


async def test_many_deployments_leave_the_base_model_its_answers(
    server: Config, replica: Replica, adapters: dict[str, MadeAdapter], tmp_path: Path
) -> None:
    """The engine, too, has forgotten what was unloaded: else the last slot would be taken by the third."""
    base = (await replica.alias("test-agent")).base_model
    before = await answers(server, [base] * 16)
    for number in range(1, DEPLOYED + 1):
        path = tmp_path / f"r{number:04}"
        shutil.copytree(adapters["good" if number % 2 else "other"].path, path)
        await make_room([replica], "test-agent", path.name, (), (), 0)
        serves = (await replica.alias("test-agent")).target
        await replica.load(f"test-agent@{path.name}", str(path))
        await replica.point("test-agent", f"test-agent@{path.name}", serves, str(path))
    last = [f"test-agent@r{number:04}" for number in (DEPLOYED - 1, DEPLOYED)]
    assert (await replica.models()).keys() - {base} == set(last)
    mixed = await answers(server, [base, last[0], base, last[1]] * 4)
    assert mixed[::2] == before[::2]
    assert not {*mixed[1::2]} & {*before}, "otherwise this shows nothing"
    with pytest.raises(ServeError, match="all 2 slots for adapters are taken"):
        await replica.load("by-hand", adapters["good"].path)


async def test_each_of_vllms_endpoints_refuses_the_load_that_would_take_the_last_slot(
    server: Config, replica: Replica, adapters: dict[str, MadeAdapter]
) -> None:
    for name in ("one", "two"):
        if len(await replica.models()) < 3:
            await replica.load(name, adapters["good"].path)
    path = adapters["other"].path
    async with httpx2.AsyncClient(base_url=server.serving.urls[0], timeout=120, headers=managing(server)) as client:
        loads = {
            "/v1/load_lora_adapter": {"lora_name": "three", "lora_path": path},
            "/v1/load_lora_adapter/": {"lora_name": "three", "lora_path": path},
            "/adapters": {"name": "three", "src": path},
        }
        statuses = [
            (await client.post(each, json=body, follow_redirects=True)).status_code for each, body in loads.items()
        ]
    assert statuses == [409, 409, 404]
    assert "three" not in await replica.models()
