"""A workflow of two agents, each with a model of its own: the planner adds two numbers, the solver multiplies them.

It is loaded by file name in a process of its own. Both are asked in each rollout; the response is that of the agent
whose target is trained.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from typing import Any, Final

from openai import AsyncOpenAI

SYSTEM: Final = "You answer questions of arithmetic."
OPERATIONS: Final = {"planner": "plus", "solver": "times"}
"""What each agent is asked about, by which its calls are told apart."""


async def run(task: Mapping[str, Any], model: object, auxiliary_models: Mapping[str, object]) -> dict[str, Any]:
    """A rollout. Metrics: whether each agent's answer is boxed."""
    assert set(OPERATIONS) <= set(auxiliary_models)
    told = await asyncio.gather(*(ask(task["models"][name], question(task, name)) for name in OPERATIONS))
    answers = dict(zip(OPERATIONS, told, strict=True))
    trained = next(name for name, where in task["models"].items() if where["model"] == task["openai"]["model"])
    boxed = {name: float("\\boxed{" in answer) for name, answer in answers.items()}
    return {"response": answers[trained], "metrics": boxed}


def question(task: Mapping[str, Any], name: str) -> str:
    return re.sub("|".join(OPERATIONS.values()), OPERATIONS[name], task["main_query"])


async def ask(where: Mapping[str, str], text: str) -> str:
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]
    async with AsyncOpenAI(base_url=where["base_url"], api_key=where["api_key"]) as client:
        said = await client.chat.completions.create(model=where["model"], messages=messages)
    return said.choices[0].message.content or ""
