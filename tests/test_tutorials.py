"""Every command of the tutorials can be typed, in the order in which it stands there.

What needs a GPU, a server or minutes runs with `--help`, or as `make --dry-run`. Everything else runs as it stands.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.web.recorded_state import unpack

ROOT = Path(__file__).parent.parent
TUTORIALS = ROOT / "docs" / "tutorials"
INSTALLED = {". .venv/bin/activate": ":"}
WHOLE = ("make demo", "make demo-real", "make demo-agent", "make demo-agent DEMO_ARGS=--workflow")
"""`make test-all` runs these, in tests/demo."""


def commands(page: str) -> Iterator[str]:
    for block in re.findall(r"^```console\n(.*?)^```", (TUTORIALS / page).read_text(), re.MULTILINE | re.DOTALL):
        yield from re.findall(r"^\$ (.*)$", block, re.MULTILINE)


def typed(line: str) -> str:
    """The line, with what a test cannot do replaced by the nearest to it."""
    line = INSTALLED.get(line, line)
    if line.startswith("make "):
        # The shell's directory may be another one by then.
        return f"make --dry-run -C {shlex.quote(str(ROOT))} {line.removeprefix('make ')} >/dev/null"
    if line.startswith("flywheel web"):
        return f"{{ timeout -s INT 5 {line} --port 0 || [ $? = 124 ] || [ $? = 130 ]; }}"
    return line


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
    lines = []
    for line in commands("judge-100-replies.md"):
        lines.append(typed(line).replace("4401", port))
        if line.startswith("python -m flywheel.cli.demo.judge"):
            connecting = f"import socket; socket.create_connection(('127.0.0.1', {port}), 1)"
            lines.append(f'until python -c "{connecting}" 2>/dev/null; do sleep 0.2; done')
        if line.startswith("cp "):
            lines.append(f"sed -i s/4401/{port}/ ~/judge-100/flywheel.yaml")
    told = run(lines, tmp_path)
    page = (TUTORIALS / "judge-100-replies.md").read_text()
    printed = {line.strip() for line in told.splitlines()}
    for language, shown in re.findall(r"^```(\w*)\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        if not language:
            # Paths, durations and token counts may be others.
            varying = re.compile(r"~/judge-100|longest read|tokens")
            assert {line.strip() for line in shown.splitlines() if not varying.search(line)} <= printed
    assert "100 judged: 61 accepted, 39 rejected" in told
    assert "4 labelled replies in labels.jsonl" in told


def test_the_files_of_the_tutorial_are_those_that_the_page_shows() -> None:
    page = (TUTORIALS / "judge-100-replies.md").read_text()
    folder = ROOT / "examples" / "judge_100"
    config, rubric = map(yaml.safe_load, re.findall(r"```yaml\n(.*?)```", page, re.DOTALL))
    assert config == yaml.safe_load((folder / "flywheel.yaml").read_text())
    shipped = yaml.safe_load((folder / "rubric.yaml").read_text())
    assert rubric == {key: value for key, value in shipped.items() if key != "examples"}


HERE = ("flywheel init", "export ", "make ", ". ")
"""Of the tutorial for a GPU, what runs as it stands."""


@pytest.mark.slow
def test_first_round(tmp_path: Path) -> None:
    lines = []
    for line in commands("first-round.md"):
        if line.startswith(HERE):
            lines.append(typed(line))
        elif line == "flywheel doctor":
            # It finds what the page starts next, and a key that no judge takes.
            lines.append("flywheel doctor >~/doctor.txt || [ $? = 1 ]; grep -q '^failed *server' ~/doctor.txt")
        elif line.startswith("flywheel "):
            words = line.removesuffix(" &").split()
            lines.append(f"{' '.join(words[:2])} --help >/dev/null")
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
    lines = [typed(line) for line in commands(page) if not line.startswith("export FLYWHEEL_CONFIG=")]
    told = run(lines, tmp_path, FLYWHEEL_CONFIG=str(tmp_path / "flywheel.yaml"))
    assert all(text in told for text in shown)


def test_every_tutorial_has_a_test() -> None:
    assert {path.name for path in TUTORIALS.glob("*.md")} == {
        "judge-100-replies.md", "first-round.md", "tool-agent.md", "small-model.md",
    }  # fmt: skip
