"""The examples run as they are, and what they send is what the tests of the call log rely on."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests.agents.running import EXAMPLES, run
from tests.agents.scripted_model import Recorder, ScriptedModel, text_of
from tests.daemon.following import Following
from tests.factories.recording_server import Server, configuration, exported
from tests.serving.fake_vllm import running, with_middleware
from tests.waiting import until


def sent_by(program: str, *questions: str) -> tuple[list[str], list[dict[str, Any]]]:
    """What a program prints, and what it sends."""
    sent = Recorder(with_middleware(ScriptedModel(), FLYWHEEL_ALIAS="my-agent"))
    with running(sent) as url:
        return run(EXAMPLES / program, *questions, server=url), sent.requests


@pytest.mark.slow
def test_agentscope_calls_its_tool_and_sends_the_runtime_reminder() -> None:
    said, requests = sent_by("agentscope/agent.py", "What is 12 times 34?", "Thank you")
    assert said == ["The result is 408.", "You asked: Thank you"]
    assert [len(request["messages"]) for request in requests] == [3, 5, 7]
    assert "<system-reminder>" in str(requests[0]["messages"][2])


class FirstTool(ScriptedModel):
    """It calls the first tool that is offered with the number that was asked for, and repeats the result."""

    def reply(self, wanted: dict[str, Any]) -> dict[str, Any]:
        last = wanted["messages"][-1]
        if last["role"] == "tool":
            return {"content": text_of(last)}
        function = {"name": wanted["tools"][0]["function"]["name"], "arguments": '{"number": 7}'}
        return {"content": None, "tool_calls": [{"id": "call-1", "type": "function", "function": function}]}


@pytest.mark.slow
def test_an_agent_with_a_thousand_tools_offers_those_that_it_finds() -> None:
    sent = Recorder(with_middleware(FirstTool(), FLYWHEEL_ALIAS="my-agent"))
    with running(sent) as url:
        program = EXAMPLES / "tool_retrieval" / "agent.py"
        said = run(program, "Please cancel the hotel booking 7", "Now pay the salary 7", server=url)
    assert said == ["Done: cancel hotel booking 7.", "Done: pay salary 7."]
    offered = [[tool["function"]["name"] for tool in request["tools"]] for request in sent.requests]
    assert [len(set(names)) for names in offered] == [10] * 4
    assert [names[0] for names in offered] == ["cancel_hotel_booking"] * 2 + ["pay_salary"] * 2


@pytest.mark.slow
def test_openai_client() -> None:
    said, requests = sent_by("openai_client/chat.py", "Hello", "Who?")
    assert said == ["You asked: Hello", "You asked: Who?"]
    assert [len(request["messages"]) for request in requests] == [2, 4]


@pytest.mark.slow
async def test_a_program_with_spans_of_its_own(server: Server, tmp_path: Path, free_port: int) -> None:
    config = configuration(tmp_path, server, {"type": "otlp", "listen": f"127.0.0.1:{free_port}"})
    async with Following(config):
        traces = f"http://127.0.0.1:{free_port}/v1/traces"
        program = EXAMPLES / "own_spans" / "chat.py"
        said = await asyncio.to_thread(run, program, "Hello", "Who?", server=server.url, traces=traces)
        await until(lambda: len(exported(config)) == 2, "two tasks")
    lines = exported(config)
    assert [line["answer"] for line in lines] == said == ["You asked: Hello", "You asked: Who?"]
    assert len({line["metadata"]["conversation_id"] for line in lines}) == 1
    assert [line["metadata"]["prompt_source"] for line in lines] == ["calls", "calls"]
    assert [line["metadata"]["turn"] for line in lines] == [0, 1]


@pytest.mark.slow
@pytest.mark.parametrize(("folder", "package"), [("langgraph", "langgraph"), ("openai_agents", "agents")])
async def test_agents_of_other_frameworks(server: Server, tmp_path: Path, folder: str, package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"the packages that examples/{folder}/agent.py names are not installed")
    config = configuration(tmp_path, server, {"type": "calls"})
    async with Following(config):
        program = EXAMPLES / folder / "agent.py"
        said = await asyncio.to_thread(run, program, "What is 12 times 34?", "And 5 by 6?", server=server.url)
        await until(lambda: len(exported(config)) == 2, "two tasks")
    assert [line["answer"] for line in exported(config)] == said == ["The result is 408.", "The result is 30."]
