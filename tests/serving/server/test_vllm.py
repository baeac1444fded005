"""The serving side against real vLLM: what it answers, refuses and survives."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from flywheel.errors import ServeError
from flywheel.records.request_id import BASE_VERSION, mark_of
from flywheel.records.round import AdapterRef
from flywheel.records.states import DeploymentState
from flywheel.serving.calls.call_log import RecordedCall
from flywheel.serving.client.adapter_swap import SwapReport, retire, rollback, swap
from flywheel.serving.client.replica_client import Replica
from flywheel.serving.client.weight_verification import prove
from flywheel.sources.calls.parsing import parse
from flywheel.system.files import tree_sha256
from tests.conftest import MadeAdapter, VllmServer
from tests.factories.adapter import put_matrices

pytestmark = pytest.mark.slow


@pytest.fixture
async def replica(vllm_server: VllmServer) -> AsyncIterator[Replica]:
    async with Replica(vllm_server.url, vllm_server.admin_key) as client:
        yield client


async def answered_by(server: VllmServer, model: str) -> str:
    request = {"model": model, "messages": [{"role": "user", "content": "What is 3 plus 4?"}], "max_tokens": 8}
    async with httpx2.AsyncClient(timeout=120, headers=server.headers) as client:
        answer = await client.post(f"{server.url}/v1/chat/completions", json=request)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["model"])


async def put(
    replica: Replica, server: VllmServer, alias: str, version: str | None, path: str, probed: MadeAdapter | None
) -> SwapReport:
    async def ignore(_: DeploymentState, __: SwapReport | None = None) -> None: ...

    probe = probed.probe if probed else None
    adapter = ref(version, path) if version else None
    return await swap([replica], alias, adapter, probe, ignore)


def ref(version: str, path: str) -> AdapterRef:
    return AdapterRef(name=version, path=path, sha256=tree_sha256(Path(path)))


async def test_it_starts_with_what_was_deployed(vllm_server: VllmServer, replica: Replica) -> None:
    assert await answered_by(vllm_server, vllm_server.alias) == vllm_server.base_model
    assert await answered_by(vllm_server, "restored-agent") == "restored-agent@r0001"
    request = {"model": "damaged-agent", "messages": [{"role": "user", "content": "7"}]}
    async with httpx2.AsyncClient(headers=vllm_server.headers) as client:
        refused = await client.post(f"{vllm_server.url}/v1/chat/completions", json=request)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        assert "damaged-agent@r0001 cannot be served again" in refused.json()["error"]["message"]
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
    assert probe.passed
    assert probe.adapter_slope == pytest.approx(1, abs=0.01)  # float32 on both sides
    await put(replica, vllm_server, "swap-agent", "r0002", other.path, other)
    assert await answered_by(vllm_server, "swap-agent") == "swap-agent@r0002"
    await rollback([replica], "swap-agent", ref("r0001", good.path))
    assert await answered_by(vllm_server, "swap-agent") == "swap-agent@r0001"
    await rollback([replica], "swap-agent", None)
    assert await answered_by(vllm_server, "swap-agent") == vllm_server.base_model


async def test_an_adapter_that_fits_no_layer_is_not_loaded(replica: Replica, tmp_path: Path) -> None:
    """vLLM would load it, and answer as the base model does."""
    shapes = {"model.layers.7.self_attn.q_proj": (128, 128)}
    with pytest.raises(ServeError, match=r"has no layer model\.layers\.7\.self_attn\.q_proj"):
        await replica.load("no-layer", str(put_matrices(tmp_path / "a", shapes)))
    assert "no-layer" not in await replica.models()
    layers = {"model.layers.0.self_attn.q_proj": (128, 128)}
    folder = put_matrices(tmp_path / "b", layers)
    with pytest.raises(ServeError, match="are not those that were evaluated"):
        await replica.load("a-layer", str(folder), "0" * 64)
    assert await replica.load("a-layer", str(folder), tree_sha256(folder))
    await replica.unload("a-layer")


async def test_wrong_weights_are_noticed(
    vllm_server: VllmServer, replica: Replica, adapters: dict[str, MadeAdapter]
) -> None:
    good, other = adapters["good"], adapters["other"]
    await put(replica, vllm_server, "wrong-agent", "r0001", good.path, good)
    with pytest.raises(ServeError, match="prove wrong-agent@r0002"):
        await put(replica, vllm_server, "wrong-agent", "r0002", good.path, other)
    assert await answered_by(vllm_server, "wrong-agent") == "wrong-agent@r0001"
    assert "wrong-agent@r0002" not in await replica.models()


@pytest.mark.parametrize("wrong", ["zeroed", "half", "parent", "other"])
@pytest.mark.parametrize("recorded", ["next", "shifted"])
async def test_no_wrong_weights_are_swapped_in_under_the_name_of_an_adapter(
    vllm_server: VllmServer, replica: Replica, adapters: dict[str, MadeAdapter], wrong: str, recorded: str
) -> None:
    """Weights that do nothing, those of the parent, half of them and another adapter's, on a server with the base
    model of the round and on one where it is shifted."""
    alias = f"{wrong}-{recorded}"
    with pytest.raises(ServeError, match=f"prove {alias}@r0002"):
        await put(replica, vllm_server, alias, "r0002", adapters[wrong].path, adapters[recorded])
    assert (await replica.alias(alias)).target == vllm_server.base_model
    assert f"{alias}@r0002" not in await replica.models()


@pytest.mark.parametrize("recorded", ["next", "shifted"])
async def test_the_base_model_proves_no_adapter_and_right_weights_pass(
    vllm_server: VllmServer, replica: Replica, adapters: dict[str, MadeAdapter], recorded: str
) -> None:
    base, probe = vllm_server.base_model, adapters[recorded].probe
    with pytest.raises(ServeError, match=f"prove {base} .* shows 0.00 of its parent's"):
        await prove(replica, base, base, probe)
    alias = f"right-{recorded}"
    report = await put(replica, vllm_server, alias, "r0002", adapters["next"].path, adapters[recorded])
    figures = report.replicas[0].probe
    assert figures is not None and figures.passed
    await rollback([replica], alias, None)
    assert await replica.unload(f"{alias}@r0002")


async def test_what_vllm_refuses_has_a_name(
    vllm_server: VllmServer, replica: Replica, adapters: dict[str, MadeAdapter], tmp_path: Path
) -> None:
    with pytest.raises(ServeError, match="rank 16 > max_lora_rank 8"):
        await replica.load("refused@r0001", adapters["wide"].path)
    with pytest.raises(ServeError, match="finds no adapter in"):
        await replica.load("refused@r0001", str(tmp_path / "gone"))
    with pytest.raises(ServeError, match="does not exist"):
        await replica.logprobs("refused@r0001", [[1, 2, 3]])
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
    with pytest.raises(ServeError, match=r"the server refuses it|holds no readable adapter") as refused:
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
    async with httpx2.AsyncClient(base_url=vllm_server.url, timeout=120, headers=vllm_server.headers) as client:
        for path, request in asked:
            answer = await client.post(path, json={**request, "model": "named-agent"})
            assert answer.status_code == 200, f"{path}: {answer.text}"
            assert answer.json().get("model", "named-agent@r0001") == "named-agent@r0001", path


async def test_swaps_under_load_lose_nothing(
    vllm_server: VllmServer, replica: Replica, adapters: dict[str, MadeAdapter]
) -> None:
    """Each answer comes whole from a version that was current between its question and its end."""
    versions = [vllm_server.base_model]
    stop = asyncio.Event()
    wrong: list[str] = []
    answered = 0

    async def ask(client: httpx2.AsyncClient) -> None:
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
    await replica.point("load-agent", vllm_server.base_model, vllm_server.base_model)
    async with httpx2.AsyncClient(base_url=vllm_server.url, timeout=120, headers=vllm_server.headers) as client:
        asking = [asyncio.create_task(ask(client)) for _ in range(8)]
        for number in range(1, 6):
            made = adapters["good" if number % 2 else "other"]
            swapping = True
            versions.append(f"load-agent@r{number:04}")
            await put(replica, vllm_server, "load-agent", f"r{number:04}", made.path, made)
            swapping = False
            await retire([replica], "load-agent", [f"r{number - 1:04}"], 1.0)
        stop.set()
        await asyncio.gather(*asking)
    assert wrong == []
    assert answered > 20
    kept = {name for name in await replica.models() if name.startswith("load-agent@")}
    assert kept == {"load-agent@r0004", "load-agent@r0005"}


async def test_seeded_requests_that_do_not_fit_into_one_step_are_survived(vllm_server: VllmServer) -> None:
    """What killed the engine: a prompt with a seed of which only a part was computed in a step."""
    async with httpx2.AsyncClient(timeout=300, headers=vllm_server.headers) as client:

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


QUESTION = {"messages": [{"role": "user", "content": "What is 3 plus 4?"}], "max_tokens": 4}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


async def ids(client: httpx2.AsyncClient, path: str, request: dict[str, object]) -> list[str]:
    """The id of an answer, and the one that all parts of the same answer as a stream have."""
    # What the client says is replaced.
    headers = {"X-Request-Id": "of-the-client"}
    whole = await client.post(path, json=request, headers=headers)
    assert whole.status_code == 200, whole.text
    async with client.stream("POST", path, json={**request, "stream": True}, headers=headers) as stream:
        events = [line.removeprefix("data: ") async for line in stream.aiter_lines() if line.startswith("data: {")]
    streamed = {str(json.loads(event)["id"]) for event in events}
    assert len(streamed) == 1
    return [str(whole.json()["id"]), *streamed]


async def test_the_response_id_says_which_version_answered(
    vllm_server: VllmServer, replica: Replica, adapters: dict[str, MadeAdapter]
) -> None:
    good = adapters["good"]
    await put(replica, vllm_server, "told-agent", "r0001", good.path, good)
    instance = (await replica.alias("told-agent")).instance
    requests: list[tuple[str, dict[str, object]]] = [
        ("/v1/chat/completions", dict(QUESTION)),
        ("/v1/completions", {"prompt": "7", "max_tokens": 2}),
    ]
    async with httpx2.AsyncClient(base_url=vllm_server.url, timeout=120, headers=vllm_server.headers) as client:
        for version in ("told-agent@r0001", BASE_VERSION):
            for path, request in requests:
                found = await ids(client, path, {**request, "model": "told-agent"})
                marks = [mark_of(each) for each in found]
                assert [(mark.instance, mark.version) for mark in marks if mark] == [(instance, version)] * 2
                assert found[0] != found[1], "each request has an id of its own"
            await rollback([replica], "told-agent", None)


async def recorded(replica: Replica, mark: str) -> list[RecordedCall]:
    """The calls whose body holds the mark, as soon as there is one."""
    read = 0
    async with asyncio.timeout(60):
        while True:
            # Other tests leave more calls than a page has.
            page = await replica.calls(read, 1000)
            assert page is not None
            if found := [call for _, call in page.calls if mark.encode() in call.request]:
                return found
            if page.calls:
                read, _ = page.calls[-1]
            else:
                await asyncio.sleep(0.1)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "prefix", "request_body"),
    [
        ("/v1/chat/completions", "chatcmpl", {**QUESTION, "tools": [TOOL]}),
        ("/v1/completions", "cmpl", {"prompt": "7", "max_tokens": 2}),
        (
            "/v1/messages",
            "chatcmpl",
            {
                "system": "Be brief.",
                "messages": [{"role": "user", "content": "What is 3 plus 4?"}],
                "tools": [{"name": "add", "input_schema": {"type": "object"}}],
                "max_tokens": 4,
            },
        ),
        ("/v1/responses", "resp", {"input": "What is 3 plus 4?", "max_output_tokens": 4, "request_id": "resp_mine"}),
    ],
)
async def test_what_vllm_answers_is_recorded_byte_for_byte(
    vllm_server: VllmServer, replica: Replica, path: str, prefix: str, request_body: dict[str, object], stream: bool
) -> None:
    mark = f"of {path} {stream}"
    body = json.dumps({**request_body, "model": vllm_server.alias, "stream": stream, "user": mark}, indent=1).encode()
    async with httpx2.AsyncClient(base_url=vllm_server.url, timeout=120, headers=vllm_server.headers) as client:
        by_name = {**request_body, "model": vllm_server.base_model, "user": mark}
        assert (await client.post(path, json=by_name)).status_code == 200
        answer = await client.post(path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 200, answer.text
    (call,) = await recorded(replica, mark)
    assert json.loads(call.request) == json.loads(body)
    assert call.response == answer.content
    assert (call.path, call.version, call.status, call.is_complete) == (path, BASE_VERSION, 200, True)
    assert call.media_type == ("text/event-stream" if stream else "application/json")
    assert f'"{prefix}{"_" if prefix == "resp" else "-"}{call.request_id}' in answer.text
    assert b"mine" not in answer.content
    parsed = parse(call)
    assert (parsed.error, parsed.is_interrupted, len(parsed.answers)) == ("", False, 1)
    assert parsed.answers[0].content or parsed.answers[0].reasoning


async def test_a_client_that_leaves_a_stream_is_recorded_as_one(vllm_server: VllmServer, replica: Replica) -> None:
    request = {**QUESTION, "model": vllm_server.alias, "max_tokens": 400, "ignore_eos": True, "stream": True}
    # On a busy machine the answer can be whole before the client has left.
    for mark in (f"of one that leaves, attempt {number}" for number in range(100)):
        async with (
            httpx2.AsyncClient(base_url=vllm_server.url, timeout=120, headers=vllm_server.headers) as client,
            client.stream("POST", "/v1/chat/completions", json={**request, "user": mark}) as stream,
        ):
            seen = await anext(stream.aiter_bytes())
        (call,) = await recorded(replica, mark)
        assert call.response.startswith(seen)
        if not call.is_complete:
            break
    assert (call.status, call.is_complete) == (200, False)
    assert parse(call).is_interrupted


def test_anthropics_client_is_answered_and_reads_what_is_refused(
    vllm_server: VllmServer, adapters: dict[str, MadeAdapter]
) -> None:
    import anthropic

    ask: Any = {"messages": [{"role": "user", "content": "7"}], "max_tokens": 4}
    with anthropic.Anthropic(base_url=vllm_server.url, api_key=vllm_server.key, max_retries=0) as client:
        assert client.messages.create(model=vllm_server.alias, **ask).usage.output_tokens > 0
        with pytest.raises(anthropic.NotFoundError, match=r"This server answers as .*test-agent"):
            client.messages.create(model="restored-agent@r0001", **ask)
    with (
        anthropic.Anthropic(base_url=vllm_server.url, api_key="wrong", max_retries=0) as stranger,
        pytest.raises(anthropic.AuthenticationError),
    ):
        stranger.messages.create(model=vllm_server.alias, **ask)


def test_openais_client_reads_what_vllm_does_not_have(vllm_server: VllmServer) -> None:
    """Also with the admin key, with which vLLM itself answers."""
    for key in (vllm_server.key, str(vllm_server.admin_key)):
        with openai.OpenAI(base_url=f"{vllm_server.url}/v1", api_key=key, max_retries=0) as client:
            assert client.models.retrieve(vllm_server.alias).owned_by == "flywheel"
            for call, given in (
                (client.files.list, {}),
                (client.embeddings.create, {"model": vllm_server.alias, "input": "7"}),
            ):
                with pytest.raises(openai.NotFoundError, match="this server has no such path"):
                    call(**given)
            with pytest.raises(
                openai.NotFoundError, match=r"`gpt-5` does not exist\. This server answers as .*test-agent"
            ):
                client.chat.completions.create(model="gpt-5", messages=[{"role": "user", "content": "7"}])
            with pytest.raises(openai.NotFoundError, match="`gpt-5` does not exist"):
                client.responses.create(model="gpt-5", input="7")


def test_no_header_makes_an_agent_reach_a_version(vllm_server: VllmServer) -> None:
    ask = {"model": vllm_server.alias, "messages": [{"role": "user", "content": "7"}], "max_tokens": 2}
    chosen = {"x-amzn-sagemaker-adapter-identifier": "restored-agent@r0001"}
    for key, model in ((vllm_server.admin_key, "restored-agent@r0001"), (vllm_server.key, vllm_server.base_model)):
        headers = {"authorization": f"Bearer {key}", **chosen}
        answer = httpx2.post(f"{vllm_server.url}/invocations", json=ask, headers=headers, timeout=120)
        assert answer.json().get("model") == model, answer.text


async def test_an_agent_with_tools_is_answered(vllm_server: VllmServer) -> None:
    async with httpx2.AsyncClient(base_url=vllm_server.url, timeout=120, headers=vllm_server.headers) as client:
        request = {**QUESTION, "model": vllm_server.alias, "tools": [TOOL]}
        answer = await client.post("/v1/chat/completions", json=request)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["message"]["content"]


async def test_nothing_but_health_is_open(vllm_server: VllmServer, adapters: dict[str, MadeAdapter]) -> None:
    """vLLM's own guard lets /invocations, /tokenize, /detokenize and others through."""
    adapter = {"lora_name": "stolen@r0001", "lora_path": adapters["good"].path}
    async with httpx2.AsyncClient(base_url=vllm_server.url, timeout=60) as client:
        described = await client.get("/openapi.json", headers={"authorization": f"Bearer {vllm_server.admin_key}"})
        listed = {path: list(methods) for path, methods in described.json()["paths"].items()}
        assert {"/invocations", "/tokenize", "/v1/load_lora_adapter"} <= listed.keys()
        listed |= {path: ["get"] for path in ("/docs", "/redoc", "/openapi.json", "/metrics")}
        for path, methods in sorted(listed.items()):
            for method in methods:
                status = (await client.request(method, path.replace("{response_id}", "x"), json={})).status_code
                assert (status == 401) == (path not in {"/health", "/ping"}), f"{method} {path}: {status}"
        ready = await client.get("/flywheel/ready")
        assert (ready.status_code, ready.json()["health"], ready.json()["ready"]) == (200, 200, True)
        for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/flywheel/alias"):
            refused = await client.post(path, json=adapter, headers=vllm_server.headers)
            assert refused.status_code == 403, f"{path}: {refused.text}"
        assert (await client.get("/v1/models", headers={"host": "evil.example"})).status_code == 421


async def test_no_key_is_in_the_list_of_processes(vllm_server: VllmServer) -> None:
    keys = [vllm_server.key, str(vllm_server.admin_key)]
    environment = Path(f"/proc/{vllm_server.process}/environ").read_text().split("\0")
    keys += [line.partition("=")[2] for line in environment if line.startswith("VLLM_API_KEY=")]
    assert len(keys) == 3 and all(keys)
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            line = process.read_text(errors="replace")
            assert not any(key in line for key in keys)


async def test_pickled_weights_never_reach_vllm(
    replica: Replica, adapters: dict[str, MadeAdapter], tmp_path: Path
) -> None:
    path = tmp_path / "pickled"
    shutil.copytree(adapters["good"].path, path)
    (path / "adapter_model.bin").write_bytes(b"cos\nsystem\n")
    with pytest.raises(ServeError, match="only safetensors"):
        await replica.load("pickled@r0001", str(path))
    assert "pickled@r0001" not in await replica.models()


@pytest.mark.parametrize("levels", [90, 101, 400, 950, 100_000])
async def test_a_deeply_nested_body_is_never_an_error_of_the_server(vllm_server: VllmServer, levels: int) -> None:
    """Also where vLLM or the template walks into what was nested, as into the parameters of a tool."""
    deep = '{"a":' * levels + "1" + "}" * levels
    alias = json.dumps(vllm_server.alias)
    tool = f'{{"type": "function", "function": {{"name": "f", "parameters": {deep}}}}}'
    messages = '[{"role": "user", "content": "7"}]'
    nested = [
        f'{{"model": {alias}, "messages": [], "a": {deep}}}',
        f'{{"model": {alias}, "max_tokens": 1, "messages": {messages}, "tools": [{tool}]}}',
        f'{{"model": {alias}, "prompt": {deep}}}',
        "[" * levels,
    ]
    kind = {"content-type": "application/json"}
    async with httpx2.AsyncClient(base_url=vllm_server.url, timeout=120, headers=vllm_server.headers) as client:
        for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/v1/messages", "/v1/responses"):
            for body in nested:
                answer = await client.post(path, content=body, headers=kind)
                assert answer.status_code < 500, f"{path}: {answer.text[:300]}"
                assert levels <= 100 or answer.status_code == 400
    admin = {**kind, "authorization": f"Bearer {vllm_server.admin_key}"}
    async with httpx2.AsyncClient(base_url=vllm_server.url, headers=admin) as client:
        for path in ("/v1/unload_lora_adapter", "/v1/load_lora_adapter"):
            assert (await client.post(path, content=nested[0])).status_code in (400, 413)
        assert (await client.put("/flywheel/alias", content=nested[0])).status_code in (400, 413)


async def test_it_says_when_it_is_ready_and_where(vllm_server: VllmServer) -> None:
    lines = [line for line in vllm_server.log.read_text().splitlines() if "flywheel serve is ready" in line]
    assert len(lines) == 1
    told = f"ready at {vllm_server.url}/v1: {vllm_server.alias} is answered by {vllm_server.base_model}"
    assert told in lines[0]
