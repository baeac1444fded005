"""The examples run as they are, and what they send is what the tests of the call log rely on."""

from __future__ import annotations

from tests.agents.running import EXAMPLES, run
from tests.agents.scripted_model import Recorder, ScriptedModel
from tests.serving.fake_vllm import running, with_middleware


def test_agentscope_calls_its_tool_and_sends_the_runtime_reminder() -> None:
    sent = Recorder(with_middleware(ScriptedModel(), FLYWHEEL_ALIAS="my-agent"))
    with running(sent) as url:
        said = run(EXAMPLES / "agentscope" / "agent.py", "What is 12 times 34?", "Thank you", server=url)
    assert said == ["The result is 408.", "You asked: Thank you"]
    assert [len(request["messages"]) for request in sent.requests] == [3, 5, 7]
    assert "<system-reminder>" in str(sent.requests[0]["messages"][2])


def test_openai_client() -> None:
    sent = Recorder(with_middleware(ScriptedModel(), FLYWHEEL_ALIAS="my-agent"))
    with running(sent) as url:
        said = run(EXAMPLES / "openai_client" / "chat.py", "Hello", "Who?", server=url)
    assert said == ["You asked: Hello", "You asked: Who?"]
    assert [len(request["messages"]) for request in sent.requests] == [2, 4]
