"""`flywheel workflow check` says what the user's agent did, and what a round would fail on."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from flywheel.records.states import Split
from tests.agents.running import EXAMPLES
from tests.agents.scripted_model import Recorder, ScriptedModel
from tests.cli.conftest import Ran, Run
from tests.factories.documented_json import compare, documented
from tests.factories.state import write_state
from tests.factories.trace import replies_on
from tests.factories.verdict import put_judged
from tests.serving.fake_vllm import running

AGENT = f"{EXAMPLES / 'workflow' / 'agent.py'}:run"
TASKS = EXAMPLES / "workflow" / "tasks.jsonl"
# The import of AgentScope takes seconds, and these functions need no model of it.
OTHERS = """
import asyncio
import json
import sys
import threading
import urllib.error
import urllib.request

sys.modules["agentscope"] = None


def ask(task, model=None, path="chat/completions", seconds=100):
    at = task["openai"]
    body = {"model": model or at["model"], "messages": [{"role": "user", "content": task["main_query"]}]}
    request = urllib.request.Request(f"{at['base_url']}/{path}", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=seconds) as reply:
        return json.load(reply)["choices"][0]["message"]["content"]


async def plain(task, model):
    return {"response": ask(task), "reward": float(task["colour"] == task["metadata"]["colour"] == "red")}


async def hurried(task, model):
    try:
        ask({**task, "main_query": "slow"}, seconds=3)
    except TimeoutError:
        pass
    return {"response": ask(task)}


async def makes_the_best_of_it(task, model):
    try:
        ask(task, "small")
    except urllib.error.HTTPError:
        pass
    return {"response": ask(task)}


async def other_model(task, model):
    return {"response": ask(task, "gpt-9")}


async def many_models(task, model):
    said = [ask(task), ask(task, "gpt-9"), ask(task, "gpt-9"), ask(task, "small")]
    try:
        ask(task, "gpt-4o")
    except urllib.error.HTTPError as error:
        said.append(json.load(error)["error"]["message"])
    return {"response": json.dumps(said)}


async def two_targets(task, model):
    return {"response": "".join(ask({**task, "openai": each}) for each in task["models"].values())}


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


async def pooled(task, model):
    return {"response": await asyncio.to_thread(ask, task)}


async def timed(task, model):
    threading.Timer(1000, ask, [task]).start()
    return {"response": ask(task)}
"""
REPEATED = """
import os
import random
import time

clients = []
seen = ["Hello"]


def note():
    with open("pids", "a") as file:
        file.write(f"{os.getpid()} ")
    return str(open("pids").read().count(" "))


async def alike(task, model):
    note()
    return {"response": ask(task)}


async def keeps(task, model):
    seen.append("again")
    return {"response": ask({**task, "main_query": " ".join(seen[:-1])})}


async def keeps_a_client(task, model):
    clients.append(task["openai"])
    return {"response": ask({**task, "openai": clients[0]})}


async def by_chance(task, model):
    return {"response": ask({**task, "main_query": f"{task['main_query']} {random.random()}"})}


async def keeps_beside_the_time(task, model):
    seen.append("again")
    return {"response": ask({**task, "main_query": f"{time.time_ns()} {' '.join(seen[:-1])}"})}


async def through_a_file(task, model):
    return {"response": ask({**task, "main_query": "This is run " + note()})}
"""
JUDGE = """
import re

from ajet.task_judge.base_judge import BaseJudge


class SameBox(BaseJudge):
    def compute_reward(self, workflow_task, workflow_output):
        box = re.search(r"\\\\boxed\\{([^}]*)\\}", workflow_output.metadata["final_answer"])
        is_right = box is not None and box.group(1) == workflow_task.task.metadata["answer"]
        return float(is_right), is_right


class Harsh(BaseJudge):
    def compute_reward(self, workflow_task, workflow_output):
        return 0.0


class Needs(BaseJudge):
    def compute_reward(self, workflow_task, workflow_output):
        return workflow_output.metadata["score"]
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


@pytest.mark.slow
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
    assert (ran.json["problems"], ran.json["models"]) == ([], {"my-agent": 2})
    shown = flywheel("workflow", "check", AGENT, "--task", TASKS, "--url", url)
    assert "2. my-agent: 5 messages, tools multiply;" in shown.out
    assert "reward    1 (the agent returns a response and a reward: the rubric's score counts, and" in shown.out


@pytest.mark.slow
def test_a_number_alone_is_the_reward(flywheel: Run, url: str, others: Path, row: Path) -> None:
    ran = flywheel("workflow", "check", f"{others}:lost", "--task", row, "--url", url)
    assert ran.code == 0, ran.err
    assert "reward    0.5 (the agent returns a reward and no response: its reward alone counts" in ran.out
    assert "A round can use it." in ran.out


@pytest.mark.slow
def test_threads_that_stay_after_a_run_are_listed_and_the_own_keys_of_a_row_reach_the_agent(
    flywheel: Run, url: str, others: Path, row: Path
) -> None:
    ran = flywheel("workflow", "check", f"{others}:pooled", "--task", row, "--url", url)
    assert ran.code == 0, ran.err
    assert "note      after the run, its process has 1 thread that runs none of its code: asyncio_0." in ran.out
    ran = flywheel("workflow", "check", f"{others}:plain", "--task", row, "--url", url, "--json")
    assert (ran.code, ran.json["reward"], ran.json["response"]) == (0, 1.0, "You asked: Hello")
    assert ran.json["notes"] == []
    ran = flywheel("workflow", "check", f"{others}:streaming", "--task", row, "--url", url, "--json")
    assert (ran.code, ran.json["response"]) == (0, "data:"), ran.err
    [call] = ran.json["calls"]
    assert (call["stream"], call["tools"], call["finish_reason"]) == (True, [], "stop")


@pytest.fixture
def with_judge(flywheel: Run, url: str, others: Path, tmp_path: Path) -> Callable[..., Ran]:
    """Checks a workflow on a state with accepted answers, of which one has nested braces."""
    answers = [r"\boxed{7}", r"\boxed{\frac{1}{2}}", "It is 4.", r"\boxed{1} or \boxed{2}", r"\boxed{8}"]
    replies = [replace(one, answer=answer) for one, answer in zip(replies_on(Split.TRAIN, 5), answers, strict=True)]
    write_state(tmp_path / "state", put_judged, *replies)
    (tmp_path / "judges.py").write_text(JUDGE)

    def check(judge: str, *arguments: str) -> Ran:
        settings = {
            "state": {"dir": "state"},
            "serving": {"urls": [url]},
            "rollout": {
                "agent": {"workflow": f"{others}:plain"},
                "reward_function": f"judges.py->{judge}",
                "reward": {"rubric": 0, "workflow": 1},
            },
        }
        (tmp_path / "flywheel.yaml").write_text(json.dumps(settings))
        return flywheel("workflow", "check", "--task", tmp_path / "rows.jsonl", *arguments)

    return check


@pytest.mark.slow
def test_each_target_is_asked_by_its_own_name(flywheel: Run, others: Path, row: Path, tmp_path: Path) -> None:
    server = Recorder(ScriptedModel())
    with running(server) as url:
        settings = {
            "serving": {"urls": [url]},
            "targets": {name: {"agents": [name], "alias": f"{name}-model"} for name in ("ours", "theirs")},
            "rollout": {"agent": {"workflow": f"{others}:two_targets"}},
        }
        (tmp_path / "flywheel.yaml").write_text(json.dumps(settings))
        ran = flywheel("workflow", "check", "--task", row, "--json")
    assert ran.code == 0, ran.err
    asked = ["ours-model", "theirs-model"]
    assert [call["model"] for call in ran.json["calls"]] == asked
    assert [each["model"] for each in server.requests] == asked * 6


@pytest.mark.slow
def test_names_of_models_are_listed_and_answered_as_in_a_round(
    flywheel: Run, others: Path, row: Path, tmp_path: Path
) -> None:
    policy, user = Recorder(ScriptedModel()), Recorder(ScriptedModel())
    with running(policy) as url, running(user) as user_url:
        rollout = {
            "agent": {"workflow": f"{others}:many_models"},
            "auxiliary_models": {"user": {"base_url": f"{user_url}/v1", "model": "small"}},
            "models": {"gpt-4o": "refuse"},
        }
        (tmp_path / "flywheel.yaml").write_text(json.dumps({"serving": {"urls": [url]}, "rollout": rollout}))
        ran = flywheel("workflow", "check", "--task", row, "--json")
        shown = flywheel("workflow", "check", "--task", row)
    assert ran.code == 0, ran.err
    assert ran.json["models"] == {"my-agent": 1, "gpt-9": 2, "small": 1, "gpt-4o": 1}
    [note] = ran.json["notes"]
    assert note.startswith("the agent asks for gpt-9 2 times, which is neither an alias nor the base nor an")
    assert json.loads(ran.json["response"])[4] == "the model gpt-4o is refused (rollout.models)"
    # Calls of the policy, as a round trains on them, in six runs each; the server knows its alias alone.
    assert [each["model"] for each in policy.requests] == ["my-agent"] * 36
    assert (len(ran.json["calls"]), [each["model"] for each in user.requests]) == (3, ["small"] * 12)
    assert "models    my-agent 1 time, gpt-9 2 times, small 1 time, gpt-4o 1 time\n" in shown.out
    assert f"note      {note}\n" in shown.out


@pytest.mark.slow
def test_an_agent_that_gives_up_a_call_or_whose_other_model_fails_cannot_be_used(
    flywheel: Run, others: Path, row: Path, tmp_path: Path
) -> None:
    """Whatever it returns: in a round, each such rollout is without a reward."""
    model, is_over = ScriptedModel(), threading.Event()

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        first = await receive()
        if b"slow" in first.get("body", b""):
            await asyncio.to_thread(is_over.wait)
        messages = iter([first])

        async def again() -> Any:
            return next(messages, None) or await receive()

        await model(scope, again, send)

    with running(slow) as url:
        for function, why in (
            ("hurried", "nor has a retry of it (abandoned_call): it was given up before the engine had answered"),
            ("makes_the_best_of_it", "(HTTP status 502): rollout.auxiliary_models.user does not answer"),
        ):
            user = {"base_url": "http://127.0.0.1:9/v1", "model": "small"}
            rollout = {"agent": {"workflow": f"{others}:{function}"}, "auxiliary_models": {"user": user}}
            (tmp_path / "flywheel.yaml").write_text(json.dumps({"serving": {"urls": [url]}, "rollout": rollout}))
            ran = flywheel("workflow", "check", "--task", row, "--json")
            assert ran.code == 1
            assert why in ran.json["problems"][0]
            [failed] = [call for call in ran.json["calls"] if call["status"] != 200]
            assert failed["error"] == ran.json["calls"][0]["error"] != ""
        is_over.set()
        for thread in threading.enumerate():
            if thread.name == "judging":
                thread.join(60)


@pytest.mark.slow
def test_accepted_answers_that_a_judge_cannot_match_are_named(with_judge: Callable[..., Ran], row: Path) -> None:
    ran = with_judge("SameBox")
    assert ran.code == 0, ran.err
    assert "judge     rewards 2 of 5 accepted answers" in ran.out
    for why in (
        "1 not: the box has nested braces, and the pattern stops at the first } (t-",
        "1 not: there is no \\boxed{…} (t-",
        "1 not: there are several boxes (t-",
    ):
        assert why in ran.out
    assert with_judge("SameBox", "--answers", "1", "--json").json["judge"] == {"answers": 1, "unmatched": {}}
    assert with_judge("SameBox", "--answers", "0", "--json").json["judge"] is None


@pytest.mark.slow
def test_a_judge_that_rewards_no_accepted_answer(with_judge: Callable[..., Ran], row: Path) -> None:
    ran = with_judge("Harsh")
    assert ran.code == 1
    assert "its judge rewards none of 5 accepted answers" in ran.err
    # What it needs may be what only the workflow returns.
    ran = with_judge("Needs")
    assert "3 not: the reward function raised KeyError: 'score'" in ran.out
    assert "its judge rewards none" not in ran.err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "problem"),
    [
        ("not_a_number", "the agent failed (not_a_number)"),
        ("timed", "the agent failed (left_threads): it left a thread running: Thread-"),
    ],
)
def test_what_a_round_would_fail_on(
    flywheel: Run, url: str, others: Path, row: Path, function: str, problem: str
) -> None:
    ran = flywheel("workflow", "check", f"{others}:{function}", "--task", row, "--url", url)
    assert ran.code == 1
    assert problem in ran.err
    assert "A round can use it." not in ran.out


@pytest.fixture
def repeated(flywheel: Run, url: str, row: Path, tmp_path: Path) -> Callable[..., Ran]:
    """Checks a function whose runs are compared."""
    (tmp_path / "repeated.py").write_text(OTHERS + REPEATED)
    return lambda name, *options: flywheel(
        "workflow", "check", f"{tmp_path}/repeated.py:{name}", "--task", row, "--url", url, *options
    )


@pytest.mark.slow
def test_the_same_task_runs_three_times_in_one_process_and_three_times_in_fresh_ones(
    repeated: Callable[..., Ran], tmp_path: Path
) -> None:
    ran = repeated("alike", "--json")
    assert ran.code == 0, ran.err
    assert ran.json["isolation"]["first_message"] == "same"
    assert ran.json["isolation"]["process_seconds"] > 0
    assert (len(ran.json["calls"]), ran.json["notes"]) == (1, [])
    one, *fresh = pids = (tmp_path / "pids").read_text().split()
    assert (len(pids), fresh[:2], len({*pids})) == (6, [one, one], 4)
    said = repeated("alike").out
    assert "isolation first message of runs in one process and in fresh ones: same; rollout.agent.isolation: " in said
    assert re.search(r"rollout\.agent\.isolation: run costs \d+\.\d s per run", said)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "found", "notes"),
    [
        (
            "keeps",
            "differs in one process",
            [
                "state seems to leak from one run to the next in the same process: the first message was",
                '"content": "Hello"}]',
                ': "Hello again"}]',
                "rollout.agent.isolation: run",
            ],
        ),
        # As in a round, the address of a run is refused when it has ended.
        (
            "keeps_a_client",
            "differs in one process",
            [
                "a further run of the task failed: the agent failed (raised): it raised HTTPError: ",
                "and then none at the address of the run",
            ],
        ),
        (
            "keeps_beside_the_time",
            "differs in one process",
            ["differs in fresh processes, too (time", "Hello again"],
        ),
        ("by_chance", "differs in fresh processes", ["differs in fresh processes, too (time, chance"]),
        ("through_a_file", "differs in fresh processes", ["This is run 1", "This is run 4"]),
    ],
)
def test_runs_that_begin_differently_are_said(
    repeated: Callable[..., Ran], function: str, found: str, notes: list[str]
) -> None:
    ran = repeated(function)
    assert (ran.code, f"in fresh ones: {found}; " in ran.out) == (0, True), ran.out + ran.err
    for text in notes:
        assert text in ran.out, text


@pytest.mark.slow
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
    for wrong, code, why in (
        ("http://127.0.0.1:9", 1, "Start `flywheel serve`"),
        ("127.0.0.1:9", 78, "127.0.0.1:9 is no HTTP URL"),
    ):
        ran = flywheel("workflow", "check", f"{others}:plain", "--task", row, "--url", wrong)
        assert (ran.code, why in ran.err) == (code, True), ran.err


@pytest.mark.slow
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
    assert "the agent made no call of the model" in ran.json["problems"][0]
