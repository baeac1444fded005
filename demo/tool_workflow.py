"""The agent of the demo with a tool, and the workflow that runs it in rollouts: `demo/tool_workflow.py:run`.

Owns the agent; must not know who answers. Workflows are loaded by file name in a process of their own, where the
package `demo` cannot be imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from agentscope.agent import Agent
from agentscope.message import UserMsg
from agentscope.model import ChatModelBase
from agentscope.tool import FunctionTool, Toolkit

from flywheel.cli.demo.questions import SYSTEM_PROMPT

NAME: Final = "calculator"


def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


async def answer(model: ChatModelBase, question: str) -> str:
    """The answer of a new agent. Raises what the model's client raises."""
    agent = Agent(
        name=NAME,
        system_prompt=SYSTEM_PROMPT,
        model=model,
        toolkit=Toolkit(tools=[FunctionTool(add, is_read_only=True)]),
    )
    reply = await agent.reply(UserMsg(name="user", content=question))
    return reply.get_text_content() or ""


async def run(task: Mapping[str, Any], model: ChatModelBase) -> dict[str, str]:
    """A rollout: the same agent as in service, with the tool that it has there. The rubric gives the reward."""
    return {"response": await answer(model, task["main_query"])}
