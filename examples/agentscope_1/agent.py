"""An AgentScope 1.x agent with a tool: `python agent.py "What is 12 times 34?"`.

It asks for the alias, so it gets each new adapter, and sends its traces to `flywheel run`.
"""

import asyncio
import sys

import agentscope
from agentscope.agent import ReActAgent
from agentscope.formatter import OpenAIChatFormatter
from agentscope.memory import InMemoryMemory
from agentscope.message import Msg, TextBlock
from agentscope.model import OpenAIChatModel
from agentscope.tool import Toolkit, ToolResponse
from opentelemetry import trace

agentscope.init(project="calculator", tracing_url="http://127.0.0.1:4318/v1/traces")


def multiply(a: int, b: int) -> ToolResponse:
    """Multiply two whole numbers.

    Args:
        a (int): the first number
        b (int): the second number
    """
    return ToolResponse(content=[TextBlock(type="text", text=str(a * b))])


async def main() -> None:
    toolkit = Toolkit()
    toolkit.register_tool_function(multiply)
    agent = ReActAgent(
        name="calculator",
        sys_prompt="You are a calculator. Use your tools.",
        # OPENAI_BASE_URL=http://127.0.0.1:8000/v1 is `flywheel serve`, and my-agent the alias. AgentScope 1.0.21
        # cannot read streams of version 3 of the openai package.
        model=OpenAIChatModel(model_name="my-agent", api_key="unused", stream=False),
        formatter=OpenAIChatFormatter(),
        memory=InMemoryMemory(),
        toolkit=toolkit,
    )
    for question in sys.argv[1:]:
        answer = await agent(Msg("user", question, "user"))
        print(answer.get_text_content())
    trace.get_tracer_provider().shutdown()  # sends what is left


asyncio.run(main())
