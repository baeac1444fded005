"""What clients and servers of models may send, or anything like it."""

from __future__ import annotations

from hypothesis import strategies as st

_KEYS = st.sampled_from(
    [
        "messages",
        "role",
        "content",
        "tool_calls",
        "function",
        "name",
        "arguments",
        "choices",
        "message",
        "delta",
        "index",
        "type",
        "text",
        "input",
        "output",
        "item",
        "response",
        "output_index",
        "error",
        "usage",
        "finish_reason",
        "tools",
        "prompt_tokens",
        "id",
        "reasoning",
        "n",
        "detail",
        "instructions",
        "status",
        "incomplete_details",
        "summary",
    ]
)
_WORDS = [
    "message",
    "function_call",
    "reasoning",
    "assistant",
    "response.completed",
    "response.output_item.added",
    "response.output_text.delta",
    "message_start",
    "message_delta",
    "content_block_start",
    "content_block_delta",
    "tool_use",
    "tool_result",
    "thinking",
    "function_call_output",
    "completed",
    "incomplete",
]
_LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.sampled_from(_WORDS)
VALUES = st.recursive(_LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEYS, inner, max_size=4))
PATHS = ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"]
