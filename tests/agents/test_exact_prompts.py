"""What the task of a genuine agent says the model was sent is what the model was sent."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from flywheel.config.file import Config
from tests.agents.running import ROOT, agentscope, run
from tests.daemon.following import Following, status
from tests.factories.recording_server import (
    CALLS,
    LONG_WAIT,
    OTLP,
    Json,
    Server,
    configuration,
    end_waiting,
    exported,
)
from tests.waiting import until

QUESTIONS = ("What is 12 times 34?", "And 5 by 6?", "Thank you", "What is 7 times 8?")
SETTINGS = list(itertools.product((True, False), (True, False)))
"""Whether the agent asks for streams, and whether it has a tool."""


async def ask_everything(server: Server, traces: str | None) -> None:
    """Four agents, each with a conversation of four turns, and a swap in the middle of each."""
    with agentscope(server.url, traces) as agents:
        for number, (stream, tools) in enumerate(SETTINGS):
            agents.begin(stream=stream, tools=tools)
            for turn, question in enumerate(QUESTIONS):
                if turn == 2:
                    await server.point(f"my-agent@r{number + 1:04}")
                assert await asyncio.to_thread(agents.ask, question)


def flat(message: Json) -> Json:
    """A message as a task has it: its text as one string, without the names of speakers."""
    content = message.get("content") or ""
    text = content if isinstance(content, str) else "\n".join(part["text"] for part in content)
    kept = {key: message[key] for key in ("tool_calls", "tool_call_id") if key in message}
    return {"role": message["role"], "content": text, **kept}


def first_requests(requests: Sequence[Json]) -> list[Json]:
    """The requests that begin a reply: those that do not end with the result of a tool."""
    return [request for request in requests if request["messages"][-1]["role"] != "tool"]


def check(lines: Sequence[Json], requests: Sequence[Json]) -> None:
    """The lines say exactly what was sent."""
    begun = first_requests(requests)
    assert len(lines) == len(begun) == len(SETTINGS) * len(QUESTIONS)
    expected = [
        "" if turn < 2 and number == 0 else f"my-agent@r{number + (turn >= 2):04}"
        for number in range(len(SETTINGS))
        for turn in range(len(QUESTIONS))
    ]
    for line, request, adapter in zip(lines, begun, expected, strict=True):
        metadata = line["metadata"]
        assert [flat(message) for message in line["prompt"]] == [flat(message) for message in request["messages"]]
        assert json.loads(metadata["tools_json"]) == request.get("tools", [])
        assert (metadata["prompt_source"], metadata["prompt_exact"], metadata["prompt_reason"]) == ("calls", True, "")
        assert (metadata["adapter_source"], metadata["adapter"]) == ("id", adapter)
    assert [line["main_query"] for line in lines] == [*QUESTIONS] * len(SETTINGS)
    assert any("<system-reminder>" in message["content"] for line in lines for message in line["prompt"])


@pytest.mark.extended
@pytest.mark.slow
async def test_agents_without_tracing_give_the_same_tasks(server: Server, tmp_path: Path) -> None:
    (tmp_path / "traced").mkdir()
    (tmp_path / "untraced").mkdir()
    traced = configuration(tmp_path / "traced", server, OTLP)
    untraced = configuration(tmp_path / "untraced", server, CALLS)
    async with Following(traced) as following, Following(untraced):
        await ask_everything(server, following._sources._receivers[0].url)
        for config in (traced, untraced):
            await until(
                lambda c=config: len(exported(c)) == len(SETTINGS) * len(QUESTIONS), "the tasks of all replies"
            )
    for config in (traced, untraced):
        check(exported(config), server.requests)

    def essence(config: Config) -> list[Json]:
        same = ("main_query", "init_messages", "prompt", "answer")
        also = ("turn", "adapter", "model", "tools_json", "trajectory_json", "parameters_json", "prompt_exact")
        also += ("input_tokens", "output_tokens", "prompt_tokens")
        return [{n: line[n] for n in same} | {n: line["metadata"][n] for n in also} for line in exported(config)]

    assert essence(untraced) == essence(traced)
    assert len({line["metadata"]["conversation_id"] for line in exported(untraced)}) == len(SETTINGS)


@pytest.mark.slow
async def test_both_sources_together_count_each_reply_once(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replies = len(SETTINGS) * len(QUESTIONS)
    config = configuration(tmp_path, server, OTLP, CALLS, **LONG_WAIT)

    async def calls_are_read() -> bool:
        return (await status(config))["skipped"].get("recorded") == replies

    async with Following(config) as following:
        await ask_everything(server, following._sources._receivers[0].url)
        await until(lambda: len(exported(config)) == replies, "the tasks of all replies")
        end_waiting(monkeypatch)
        await until(calls_are_read, "the replies that both sources show")
    check(exported(config), server.requests)
    shown = await status(config)
    assert shown["balanced"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    ["langchain", *(pytest.param(kind, marks=pytest.mark.extended) for kind in ("openai_agents", "silent"))],
)
async def test_replies_become_tasks_once_beside_the_spans_of_an_instrumentation(
    server: Server, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the spans have no messages at all, those are the recorded calls'."""
    config = configuration(tmp_path, server, OTLP, CALLS, **LONG_WAIT)
    async with Following(config) as following:
        traces = following._sources._receivers[0].url
        program = ROOT / "tests" / "agents" / "instrumented_agent.py"
        said = await asyncio.to_thread(run, program, kind, "Hello", "Who?", server=server.url, traces=traces)

        async def both_are_read() -> bool:
            return [each["replies"] for each in (await status(config))["sources"]] == [4, 2]

        await until(lambda: len(exported(config)) == 2, "two tasks of the traces")
        end_waiting(monkeypatch)
        await until(both_are_read, "the spans and the calls")
    lines = exported(config)
    assert [line["answer"] for line in lines] == said == ["You asked: Hello", "You asked: Who?"]
    assert [line["metadata"]["turn"] for line in lines] == [0, 1]
    assert [line["metadata"]["prompt_exact"] for line in lines] == [True, True]
    shown = await status(config)
    assert (shown["skipped"], shown["balanced"]) == ({"nested": 2, "recorded": 2}, True)
