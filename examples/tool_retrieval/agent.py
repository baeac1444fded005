"""An AgentScope 2.x agent with 1,000 tools: `python agent.py "Please cancel the hotel booking 7"`.

Each call of the model offers it the ten tools that the index finds for the conversation. TOOL_INDEX names the
directory that `flywheel retrieval train` wrote; without it, BM25 searches.
"""

import asyncio
import functools
import itertools
import os
import sys

from agentscope.agent import Agent
from agentscope.credential import OpenAICredential
from agentscope.message import UserMsg
from agentscope.middleware import MiddlewareBase, TracingMiddleware
from agentscope.model import OpenAIChatModel
from agentscope.tool import FunctionTool, Toolkit
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

import flywheel

ACTIONS = (
    "create cancel update show approve archive assign copy export import merge rename share lock schedule"
    " translate validate compare count print restore sign pay refund track"
)
OBJECTS = (
    "invoice customer employee meeting task file picture video contract payment product parcel vehicle building"
    " room ticket password account report budget holiday salary course exam recipe song flight hotel_booking"
    " device sensor backup newsletter survey complaint licence warranty supplier warehouse machine timesheet"
)


def act(action: str, thing: str, number: int) -> str:
    return f"Done: {action} {thing.replace('_', ' ')} {number}."


TOOLS = [
    FunctionTool(
        functools.partial(act, action, thing),
        name=f"{action}_{thing}",
        description=f"{action} the {thing.replace('_', ' ')} with this number".capitalize(),
        input_schema={"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]},
        is_read_only=True,
    )
    for action, thing in itertools.product(ACTIONS.split(), OBJECTS.split())
]


class ToolSearch(MiddlewareBase):
    """Offers the model the tools that fit the conversation."""

    def __init__(self, directory, k=10):
        self.directory, self.k, self.index = directory, k, None

    async def on_model_call(self, agent, input_kwargs, next_handler):
        if self.index is None:
            self.index = flywheel.ToolIndex(self.directory, input_kwargs["tools"])
        told = [{"role": one.role, "content": one.get_text_content() or ""} for one in input_kwargs["messages"]]
        return await next_handler(tools=self.index.search(told, self.k))


async def main() -> None:
    tracing = TracerProvider()
    tracing.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))  # to http://localhost:4318
    trace.set_tracer_provider(tracing)
    agent = Agent(
        name="office",
        system_prompt="You work in an office. Use your tools.",
        # OPENAI_BASE_URL=http://127.0.0.1:8000/v1 is `flywheel serve`, and my-agent the alias.
        model=OpenAIChatModel(credential=OpenAICredential(api_key="unused"), model="my-agent"),
        toolkit=Toolkit(tools=TOOLS),
        # Search is the outer one, so that traces have the tools that were offered.
        middlewares=[ToolSearch(os.environ.get("TOOL_INDEX")), TracingMiddleware()],
    )
    for question in sys.argv[1:]:
        answer = await agent.reply(UserMsg(name="user", content=question))
        print(answer.get_text_content())
    tracing.shutdown()


asyncio.run(main())
