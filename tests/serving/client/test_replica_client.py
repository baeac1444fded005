"""What each failure of a server is called, and what is proposed."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from flywheel.errors import ServeError
from flywheel.serving.client import replica_client as client_module
from flywheel.serving.client.replica_client import Alias, Replica
from flywheel.system.http_client import ssl_context
from tests.serving.fake_vllm import BASE, FakeVllm, replica, running, with_middleware


@pytest.fixture
def app() -> FakeVllm:
    return FakeVllm()


@pytest.fixture
async def client(app: FakeVllm) -> AsyncIterator[Replica]:
    with replica(app) as url:
        async with Replica(url + "/", timeout_seconds=30) as client:
            yield client


async def test_load_flip_unload(client: Replica, tmp_path: Path) -> None:
    path = str(tmp_path)
    assert await client.ready()
    assert await client.load("agent@r0001", path) is True
    assert await client.load("agent@r0001", path) is False
    assert await client.models() == {BASE: "/models/tiny", "agent@r0001": path}
    first = await client.alias("agent")
    instance, revision = first.instance, first.revision
    assert revision is not None
    assert first == Alias(BASE, None, BASE, None, instance, revision=revision)
    await client.point("agent", "agent@r0001", BASE, path, "a hash")
    assert await client.alias("agent") == Alias("agent@r0001", path, BASE, "a hash", instance, revision=revision + 1)
    assert await client.alias("never-set") == Alias(BASE, None, BASE, None, instance)
    with pytest.raises(ServeError, match="an alias stands for agent@r0001"):
        await client.unload("agent@r0001")
    await client.point("agent", BASE, "agent@r0001")
    assert await client.unload("agent@r0001") is True
    assert await client.unload("agent@r0001") is False


async def test_a_name_never_changes_its_weights(client: Replica, app: FakeVllm, tmp_path: Path) -> None:
    app.loaded["agent@r0001"] = "/somewhere/else"
    with pytest.raises(ServeError, match="another adapter, from /somewhere/else"):
        await client.load("agent@r0001", str(tmp_path))
    assert app.loaded == {"agent@r0001": "/somewhere/else"}


async def test_a_flip_that_something_else_has_overtaken(client: Replica) -> None:
    with pytest.raises(ServeError, match=f"agent is {BASE}, not agent@r0001") as refused:
        await client.point("agent", "agent@r0002", "agent@r0001")
    assert refused.value.retryable


async def test_unreachable() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # bound and not listening: nobody else can have it
        async with Replica(f"http://127.0.0.1:{held.getsockname()[1]}") as client:
            assert await client.ready() is False
            with pytest.raises(ServeError, match="cannot be reached") as refused:
                await client.models()
    assert refused.value.retryable
    assert "flywheel serve" in refused.value.hint


async def test_no_answer_in_time(app: FakeVllm) -> None:
    app.slow_paths.add("/v1/models")
    with replica(app) as url:
        async with Replica(url, timeout_seconds=0.2) as client:
            with pytest.raises(ServeError, match="no answer within its time") as refused:
                await client.models()
    assert refused.value.retryable


@pytest.mark.slow
async def test_what_takes_no_time_is_not_waited_for_as_long_as_loading(
    app: FakeVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica that hangs would keep `swap.lock`, and a rollback waiting for it."""
    monkeypatch.setattr(client_module, "QUICK_SECONDS", 0.2, raising=False)
    app.slow_paths |= {"/v1/models", "/health", "/v1/unload_lora_adapter"}
    with replica(app) as url:
        async with Replica(url, timeout_seconds=600) as client:
            for call in (client.models(), client.unload("agent@r0001")):
                with pytest.raises(ServeError, match="no answer within its time"):
                    await asyncio.wait_for(call, 30)
            assert await asyncio.wait_for(client.ready(), 30) is False


@pytest.mark.slow
async def test_an_answer_that_drips_is_given_up() -> None:
    async def dripping(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        left = asyncio.create_task(receive())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not (await asyncio.wait([left], timeout=0.05))[0]:
            await send({"type": "http.response.body", "body": b" ", "more_body": True})

    with running(dripping) as url:
        async with Replica(url, timeout_seconds=0.5) as client:
            with pytest.raises(ServeError, match="no answer within its time"):
                await client.models()


async def test_an_adapter_that_vllm_cannot_serve_is_not_tried_for_ever(
    client: Replica, app: FakeVllm, tmp_path: Path
) -> None:
    app.faults["/v1/load_lora_adapter"] = (500, "Call to add_lora failed: vLLM does not yet support DoRA.")
    with pytest.raises(ServeError, match="does not yet support DoRA") as refused:
        await client.load("agent@r0001", str(tmp_path))
    assert not refused.value.retryable
    app.faults["/v1/load_lora_adapter"] = (500, "EngineCore encountered an issue.")
    app.faults["/health"] = (503, "")
    with pytest.raises(ServeError, match="EngineCore encountered an issue") as refused:
        await client.load("agent@r0001", str(tmp_path))
    assert refused.value.retryable


async def test_a_server_that_restarted_before_it_was_asked_is_asked_again(client: Replica) -> None:
    with pytest.raises(ServeError, match="does not exist") as refused:
        await client.logprobs("agent@r0001", [[1, 2, 3]])
    assert refused.value.retryable


async def test_a_middleware_that_does_not_know_the_base_model(app: FakeVllm) -> None:
    """It was named to vLLM by hand, without its settings: nothing could be taken back to the base model."""
    with running(with_middleware(app, FLYWHEEL_ALIAS="", FLYWHEEL_BASE_MODEL="")) as url:
        async with Replica(url) as client:
            with pytest.raises(ServeError, match="FLYWHEEL_BASE_MODEL"):
                await client.alias("agent")


async def test_a_server_without_runtime_loading(client: Replica, app: FakeVllm, tmp_path: Path) -> None:
    app.lora = False
    with pytest.raises(ServeError, match="does not load adapters at run time") as refused:
        await client.load("agent@r0001", str(tmp_path))
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True" in refused.value.hint
    assert not refused.value.retryable


async def test_an_adapter_that_the_server_cannot_see(client: Replica, tmp_path: Path) -> None:
    with pytest.raises(ServeError, match="finds no adapter in") as refused:
        await client.load("agent@r0001", str(tmp_path / "gone"))
    assert "server's own disk" in refused.value.hint


async def test_too_large_a_rank(client: Replica, app: FakeVllm, tmp_path: Path) -> None:
    app.faults["/v1/load_lora_adapter"] = (
        500,
        "Call to add_lora failed: LoRA rank 64 is greater than max_lora_rank 32.",
    )
    with pytest.raises(ServeError, match="rank 64 > max_lora_rank 32") as refused:
        await client.load("agent@r0001", str(tmp_path))
    assert "serving.max_lora_rank 64" in refused.value.hint
    assert not refused.value.retryable


async def test_a_server_without_the_alias_middleware(app: FakeVllm) -> None:
    with running(app) as url:
        async with Replica(url) as client:
            for call in (client.alias("agent"), client.point("agent", "agent@r0001", BASE)):
                with pytest.raises(ServeError, match="no alias middleware") as refused:
                    await call
                assert "--middleware" in refused.value.hint


async def test_keys(app: FakeVllm) -> None:
    with running(with_middleware(app, FLYWHEEL_API_KEY="s3cret", FLYWHEEL_ADMIN_KEY="admin")) as url:
        async with Replica(url, "admin") as client:
            assert (await client.alias("agent")).target == BASE
            assert await client.models() == {BASE: "/models/tiny"}
        for key in ("wrong", "s3cret", None):
            async with Replica(url, key) as client:
                with pytest.raises(ServeError, match="refuses the key") as refused:
                    await client.alias("agent")
            assert "serving.admin_key_env" in refused.value.hint
            assert key is None or key not in str(refused.value)


@pytest.mark.parametrize(("status", "retryable"), [(500, True), (503, True), (429, True), (400, False), (418, False)])
async def test_other_refusals_carry_the_servers_words(
    client: Replica, app: FakeVllm, status: int, retryable: bool
) -> None:
    app.faults["/v1/completions"] = (status, "the engine\n is dead")
    with pytest.raises(ServeError) as refused:
        await client.logprobs(BASE, [[1, 2, 3]])
    assert refused.value.retryable is retryable
    assert "the engine is dead" in refused.value.why or status == 503


async def test_logprobs_of_the_continuation(client: Replica, app: FakeVllm) -> None:
    app.logprobs[BASE] = [-0.5, -1.5]
    assert await client.logprobs(BASE, [[7, 8, 9, 5], [7, 8, 9, 5, 5]]) == [-0.5, -1.5]


@pytest.mark.parametrize("encoding", [None, b"gzip"])
@pytest.mark.parametrize("body", [b"<html>", b"[]", b'{"data": 1}', b'{"data": [1]}', b'{"data": [{}]}'])
async def test_something_else_listens_there(body: bytes, encoding: bytes | None) -> None:
    async def other(scope: dict[str, object], receive: object, send: object) -> None:
        headers = [(b"content-encoding", encoding)] if encoding else []
        await send({"type": "http.response.start", "status": 200, "headers": headers})  # type: ignore[operator]
        await send({"type": "http.response.body", "body": body})  # type: ignore[operator]

    with running(other) as url:
        async with Replica(url) as client:
            with pytest.raises(ServeError, match="not what vLLM answers"):
                await client.models()
            with pytest.raises(ServeError, match=r"not what vLLM answers|no alias middleware"):
                await client.alias("agent")


async def test_certificates_are_loaded_for_https_alone_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon looks at every server again and again, and nothing else goes on while they are loaded."""
    loaded: list[object] = []
    real = ssl.SSLContext.load_verify_locations

    def load(self: ssl.SSLContext, *args: Any, **kwargs: Any) -> None:
        loaded.append(args or kwargs)
        real(self, *args, **kwargs)

    monkeypatch.setattr(ssl.SSLContext, "load_verify_locations", load)
    for _ in range(3):
        async with Replica("http://127.0.0.1:9"):
            pass
    assert loaded == []
    for _ in range(3):
        async with Replica("https://127.0.0.1:9"):
            pass
    assert len(loaded) <= 1


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl here")
async def test_a_certificate_is_believed_when_its_authority_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    making = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    making += ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(making, check=True, capture_output=True, timeout=120)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b'HTTP/1.1 200 OK\r\ncontent-length: 12\r\n\r\n{"data": []}')
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
    url = f"https://localhost:{server.sockets[0].getsockname()[1]}"
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    ssl_context.cache_clear()
    async with server:
        async with Replica(url) as client:
            with pytest.raises(ServeError, match="its certificate is not trusted") as refused:
                await client.models()
        assert "SSL_CERT_FILE" in refused.value.hint
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        ssl_context.cache_clear()
        async with Replica(url) as client:
            assert await client.models() == {}
    ssl_context.cache_clear()
