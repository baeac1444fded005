"""Genuine AgentScope agents, told by lines of JSON on stdin, and answering by lines on stdout.

`{"agent": {"stream": true, "tools": true}}` makes a new agent, `{"ask": "…"}` asks it. Its settings are the defaults,
so it sends the runtime reminder. Tracing is on unless OTEL_SDK_DISABLED is set.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

from agentscope.agent import Agent
from agentscope.credential import OpenAICredential
from agentscope.message import UserMsg
from agentscope.middleware import TracingMiddleware
from agentscope.model import OpenAIChatModel
from agentscope.tool import FunctionTool, Toolkit
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor


def multiply(a: int, b: int) -> str:
    """Multiply two whole numbers.

    Args:
        a: the first number
        b: the second number
    """
    return str(a * b)


def agent_of(wanted: dict[str, Any]) -> Agent:
    return Agent(
        name="calculator",
        system_prompt="You are a calculator.",
        model=OpenAIChatModel(
            credential=OpenAICredential(api_key="unused"), model="my-agent", stream=wanted["stream"]
        ),
        toolkit=Toolkit(tools=[FunctionTool(multiply, is_read_only=True)]) if wanted["tools"] else None,
        middlewares=[TracingMiddleware()],
    )


async def main() -> None:
    tracing = TracerProvider()
    if "OTEL_SDK_DISABLED" not in os.environ:
        tracing.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(), schedule_delay_millis=200))
        trace.set_tracer_provider(tracing)
    agent = None
    while line := await asyncio.to_thread(sys.stdin.readline):
        told = json.loads(line)
        if "agent" in told:
            agent = agent_of(told["agent"])
        else:
            answer = await agent.reply(UserMsg(name="user", content=told["ask"]))
            print(answer.get_text_content(), flush=True)
    tracing.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
