"""`flywheel workflow env` makes the interpreter of a workflow for AgentScope 1.x, of tiny packages with the names of
the real ones here; `tests/agents` makes one of these."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.factories.config import write_yaml

PACKAGES = (
    ("agentscope", "1.0.21"), ("agentscope", "1.0.22"), ("mcp", "1.9"), ("mcp", "2.1"), ("sqlalchemy", "2.1"),
    ("tqdm", "4.1"),
)  # fmt: skip
ROLLOUT = {
    "agent": {"workflow": "agent.py:run"}, "reward": {"workflow": 1}, "reward_function": "judge.py:judge",
    "setup": "depot.doors:unlock",
}  # fmt: skip
AGENT = """
import asyncio
import json as as_json
from typing import TYPE_CHECKING

import __main__
import prices
from prices.local import cheapest

import agentscope.agent
from flywheel.tuner import WorkflowOutput
from trinity.common.rewards.math_reward import MathBoxedRewardFn

if TYPE_CHECKING:
    import pandas
else:
    import polars
if not TYPE_CHECKING:
    import pyarrow


async def run(task, model):
    from . import siblings
    from stock.levels import level
    import yaml, tqdm
"""


def wheel(folder: Path, name: str, version: str, module: str = "") -> None:
    """A package with one empty module and a script."""
    about = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as made:
        made.writestr(f"{module or name}/__init__.py", "def main(): print('it runs')\n")
        extra = "Provides-Extra: asyncio\n" if name == "sqlalchemy" else ""
        made.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{extra}")
        made.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        made.writestr(f"{about}/entry_points.txt", f"[console_scripts]\n{name} = {module or name}:main\n")
        made.writestr(f"{about}/RECORD", "")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which pip finds packages, and nowhere else."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name, version in PACKAGES:
        wheel(folder, name, version)
    wheel(folder, "stock_of_a_shop", "1.0", "stock")
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": str(folder), "CONFIG_FILE": os.devnull}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    return folder


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    """A project with a workflow."""
    folder = tmp_path / "shop"
    (folder / "prices").mkdir(parents=True)
    (folder / "prices" / "local.py").write_text("import numpy\n")
    (folder / "agent.py").write_text(AGENT)
    (folder / "judge.py").write_text("import shapely\nasync def judge(task, response): ...\n")
    (folder / "packages.txt").write_text("stock-of-a-shop\n")
    write_yaml(folder / "flywheel.yaml", {"rollout": ROLLOUT})
    return folder


@pytest.fixture
def stuck() -> Iterator[socket.socket]:
    """An index that never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(300)
        yield server


def names(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


@pytest.mark.slow
def test_it_is_there_when_it_is_complete(
    flywheel: Run, index: Path, shop: Path, stuck: socket.socket, tmp_path: Path
) -> None:
    made = tmp_path / "made" / "agents own"
    command = ["workflow", "env", "-c", str(shop / "flywheel.yaml"), "--output", str(made)]
    port = stuck.getsockname()[1]
    offline = {"PIP_NO_INDEX": "0", "PIP_INDEX_URL": f"http://127.0.0.1:{port}/simple"}
    process = subprocess.Popen(
        [sys.executable, "-m", "flywheel", *command], env=os.environ | offline, start_new_session=True
    )
    with stuck.accept()[0]:  # pip asks for a package
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert not made.exists()
        os.killpg(process.pid, signal.SIGKILL)

    ran = flywheel(*command, "--requirement", shop / "packages.txt")
    assert (ran.code, ran.out.splitlines()) == (0, [
        "missing: depot, which the settings name",
        f"missing: numpy, which {shop}/prices/local.py imports",
        f"missing: polars, which {shop}/agent.py imports",
        f"missing: pyarrow, which {shop}/agent.py imports",
        f"missing: shapely, which {shop}/judge.py imports",
        f"missing: yaml, which {shop}/agent.py imports",
        f"rollout.agent.python: {made}/bin/python",
    ]), ran.err  # fmt: skip
    assert names(made.parent) == [made.name], "what the killed one left is removed"
    look = "import importlib.metadata as m; print(*map(m.version, ('agentscope', 'mcp', 'tqdm', 'stock-of-a-shop')))"
    said = subprocess.run([made / "bin" / "python", "-c", look], capture_output=True, text=True, check=True)
    assert said.stdout.split() == ["1.0.21", "1.9", "4.1", "1.0"]
    for script, told in ((["agentscope"], "it runs"), (["pip", "--version"], str(made))):
        said = subprocess.run([made / "bin" / script[0], *script[1:]], capture_output=True, text=True, check=True)
        assert told in said.stdout
    assert f"VIRTUAL_ENV={str(made)!r}" in (made / "bin" / "activate").read_text().replace('"', "'")


@pytest.mark.slow
def test_what_pip_says_is_the_last_line(flywheel: Run, index: Path, shop: Path, tmp_path: Path) -> None:
    made = tmp_path / "made" / "agent"
    (shop / "old.txt").write_text("mcp>=2\n")
    ran = flywheel("workflow", "env", f"{shop}/agent.py:run", "--output", made, "--requirement", shop / "old.txt")
    assert (ran.code, ran.out) == (1, "")
    [line] = ran.err.splitlines()
    assert line.startswith(f"flywheel: cannot make the environment {made}: Cannot install mcp<2 and mcp>=2 because")
    assert line.endswith("leaves room for agentscope==1.0.21, mcp<2, sqlalchemy[asyncio], tqdm.")
    assert names(made.parent) == []


def test_a_folder_that_exists_stays_as_it_is(flywheel: Run, shop: Path, tmp_path: Path) -> None:
    before = names(shop)
    for output, there in ((shop, shop), (tmp_path / "link", tmp_path / "nowhere")):
        if output != shop:
            output.symlink_to(there)
        ran = flywheel("workflow", "env", f"{shop}/agent.py:run", "--output", output)
        assert (ran.code, ran.out) == (1, "")
        assert f"cannot make the environment {output}: it exists already" in ran.err
    assert names(shop) == before


@pytest.mark.parametrize(
    ("arguments", "code", "why"),
    [
        ([], 78, "rollout.agent names no workflow. Name one there, or as FILE.py:function on the command line."),
        (["--set", "rollout.agent={command: [node, agent.mjs]}"], 78, "rollout.agent names no workflow."),
        (["none.py:run"], 78, "none.py: No such file or directory."),
        (["broken.py:run"], 78, "broken.py: '(' was never closed (broken.py, line 2)."),
        (["agent.py:run", "--requirement", "none.txt"], 2, "none.txt"),
    ],
)
def test_what_cannot_be_read_is_said_before_anything_is_made(
    flywheel: Run, tmp_path: Path, arguments: list[str], code: int, why: str
) -> None:
    (tmp_path / "broken.py").write_text("import os\nprint(\n")
    (tmp_path / "agent.py").write_text(AGENT)
    ran = flywheel("workflow", "env", *arguments)
    assert (ran.code, ran.out) == (code, "")
    assert why in " ".join(ran.err.split())
    assert names(tmp_path) == ["agent.py", "broken.py"]
