"""AgentScope agents with default settings and a tool that adds, each asked one question for a sum.

Owns the agent; must not know who answers, nor that its calls are recorded: it is traced by nothing else.
"""

from __future__ import annotations

from typing import Final

import openai
from agentscope.agent import Agent
from agentscope.credential import OpenAICredential
from agentscope.message import UserMsg
from agentscope.model import OpenAIChatModel
from agentscope.tool import FunctionTool, Toolkit

from demo.users import Users
from flywheel.demo.questions import SYSTEM_PROMPT, large_sum

NAME: Final = "calculator"


def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


class AgentUsers(Users):
    """A new agent for each dialogue, as a service has one for each of its users."""

    def __init__(self, url: str, model: str, *, rate: float, seed: int | None = None) -> None:
        super().__init__(model, rate=rate, seed=seed)
        self._chat = OpenAIChatModel(
            credential=OpenAICredential(api_key="unused", base_url=f"{url}/v1"),
            model=model,
            # The server is on this machine: a proxy of the environment is not for it.
            client_kwargs={"http_client": openai.DefaultAsyncHttpxClient(trust_env=False)},
        )

    async def run(self) -> None:
        try:
            await self.keep_asking()
        finally:
            await self._chat.client.close()

    async def dialogue(self) -> None:
        _, _, question = large_sum(self.random)
        agent = Agent(
            name=NAME,
            system_prompt=SYSTEM_PROMPT,
            model=self._chat,
            toolkit=Toolkit(tools=[FunctionTool(add, is_read_only=True)]),
        )
        self.asked += 1
        try:
            await agent.reply(UserMsg(name="user", content=question.text))
        except openai.OpenAIError as error:
            await self.has_failed(error)
        else:
            self.has_answered()
