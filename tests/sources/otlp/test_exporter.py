"""The real OpenTelemetry SDK sends an AgentScope conversation; it is read as the replies it holds."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import StatusCode

from flywheel.records.states import SkipReason
from flywheel.sources.otlp.receiver import Receiver
from tests.sources.otlp.exporting import stored
from tests.sources.studio.reading import MUCH_LATER, read_all
from tests.waiting import until


def said(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "parts": [{"type": "text", "content": text}], "name": role, "finish_reason": "stop"}


def messages(*written: dict[str, Any]) -> str:
    return json.dumps(written, ensure_ascii=False)


def converse(provider: TracerProvider, turns: int) -> None:
    """What AgentScope's tracing records: one agent with a tool, `turns` replies of one conversation."""
    tracer = provider.get_tracer("agentscope", "2.0.11")
    for turn in range(turns):
        asked, answer = f"What is {turn} + 1? 你好", f"\\boxed{{{turn + 1}}}"
        common = {"gen_ai.conversation.id": "c-1"}
        with tracer.start_as_current_span("invoke_agent Solver") as agent:
            agent.set_attributes(
                {
                    **common,
                    "gen_ai.operation.name": "invoke_agent",
                    "gen_ai.agent.name": "Solver",
                    "gen_ai.input.messages": messages(said("user", asked)),
                }
            )
            with tracer.start_as_current_span("chat m") as chat:
                call = {"type": "tool_call", "id": f"call-{turn}", "name": "add", "arguments": {"a": turn}}
                chat.set_attributes(
                    {
                        **common,
                        "gen_ai.operation.name": "chat",
                        "gen_ai.request.model": "m",
                        "gen_ai.usage.input_tokens": 7,
                        "gen_ai.usage.output_tokens": 2,
                        "gen_ai.response.finish_reasons": ["stop"],
                        "gen_ai.input.messages": messages(said("system", "Be brief."), said("user", asked)),
                        "gen_ai.output.messages": messages({"role": "assistant", "parts": [call]}),
                    }
                )
            with tracer.start_as_current_span("execute_tool add") as tool:
                tool.set_attributes(
                    {
                        **common,
                        "gen_ai.operation.name": "execute_tool",
                        "gen_ai.tool.name": "add",
                        "gen_ai.tool.call.id": f"call-{turn}",
                        "gen_ai.tool.call.arguments": json.dumps({"a": turn}),
                        "gen_ai.tool.call.result": str(turn + 1),
                    }
                )
            if turn == 1:
                agent.record_exception(ValueError("the model went away"))
                agent.set_status(StatusCode.ERROR, "the model went away")
            else:
                agent.set_attribute("gen_ai.output.messages", messages(said("assistant", answer)))
                agent.set_status(StatusCode.OK)


@pytest.mark.parametrize("compression", list(Compression))
async def test_an_sdk_conversation_is_read_as_its_replies(
    receiver: Receiver, inbox: Path, compression: Compression
) -> None:
    def send() -> None:
        provider = TracerProvider(resource=Resource.create({"service.name": "math-tutor"}))
        exporter = OTLPSpanExporter(endpoint=receiver.url, compression=compression, timeout=30)
        provider.add_span_processor(BatchSpanProcessor(exporter, max_export_batch_size=3))
        converse(provider, 3)
        provider.shutdown()

    await asyncio.to_thread(send)

    replies, dead, _ = read_all(inbox, now=MUCH_LATER)
    assert dead == []
    assert [(r.query, r.answer) for r in replies if r.skip is None] == [
        ("What is 0 + 1? 你好", "\\boxed{1}"),
        ("What is 2 + 1? 你好", "\\boxed{3}"),
    ]
    first, failed, _ = replies
    assert (first.agent, first.conversation_id, first.service, first.model) == ("Solver", "c-1", "math-tutor", "m")
    assert (first.input_tokens, first.output_tokens) == (7, 2)
    assert first.history == ({"role": "system", "content": "Be brief."},)
    assert [m["role"] for m in first.trajectory] == ["assistant", "tool"]
    assert first.trajectory[1]["content"] == "1"
    assert (failed.skip, failed.skip_detail) == (SkipReason.ERROR, "ValueError: the model went away")


@pytest.mark.slow
async def test_the_exporter_keeps_what_the_inbox_cannot_take(
    receiver: Receiver, inbox: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The SDK tries again after a 503: nothing is lost by an inbox that somebody holds for a while."""
    other = sqlite3.connect(inbox, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    provider = TracerProvider()
    provider.add_span_processor(
        BatchSpanProcessor(OTLPSpanExporter(endpoint=receiver.url, timeout=60), schedule_delay_millis=50)
    )
    await asyncio.to_thread(converse, provider, 1)
    await until(lambda: "cannot write to the inbox" in caplog.text, "the first attempt")
    other.execute("ROLLBACK")
    other.close()
    await asyncio.to_thread(provider.shutdown)
    assert len(stored(inbox)) == 3
