"""The agents of the demo with a tool: what they send is what its policy was taught, and what is counted of them."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import jinja2
import pytest
import yaml
from tokenizers import Tokenizer

from demo import agent
from demo.tool_agent import AgentUsers
from demo.tool_prompt import ADD, REMINDER
from demo.users import TrafficError
from demo.wheel import Scene
from flywheel.cli.demo.questions import SYSTEM_PROMPT, solve
from flywheel.config.file import load
from flywheel.config.training import AgentProgramSettings
from flywheel.training.program.agent_program import AgentProgram, ModelEndpoint
from flywheel.training.program.program_pool import ProgramPool
from tests.agents.scripted_model import Recorder, ScriptedModel
from tests.serving.fake_vllm import running
from tests.waiting import until

POLICY = Path(__file__).parent.parent.parent / "demo" / "tool_policy"
TOKENIZER = Tokenizer.from_file(str(POLICY / "tokenizer.json"))

Json = dict[str, Any]


async def requests_of(dialogues: int) -> list[Json]:
    """What agents send for so many dialogues, all of which are answered."""
    recorder = Recorder(ScriptedModel())
    with running(recorder) as url:
        users = AgentUsers(url, "demo-agent", rate=500, seed=1)
        asking = asyncio.create_task(users.run())
        await until(lambda: len(recorder.requests) >= 2 * dialogues or asking.done(), "all dialogues")
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
    assert users.failed == 0
    return recorder.requests


def said(message: Json) -> Json:
    """A message as the template is given it: the text of its parts, and the arguments of its calls as values."""
    content = message.get("content") or ""
    text = content if isinstance(content, str) else "\n".join(part["text"] for part in content)
    calls = [
        {"type": "function", "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
        for call in message.get("tool_calls", ())
    ]
    return {"role": message["role"], "content": text, **({"tool_calls": calls} if calls else {})}


async def requests_of_the_workflow() -> list[Json]:
    """What the agent sends in a rollout of `--workflow`."""
    recorder = Recorder(ScriptedModel())
    pool = ProgramPool(AgentProgram(workflow=agent.WORKFLOW.rollout["agent"]["workflow"]), workers=1)
    try:
        with running(recorder) as url:
            models = {"demo-agent": ModelEndpoint(f"{url}/v1", "demo-agent")}
            result = await pool.run({"main_query": "What is 123 plus 456?"}, models, "demo-agent")
    finally:
        pool.close()
    assert (result.error, result.response) == ("", "The result is 579.")
    return recorder.requests


@pytest.mark.slow
@pytest.mark.parametrize("scene", ["service", "workflow"])
async def test_agents_send_what_the_policy_was_taught(scene: str) -> None:
    reminder = re.escape(REMINDER).replace(r"\{time\}", r"[0-9T:-]{19}").replace(r"\{zone\}", r"[\w/+-]+")
    sent = await (requests_of(4) if scene == "service" else requests_of_the_workflow())
    assert all(request["tools"] == [ADD] for request in sent)
    finished = [request["messages"] for request in sent if len(request["messages"]) == 5]
    assert finished
    for messages in finished:
        system, question, reminded, called, result = map(said, messages)
        assert system == {"role": "system", "content": SYSTEM_PROMPT}
        assert re.fullmatch(reminder, reminded["content"])
        assert reminded["role"] == question["role"] == "user"
        assert result == {"role": "tool", "content": str(solve(question["content"]))}

        first = tokens([system, question, reminded])
        second = tokens([system, question, reminded, called, result])
        arguments = json.dumps(called["tool_calls"][0]["function"]["arguments"])
        spoken = f'<tool_call>\n{{"name": "add", "arguments": {arguments}}}\n</tool_call><|im_end|>'
        spoken_ids = TOKENIZER.encode(spoken).ids
        assert second[: len(first) + len(spoken_ids)] == first + spoken_ids
        assert len(second) < 160


def tokens(messages: list[Json]) -> list[int]:
    """The prompt as transformers renders it, without the seconds to import that."""
    environment = jinja2.Environment()
    environment.filters["tojson"] = json.dumps
    template = environment.from_string((POLICY / "chat_template.jinja").read_text())
    return list(TOKENIZER.encode(template.render(messages=messages, tools=[ADD], add_generation_prompt=True)).ids)


async def test_a_server_that_fails_ends_the_traffic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("demo.users.MAX_FAILURES", 1)
    with running(ScriptedModel()) as url:
        users = AgentUsers(f"{url}/nothing-here", "demo-agent", rate=100)
        with pytest.raises(TrafficError, match="questions to demo-agent failed in a row"):
            await asyncio.wait_for(users.run(), 60)


@pytest.mark.parametrize("scene", [agent.SCENE, agent.WORKFLOW], ids=["recorded", "workflow"])
def test_the_shipped_configuration_is_taken(tmp_path: Path, scene: Scene) -> None:
    file = tmp_path / "flywheel.yaml"
    file.write_text(yaml.safe_dump(scene.settings(tmp_path, "http://127.0.0.1:1/v1", 2)))
    config = load(file)
    assert config.state_dir == tmp_path / "state"
    assert config.serving.urls == ["http://127.0.0.1:2"]
    assert (Path(config.model.base) / "config.json").is_file()
    if scene is agent.SCENE:
        assert config.rollout.agent is None
    else:
        assert isinstance(config.rollout.agent, AgentProgramSettings)
        assert config.rollout.agent.workflow == f"{POLICY.parent / 'tool_workflow.py'}:run"


def line(adapter: str, *steps: Json) -> str:
    return json.dumps({"metadata": {"adapter": adapter, "trajectory_json": json.dumps(steps)}})


CALLED = ({"role": "assistant", "tool_calls": [{}]}, {"role": "tool", "content": "3"})


def test_the_figures_are_of_the_first_and_the_last_version(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    lines = [line(""), line("policy", *CALLED), line(""), line("demo-agent@r0002", *CALLED), line("demo-agent@r0001")]
    (tmp_path / "state" / "tasks.jsonl").write_text("\n".join(lines) + "\n")
    status = {
        "promoted": 2,
        "rounds": [
            {"round": "r0002", "state": "promoted", "parent": "r0001", "adapter": "r0002", "comparison": None},
            {"round": "r0001", "state": "promoted", "parent": None, "adapter": "r0001", "comparison": None},
        ],
        "by_adapter": [
            {"adapter": "", "accepted": 1, "rejected": 3, "undecided": 0},
            {"adapter": "demo-agent@r0002", "accepted": 3, "rejected": 1, "undecided": 0},
        ],
    }
    assert agent.figures(status, tmp_path) == {
        "calls_before": pytest.approx(1 / 3),
        "calls_after": 1.0,
        "acceptance_before": 0.25,
        "acceptance_after": 0.75,
        "promoted": 2,
    }
    shown = agent.table(status, tmp_path)
    assert [column.header for column in shown.columns][:2] == ["adapter", "calls the tool"]
    assert list(shown.columns[1].cells) == ["0.33", "0.00", "1.00"]
