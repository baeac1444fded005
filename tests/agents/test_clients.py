"""Programs without tracing: what the plain clients of OpenAI send becomes the replies that they got."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import openai
import pytest

from flywheel.config.file import Config
from tests.agents.running import EXAMPLES, environment, run
from tests.daemon.following import Following, status
from tests.factories.recording_server import CALLS, Json, Server, configuration, exported
from tests.waiting import until

OPENING = "Hello"
LAST = "That is all"


async def settled(server: Server, config: Config, tasks: int, **skipped: int) -> list[Json]:
    """The lines, once there are this many, and nothing else was counted. Calls are taken in the order in which they
    began: what is not there when a last one is will not come."""
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="of the last") as client:
        await talk(client, [LAST])

    def has_come() -> bool:
        return any(line["main_query"] == LAST for line in exported(config))

    await until(has_come, f"the task after {tasks}")
    *lines, last = exported(config)
    shown = await status(config)
    assert (len(lines), last["main_query"]) == (tasks, LAST)
    assert shown["sources"][0]["skipped"] == skipped
    assert shown["balanced"]
    counted = {state: count for state, count in shown["replies"].items() if count}
    assert counted == {"converted": tasks + 1} | ({"skipped": sum(skipped.values())} if skipped else {})
    return lines


async def talk(client: openai.AsyncOpenAI, questions: list[str], *, stream: bool = False, **wanted: Any) -> None:
    """One conversation, in which each answer is repeated to the model."""
    messages: list[Any] = [{"role": "system", "content": "You are polite."}]
    for question in questions:
        messages.append({"role": "user", "content": question})
        if stream:
            chunks = await client.chat.completions.create(model="my-agent", messages=messages, stream=True, **wanted)
            said = "".join([chunk.choices[0].delta.content or "" async for chunk in chunks if chunk.choices])
        else:
            answer = await client.chat.completions.create(model="my-agent", messages=messages, **wanted)
            said = answer.choices[0].message.content or ""
        messages.append({"role": "assistant", "content": said})


def dialogues(lines: list[Json]) -> Counter[tuple[str, ...]]:
    """The questions of each conversation."""
    found: dict[str, list[str]] = {}
    for line in lines:
        found.setdefault(line["metadata"]["conversation_id"], []).append(line["main_query"])
        history = [message["content"] for message in line["init_messages"] if message["role"] == "user"]
        assert history == found[line["metadata"]["conversation_id"]][:-1]
        assert line["metadata"]["turn"] == len(history)
    return Counter(map(tuple, found.values()))


@pytest.mark.slow
async def test_the_example(server: Server, tmp_path: Path) -> None:
    config = configuration(tmp_path, server, CALLS)
    async with Following(config):
        program = EXAMPLES / "openai_client" / "chat.py"
        said = await asyncio.to_thread(run, program, "Hello", "Who?", server=server.url)
        lines = await settled(server, config, 2)
    assert [line["answer"] for line in lines] == said == ["You asked: Hello", "You asked: Who?"]
    assert dialogues(lines) == {("Hello", "Who?"): 1}


@pytest.mark.slow
async def test_concurrent_conversations_that_begin_alike(server: Server, tmp_path: Path) -> None:
    config = configuration(tmp_path, server, CALLS)
    talks = [[OPENING, f"I am number {number}", "Goodbye"] for number in range(8)] + [[OPENING], [OPENING]]
    async with Following(config):
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="one") as client:
            await asyncio.gather(*(talk(client, each, stream=place % 2 == 0) for place, each in enumerate(talks)))
        lines = await settled(server, config, sum(map(len, talks)))
    assert dialogues(lines) == Counter(map(tuple, talks))


@pytest.mark.slow
async def test_two_credentials_and_two_users_with_the_same_opening(server: Server, tmp_path: Path) -> None:
    config = configuration(tmp_path, server, CALLS)
    async with Following(config):
        for key in ("one", "two"):
            async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=key) as client:
                for user in ("ann", "ben"):
                    await talk(client, [OPENING], user=user)
        for key in ("one", "two"):
            async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=key) as client:
                for user in ("ann", "ben"):
                    await talk(client, [OPENING, f"{key} {user}"], user=user)
        lines = await settled(server, config, 12)
    by_talk = {line["metadata"]["conversation_id"]: line["metadata"]["user_id"] for line in lines}
    assert Counter(by_talk.values()) == {"ann": 4, "ben": 4}
    assert dialogues(lines)[(OPENING,)] == 4


@pytest.mark.slow
async def test_a_retry_of_the_client_and_one_that_leaves(server: Server, tmp_path: Path) -> None:
    config = configuration(tmp_path, server, CALLS)
    server.model.failures = 1
    async with Following(config):
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="one", max_retries=2) as client:
            await talk(client, [OPENING])
            server.model.pause = 600.0  # it says no second word before its client has left
            stream = await client.chat.completions.create(
                model="my-agent", messages=[{"role": "user", "content": "Tell me a long story"}], stream=True
            )
            async for _ in stream:
                break
            await stream.close()

            async def is_noticed() -> bool:
                found = (await status(config))["sources"]
                return bool(found) and found[0]["skipped"].get("interrupted") == 1

            await until(is_noticed, "the call without a reader")
            server.model.pause = 0.0
            await talk(client, [OPENING, "Again"])
        lines = await settled(server, config, 3, error=1, interrupted=1)
    assert dialogues(lines) == {(OPENING,): 1, (OPENING, "Again"): 1}


@pytest.mark.long
@pytest.mark.skipif(shutil.which("npm") is None, reason="there is no npm")
async def test_the_client_for_node(server: Server, tmp_path: Path) -> None:
    (tmp_path / "node").mkdir()
    (tmp_path / "node" / "talk.mjs").write_text(TALK)
    for command in (["npm", "install", "--no-fund", "--no-audit", "openai@7"],):
        await asyncio.to_thread(subprocess.run, command, cwd=tmp_path / "node", check=True, timeout=300)
    config = configuration(tmp_path, server, CALLS)
    async with Following(config):
        for way in ("plain", "stream"):
            await asyncio.to_thread(
                subprocess.run,
                ["node", "talk.mjs", way, OPENING, "What is 6 times 7?"],
                cwd=tmp_path / "node",
                env=environment(server.url),
                check=True,
                timeout=120,
            )
        lines = await settled(server, config, 4)
    assert dialogues(lines) == {(OPENING, "What is 6 times 7?"): 2}


TALK = """
import OpenAI from "openai";
const client = new OpenAI();
const messages = [{role: "system", content: "You are polite."}];
for (const question of process.argv.slice(3)) {
  messages.push({role: "user", content: question});
  let said = "";
  if (process.argv[2] === "stream") {
    for await (const chunk of await client.chat.completions.create({model: "my-agent", messages, stream: true})) {
      said += chunk.choices[0]?.delta?.content ?? "";
    }
  } else {
    said = (await client.chat.completions.create({model: "my-agent", messages})).choices[0].message.content;
  }
  messages.push({role: "assistant", content: said});
}
"""
