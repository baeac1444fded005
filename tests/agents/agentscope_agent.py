"""A genuine AgentScope agent, asked by lines on stdin and answering by lines on stdout.

`python -m tests.agents.agentscope_agent '{"stream": true, "tools": true}'`. Its settings are the defaults, so it
sends the runtime reminder. Tracing is on unless OTEL_SDK_DISABLED is set.
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


async def main(wanted: dict[str, Any]) -> None:
    tracing = TracerProvider()
    if "OTEL_SDK_DISABLED" not in os.environ:
        tracing.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        trace.set_tracer_provider(tracing)
    agent = Agent(
        name="calculator",
        system_prompt="You are a calculator.",
        model=OpenAIChatModel(
            credential=OpenAICredential(api_key=wanted.get("key", "unused")),
            model="my-agent",
            stream=wanted["stream"],
        ),
        toolkit=Toolkit(tools=[FunctionTool(multiply, is_read_only=True)]) if wanted["tools"] else None,
        middlewares=[TracingMiddleware()],
    )
    while question := await asyncio.to_thread(sys.stdin.readline):
        answer = await agent.reply(UserMsg(name="user", content=question.strip()))
        print(answer.get_text_content(), flush=True)
    tracing.shutdown()


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
