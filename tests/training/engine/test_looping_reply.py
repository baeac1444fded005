"""A rollout of one message that loops: the engine is real, what vLLM returned is scripted."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from flywheel.training.data.rollout import RolloutRequest
from flywheel.training.engine.engine import Engine
from tests.factories.engine import settings
from tests.training.data.rollouts import prompt

LOOP = "It is 7. " + "Let me say that again. " * 40


@dataclass
class Llm:
    text: str
    finish_reason: str
    errored = False

    async def generate(self, *_: Any, **__: Any) -> AsyncIterator[Any]:
        drawn = {8: SimpleNamespace(logprob=-0.5, decoded_token="x")}
        made = SimpleNamespace(
            text=self.text, token_ids=(8,), logprobs=[drawn], finish_reason=self.finish_reason
        )  # fmt: skip
        yield SimpleNamespace(outputs=[made])


class Chat:
    """Its parser takes the text for reasoning that has not ended: there is no answer."""

    def keeps_special_tokens(self, *_: Any) -> bool:
        return False

    def answer(self, *_: Any) -> Any:
        return SimpleNamespace(text="", tools=())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "reason", "loop"),
    [
        (LOOP, "length", "'. Let me say that again' is repeated 40 times"),
        (LOOP, "stop", ""),
        ("It is 7, and then", "length", ""),
    ],
)
async def test_the_whole_text_of_a_message_counts(text: str, reason: str, loop: str) -> None:
    engine = Engine(settings("a-model"))
    engine._llm, engine._chat = Llm(text, reason), Chat()
    made = await engine.generate(RolloutRequest(prompt(), 0, 1, 1.0, 8, None))
    assert (made.text, made.truncated, made.loop) == ("", reason == "length", loop)
