"""Users who ask AgentScope agents with default settings and a tool that adds for one sum each.

Must not know who answers, nor that the agents' calls are recorded: they are traced by nothing else.
"""

from __future__ import annotations

import openai

from demo.users import Users
from flywheel.cli.demo.questions import large_sum


class AgentUsers(Users):
    """A new agent for each dialogue, as a service has one for each of its users."""

    def __init__(self, url: str, model: str, *, rate: float, seed: int | None = None) -> None:
        from agentscope.credential import OpenAICredential
        from agentscope.model import OpenAIChatModel

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
        from demo.tool_workflow import answer

        _, _, question = large_sum(self.random)
        self.asked += 1
        try:
            await answer(self._chat, question.text)
        except openai.OpenAIError as error:
            await self.has_failed(error)
        else:
            self.has_answered()
