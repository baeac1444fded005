"""What the genuine SDKs of OpenInference and Langfuse send becomes the replies that their agents gave."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from flywheel.config.ingest import OtlpSource
from flywheel.records.states import SkipReason
from flywheel.records.trace import Reply
from flywheel.sources.otlp.receiver import Receiver
from tests.agents.running import ROOT, run
from tests.agents.scripted_model import ScriptedModel
from tests.daemon.following import Following, status
from tests.factories.config import make_config
from tests.factories.recording_server import (
    CALLS,
    LONG_WAIT,
    OTLP,
    Server,
    configuration,
    end_waiting,
    exported,
)
from tests.serving.fake_vllm import running
from tests.sources.studio.reading import MUCH_LATER, read_all
from tests.waiting import until

PRODUCTS = "What is 3 times 4 and 5?"
OPENINFERENCE = ROOT / "tests" / "agents" / "openinference_agent.py"
LANGFUSE = ROOT / "tests" / "agents" / "langfuse_agent.py"


@dataclasses.dataclass
class Traced:
    """Runs an agent as a program against a scripted model, and reads what our receiver got."""

    folder: Path
    model: ScriptedModel
    url: str

    async def __call__(self, program: Path, *arguments: str) -> tuple[list[str], list[Reply]]:
        """What it printed, and the replies in the order of their beginning. No span is unreadable."""
        inbox = self.folder / "inbox.sqlite"
        receiver = Receiver("127.0.0.1:0", inbox)
        await receiver.start()
        try:
            said = await asyncio.to_thread(run, program, *arguments, server=self.url, traces=receiver.url)
        finally:
            await receiver.stop()
        replies, dead, _ = read_all(inbox, now=MUCH_LATER)
        assert dead == []
        return said, sorted(replies, key=lambda reply: reply.started_at)


@pytest.fixture
def traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Traced]:
    model = ScriptedModel()
    with running(model) as url:
        # Langfuse's SDK sends its spans there as well, and is refused.
        monkeypatch.setenv("LANGFUSE_BASE_URL", url)
        yield Traced(tmp_path, model, url)


def shown(replies: list[Reply]) -> list[Reply]:
    """The replies that become tasks."""
    return [reply for reply in replies if reply.skip is None]


def check_two_turns(said: list[str], replies: list[Reply], *, results: list[str] | None = None) -> None:
    """Two turns of one session; the first calls a tool twice in one answer."""
    first, second = replies
    assert [(reply.query, reply.answer, reply.turn) for reply in replies] == [
        (PRODUCTS, said[0], 0),
        ("Hello", said[1], 1),
    ]
    assert {(reply.conversation_id, reply.user, reply.model, reply.prompt_reason) for reply in replies} == {
        ("s-1", "ann", "my-agent", "")
    }
    assert first.history == ({"role": "system", "content": "You calculate."},)
    call, *tools = first.trajectory
    asked = [(each["function"]["name"], each["function"]["arguments"]) for each in call["tool_calls"]]
    assert asked == [("multiply", '{"a": 3, "b": 4}'), ("multiply", '{"a": 3, "b": 5}')]
    assert [tool["content"] for tool in tools] == (results or ["12", "15"])
    assert [tool["tool_call_id"] for tool in tools] == [each["id"] for each in call["tool_calls"]]
    assert [message["role"] for message in second.history] == [
        "system",
        "user",
        "assistant",
        "tool",
        "tool",
        "assistant",
    ]
    assert second.trajectory == ()


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["turns", "stream"])
async def test_openai_s_agents_traced_by_openinference(traced: Traced, scenario: str) -> None:
    """Their spans record no messages, and an agent's span without a name is around each run."""
    said, replies = await traced(OPENINFERENCE, scenario, PRODUCTS, "Hello")
    check_two_turns(said, shown(replies))
    assert {reply.agent for reply in replies} == {"calculator"}
    assert [reply.skip for reply in replies if reply.skip] == [SkipReason.NESTED] * 2
    # Only the spans of OpenAI's client name the tools.
    names = [[tool["function"]["name"] for tool in reply.tools] for reply in shown(replies)]
    assert names == ([["multiply"], ["multiply"]] if scenario == "turns" else [[], []])


@pytest.mark.extended
@pytest.mark.slow
async def test_an_agent_that_another_agent_calls_as_a_tool_has_no_reply_of_its_own(traced: Traced) -> None:
    said, replies = await traced(OPENINFERENCE, "nested", PRODUCTS)
    (reply,) = shown(replies)
    assert (reply.agent, reply.query, [reply.answer]) == ("chief", PRODUCTS, said)
    assert [step["role"] for step in reply.trajectory] == ["assistant", "tool"]
    assert reply.trajectory[1]["content"] == "The result is 15."
    assert [(other.agent, other.skip) for other in replies if other.skip] == [
        ("chief", SkipReason.NESTED),
        ("calculator", SkipReason.NESTED),
    ]


@pytest.mark.extended
@pytest.mark.slow
async def test_agents_that_hand_over_to_each_other_give_one_reply(traced: Traced) -> None:
    said, replies = await traced(OPENINFERENCE, "handoff", PRODUCTS)
    (reply,) = shown(replies)
    assert (reply.agent, reply.query, [reply.answer]) == ("front", PRODUCTS, said)
    assert reply.history == ({"role": "system", "content": "You hand over."},)
    assert reply.trajectory[0]["tool_calls"][0]["function"]["name"] == "transfer_to_calculator"


@pytest.mark.extended
@pytest.mark.slow
async def test_an_agent_by_hand_traced_by_openinference(traced: Traced) -> None:
    """Results that are JSON stay as they were, and the image of a streamed call is kept as a reference."""
    said, replies = await traced(OPENINFERENCE, "loop", PRODUCTS, "Hello", "What is this?")
    *turns, seen = replies
    check_two_turns(said, turns, results=['{"product": 12}', '{"product": 15}'])
    assert {reply.agent for reply in turns} == {"calculator"}
    assert [[tool["function"]["name"] for tool in reply.tools] for reply in turns] == [["multiply"]] * 2
    assert (seen.agent, seen.query, seen.answer, seen.skip) == ("looked_at", "What is this?", said[2], None)
    assert [image[:7] for image in seen.images] == ["sha256:"]
    assert all(reply.input_tokens > 0 and reply.output_tokens > 0 for reply in turns)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scenario", "agent"), [("agent", "calculator"), ("plain", "helpdesk"), ("silent", "helpdesk")]
)
async def test_an_agent_traced_by_langfuse(traced: Traced, scenario: str, agent: str) -> None:
    """Whether its observation is of type agent or span, whether it has one argument that is a text or two, returns a
    text or a structure, and whether it records them."""
    said, replies = await traced(LANGFUSE, scenario, PRODUCTS, "Hello")
    check_two_turns(said, replies)
    agent = "calculator" if scenario == "agent" else "helpdesk"
    assert [(reply.agent, reply.skip, len(reply.tools)) for reply in replies] == [(agent, None, 1)] * 2
    assert all(reply.input_tokens > 0 and reply.output_tokens > 0 for reply in replies)


@pytest.mark.extended
@pytest.mark.slow
async def test_a_streamed_answer_traced_by_langfuse(traced: Traced) -> None:
    said, (reply,) = await traced(LANGFUSE, "stream", "Hello")
    assert (reply.query, [reply.answer], reply.skip) == ("Hello", said, None)


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "scenario"), [(OPENINFERENCE, "loop"), (OPENINFERENCE, "turns"), (LANGFUSE, "plain")]
)
async def test_a_reply_whose_model_failed_is_skipped_with_the_reason(
    traced: Traced, program: Path, scenario: str
) -> None:
    traced.model.failures = 1_000
    said, replies = await traced(program, scenario, "Hello", "Hello?")
    assert set(said) == {"InternalServerError"}
    assert replies[0].skip is SkipReason.ERROR
    assert replies[0].query == "Hello"
    assert "overloaded" in " ".join(replies[0].errors)


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.parametrize("program", [OPENINFERENCE, LANGFUSE])
async def test_model_calls_without_a_span_above_them_are_a_warning(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, program: Path
) -> None:
    monkeypatch.setenv("LANGFUSE_BASE_URL", server.url)
    config = configuration(tmp_path, server, OTLP)

    async def warned() -> bool:
        return bool((await status(config))["sources"][0]["warning"])

    async with Following(config) as following:
        traces = following._sources._receivers[0].url
        await asyncio.to_thread(run, program, "alone", "Hello", "Who?", server=server.url, traces=traces)
        await until(warned, "the warning")
    source: dict[str, Any] = (await status(config))["sources"][0]
    assert source["replies"] == 0
    assert "2 spans (2 llm) and no reply: the model calls have no parent span" in source["warning"]
    assert "Put one span, best an agent's, around each reply" in source["warning"]
    assert "and no reply: the model calls have no parent span" in caplog.text


@pytest.mark.slow
async def test_traced_calls_that_the_server_has_recorded_give_exact_prompts(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenInference keeps the response's id, so that each reply is one task of both sources."""
    config = configuration(tmp_path, server, OTLP, CALLS, **LONG_WAIT)

    async def both_are_read() -> bool:
        return (await status(config))["skipped"].get("recorded") == 2

    async with Following(config) as following:
        traces = following._sources._receivers[0].url
        said = await asyncio.to_thread(
            run, OPENINFERENCE, "turns", PRODUCTS, "Hello", server=server.url, traces=traces
        )
        await until(lambda: len(exported(config)) == 2, "two tasks")
        end_waiting(monkeypatch)
        await until(both_are_read, "the replies that both sources show")
    lines = exported(config)
    assert [line["answer"] for line in lines] == said
    assert [(line["metadata"]["prompt_source"], line["metadata"]["prompt_exact"]) for line in lines] == [
        ("calls", True),
        ("calls", True),
    ]
    assert (await status(config))["balanced"]


def test_the_collector_s_configuration_is_whole_and_listens_beside_flywheel(tmp_path: Path) -> None:
    """Its pipelines name what is declared, all of it is used, and spans go to a port that it does not take itself."""
    text = (ROOT / "examples" / "collector" / "config.yaml").read_text()
    written = yaml.safe_load(text)
    assert written.keys() == {"receivers", "processors", "exporters", "service"}
    (pipeline,) = written["service"]["pipelines"].values()
    for part in ("receivers", "processors", "exporters"):
        assert sorted(pipeline[part]) == sorted(written[part])
    taken = {each["endpoint"] for each in written["receivers"]["otlp"]["protocols"].values()}
    sent = urlsplit(written["exporters"]["otlphttp/flywheel"]["endpoint"])
    assert sent.path == "" and sent.netloc not in taken
    page = (ROOT / "docs" / "connect" / "traces.md").read_text()
    assert "`examples/collector/config.yaml`" in page and f"`{sent.netloc}`" in page
    (source,) = make_config(tmp_path, sources=[{"type": "otlp", "listen": sent.netloc}]).sources
    assert isinstance(source, OtlpSource)
