"""`flywheel workflow check` says what the user's agent did, and what a round would fail on."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agents.running import EXAMPLES
from tests.agents.scripted_model import Recorder, ScriptedModel
from tests.cli.conftest import Run
from tests.cli.test_documented_json import compare, documented
from tests.serving.fake_vllm import running

AGENT = f"{EXAMPLES / 'workflow' / 'agent.py'}:run"
TASKS = EXAMPLES / "workflow" / "tasks.jsonl"
OTHERS = """
import json
import urllib.request


def ask(task, model=None, path="chat/completions"):
    at = task["openai"]
    body = {"model": model or at["model"], "messages": [{"role": "user", "content": task["main_query"]}]}
    request = urllib.request.Request(f"{at['base_url']}/{path}", json.dumps(body).encode())
    with urllib.request.urlopen(request) as reply:
        return json.load(reply)["choices"][0]["message"]["content"]


async def plain(task, model):
    return {"response": ask(task), "reward": float(task["colour"] == task["metadata"]["colour"] == "red")}


async def silent(task, model):
    return {"response": "408"}


async def other_model(task, model):
    return {"response": ask(task, "gpt-9")}


async def streaming(task, model):
    at = task["openai"]
    body = {"model": at["model"], "messages": [{"role": "user", "content": "Hello"}], "stream": True, "tools": 5}
    request = urllib.request.Request(f"{at['base_url']}/chat/completions", json.dumps(body).encode())
    with urllib.request.urlopen(request) as reply:
        return {"response": reply.read().decode()[:5]}


async def lost(task, model):
    try:
        ask(task, path="completions")
    except OSError:
        ask({**task, "main_query": "Hello"})
    return 0.5


async def not_a_number(task, model):
    return {"response": ask(task), "reward": float("nan")}


def sync(task, model):
    return 1.0
"""


@pytest.fixture
def url() -> Iterator[str]:
    with running(Recorder(ScriptedModel())) as url:
        yield url


@pytest.fixture
def others(tmp_path: Path) -> Path:
    (tmp_path / "others.py").write_text(OTHERS)
    return tmp_path / "others.py"


@pytest.fixture
def row(tmp_path: Path) -> Path:
    """A task without an answer, with keys of its own."""
    line = {"question": "Hello", "colour": "red", "metadata": {"colour": "red"}}
    (tmp_path / "rows.jsonl").write_text(json.dumps(line) + "\n")
    return tmp_path / "rows.jsonl"


def test_an_agent_with_a_tool(flywheel: Run, url: str) -> None:
    ran = flywheel("workflow", "check", AGENT, "--task", TASKS, "--url", url, "--json")
    assert ran.code == 0, ran.err
    compare(ran.json, documented("workflow check"), "workflow check")
    assert [call["messages"] for call in ran.json["calls"]] == [3, 5]
    assert [call["tools"] for call in ran.json["calls"]] == [["multiply"]] * 2
    assert [call["finish_reason"] for call in ran.json["calls"]] == ["tool_calls", "stop"]
    assert (ran.json["response"], ran.json["reward"], ran.json["metrics"]) == (
        "The result is 408.",
        1.0,
        {"tool_calls": 1.0},
    )
    assert ran.json["problems"] == []
    shown = flywheel("workflow", "check", AGENT, "--task", TASKS, "--url", url)
    assert "2. my-agent: 5 messages, tools multiply;" in shown.out
    assert "not used: rollout.reward.workflow is 0" in shown.out


def test_the_own_keys_of_a_row_reach_the_agent(flywheel: Run, url: str, others: Path, row: Path) -> None:
    ran = flywheel("workflow", "check", f"{others}:plain", "--task", row, "--url", url, "--json")
    assert (ran.code, ran.json["reward"], ran.json["response"]) == (0, 1.0, "You asked: Hello")


def test_a_streamed_answer_is_read_and_passed_on(flywheel: Run, url: str, others: Path, row: Path) -> None:
    ran = flywheel("workflow", "check", f"{others}:streaming", "--task", row, "--url", url, "--json")
    assert (ran.code, ran.json["response"]) == (0, "data:"), ran.err
    [call] = ran.json["calls"]
    assert (call["stream"], call["tools"], call["finish_reason"]) == (True, [], "stop")


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        ("silent", "it did not call the model"),
        ("other_model", "it asked for the model gpt-9, and the one that is trained is my-agent"),
        ("not_a_number", "the run failed (not_a_number)"),
        ("lost", "the run failed (no_response)"),
    ],
)
def test_what_a_round_would_fail_on(
    flywheel: Run, url: str, others: Path, row: Path, function: str, problem: str
) -> None:
    ran = flywheel("workflow", "check", f"{others}:{function}", "--task", row, "--url", url)
    assert ran.code == 1
    assert problem in ran.err
    assert "A round can use it." not in ran.out


def test_what_is_refused_before_a_run(flywheel: Run, url: str, others: Path, row: Path, tmp_path: Path) -> None:
    for arguments, code, why in (
        ((f"{others}:sync", "--task", row), 78, "not an async function"),
        ((f"{others}:plain", "--task", tmp_path / "none.jsonl"), 78, "neither a file nor a task of the state"),
        ((f"{others}:plain",), 78, "the state has no accepted task"),
        (("--task", row), 78, "rollout.agent names no workflow and no command"),
        ((f"{others}:plain", "--task", others), 78, "it is not JSON"),
    ):
        ran = flywheel("workflow", "check", *arguments, "--url", url)
        assert (ran.code, why in ran.err) == (code, True), ran.err
    ran = flywheel("workflow", "check", f"{others}:plain", "--task", row, "--url", "http://127.0.0.1:9")
    assert ran.code == 1
    assert "Start `flywheel serve`" in ran.err


def test_a_command_on_a_task_of_the_state(flywheel: Run, url: str, round_due: None, tmp_path: Path) -> None:
    program = 'import json, sys; task = json.load(sys.stdin); print(json.dumps({"response": task["main_query"]}))'
    settings = {
        "state": {"dir": "state"},
        "serving": {"urls": [url]},
        "rollout": {"agent": {"command": [sys.executable, "-c", program]}},
    }
    (tmp_path / "flywheel.yaml").write_text(json.dumps(settings))
    ran = flywheel("workflow", "check", "--json")
    assert ran.code == 1
    assert ran.json["response"] == ran.json["response"].strip() != ""
    assert "it did not call the model" in ran.json["problems"][0]
