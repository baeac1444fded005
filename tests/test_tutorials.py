"""Every command of the tutorials and of the cookbook can be typed, in the order in which it stands there.

What needs a GPU, a server or minutes runs with `--help`, or as `make --dry-run`. Everything else runs as it stands.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import yaml

from demo.ports import held_port
from flywheel.cli.demo import recorded_round
from tests.web.recorded_state import unpack

ROOT = Path(__file__).parent.parent
TUTORIALS = ROOT / "docs" / "start"
COOKBOOK = ROOT / "docs" / "cookbook.md"
INSTALLED = {". .venv/bin/activate": ":"}
WHOLE = ("make demo", "make demo-real", "make demo-agent", "make demo-agent DEMO_ARGS=--workflow")
"""`make test-all` runs these, in tests/demo."""
JUDGE = "python -m flywheel.cli.demo.judge"


def commands(page: Path) -> Iterator[str]:
    for block in re.findall(r"^```console\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        for line in re.findall(r"^\$ ((?:.*\\\n)*.*)$", block, re.MULTILINE):
            yield " ".join(line.replace("\\\n", " ").split())


def outputs(page: Path) -> Iterator[str]:
    """The lines of the blocks that have no language: what commands print."""
    for language, shown in re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        if not language:
            yield from shown.splitlines()


def typed(line: str) -> str:
    """The line, with what a test cannot do replaced by the nearest to it."""
    line = INSTALLED.get(line, line)
    if line.startswith("make "):
        # The shell's directory may be another one by then.
        return f"make --dry-run -C {shlex.quote(str(ROOT))} {line.removeprefix('make ')} >/dev/null"
    if line.startswith("flywheel web"):
        return f"{{ timeout -s INT 5 {line} --port 0 || [ $? = 124 ] || [ $? = 130 ]; }}"
    return line


def helped(line: str) -> str:
    """The command's help, in place of the command."""
    words = line.removesuffix(" &").split()
    return f"{' '.join(words[: 3 if words[1] == 'retrieval' else 2])} --help >/dev/null"


def until_open(port: str) -> str:
    connecting = f"import socket; socket.create_connection(('127.0.0.1', {port}), 1)"
    return f'until python -c "{connecting}" 2>/dev/null; do sleep 0.2; done'


def run(lines: list[str], home: Path, **environment: str) -> str:
    """What a shell that stops at the first error prints."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("FLYWHEEL_", "OPENAI_", "XDG_"))
    }
    script = "\n".join(["set -eu", "trap 'kill $(jobs -p) 2>/dev/null || :' EXIT", *lines])
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=ROOT,
        env={**kept, "PATH": path, "HOME": str(home), "PYTHONPATH": str(ROOT), "COLUMNS": "80", **environment},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.extended
@pytest.mark.slow
def test_judge_100_replies(tmp_path: Path, free_port: int) -> None:
    port = str(free_port)
    page = TUTORIALS / "judge-100-replies.md"
    lines = []
    for line in commands(page):
        lines.append(typed(line).replace("4401", port))
        if line.startswith(JUDGE):
            lines.append(until_open(port))
        if line.startswith("cp "):
            lines.append(f"sed -i s/4401/{port}/ ~/judge-100/flywheel.yaml")
    told = run(lines, tmp_path)
    printed = {line.strip() for line in told.splitlines()}
    # Paths, durations and token counts may be others.
    varying = re.compile(r"~/judge-100|longest read|tokens")
    assert {line.strip() for line in outputs(page) if not varying.search(line)} <= printed
    assert "100 judged: 48 accepted, 52 rejected" in told
    assert "4 labelled replies in labels.jsonl" in told


@pytest.mark.parametrize(
    ("page", "folder"), [("judge-100-replies.md", "judge_100"), ("first-verdict.md", "first_verdict")]
)
def test_the_files_of_the_tutorial_are_those_that_the_page_shows(page: str, folder: str) -> None:
    config, rubric = map(yaml.safe_load, re.findall(r"```yaml\n(.*?)```", (TUTORIALS / page).read_text(), re.DOTALL))
    assert config == yaml.safe_load((ROOT / "examples" / folder / "flywheel.yaml").read_text())
    shipped = yaml.safe_load((ROOT / "examples" / folder / "rubric.yaml").read_text())
    assert rubric == {key: value for key, value in shipped.items() if key != "examples"}


def test_the_100_replies_are_some_of_those_that_the_demo_shows() -> None:
    lines = [
        json.loads(line) for line in (ROOT / "examples" / "judge_100" / "replies.jsonl").read_text().splitlines()
    ]
    assert len(lines) == 100
    assert sum("adapter" in line["metadata"] for line in lines) == 50
    with closing(sqlite3.connect(":memory:")) as database:
        database.executescript(recorded_round.shipped().files[recorded_round.REPLIES_FILE].decode())
        [[names]] = database.execute(
            "SELECT group_concat(name) FROM sqlite_master WHERE name LIKE '%span%' AND type = 'table'"
        )
        recorded = "".join(str(row) for row in database.execute(f"SELECT * FROM {names.split(',')[0]}"))
    for line in lines:
        assert line["question"] in recorded


@pytest.mark.slow
def test_first_verdict(tmp_path: Path) -> None:
    page = TUTORIALS / "first-verdict.md"
    with held_port() as judging, held_port() as receiving:
        lines = []
        for line in commands(page):
            lines.append(typed(line).replace("4401", str(judging)).replace("4318", str(receiving)))
            if line.startswith("cp "):
                lines.append(f"sed -i 's/4401/{judging}/; s/4318/{receiving}/' ~/first-verdict/flywheel.yaml")
            if line.startswith("curl "):
                lines.append("until flywheel tasks --state accepted | grep -q '12 plus 30'; do sleep 0.5; done")
        told = run(lines, tmp_path)
    when = re.compile(r" \(\S+ \S+ UTC\)")
    assert {when.sub("", line) for line in outputs(page)} <= {when.sub("", line) for line in told.splitlines()}


HERE = ("flywheel init", "export ", "make ", ". ")
"""Of the tutorial for a GPU, what runs as it stands."""
OWN_VLLM = ("pip install --no-deps .", "vllm serve ")
"""tests/serving/server/test_vllm_by_hand.py runs these."""


@pytest.mark.slow
def test_first_round(tmp_path: Path) -> None:
    lines = []
    for line in commands(TUTORIALS / "first-round.md"):
        if line.startswith(OWN_VLLM):
            continue
        if line.startswith(HERE):
            lines.append(typed(line))
        elif line == "flywheel doctor":
            # It finds what the page starts next, and a key that no judge takes.
            lines.append("flywheel doctor >~/doctor.txt || [ $? = 1 ]; grep -q '^failed *server' ~/doctor.txt")
        elif line.startswith("flywheel "):
            lines.append(helped(line))
        elif " python " in line:
            assert (ROOT / line.split()[2]).is_file()
        else:
            assert line == "nvidia-smi"
    run(lines, tmp_path, HF_HUB_OFFLINE="1", HTTPS_PROXY="http://127.0.0.1:9", NO_PROXY="127.0.0.1,localhost")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "shown"),
    [
        ("tool-agent.md", ["r0002", "add"]),
        pytest.param("small-model.md", ["r0002"], marks=pytest.mark.extended),
    ],
)
def test_commands_on_the_files_of_a_demo(tmp_path: Path, page: str, shown: list[str]) -> None:
    config = unpack(tmp_path)
    settings = {"state": {"dir": str(config.state_dir)}, "model": {"alias": config.model.alias}}
    (tmp_path / "flywheel.yaml").write_text(yaml.safe_dump(settings))
    lines = [typed(line) for line in commands(TUTORIALS / page) if not line.startswith("export FLYWHEEL_CONFIG=")]
    told = run(lines, tmp_path, FLYWHEEL_CONFIG=str(tmp_path / "flywheel.yaml"))
    assert all(text in told for text in shown)


@pytest.mark.slow
def test_the_cookbook(tmp_path: Path, free_port: int) -> None:
    port = str(free_port)
    lines = []
    for line in commands(COOKBOOK):
        if line.startswith("flywheel retrieval"):
            lines.append(helped(line))
        elif line.startswith("flywheel filter"):
            lines.append(f"{line} --set judge.base_url=http://127.0.0.1:{port}/v1")
            too_high = line.replace("0.4", "0.8")
            lines.append(f"{too_high} --set judge.base_url=http://127.0.0.1:{port}/v1 2>&1 || [ $? = 100 ]")
        else:
            lines.append(typed(line).replace("4401", port))
        if line.startswith(JUDGE):
            lines.append(until_open(port))
    assert "48 of 100" in run(lines, tmp_path)
    assert not (ROOT / "examples" / "judge_100" / "state").exists()


def test_every_tutorial_has_a_test() -> None:
    assert {path.name for path in TUTORIALS.glob("*.md")} == {
        "judge-100-replies.md", "first-verdict.md", "first-round.md", "tool-agent.md", "small-model.md",
    }  # fmt: skip
