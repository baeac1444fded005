"""Which adapters reach vLLM: directories of safetensors, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx2
import pytest

from flywheel.adapter_files import unsafe_weights
from flywheel.errors import ServeError
from flywheel.serving.replica_client import Replica
from tests.serving.fake_vllm import FakeVllm


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    folder = tmp_path / "r0001"
    folder.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors", "README.md"):
        (folder / name).touch()
    return folder


def load(url: str, path: object) -> httpx2.Response:
    return httpx2.post(f"{url}/v1/load_lora_adapter", json={"lora_name": "agent@r0001", "lora_path": path})


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


def test_weights_that_cannot_be_looked_at_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="gone"):
        unsafe_weights(tmp_path / "gone")
    assert unsafe_weights(tmp_path) == ""
