"""The scenes of `make demo-real` as a user plays them: settings, traces, and the whole of both."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from demo.calculator import Calculator
from demo.real_model import SCENES
from demo.support_desk.desk import SupportDesk
from demo.two_turns import TEACHER
from flywheel.cli.demo import judge
from flywheel.config.file import load
from flywheel.judge.rubric.file import load_rubric
from flywheel.sources.ingestion import Ingestion
from flywheel.store.kernel.database import Store
from tests.conftest import ROOT
from tests.factories.demo_run import belongings, end, start

TOTAL_SECONDS = 20 * 60
# In a process of its own, since OpenTelemetry's provider of tracers is set once in a process.
RECORDING = """
import asyncio, json, sys
from pathlib import Path
from demo.real_model import SCENES
from demo.studio import StudioDatabase
from demo.tracing import traced
from demo.two_turns import TEACHER
from flywheel.cli.demo import judge
scene = SCENES[sys.argv[1]](Path(sys.argv[2]), 0, print)
with judge.running(complete=scene.teach) as url, traced(StudioDatabase(Path(sys.argv[2]) / "studio.sqlite")) as spans:
    answers = asyncio.run(scene.traffic(url, TEACHER, scene.recorded[:12], spans))
print(json.dumps(dict(zip(scene.recorded, answers))))
"""


@pytest.mark.parametrize("name", SCENES)
def test_the_settings_of_both_turns_are_valid_and_the_phases_fit_into_twenty_minutes(
    name: str, tmp_path: Path
) -> None:
    scene = SCENES[name](tmp_path, 0, print)
    assert sum(scene.budgets.values()) <= TOTAL_SECONDS
    settings = scene.settings("http://127.0.0.1:1/v1", 2)
    first = load(scene.write("turn-1.yaml", scene.first_turn(settings)))
    second = load(scene.write("turn-2.yaml", scene.second_turn(settings)))
    assert (first.training.stages, second.training.stages) == (["sft"], ["grpo"])
    assert first.gate.samples is not None and second.gate.samples is not None
    assert first.gate.samples < second.gate.samples
    assert first.sources[0].models.teachers == [TEACHER] and not second.sources[0].models.teachers
    assert first.state_dir == second.state_dir and first.serving.urls == second.serving.urls


def test_grpo_asks_again_what_the_desk_does_not_imitate(tmp_path: Path) -> None:
    scene = SupportDesk(tmp_path, 0, print)
    settings = scene.settings("http://127.0.0.1:1/v1", 2)
    files = [load(scene.write("any.yaml", each)).filter.rubric for each in (settings, scene.second_turn(settings))]
    strict, lenient = (load_rubric(file) for file in files if file is not None)
    assert strict.criteria == lenient.criteria and strict.threshold > lenient.threshold


@pytest.mark.parametrize("name", SCENES)
def test_held_out_questions_are_asked_nowhere_else(name: str, tmp_path: Path) -> None:
    scene, other = SCENES[name](tmp_path, 3, print), SCENES[name](tmp_path, 3, print, development=True)
    assert len(set(scene.held_out)) == len(scene.held_out) >= 96
    assert not {*scene.held_out} & {*scene.recorded, *scene.asked, *other.held_out}


def test_the_calculators_large_model_is_wrong_in_the_stated_share(tmp_path: Path) -> None:
    scene = Calculator(tmp_path, 0, print)
    wrong = 0
    for question in (*scene.recorded, *scene.asked):
        messages = [{"role": "user", "content": question}]
        [choice] = scene.teach({"messages": messages})["choices"]
        calls = choice["message"].get("tool_calls")
        if calls:
            given = json.loads(calls[0]["function"]["arguments"])
            wrong += not judge.examine(question, f"\\boxed{{{given['a'] + given['b']}}}").right
            messages += [choice["message"], {"role": "tool", "content": "77"}]
            [choice] = scene.teach({"messages": messages})["choices"]
            assert choice["message"]["content"] == "\\boxed{77}"
        else:
            wrong += not judge.examine(question, choice["message"]["content"]).right
    assert 0.08 <= wrong / len((*scene.recorded, *scene.asked)) <= 0.22


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENES)
async def test_traces_of_genuine_agents_become_tasks_with_exact_prompts(name: str, tmp_path: Path) -> None:
    recording = [sys.executable, "-c", RECORDING, name, str(tmp_path)]
    recorded = subprocess.run(recording, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True)
    answers = json.loads(recorded.stdout)
    settings = SCENES[name](tmp_path, 0, print).settings("http://127.0.0.1:1/v1", 2)
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
    assert {task["main_query"]: task["metadata"]["answer"] for task in tasks} == answers
    assert len(answers) == 12
    assert all(task["metadata"]["prompt_exact"] is not False for task in tasks)
    steps = [step for task in tasks for step in json.loads(task["metadata"]["trajectory_json"])]
    assert any("tool_calls" in step for step in steps) == (name == "agent")


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("name", "share"), [("desk", "fields"), ("agent", "right")])
def test_the_small_model_learns_from_recorded_replies_and_then_by_itself(
    name: str, share: str, small_model_path: Path, tmp_path: Path
) -> None:
    process = start(tmp_path, "--json", "--scene", name, program="demo.real_model")
    try:
        said, _ = process.communicate(timeout=3500)
        assert process.returncode == 0, said
        assert belongings(tmp_path) == []
        figures = json.loads(said.splitlines()[-1])
        base, first, second = figures["measured"].values()
        assert base["sampled"]["phrases"] >= 48
        assert base["sampled"][share]["mean"] <= 0.05
        assert first["sampled"][share]["interval"][0] > base["sampled"][share]["interval"][1] + 0.2
        # GRPO may be found not to be better; then the first adapter goes on serving.
        sft, grpo = figures["rounds"]
        assert sft["state"] == "promoted" and grpo["state"] in ("promoted", "rejected")
        assert second["sampled"][share]["interval"][1] >= first["sampled"][share]["mean"]
        assert all(signal >= 5 for each in figures["signals"] for signal in each.values())
        assert figures["total_seconds"] <= TOTAL_SECONDS
    finally:
        end(process, tmp_path)
