"""The support desk as a user runs it: settings, traces, and the whole of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from demo.support_desk import models
from demo.support_desk.messages import TEACHER
from demo.support_desk.scene import BUDGETS, TEMPLATE, SupportDesk
from demo.wheel import settings_of
from flywheel.config import load
from flywheel.judge.rubric.file import load_rubric
from flywheel.sources.ingestion import Ingestion
from flywheel.store.kernel.database import Store
from tests.demo.test_demo import ROOT, belongings, end, start

TOTAL_SECONDS = 20 * 60
# In a process of its own, since OpenTelemetry's provider of tracers is set once in a process.
RECORDING = """
import asyncio, json, sys
from pathlib import Path
from demo.studio import StudioDatabase
from demo.support_desk import desk, models
from demo.support_desk.messages import TEACHER
from flywheel.cli.demo import judge
messages = TEACHER.draw(12, 0)
with judge.running(complete=models.Models(messages, 0).teach) as url:
    with desk.traced(StudioDatabase(Path(sys.argv[1]))):
        print(json.dumps(asyncio.run(desk.answers(url, models.TEACHER, messages))))
"""


def test_the_settings_of_both_turns_are_valid(tmp_path: Path) -> None:
    scene = SupportDesk(tmp_path, 0, print)
    settings = settings_of(TEMPLATE, tmp_path, "http://127.0.0.1:1/v1", 2)
    first = load(scene.write("turn-1.yaml", settings))
    second = load(scene.write("turn-2.yaml", scene.second_turn(settings)))
    assert (first.training.stages, second.training.stages) == (["sft"], ["grpo"])
    assert first.sources[0].models.teachers == [models.TEACHER] and not second.sources[0].models.teachers
    assert first.state_dir == second.state_dir and first.serving.urls == second.serving.urls
    assert first.filter.rubric is not None and second.filter.rubric is not None
    strict, lenient = load_rubric(first.filter.rubric), load_rubric(second.filter.rubric)
    assert strict.criteria == lenient.criteria and strict.threshold > lenient.threshold


def test_the_phases_fit_into_twenty_minutes() -> None:
    assert sum(BUDGETS.values()) <= TOTAL_SECONDS


async def test_traces_of_genuine_agents_become_tasks_with_exact_prompts(tmp_path: Path) -> None:
    recording = [sys.executable, "-c", RECORDING, str(tmp_path / "studio.sqlite")]
    recorded = subprocess.run(recording, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True)
    messages, answers = TEACHER.draw(12, 0), json.loads(recorded.stdout)
    settings = settings_of(TEMPLATE, tmp_path, "http://127.0.0.1:1/v1", 2)
    (tmp_path / "flywheel.yaml").write_text(yaml.safe_dump(settings))
    config = load(tmp_path / "flywheel.yaml")
    store = await Store.open(config.state_dir)
    ingestion = Ingestion(store, config)
    try:
        await ingestion.run(final=True)
    finally:
        await ingestion.close()
        await store.close()
    tasks = [json.loads(line) for line in (config.state_dir / "tasks.jsonl").read_text().splitlines()]
    assert {(task["main_query"], task["metadata"]["answer"]) for task in tasks} == {
        (message.text, answer) for message, answer in zip(messages, answers, strict=True)
    }
    assert all(task["metadata"]["prompt_exact"] is not False for task in tasks)


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_small_model_learns_from_recorded_replies_and_then_by_itself(
    small_model_path: Path, tmp_path: Path
) -> None:
    process = start(tmp_path, "--json", program="demo.support_desk")
    try:
        said, _ = process.communicate(timeout=3500)
        assert process.returncode == 0, said
        assert belongings(tmp_path) == []
        figures = json.loads(said.splitlines()[-1])
        base, first, second = figures["measured"].values()
        assert base["sampled"]["phrases"] >= 48
        assert base["sampled"]["exact"]["mean"] <= 0.05
        assert first["sampled"]["fields"]["interval"][0] > base["sampled"]["fields"]["interval"][1] + 0.2
        # GRPO may be found not to be better; then the first adapter goes on serving.
        sft, grpo = figures["rounds"]
        assert sft["state"] == "promoted" and grpo["state"] in ("promoted", "rejected")
        assert second["sampled"]["fields"]["interval"][1] > first["sampled"]["fields"]["mean"]
        assert all(signal >= 5 for each in figures["signals"] for signal in each.values())
        assert figures["total_seconds"] <= TOTAL_SECONDS
    finally:
        end(process, tmp_path)
