"""`flywheel evaluate` of base models and adapters in a real worker, beside the gate's comparison of the same ones."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from flywheel.cli.demo.questions import SYSTEM_PROMPT, questions
from flywheel.daemon.rounds.worker_process import WorkerProcess
from tests.factories.config import BOXED_RUBRIC, write_yaml
from tests.factories.judge_server import JudgeServer
from tests.factories.round import POLICY
from tests.waiting import wait_for

ROOT = Path(__file__).parents[2]
TASKS = 16
SAMPLES = 3

pytestmark = [pytest.mark.training, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def right(question: str, answer: str) -> bool:
    return bool(question) and "boxed" in answer


@pytest.fixture(scope="module")
def judge() -> Iterator[JudgeServer]:
    with JudgeServer(right) as server:
        yield server


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, judge: JudgeServer) -> Path:
    """A folder with questions to learn from and others, and the configuration. Each answer is asked for once."""
    home = tmp_path_factory.mktemp("evaluated")
    asked = random.Random(1).sample(questions(), 48 + TASKS)
    rows = [
        {
            "task_id": f"q{place}",
            "messages": [
                {"role": "system", "content": SYSTEM_PROMPT},
                {"role": "user", "content": each.text},
                {"role": "assistant", "content": f"\\boxed{{{each.answer}}}"},
            ],
        }
        for place, each in enumerate(asked)
    ]
    for name, own in (("train.jsonl", rows[:48]), ("tasks.jsonl", rows[48:])):
        (home / name).write_text("".join(json.dumps(row) + "\n" for row in own))
    write_yaml(
        home / "flywheel.yaml",
        {
            "state": {"dir": "state"},
            "model": {"base": str(POLICY)},
            "judge": {"base_url": judge.base_url, "model": "judge", "max_thread": 4},
            "filter": {"rubric": str(BOXED_RUBRIC)},
            "gate": {"samples": SAMPLES, "min_tasks": 8},
            "rollout": {"max_model_len": 256, "max_completion_tokens": 64},
            "serving": {"max_model_len": 256},
            "training": {"lora": {"r": 8}},
        },
    )
    return home


def start(folder: Path, *arguments: str | Path) -> subprocess.Popen[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("FLYWHEEL_", "OPENAI_"))}
    environment = {**kept, "PYTHONPATH": str(ROOT), "OPENAI_API_KEY": "none", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "flywheel", *map(str, arguments)]
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def flywheel(folder: Path, *arguments: str | Path) -> Any:
    process = start(folder, *arguments, "--json")
    out, err = process.communicate(timeout=900)
    assert process.returncode == 0, err
    return json.loads(out)


@dataclass(frozen=True)
class Measured:
    """What the gate says of an adapter, and what `flywheel evaluate` says."""

    gate: dict[str, Any]
    found: dict[str, Any]


BENCHMARK = ("--benchmark", "tasks.jsonl", "--samples", str(SAMPLES))


@pytest.fixture(scope="module")
def measured(folder: Path) -> Measured:
    options = ("--rubric", BOXED_RUBRIC, "--epochs", "3", "--learning-rate", "0.003", "--batch-size", "8")
    files = ("--data", "train.jsonl", "--eval-data", "tasks.jsonl", "--output", "adapter")
    gate = flywheel(folder, "train", "sft", *files, *options)["comparison"]
    return Measured(gate, flywheel(folder, "evaluate", "--model", "adapter", *BENCHMARK))


def test_an_adapter_is_measured_as_the_gate_does(folder: Path, judge: JudgeServer, measured: Measured) -> None:
    found = measured.found
    assert found["model"]["base_model"] == str(POLICY)
    assert (found["answers"], found["failed"]) == (TASKS * SAMPLES, 0)
    # The same seeds: only the order in which answers were batched differs.
    assert found["metrics"]["score"]["mean"] == pytest.approx(measured.gate["candidate_mean"], abs=0.15)
    # It is known now: nobody is asked again.
    calls = judge.calls
    again = flywheel(folder, "evaluate", "--model", "adapter", *BENCHMARK)
    assert judge.calls == calls
    assert again["metrics"] == found["metrics"]
    assert not list(folder.rglob("state.db"))


@pytest.mark.extended
def test_a_killed_evaluation_goes_on_and_compares_as_the_gate_does(
    folder: Path, judge: JudgeServer, measured: Measured
) -> None:
    """The adapter's answers are known: only the base model's are asked for."""
    known = {each.name for each in (folder / "state" / "evaluations").iterdir()}
    asked = judge.calls
    judge.hold(after=12)
    evaluate = ("evaluate", "--model", "adapter", "--against", "base", *BENCHMARK)
    with start(folder, *evaluate) as process:
        wait_for(lambda: judge.calls > asked + 12 or process.poll() is not None, "judge calls", seconds=900)
        assert process.poll() is None, process.stderr and process.stderr.read()
        [name] = {each.name for each in (folder / "state" / "evaluations").iterdir()} - known
        partial = (directory := folder / "state" / "evaluations" / name) / "partial.jsonl"
        wait_for(lambda: partial.exists() and len(partial.read_text().splitlines()) >= 12, "what was graded")
        process.send_signal(signal.SIGKILL)
    # The worker outlives the command; killed, too, it leaves what it has graded.
    for worker in WorkerProcess.strays(directory):
        os.killpg(worker.pid, signal.SIGKILL)
    judged = len(partial.read_text().splitlines())
    assert 12 <= judged < TASKS * SAMPLES
    judge.let_go()
    found = flywheel(folder, *evaluate)
    assert judge.calls - asked <= TASKS * SAMPLES + 4
    theirs, gate = found["against"]["metrics"]["score"], measured.gate
    assert found["metrics"] == measured.found["metrics"]
    assert theirs["mean"] == pytest.approx(gate["deployed_mean"], abs=0.15)
    difference = found["against"]["differences"]["score"]
    assert difference["lower"] <= gate["gain"] <= difference["upper"]
    assert gate["lower"] <= difference["difference"] <= gate["upper"]
    assert difference["difference"] == pytest.approx(found["metrics"]["score"]["mean"] - theirs["mean"])
    # Both are known now: nobody is asked again.
    calls = judge.calls
    again = flywheel(folder, *evaluate)
    assert judge.calls == calls
    assert (again["metrics"], again["against"]["flips"]) == (found["metrics"], found["against"]["flips"])
    alone = flywheel(folder, "evaluate", "--model", "base", *BENCHMARK)
    assert (alone["answers"], alone["directory"]) == (TASKS * SAMPLES, str(directory))


AGENT = """
import json, urllib.request


async def run(task, model):
    model = task["openai"]
    body = json.dumps({"model": model["model"], "messages": task["prompt"], "max_tokens": 16}).encode()
    sent = urllib.request.Request(model["base_url"] + "/chat/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(sent) as answer:
        said = json.load(answer)["choices"][0]["message"]["content"]
    return {"response": said + " boxed"}
"""


@pytest.mark.extended
def test_an_agent_of_ones_own_answers_with_a_model_of_ours(folder: Path, judge: JudgeServer) -> None:
    calls = judge.calls
    (folder / "agent.py").write_text(AGENT)
    tasks = ("--benchmark", "tasks.jsonl", "--limit", "6")
    found = flywheel(folder, "evaluate", "--model", "base", "--workflow", "agent.py:run", *tasks)
    assert (found["answers"], found["failed"]) == (6, 0)
    lines = [json.loads(line) for line in (Path(found["directory"]) / "answers.jsonl").read_text().splitlines()]
    assert all(line["answer"].endswith(" boxed") and line["program"] for line in lines)
    assert judge.calls > calls
