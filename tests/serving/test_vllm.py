"""The serving side against real vLLM: what it answers, refuses and survives."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from flywheel.errors import ServeError
from flywheel.files import tree_sha256
from flywheel.round import AdapterRef
from flywheel.serving.client import Replica
from flywheel.serving.report import SwapReport
from flywheel.serving.retirement import retire
from flywheel.serving.swap import rollback, swap
from flywheel.states import DeploymentState
from tests.conftest import MadeAdapter, VllmServer

pytestmark = pytest.mark.slow


@pytest.fixture
async def replica(vllm_server: VllmServer) -> AsyncIterator[Replica]:
    async with Replica(vllm_server.url) as client:
        yield client


async def answered_by(server: VllmServer, model: str) -> str:
    request = {"model": model, "messages": [{"role": "user", "content": "What is 3 plus 4?"}], "max_tokens": 8}
    async with httpx.AsyncClient(timeout=120) as client:
        answer = await client.post(f"{server.url}/v1/chat/completions", json=request)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["model"])


async def put(
    replica: Replica, server: VllmServer, alias: str, version: str | None, path: str, probed: MadeAdapter | None
) -> SwapReport:
    async def ignore(_: DeploymentState, __: SwapReport | None = None) -> None: ...

    probe = probed.probe if probed else None
    adapter = ref(version, path) if version else None
    return await swap([replica], alias, adapter, probe, server.config.serving, ignore)


def ref(version: str, path: str) -> AdapterRef:
    return AdapterRef(name=version, path=path, sha256=tree_sha256(Path(path)))


async def test_it_starts_with_what_was_deployed(vllm_server: VllmServer, replica: Replica) -> None:
    assert await answered_by(vllm_server, vllm_server.alias) == vllm_server.base_model
    assert await answered_by(vllm_server, "restored-agent") == "restored-agent@r0001"
    assert await answered_by(vllm_server, "damaged-agent") == vllm_server.base_model
    async with httpx.AsyncClient() as client:
        cards = (await client.get(f"{vllm_server.url}/v1/models")).json()["data"]
    assert {vllm_server.base_model, vllm_server.alias, "restored-agent"} <= {card["id"] for card in cards}
    assert vllm_server.alias not in await replica.models()


async def test_a_version_is_proven_and_swapped_in_and_back(
    vllm_server: VllmServer, replica: Replica, adapters: dict[str, MadeAdapter]
) -> None:
    good, other = adapters["good"], adapters["other"]
    first = await put(replica, vllm_server, "swap-agent", "r0001", good.path, good)
    assert await answered_by(vllm_server, "swap-agent") == "swap-agent@r0001"
    probe = first.replicas[0].probe
    assert probe is not None
    assert probe.distinct
    assert probe.to_adapter < 0.01  # float32 on both sides
    await put(replica, vllm_server, "swap-agent", "r0002", other.path, other)
    assert await answered_by(vllm_server, "swap-agent") == "swap-agent@r0002"
    await rollback([replica], "swap-agent", ref("r0001", good.path), vllm_server.config.serving)
    assert await answered_by(vllm_server, "swap-agent") == "swap-agent@r0001"
    await rollback([replica], "swap-agent", None, vllm_server.config.serving)
    assert await answered_by(vllm_server, "swap-agent") == vllm_server.base_model


async def test_wrong_weights_are_noticed(
    vllm_server: VllmServer, replica: Replica, adapters: dict[str, MadeAdapter]
) -> None:
    good, other = adapters["good"], adapters["other"]
    await put(replica, vllm_server, "wrong-agent", "r0001", good.path, good)
    with pytest.raises(ServeError, match="prove wrong-agent@r0002"):
        await put(replica, vllm_server, "wrong-agent", "r0002", good.path, other)
    assert await answered_by(vllm_server, "wrong-agent") == "wrong-agent@r0001"
    assert "wrong-agent@r0002" not in await replica.models()


async def test_what_vllm_refuses_has_a_name(
    vllm_server: VllmServer, replica: Replica, adapters: dict[str, MadeAdapter], tmp_path: Path
) -> None:
    with pytest.raises(ServeError, match="rank 16 > max_lora_rank 8"):
        await replica.load("refused@r0001", adapters["wide"].path)
    with pytest.raises(ServeError, match="finds no adapter in"):
        await replica.load("refused@r0001", str(tmp_path / "gone"))
    with pytest.raises(ServeError, match="does not exist"):
        await replica.logprobs("refused@r0001", [1, 2], [3])
    assert await replica.load("twice@r0001", adapters["good"].path) is True
    assert await replica.load("twice@r0001", adapters["good"].path) is False
    assert await replica.unload("twice@r0001") is True
    assert await replica.unload("twice@r0001") is False
    assert await replica.ready()


@pytest.mark.parametrize("setting", [{"use_dora": True}, {"modules_to_save": ["lm_head"]}, {"r": 4}])
async def test_what_vllm_never_serves_is_no_trouble_of_the_moment(
    replica: Replica, adapters: dict[str, MadeAdapter], tmp_path: Path, setting: dict[str, object]
) -> None:
    path = tmp_path / "unservable"
    shutil.copytree(adapters["good"].path, path)
    told = json.loads((path / "adapter_config.json").read_text())
    (path / "adapter_config.json").write_text(json.dumps({**told, **setting}))
    if "r" in setting:
        (path / "adapter_model.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(ServeError, match="the server refuses it") as refused:
        await replica.load("unservable@r0001", str(path))
    assert not refused.value.retryable
    assert await replica.ready()
    assert "unservable@r0001" not in await replica.models()


async def test_the_alias_is_a_model_wherever_one_is_named(
    vllm_server: VllmServer, replica: Replica, adapters: dict[str, MadeAdapter]
) -> None:
    good = adapters["good"]
    await put(replica, vllm_server, "named-agent", "r0001", good.path, good)
    asked: list[tuple[str, dict[str, object]]] = [
        ("/tokenize", {"prompt": "7"}),
        ("/v1/responses", {"input": "What is 3 plus 4?", "max_output_tokens": 4}),
        ("/v1/completions", {"prompt": "7", "max_tokens": 1}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "7"}], "max_tokens": 4}),
    ]
    async with httpx.AsyncClient(base_url=vllm_server.url, timeout=120) as client:
        for path, request in asked:
            answer = await client.post(path, json={**request, "model": "named-agent"})
            assert answer.status_code == 200, f"{path}: {answer.text}"
            assert answer.json().get("model", "named-agent@r0001") == "named-agent@r0001", path


async def test_swaps_under_load_lose_nothing(
    vllm_server: VllmServer, replica: Replica, adapters: dict[str, MadeAdapter]
) -> None:
    """Each answer comes whole from a version that was current between its question and its end."""
    settings = vllm_server.config.serving.model_copy(update={"drain_seconds": 1.0})
    versions = [vllm_server.base_model]
    stop = asyncio.Event()
    wrong: list[str] = []
    answered = 0

    async def ask(client: httpx.AsyncClient) -> None:
        nonlocal answered
        question = {"role": "user", "content": "How much is 2 times 3?"}
        request = {"model": "load-agent", "messages": [question], "max_tokens": 16}
        while not stop.is_set():
            oldest = len(versions) - 1 - swapping
            answer = await client.post("/v1/chat/completions", json=request)
            model = answer.json().get("model") if answer.status_code == 200 else None
            if model not in versions[oldest:]:
                wrong.append(f"{answer.status_code} {answer.text[:300]}, expected one of {versions[oldest:]}")
            answered += 1

    swapping = False
    await replica.flip("load-agent", vllm_server.base_model, vllm_server.base_model)
    async with httpx.AsyncClient(base_url=vllm_server.url, timeout=120) as client:
        asking = [asyncio.create_task(ask(client)) for _ in range(8)]
        for number in range(1, 6):
            made = adapters["good" if number % 2 else "other"]
            swapping = True
            versions.append(f"load-agent@r{number:04}")
            await put(replica, vllm_server, "load-agent", f"r{number:04}", made.path, made)
            swapping = False
            await retire([replica], "load-agent", [f"r{number - 1:04}"], settings)
        stop.set()
        await asyncio.gather(*asking)
    assert wrong == []
    assert answered > 20
    kept = {name for name in await replica.models() if name.startswith("load-agent@")}
    assert kept == {"load-agent@r0004", "load-agent@r0005"}


async def test_seeded_requests_that_do_not_fit_into_one_step_are_survived(vllm_server: VllmServer) -> None:
    """What killed the engine: a prompt with a seed of which only a part was computed in a step."""
    async with httpx.AsyncClient(timeout=300) as client:

        async def ask(seed: int) -> int:
            request = {
                "model": vllm_server.alias,
                "prompt": [20 + (seed + place) % 50 for place in range(480)],
                "max_tokens": 4,
                "seed": seed,
            }
            return (await client.post(f"{vllm_server.url}/v1/completions", json=request)).status_code

        assert await asyncio.gather(*(ask(seed) for seed in range(32))) == [200] * 32
        assert (await client.get(f"{vllm_server.url}/health")).status_code == 200
