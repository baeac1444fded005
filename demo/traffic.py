"""The agent's users: they ask the alias over HTTP, and each reply is traced into a Studio database.

`python -m demo.traffic --url URL --model ALIAS --database FILE [--rate N]` asks until it is stopped. Owns the
dialogues; must not know which version answers, beyond writing down what the answer says.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import secrets
import time
from pathlib import Path
from typing import Final

import httpx2

from demo.studio import Row, StudioDatabase, Turn, agent_row, call_row
from demo.users import IN_FLIGHT, Users
from flywheel.cli.demo.questions import SYSTEM_PROMPT, sample

AGENT: Final = "Tutor"
MAX_TOKENS: Final = 32
EXPORT_SECONDS: Final = 0.5
SECOND_TURN_SHARE: Final = 0.15


class Traffic(Users):
    """Dialogues whose replies are traced."""

    def __init__(
        self,
        url: str,
        model: str,
        database: StudioDatabase,
        *,
        rate: float,
        seed: int | None = None,
        api_key: str | None = None,
    ) -> None:
        super().__init__(model, rate=rate, seed=seed)
        self.answered_by: dict[str, int] = {}
        """How many answers each model name gave, as the answers said."""
        self._database = database
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx2.Limits(max_connections=IN_FLIGHT)
        self._http = httpx2.AsyncClient(base_url=url, headers=headers, timeout=60, limits=limits, trust_env=False)
        self._calls: list[Row] = []
        self._agents: list[Row] = []

    async def run(self) -> None:
        """Ask until cancelled; what was answered by then is written. Raises TrafficError and sqlite3.Error."""
        try:
            async with self._http:
                await self.keep_asking(self._export())
        finally:
            await asyncio.to_thread(self._flush)

    async def dialogue(self) -> None:
        conversation = secrets.token_hex(16)
        messages = [{"role": "system", "content": SYSTEM_PROMPT}]
        for _ in range(2 if self.random.random() < SECOND_TURN_SHARE else 1):
            question = sample(self.random).text
            messages.append({"role": "user", "content": question})
            started = time.time_ns()
            answer = await self._ask(conversation, question, messages, started)
            if answer is None:
                return
            messages.append({"role": "assistant", "content": answer})

    async def _ask(
        self, conversation: str, question: str, messages: list[dict[str, str]], started: int
    ) -> str | None:
        self.asked += 1
        request = {"model": self.model, "messages": messages, "temperature": 1.0, "max_tokens": MAX_TOKENS}
        called = time.time_ns()
        try:
            response = await self._http.post("/v1/chat/completions", json=request)
            response.raise_for_status()
        except httpx2.HTTPError as error:
            await self.has_failed(error)
            return None
        ended = time.time_ns()
        self.has_answered()
        content = response.json()
        choice = content["choices"][0]
        answer = choice["message"]["content"] or ""
        model = content["model"]
        self.answered_by[model] = self.answered_by.get(model, 0) + 1
        turn = Turn(
            conversation_id=conversation,
            agent=AGENT,
            question=question,
            answer=answer,
            messages=list(messages),
            requested_model=self.model,
            answered_model=model,
            response_id=content["id"],
            finish_reason=choice["finish_reason"],
            input_tokens=content["usage"]["prompt_tokens"],
            output_tokens=content["usage"]["completion_tokens"],
            agent_started_ns=started,
            call_started_ns=called,
            call_ended_ns=ended,
            agent_ended_ns=time.time_ns(),
        )
        self._calls.append(call_row(turn))
        self._agents.append(agent_row(turn))
        return str(answer)

    async def _export(self) -> None:
        while True:
            await asyncio.sleep(EXPORT_SECONDS)
            await asyncio.to_thread(self._flush)

    def _flush(self) -> None:
        """Write what has ended: the children in one transaction, the agents' spans in another one after it.

        The agents are taken first: the call of each of them is then surely among the calls.
        """
        agents, self._agents = self._agents, []
        calls, self._calls = self._calls, []
        self._database.export(calls)
        self._database.export(agents)


def main() -> None:
    parser = argparse.ArgumentParser(description="Ask an agent questions of arithmetic and trace its replies.")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the inference server")
    parser.add_argument("--model", default="demo-agent", help="the alias")
    parser.add_argument("--database", type=Path, required=True, help="the Studio database; made if it is missing")
    parser.add_argument("--rate", type=float, default=10.0, help="questions per second")
    options = parser.parse_args()
    traffic = Traffic(options.url, options.model, StudioDatabase(options.database), rate=options.rate)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(traffic.run())
    print(f"{traffic.asked} asked, {traffic.failed} failed, answered by {traffic.answered_by}")


if __name__ == "__main__":
    main()
