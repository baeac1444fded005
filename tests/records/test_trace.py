"""What the messages of a task show about its agent."""

from __future__ import annotations

from flywheel.records.trace import ChatMessage, sends_reasoning
from tests.cases import for_each


@for_each(
    ("message", "expected"),
    [
        ({"role": "assistant", "content": "2", "reasoning": "1 and 1."}, True),
        ({"role": "assistant", "content": None, "reasoning_content": "1 and 1."}, True),
        ({"role": "assistant", "content": None, "thinking": "1 and 1."}, True),
        ({"role": "assistant", "content": None, "reasoning_content": "1 and 1.", "reasoning_sent": False}, False),
        ({"role": "assistant", "content": "2", "reasoning": None, "reasoning_content": " \n"}, False),
        ({"role": "user", "content": "?", "reasoning": "1 and 1."}, False),
        ({"role": "assistant", "content": "2"}, False),
    ],
)
def test_an_agent_sends_reasoning_again_if_a_message_of_the_model_has_some(
    message: ChatMessage, expected: bool
) -> None:
    assert sends_reasoning([{"role": "user", "content": "?"}, message]) is expected
    assert not sends_reasoning([])
