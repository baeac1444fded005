"""An AgentScope 2.x agent with a tool: `python agent.py "What is 12 times 34?"`.

It asks for the alias, so it gets each new adapter, and sends its traces to `flywheel run`.
"""

import asyncio
import sys

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
    """Multiply two whole numbers."""
    return str(a * b)


async def main() -> None:
    tracing = TracerProvider()
    tracing.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))  # to http://localhost:4318
    trace.set_tracer_provider(tracing)
    agent = Agent(
        name="calculator",
        system_prompt="You are a calculator. Use your tools.",
        # OPENAI_BASE_URL=http://127.0.0.1:8000/v1 is `flywheel serve`, and my-agent the alias.
        model=OpenAIChatModel(credential=OpenAICredential(api_key="unused"), model="my-agent"),
        toolkit=Toolkit(tools=[FunctionTool(multiply, is_read_only=True)]),
        middlewares=[TracingMiddleware()],
    )
    for question in sys.argv[1:]:
        answer = await agent.reply(UserMsg(name="user", content=question))
        print(answer.get_text_content())
    tracing.shutdown()


asyncio.run(main())
