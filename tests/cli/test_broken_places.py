"""Every command on a full disk and a read-only mount, and with a dangling link or a directory in place of a file: it
says what failed, without a traceback."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.core import TyperGroup

from flywheel import errors
from tests.cli.conftest import Run
from tests.factories.commands import root
from tests.factories.config import write_yaml
from tests.factories.judge_server import JudgeServer
from tests.waiting import SOON

pytestmark = pytest.mark.slow

DISK, NEARLY = "4m", 64 << 10
OFTEN = {("link", "state"), ("directory", "arguments")}
CODES = {0, *(code for name, code in vars(errors).items() if name.startswith("EXIT_"))}
COMMANDS: dict[str, list[str]] = {
    "audit": ["--deep", "--source {file}"],
    "backup": ["{folder}"],
    "config show": [""],
    "config schema": ["config"],
    "dead-letters": ["", "retry 1"],
    "demo": ["--dir {folder} --no-browser"],
    "deploy": ["base"],
    "docs": ["cli"],
    "doctor": [""],
    "evaluate": ["--model m --benchmark {file}", ""],
    "export": ["--format agentjet --out {file} --force", "--format verl --out {folder}"],
    "filter": ["", "--estimate", "--report {file}", "--rubric {file}", "--tasks {file}"],
    "forget": ["--conversation c --yes"],
    "ingest": ["", "--source {file}", "--out {file}"],
    "init": ["{home} --yes", "{folder} --yes", "{folder} --yes --systemd --source {file}"],
    "label": ["line-1 accept"],
    "labels": ["", "--out {file} --force", "import {file}"],
    "migrate": ["{file} --output {folder}"],
    "prune": [""],
    "restore": ["{folder}"],
    "retrieval evaluate": ["--encoder {folder}"],
    "retrieval train": ["--base {folder} --out {folder}"],
    "rollback": [""],
    "rollouts": ["debug"],
    "round": ["", "--debug", "--adapter {folder} --trained-on {file}"],
    "rubric calibrate": ["{file} --labels {file}"],
    "rubric check": ["{file}"],
    "rubric suggest": ["", "--out {file}"],
    "run": ["--once"],
    "serve": [""],
    "show": ["line-1"],
    "status": ["", "--metrics"],
    "tasks": [""],
    "tasks from-documents": ["{folder}"],
    "tasks reject": ["line-1"],
    "tasks release": ["line-1"],
    "train dpo": ["--data {file} --output {folder}"],
    "train grpo": ["--data {file} --output {folder}"],
    "train sft": ["--data {file} --output {folder}"],
    "web": ["--port 0"],
    "why": ["line-1"],
    "workflow check": ["{file}:f", "--task {file}"],
    "workflow env": ["--output {folder}", "--requirement {file}"],
}


def leaves(command: Any, name: str = "") -> Iterator[str]:
    if isinstance(command, TyperGroup) and command.commands:
        for own, each in command.commands.items():
            yield from leaves(each, f"{name} {own}".strip())
        if not command.invoke_without_command:
            return
    yield name


@pytest.fixture(autouse=True)
def no_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither does the web UI serve, nor does this process become a server."""

    async def serve(pages: Any, listening: socket.socket, announce: Any) -> None:
        listening.close()

    def become(*given: Any) -> None:
        raise SystemExit(0)

    monkeypatch.setattr("flywheel.web.server.serve", serve)
    for name in ("execv", "execve", "execvp", "execvpe"):
        monkeypatch.setattr(os, name, become)


def written(folder: Path, judge: JudgeServer) -> Path:
    """The configuration of a state, and what is read into it."""
    lines = [{"task_id": f"line-{n}", "main_query": f"What is {n} + 1?", "answer": "good"} for n in range(5)]
    (folder / "lines.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_yaml(folder / "rubric.yaml", {"id": "r", "threshold": 0.5, "criteria": [{"id": "a", "value": "It is."}]})
    return write_yaml(
        folder / "flywheel.yaml",
        {
            "sources": [{"type": "jsonl", "path": "lines.jsonl"}],
            "state": {"dir": "state"},
            "judge": {"base_url": judge.base_url, "model": "j", "max_attempts": 1},
            "filter": {"rubric": "rubric.yaml"},
            "serving": {"urls": ["http://127.0.0.1:9"]},
            "model": {"base": str(folder / "no-model")},
            "daemon": {"metrics": None},
        },
    )


def check_all(flywheel: Run, config: Path, file: Path, folder: Path) -> None:
    """Run each command; all that went wrong is printed."""
    found = []
    for name, each in COMMANDS.items():
        for arguments in each:
            given = [part.format(file=file, folder=folder, home=config.parent) for part in arguments.split()]
            takes_config = name not in ("demo", "docs", "init", "config schema", "rubric check")
            command = [*name.split(), *given, *(["-c", str(config)] if takes_config else [])]
            try:
                ran = flywheel(*command)
                if ran.code not in CODES or (ran.code and not (ran.err + ran.out).strip()):
                    found.append(f"{command}: {ran}")
            except BaseException:  # also of an assertion about its output
                found.append(f"{command}: {traceback.format_exc()}")
    print("\n".join(found))
    assert len(found) == 0


def test_each_command_is_here(flywheel: Run) -> None:
    assert set(leaves(root())) == set(COMMANDS)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system of its own."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "none", str(disk)]
    if (
        shutil.which("mount") is None
        or subprocess.run(mount, capture_output=True, timeout=SOON, check=False).returncode
    ):
        pytest.skip("no file system can be mounted here")
    try:
        yield disk
    finally:
        os.chdir(tmp_path)
        subprocess.run(["umount", "-l", str(disk)], timeout=SOON, check=True)


def fill(disk: Path, left: int) -> None:
    with (disk / "ballast").open("wb", buffering=0) as file:
        with contextlib.suppress(OSError):
            while file.write(bytes(4096)):
                pass
        file.truncate(file.tell() - left)


@pytest.mark.parametrize(
    "how",
    [
        "nearly full",
        "read-only",
        *(
            pytest.param(how, marks=pytest.mark.extended)
            for how in ("full", "full from the start", "beside the state", "nearly full beside it")
        ),
    ],
)
def test_a_disk_that_takes_nothing(flywheel: Run, tmp_path: Path, disk: Path, judge: JudgeServer, how: str) -> None:
    config = written(tmp_path if "beside" in how else disk, judge)
    os.chdir(config.parent)
    if how != "full from the start":
        assert flywheel("ingest", "-c", config).code == 0
    if how == "read-only":
        remount = ["mount", "-o", "remount,ro", str(disk)]
        subprocess.run(remount, timeout=SOON, check=True)
    else:
        fill(disk, left=NEARLY if "nearly" in how else 0)
    check_all(flywheel, config, disk / "file.jsonl", disk / "folder")


@pytest.mark.parametrize(
    ("how", "place"),
    [
        pytest.param(how, place, marks=() if (how, place) in OFTEN else pytest.mark.extended)
        for how in ("link", "directory")
        for place in ("arguments", "configuration", "state", "files of the state")
    ],
)
def test_something_else_in_place_of_a_file(
    flywheel: Run, tmp_path: Path, judge: JudgeServer, how: str, place: str
) -> None:
    def put(path: Path) -> Path:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        if how == "link":
            path.symlink_to(tmp_path / "nothing" / path.name)
        else:
            (path / "inside").mkdir(parents=True)
        return path

    config = written(tmp_path, judge)
    state = tmp_path / "state"
    assert flywheel("ingest", "-c", config).code == 0
    changes: dict[str, Callable[[], object]] = {
        "arguments": lambda: None,
        "configuration": lambda: put(config),
        "state": lambda: put(state),
        "files of the state": lambda: [put(path) for path in sorted(state.iterdir()) if path.is_file()],
    }
    changes[place]()
    odd = put(tmp_path / "odd") if place == "arguments" else tmp_path / "odd"
    check_all(flywheel, config, odd, odd)
