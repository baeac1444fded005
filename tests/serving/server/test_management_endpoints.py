"""Which adapters reach vLLM: directories of safetensors, as many as there are slots for, and nothing else."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from flywheel.errors import ServeError
from flywheel.serving.adapter_files import why_unloadable
from flywheel.serving.client.replica_client import Replica
from flywheel.system import files
from flywheel.system.files import tree_sha256
from tests.serving.fake_vllm import FakeVllm, replica, with_middleware


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    folder = tmp_path / "r0001"
    folder.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors", "README.md"):
        (folder / name).touch()
    return folder


def load(url: str, path: object, **more: object) -> httpx2.Response:
    wanted = {"lora_name": "agent@r0001", "lora_path": path, **more}
    return httpx2.post(f"{url}/v1/load_lora_adapter", json=wanted)


def test_safetensors_are_loaded(app: FakeVllm, url: str, adapter: Path) -> None:
    assert load(url, str(adapter)).status_code == 200
    assert app.loaded == {"agent@r0001": str(adapter)}


@pytest.mark.parametrize(
    "name",
    [
        "adapter_model.bin",
        "adapter_model.pt",
        "adapter_model.pkl",
        "x.pth",
        "x.ckpt",
        "X.BIN",
        "deeper/optimizer.bin",
    ],
)
async def test_pickled_weights_are_refused_before_vllm_sees_them(
    app: FakeVllm, url: str, adapter: Path, name: str
) -> None:
    (adapter / name).parent.mkdir(exist_ok=True)
    (adapter / name).touch()
    refused = load(url, str(adapter))
    assert refused.status_code == 400
    assert str(adapter / name) in refused.json()["error"]["message"]
    async with Replica(url) as client:
        with pytest.raises(ServeError, match="only safetensors") as error:
            await client.load("agent@r0001", str(adapter))
    assert error.value.hint
    assert not error.value.retryable
    assert "POST /v1/load_lora_adapter" not in app.calls


@pytest.mark.parametrize("path", ["somebody/an-adapter-on-the-hub", "~/adapter", "/gone"])
def test_what_is_no_directory_is_not_looked_for_elsewhere(app: FakeVllm, url: str, path: str) -> None:
    refused = load(url, path)
    assert (refused.status_code, app.calls) == (404, [])
    assert "No adapter found" in refused.text


@pytest.mark.parametrize("path", [None, 7, "a\0b"])
def test_what_is_no_path_is_refused(app: FakeVllm, url: str, path: Any) -> None:
    assert (load(url, path).status_code, app.calls) == (400, [])


@pytest.mark.parametrize("body", [b"", b"[", b"[]", b"[" * 50_000, b'{"lora_path": "/tmp"'])
def test_what_is_no_request_is_refused(app: FakeVllm, url: str, body: bytes) -> None:
    headers = {"content-type": "application/json"}
    assert httpx2.post(f"{url}/v1/load_lora_adapter", content=body, headers=headers).status_code == 400
    assert app.calls == []


def test_a_folder_that_is_gone_is_not_loadable(tmp_path: Path) -> None:
    assert why_unloadable(tmp_path / "gone") == f"its directory {tmp_path / 'gone'} is not there"
    assert why_unloadable(tmp_path) == ""


@pytest.mark.parametrize("sha256", ["0" * 64, "", 7, ["x"]])
async def test_an_adapter_with_another_hash_is_not_loaded(
    app: FakeVllm, url: str, adapter: Path, sha256: object
) -> None:
    refused = load(url, str(adapter), sha256=sha256)
    assert (refused.status_code, app.calls) == (400, [])
    if sha256 and isinstance(sha256, str):
        assert f"the files in {adapter} are not those that were evaluated" in refused.text
        async with Replica(url) as client:
            with pytest.raises(ServeError, match="are not those that were evaluated") as error:
                await client.load("agent@r0001", str(adapter), sha256)
        assert "Restore its files" in error.value.hint
    assert load(url, str(adapter), sha256=tree_sha256(adapter)).status_code == 200


def test_files_are_hashed_again_when_they_have_changed(
    app: FakeVllm, url: str, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed = []
    monkeypatch.setattr(files, "tree_sha256", lambda folder: hashed.append(folder) or tree_sha256(folder))
    sha256 = tree_sha256(adapter)
    for _ in range(3):
        assert load(url, str(adapter), sha256=sha256).status_code == 200
        app.loaded.clear()
    assert hashed == [adapter]

    def in_place(weights: Path) -> None:
        weights.write_bytes(b"x")

    def of_the_same_size_and_time(weights: Path) -> None:
        other = weights.with_name("other")
        other.write_bytes(b"y")
        os.utime(other, ns=(weights.stat().st_mtime_ns,) * 2)
        other.rename(weights)

    def of_the_same_size(weights: Path) -> None:
        weights.write_bytes(b"z")
        os.utime(weights, ns=(0, 0))

    for change in (in_place, of_the_same_size_and_time, of_the_same_size):
        change(adapter / "adapter_model.safetensors")
        assert load(url, str(adapter), sha256=sha256).status_code == 400
        assert load(url, str(adapter), sha256=(sha256 := tree_sha256(adapter))).status_code == 200
        app.loaded.clear()


class SlowVllm(FakeVllm):
    """Takes a while to load, as vLLM does."""

    async def load(self, wanted: dict[str, Any], send: Any) -> None:
        await asyncio.sleep(0.05)
        await super().load(wanted, send)


@pytest.fixture
def full(adapter: Path) -> Iterator[tuple[SlowVllm, str]]:
    """A server with two slots, of which one is taken."""
    app = SlowVllm()
    with replica(app, lambda it: with_middleware(it, max_adapters=2)) as url:
        assert load(url, str(adapter)).status_code == 200
        yield app, url


async def test_no_more_adapters_are_loaded_than_there_are_slots_for(
    full: tuple[SlowVllm, str], adapter: Path
) -> None:
    app, url = full
    names = [f"agent@r{number:04}" for number in range(2, 8)]
    async with httpx2.AsyncClient(base_url=url) as client:
        wanted = [{"lora_name": name, "lora_path": str(adapter)} for name in names]
        answers = await asyncio.gather(*(client.post("/v1/load_lora_adapter", json=each) for each in wanted))
    assert sorted(answer.status_code for answer in answers) == [200, *[409] * 5]
    assert len(app.loaded) == 2
    async with Replica(url) as client:
        assert (await client.alias("agent")).max_adapters == 2
        with pytest.raises(ServeError, match=r"all 2 slots for adapters are taken: agent@r0001, agent@r") as refused:
            await client.load("by-hand", str(adapter))
        assert "serving.max_loras" in refused.value.hint
        assert not refused.value.retryable
        # What is loaded needs no slot of its own, and one that was unloaded leaves its slot to others.
        assert load(url, str(adapter)).status_code == 400
        await client.unload("agent@r0001")
        assert await client.load("by-hand", str(adapter))


@pytest.mark.parametrize("path", ["/adapters", "/adapters/"])
def test_no_other_endpoint_loads_adapters(full: tuple[SlowVllm, str], adapter: Path, path: str) -> None:
    app, url = full
    refused = httpx2.post(f"{url}{path}", json={"name": "by-hand", "src": str(adapter)})
    assert refused.status_code == 404
    assert "/v1/load_lora_adapter" in refused.json()["error"]["message"]
    assert f"POST {path}" not in app.calls
