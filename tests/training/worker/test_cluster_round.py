"""A round on a Ray cluster whose nodes cannot read the worker's files, and of which one is removed in the middle of a
step.

The worker's node has no room for the round. Two nodes have a process of the trainer each, one of them with an engine,
and a third has the other engine. All have an empty file system of their own where the worker has the round's
directory.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from flywheel.cli.demo import judge
from flywheel.config.file import Config
from flywheel.records.round import AdapterRef, RoundSpec
from flywheel.system.files import tree_sha256
from flywheel.system.process_folder import PREFIX
from flywheel.training.data.graded_rollouts import PARTIAL_FILE
from tests.factories.worker import GROUP, PROMPTS, Done, lines, run
from tests.factories.worker import spec as round_spec
from tests.waiting import wait_for

pytestmark = [pytest.mark.long, pytest.mark.training, pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 6
RAY = [sys.executable, "-m", "ray.scripts.scripts"]
BLIND = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"']


def end(process: subprocess.Popen[bytes]) -> None:
    """Ray's processes and what they started, whoever their parent is by now."""
    members = [*below(process), psutil.Process(process.pid)]
    for member in members:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    psutil.wait_procs(members, timeout=30)
    process.wait()


def below(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


class Nodes:
    """Of a Ray cluster. `blind` is a folder in which nodes see nothing."""

    def __init__(self, folder: Path, blind: Path) -> None:
        self._folder, self.blind = folder, blind
        self.processes: list[subprocess.Popen[bytes]] = []
        self.authentication = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        self.address = ""

    def start(self, *options: str) -> subprocess.Popen[bytes]:
        is_head = not self.address
        where = ["--head", "--port=0", f"--temp-dir={self._folder}", "--include-dashboard=false"]
        command = [
            *RAY,
            "start",
            "--block",
            "--object-store-memory=200000000",
            *options,
        ]
        command += where if is_head else [f"--address={self.address}"]
        output = self._folder / f"node-{len(self.processes)}.log"
        with output.open("wb") as log:
            process = subprocess.Popen(
                command if is_head else [*BLIND, str(self.blind), *command],
                env={**os.environ, **self.authentication, "HF_HUB_OFFLINE": "1"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self.processes.append(process)
        if is_head:
            current = self._folder / "ray_current_cluster"
            self.address = wait_for(lambda: current.exists() and current.read_text().strip(), "the cluster")
        # A round is placed on the nodes that are there.
        wait_for(lambda: "Ray runtime started" in output.read_text(), "the node")
        return process

    def copies(self) -> list[Path]:
        """Folders of processes on its nodes."""
        return list(self._folder.glob(f"**/{PREFIX}*"))


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    blind = tmp_path_factory.mktemp("worker")
    if subprocess.run([*BLIND, str(blind), "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may not make a mount namespace, without which nodes see the worker's files")
    # A socket's path has at most 107 characters.
    with contextlib.ExitStack() as stack:
        folder = Path(f"/tmp/fwc-{secrets.token_hex(4)}")
        folder.mkdir(mode=0o700)
        stack.callback(subprocess.run, ["rm", "-rf", str(folder)], check=True)
        made = Nodes(folder, blind)
        stack.callback(lambda: [end(each) for each in made.processes if each.poll() is None])
        made.start("--num-cpus=0")
        yield made


def parent(directory: Path) -> AdapterRef:
    """An adapter with an effect, where only the worker can read it."""
    from flywheel.config.training import LoraSettings
    from tests.factories.policy import load_policy, save_adapter
    from tests.factories.round import POLICY

    directory.mkdir()
    save_adapter(load_policy(str(POLICY), None, LoraSettings(r=8, alpha=16), seed=3), directory / "adapter")
    return AdapterRef(name="r0000", path=str(directory / "adapter"), sha256=tree_sha256(directory / "adapter"))


def settings(judge_url: str, address: str) -> dict[str, Any]:
    given = round_spec(judge_url).settings
    given["rollout"] |= {"engines": 2}
    given["training"] |= {"steps": STEPS, "workers": 2}
    given["ray"] |= {"address": address}
    return Config.model_validate(given).model_dump(mode="json")


@dataclass(frozen=True)
class Ended:
    round: Done
    trainers: list[int]
    """The number of processes of the trainer on each node."""
    killed: list[str]
    """The commands of the processes of the node that was removed."""


@pytest.fixture(scope="module")
def ended(nodes: Nodes) -> Ended:
    # As in Ray's placement group: what shares a GPU (here only a number) is one node's.
    nodes.start("--num-cpus=2", "--num-gpus=1")
    others = [nodes.start("--num-cpus=1", "--num-gpus=1") for _ in range(2)]
    killed: list[str] = []
    trainers: list[int] = []
    own = nodes.blind / "r0001"

    def remove() -> None:
        def engine() -> tuple[subprocess.Popen[bytes], psutil.Process] | None:
            """The engine that is alone on its node, and the node."""
            assert not (own / "error.json").exists(), (own / "error.json").read_text()
            found = ((node, each) for node in others for each in below(node) if "ray::Engine" in command(each))
            return next(found, None)

        def is_generating() -> bool:
            assert not (own / "error.json").exists(), (own / "error.json").read_text()
            return (own / PARTIAL_FILE).exists()

        def is_stuck() -> bool:
            """Whether the other engine has ended and this one has rollouts that it will not end."""
            wait_for(is_generating, "rollouts", seconds=400)
            process.suspend()
            with contextlib.suppress(AssertionError):
                wait_for(lambda: not is_generating(), "the end of the step", seconds=8)
                process.resume()
                return False
            return True

        lost, process = wait_for(engine, "an engine alone on a node")
        wait_for(is_stuck, "a step in which it has rollouts", seconds=400)
        trainers.extend(sum("ray::Trainer" in command(each) for each in below(node)) for node in nodes.processes)
        killed.extend(map(command, below(lost)))
        end(lost)

    with judge.running() as url:
        made: RoundSpec = round_spec(url, parent=parent(nodes.blind / "r0000"), settings=settings(url, nodes.address))
        with pytest.MonkeyPatch.context() as patch:
            for name, value in nodes.authentication.items():
                patch.setenv(name, value)
            return Ended(run(own, made, remove), trainers, killed)


def test_the_round_is_whole_although_no_node_reads_its_directory(ended: Ended) -> None:
    done = ended.round
    assert sorted(ended.trainers) == [0, 0, 1, 1]
    assert done.code == 0, done.stderr
    result = done.result
    assert result.outcome == "trained"
    assert result.adapter is not None
    assert tree_sha256(Path(result.adapter.path)) == result.adapter.sha256
    assert result.comparison is not None
    assert result.probe is not None
    assert [line["step"] for line in done.steps] == list(range(1, STEPS + 1))
    # Nothing twice and nothing missing.
    assert len(done.rollouts) == STEPS * PROMPTS * GROUP
    assert all(line["logprob_gap"] < 0.01 for line in done.steps)
    assert len(lines(done.directory / "usage.jsonl")) > STEPS


def test_a_node_that_is_removed_costs_its_rollouts_and_not_the_round(ended: Ended) -> None:
    done = ended.round
    assert "ray::Engine" in " ".join(ended.killed)
    lost = [line["rollouts_lost"] for line in done.steps]
    assert sum(count > 0 for count in lost) == 1
    # They were made again, by the other engine.
    assert 0 < sum(lost) <= PROMPTS * GROUP
    assert all(line["rollouts"] == PROMPTS * GROUP and line["undecided"] == 0 for line in done.steps)
    log = (done.directory / "worker.log").read_text()
    assert "a rollout engine is lost, and 1 left" in log


def test_nothing_of_the_round_stays_on_its_nodes(ended: Ended, nodes: Nodes) -> None:
    # A node that is removed has no process left that could do it.
    assert len(nodes.copies()) <= 1
    assert ended.round.left_running == []
