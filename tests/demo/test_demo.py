"""The demo as a user runs it: the whole wheel on real parts, and its end."""

from __future__ import annotations

import contextlib
import json
import signal
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import yaml

from demo import panel
from demo.__main__ import SCENE
from flywheel.cli.demo import recorded_round
from flywheel.config.file import load, parse
from tests.factories.demo_run import ROOT, belongings, end, start
from tests.waiting import wait_for


def daemons(folder: Path) -> list[psutil.Process]:
    """Those of `belongings` that are `flywheel run`."""
    found = []
    for process in belongings(folder):
        with contextlib.suppress(psutil.Error):
            if "run" in process.cmdline():
                found.append(process)
    return found


def test_the_shipped_configuration_is_taken(tmp_path: Path) -> None:
    raw = SCENE.settings(tmp_path, "http://127.0.0.1:1/v1", 2)
    file = tmp_path / "flywheel.yaml"
    file.write_text(yaml.safe_dump(raw))
    config = load(file)
    assert config.sources[0].path == tmp_path / "studio.sqlite"
    assert config.state_dir == tmp_path / "state"
    assert config.serving.urls == ["http://127.0.0.1:2"]
    assert (Path(config.model.base) / "config.json").is_file()
    assert config.filter.rubric.is_file()
    assert load(ROOT / "configs" / "demo.yaml").model.alias == config.model.alias == "demo-agent"
    assert config.deploy.watch.new_share == 1
    watched = parse(replace(SCENE, watches=True).settings(tmp_path, "http://127.0.0.1:1/v1", 2), "watched", tmp_path)
    assert (watched.deploy.watch.new_share, watched.deploy.watch.until_units) == (0.5, 120)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "started"),
    [
        ("demo", "run"),
        pytest.param("demo", "vllm", marks=pytest.mark.long),
        pytest.param("demo.agent", "vllm", marks=pytest.mark.long),
        pytest.param("demo.real_model", "vllm", marks=pytest.mark.long),
    ],
)
def test_ctrl_c_leaves_no_process(tmp_path: Path, program: str, started: str) -> None:
    process = start(tmp_path, program=program)
    try:

        def is_started() -> bool:
            # vLLM's own children are the ones that could stay behind.
            return len(belongings(tmp_path)) >= 4 if started == "vllm" else bool(daemons(tmp_path))

        wait_for(lambda: is_started() or process.poll() is not None, "the demo to start", seconds=300)
        assert process.poll() is None, process.communicate()[0]
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=120)
        assert process.returncode == 130
        assert "nothing runs any more" in " ".join(said.split())
        assert belongings(tmp_path) == []
    finally:
        end(process, tmp_path)


@pytest.mark.slow
def test_a_part_that_dies_ends_the_demo_with_its_reason(tmp_path: Path) -> None:
    process = start(tmp_path)
    try:
        wait_for(lambda: daemons(tmp_path) or process.poll() is not None, "the daemon", seconds=300)
        assert process.poll() is None, process.communicate()[0]
        daemons(tmp_path)[0].kill()
        said, _ = process.communicate(timeout=120)
        assert process.returncode == 1
        assert "flywheel run was ended by signal 9" in " ".join(said.split())
        assert belongings(tmp_path) == []
    finally:
        end(process, tmp_path)


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.long
@pytest.mark.timeout(1200)
def test_one_turn_of_the_wheel(tmp_path: Path) -> None:
    runs, recording = tmp_path / "runs", tmp_path / "recorded.tar.xz"
    process = start(runs, "--record", str(recording), "--minutes", "15")
    try:
        said, _ = process.communicate(timeout=1100)
        logs = "\n".join(f"{log}:\n{log.read_text()[-2000:]}" for log in runs.glob("*/run.log"))
        assert process.returncode == 0, f"{said}\n{logs}"
        assert belongings(runs) == []
        [folder] = runs.iterdir()
        status = json.loads((folder / "status.json").read_text())
        assert status["balanced"] is True
        assert status["promoted"] == 1
        base, first = panel.lines(status)
        assert (base.version, first.version) == ("base", status["deployment"]["adapter"])
        assert base.acceptance is not None and first.acceptance is not None
        assert 0.1 < base.acceptance < 0.45
        assert first.acceptance > base.acceptance
        assert base.held_out is not None and first.held_out is not None
        assert first.held_out > base.held_out
        assert first.version in said and "held-out score" in said
        with recording.open("rb") as packed:
            recorded = recorded_round.read(packed).round
        assert recorded.result.round_id == first.version and len(recorded.train) >= 32
    finally:
        end(process, runs)


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.long
@pytest.mark.timeout(2000)
@pytest.mark.parametrize("rollouts", ["recorded", "workflow"])
def test_an_agent_learns_to_call_its_tool(tmp_path: Path, rollouts: str) -> None:
    """Its policy acts with recorded results of the tool, or the agent itself acts with its tool."""
    options = ["--workflow"] if rollouts == "workflow" else []
    process = start(tmp_path, "--rounds", "2", "--minutes", "30", "--json", *options, program="demo.agent")
    try:
        said, _ = process.communicate(timeout=1900)
        logs = "\n".join(f"{log}:\n{log.read_text()[-2000:]}" for log in tmp_path.glob("*/run.log"))
        assert process.returncode == 0, f"{said}\n{logs}"
        assert belongings(tmp_path) == []
        figures = json.loads(said.splitlines()[-1])
        assert 0.2 < figures["calls_before"] < 0.4
        assert figures["calls_after"] >= 0.7
        assert figures["acceptance_before"] < 0.4
        assert figures["acceptance_after"] >= 0.6
        assert figures["promoted"] == 2
        [folder] = tmp_path.iterdir()
        status = json.loads((folder / "status.json").read_text())
        assert status["balanced"] is True
        for trained in (each for each in status["rounds"] if each["state"] == "promoted"):
            lines = [json.loads(line) for line in (Path(trained["dir"]) / "metrics.jsonl").read_text().splitlines()]
            steps = [line for line in lines if line.get("event") == "step"]
            assert steps
            if rollouts == "workflow":
                assert not any(sum(step["program"]["failures"].values()) for step in steps)
            else:
                assert not any("program" in step for step in steps)
        tasks = [json.loads(line) for line in (folder / "state" / "tasks.jsonl").read_text().splitlines()]
        assert all(task["metadata"]["prompt_source"] == "calls" for task in tasks)
        assert all(task["metadata"]["prompt_exact"] for task in tasks)
    finally:
        end(process, tmp_path)
